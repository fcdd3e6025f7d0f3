"""What every series of ours is called, and how those are told apart that there are many of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PREFIX", "RANK", "SCOPE", "counter", "gauge"]

PREFIX: Final = "select_service_"
SCOPE: Final = ("model_name", "tenant_id")
RANK: Final = ("worker_id", "dp_rank", *SCOPE)


def counter(
    name: str, text: str, labels: Sequence[str] | None = None, *, value: float | None = None
) -> CounterMetricFamily:
    """Return a family of counters: of one, if it has its value, else without series."""
    return CounterMetricFamily(PREFIX + name, text, value, labels)


def gauge(
    name: str, text: str, labels: Sequence[str] | None = None, *, value: float | None = None
) -> GaugeMetricFamily:
    """Return a family of gauges likewise."""
    return GaugeMetricFamily(PREFIX + name, text, value, labels)
