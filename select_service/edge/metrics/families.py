"""What every series of ours is called, and how those are told apart that there are many of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PREFIX", "RANK", "SCOPE", "counter", "counters", "gauge", "histogram", "summary"]

PREFIX: Final = "select_service_"
SCOPE: Final = ("model_name", "tenant_id")
RANK: Final = ("worker_id", "dp_rank", *SCOPE)


def counter(
    name: str, text: str, labels: Sequence[str] | None = None, *, value: float | None = None
) -> CounterMetricFamily:
    """Return a family of counters: of one, if it has its value, else without series."""
    return CounterMetricFamily(PREFIX + name, text, value, labels)


def counters(name: str, text: str, label: str, counts: Mapping[str, float]) -> CounterMetricFamily:
    """Return a family of counters, one for each value of a label."""
    family = counter(name, text, (label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def gauge(
    name: str, text: str, labels: Sequence[str] | None = None, *, value: float | None = None
) -> GaugeMetricFamily:
    """Return a family of gauges likewise."""
    return GaugeMetricFamily(PREFIX + name, text, value, labels)


def histogram(name: str, text: str, labels: Sequence[str]) -> HistogramMetricFamily:
    """Return a family of histograms, without series."""
    return HistogramMetricFamily(PREFIX + name, text, labels=labels)


def summary(name: str, text: str, labels: Sequence[str]) -> SummaryMetricFamily:
    """Return a family of summaries, without series."""
    return SummaryMetricFamily(PREFIX + name, text, labels=labels)
