"""Workers of an earlier demo at the service: removed, or a reason not to start beside them.

A demo that is killed outright cannot take its workers out. The next one would give them new engines
under old reservations, and find load that never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from indexer.core.endpoint import tcp_address
from select_service.demo.client import SelectorRefused

if TYPE_CHECKING:
    from select_service.demo.client import SelectorClient

_GREETING_WAIT_S: Final = 2.0
_ZMTP_SIGNATURE: Final = b"\xff"
"""What every ZMQ socket says first; on a port that was given away since, another program
answers."""


def engine_endpoint(worker_id: int) -> str:
    """Return the endpoint of a worker of the demo, which is out of reach and only it has."""
    return f"http://engine-{worker_id}.invalid:8000"


async def remove_left_over(client: SelectorClient) -> list[int]:
    """Remove the workers of demos that have ended, with their reservations; return their ids.

    Raises:
        SelectorRefused: a demo still runs at this service, or the service refuses.
    """
    left: list[int] = []
    for record in await client.workers():
        worker_id = record["worker_id"]
        if record.get("endpoint") != engine_endpoint(worker_id):
            continue
        publisher = record.get("kv_events_endpoint") or ""
        if await _publishes(publisher):
            reason = (
                f"another demo runs at this service: its engine {worker_id} publishes at "
                f"{publisher}. End it first (Ctrl-C), or leave --url away"
            )
            raise SelectorRefused(reason)
        left.append(worker_id)
    for worker_id in left:
        await client.deregister(worker_id)
    return left


async def _publishes(endpoint: str) -> bool:
    """Whether a ZMQ socket listens there."""
    address = tcp_address(endpoint)
    if address is None:
        return False
    host, port = address
    try:
        async with asyncio.timeout(_GREETING_WAIT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                return await reader.read(1) == _ZMTP_SIGNATURE
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
