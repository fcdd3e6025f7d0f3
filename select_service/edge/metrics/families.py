"""The naming of our series, and iteration over many of them in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

__all__ = [
    "PREFIX",
    "RANK",
    "ROWS_PER_STEP",
    "SCOPE",
    "Collector",
    "Steps",
    "counter",
    "counters",
    "gauge",
    "histogram",
    "paced",
    "summary",
]

Steps: TypeAlias = "Iterator[Metric | None]"
"""What a collector says: families, and None where others may have their turn before it goes on.

Between two steps the state may change; what is told of one thing is read in one step.
"""

ROWS_PER_STEP: Final = 16
"""Ranks looked at between two stops: some 5 µs each."""


T = TypeVar("T")


def paced(things: Iterable[T]) -> Iterator[T | None]:
    """Yield all of them, and None after every so many, for who passes it on as a step.

    What is summed up under one name may be a thousand scopes.
    """
    for number, thing in enumerate(things, 1):
        yield thing
        if not number % ROWS_PER_STEP:
            yield None


class Collector(Protocol):
    """Reads counters when somebody scrapes."""

    def collect(self) -> Steps:
        """Say them."""


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
