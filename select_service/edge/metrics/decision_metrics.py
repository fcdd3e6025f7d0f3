"""Metrics of recorded decisions, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver


class DecisionMetrics(Collector):
    """Zero with `--decision-ring 0`."""

    def __init__(self, service: Driver) -> None:
        self._decisions = service.core.decisions

    @override
    def collect(self) -> Iterator[Metric]:
        ring = self._decisions
        for name, text, value in (
            ("decision_records", "Decisions kept.", len(ring)),
            ("decision_bytes", "Memory charged for the decisions kept.", ring.bytes),
        ):
            yield gauge(name, text, value=value)
        yield counter(
            "decision_records_evicted",
            "Decisions dropped to make room for later ones.",
            value=ring.evicted,
        )
