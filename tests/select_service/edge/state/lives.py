"""Lives of a service over one directory, and disks that refuse."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from select_service.edge.app import create_app, create_driver
from select_service.edge.driver.driver import Driver
from tests.select_service.edge.serving import PROMPT, SETTINGS


@contextlib.asynccontextmanager
async def life(
    tmp_path: Path, *, kill: bool = False, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Driver]]:
    """One life of a service over the directory; killed, it writes and says no more."""
    chosen = replace(SETTINGS, state_dir=str(tmp_path), **settings)
    service = create_driver(chosen)
    try:
        await service.start()
        transport = httpx.ASGITransport(create_app(service, chosen))
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            yield client, service
            service.core.check()
    finally:
        if kill:
            assert service.keeper is not None
            service.keeper.journal._changes = None
        await service.close()


def body(reservation_id: str, **fields: Any) -> dict[str, Any]:
    return {**PROMPT, "reservation_id": reservation_id, **fields}


async def post(client: httpx.AsyncClient, path: str, content: Any = None) -> httpx.Response:
    return await client.post(path, json=content)
