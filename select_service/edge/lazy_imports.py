"""Modules that are loaded after the port opens, or on first use if that comes sooner.

Imports dominate the start-up time. No scraper comes in the first half second, so the renderers of
/metrics and /openapi.json and the MessagePack codec stay out of it (`app.py` and `http/api.py`
import them when called for). They are then loaded one module at a time, so that no request waits
for more than one of them.
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = logging.getLogger("select_service")

LATE: Final = (
    "email.message",  # to http.server: the standard library modules that prometheus_client needs
    "http.client",
    "urllib.request",
    "wsgiref.simple_server",
    "prometheus_client",
    "select_service.edge.metrics.exposition",
    "select_service.edge.http.openapi",
    "select_service.edge.codec.msgpack_codec",
    "select_service.core.diagnostics.causes",
    "select_service.core.diagnostics.suspicions",
    "select_service.core.diagnostics.fleet_checks",
    "select_service.core.diagnostics.stream_checks",
    "select_service.core.diagnostics.prompt_checks",
    "select_service.edge.doctor",
    "select_service.core.decisions.explain",
)
"""In this order each takes one to three milliseconds, prometheus_client six."""

PAUSE_S: Final = 0.05
"""Before each module: the first requests after the port has opened come first."""

STEP_PAUSE_S: Final = 0.005
"""Before each of the caller's steps."""


def load() -> None:
    """Load everything at once: 20 ms."""
    for name in LATE:
        import_module(name)


async def load_in_turns(steps: Iterable[None] = ()) -> None:
    """Load everything with pauses for requests; what fails now is loaded on first use.

    Args:
        steps: run one by one once all is loaded; a few milliseconds each at most.
    """
    for name in LATE:
        await asyncio.sleep(PAUSE_S)
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - for example no descriptors or memory left
            _log.warning("loaded when it is asked for: %s: %r", name, error)
    try:
        for _ in steps:
            await asyncio.sleep(STEP_PAUSE_S)
    except Exception as error:  # noqa: BLE001 - first use will raise it again, and count it
        _log.warning("made when it is asked for: %r", error)
