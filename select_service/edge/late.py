"""What can wait a moment: loaded once the port is open, or with who asks for it before.

A start lasts as long as its imports. Nobody scrapes in the first half second, so what renders
/metrics and /openapi.json is not loaded before the port opens, nor what reads MessagePack (`app.py`
and `http/bodies.py` import it when it is called for), but then one module at a time: no request
waits for more than one of them.
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LATE", "PAUSE_S", "load", "load_in_turns"]

_log = logging.getLogger("select_service")

LATE: Final = (
    "email.message",  # down to http.server: what prometheus_client needs of the standard library
    "http.client",
    "urllib.request",
    "wsgiref.simple_server",
    "prometheus_client",
    "select_service.edge.metrics.exposition",
    "select_service.edge.http.openapi",
    "select_service.edge.codec.msgpack_codec",
    "select_service.core.doctor.causes",
    "select_service.core.doctor.suspicions",
    "select_service.core.doctor.fleet",
    "select_service.core.doctor.streams",
    "select_service.core.doctor.prompts",
    "select_service.edge.doctor",
    "select_service.core.decisions.explaining",
)
"""In this order each takes one to three milliseconds, prometheus_client six."""

PAUSE_S: Final = 0.05
"""Before each of them: the first requests after the port has opened come first."""

STEP_PAUSE_S: Final = 0.005
"""Before each step of what is made of it."""


def load() -> None:
    """Load it all at once: 20 ms."""
    for name in LATE:
        import_module(name)


async def load_in_turns(steps: Iterable[None] = ()) -> None:
    """Load it with pauses for requests; what cannot be loaded now is left to who asks for it.

    Args:
        steps: taken one by one when all is loaded, of milliseconds at most.
    """
    for name in LATE:
        await asyncio.sleep(PAUSE_S)
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - no descriptors left, for one, or no memory
            _log.warning("loaded when it is asked for: %s: %r", name, error)
    try:
        for _ in steps:
            await asyncio.sleep(STEP_PAUSE_S)
    except Exception as error:  # noqa: BLE001 - who asks for it is told, and counted
        _log.warning("made when it is asked for: %r", error)
