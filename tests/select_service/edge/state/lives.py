"""Lives of a service over one directory, and disks that refuse."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from select_service.edge.app import create_app, create_driver
from select_service.edge.driver.driver import Driver
from tests import wait
from tests.select_service.edge.serving import PROMPT, SETTINGS

Use = Callable[[httpx.AsyncClient, Driver], Awaitable[None]]


def life(tmp_path: Path, use: Use, *, kill: bool = False, **settings: Any) -> None:
    """One life of a service over the directory; killed, it writes and says no more."""

    async def run() -> None:
        chosen = replace(SETTINGS, state_dir=str(tmp_path), **settings)
        service = create_driver(chosen)
        try:
            await service.start()
            transport = httpx.ASGITransport(create_app(service, chosen))
            async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
                await use(client, service)
                service.core.check()
        finally:
            if kill:
                assert service.keeper is not None
                service.keeper.journal._changes = None
            await service.close()

    wait.run(run())


def body(reservation_id: str, **fields: Any) -> dict[str, Any]:
    return {**PROMPT, "reservation_id": reservation_id, **fields}


async def post(client: httpx.AsyncClient, path: str, content: Any = None) -> httpx.Response:
    return await client.post(path, json=content)
