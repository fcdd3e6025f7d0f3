"""A service that traces, and who asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from select_service.edge.driver.driver import Driver
from tests.select_service.edge.serving import Wire, add_worker, listening

ON: dict[str, Any] = {"tracing": "otlp", "trace_interval_ms": 10}


@asynccontextmanager
async def traced(**settings: Any) -> AsyncIterator[tuple[Wire, Driver]]:
    """A service that traces, with one worker, and a connection to it."""
    async with listening(**(ON | settings)) as (port, service, _):
        add_worker(service)
        try:
            yield await Wire.to(port), service
        finally:
            await Wire.close_all()
            assert service.tracing is not None
            assert service.tracing.recorder.waiting == {}
            assert service.tracing.recorder.current is None
