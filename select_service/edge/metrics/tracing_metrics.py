"""Metrics of tracing, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, counters, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver

__all__ = ["TracingMetrics"]


class TracingMetrics(Collector):
    """The same families whether requests are traced or not."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        tracing = self._service.tracing
        yield gauge("tracing", "1 where requests are traced.", value=tracing is not None)
        yield counter(
            "traced_requests", "Requests traced.", value=0 if tracing is None else tracing.sampled
        )
        yield gauge(
            "trace_queue_spans",
            "Spans that wait to be exported.",
            value=0 if tracing is None else tracing.export.queued,
        )
        yield counters(
            "trace_spans",
            "Spans by what became of them: dropped for a full queue, failed at the collector.",
            "outcome",
            {
                outcome: 0 if tracing is None else getattr(tracing.export, outcome)
                for outcome in ("exported", "dropped", "failed")
            },
        )
