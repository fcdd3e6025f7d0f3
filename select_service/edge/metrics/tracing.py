"""What /metrics says of tracing, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver import Driver

__all__ = ["TracingMetrics"]


class TracingMetrics(Collector):
    """The same families whether requests are traced or not."""

    def __init__(self, service: Driver, prefix: str) -> None:
        self._service = service
        self._prefix = prefix

    @override
    def collect(self) -> Iterator[Metric]:
        tracing = self._service.tracing
        on = GaugeMetricFamily(self._prefix + "tracing", "1 where requests are traced.")
        on.add_metric((), tracing is not None)
        yield on
        traced = CounterMetricFamily(self._prefix + "traced_requests", "Requests traced.")
        traced.add_metric((), 0 if tracing is None else tracing.sampled)
        yield traced
        queued = GaugeMetricFamily(
            self._prefix + "trace_queue_spans", "Spans that wait to be exported."
        )
        queued.add_metric((), 0 if tracing is None else tracing.export.queued)
        yield queued
        spans = CounterMetricFamily(
            self._prefix + "trace_spans",
            "Spans by what became of them: dropped for a full queue, failed at the collector.",
            labels=("outcome",),
        )
        for outcome in ("exported", "dropped", "failed"):
            count = 0 if tracing is None else getattr(tracing.export, outcome)
            spans.add_metric([outcome], count)
        yield spans
