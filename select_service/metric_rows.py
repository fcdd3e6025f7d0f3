"""Metrics as tables: one row for each metric, with its name, kind, help, reading and labels.

A new metric is a row in the table of its subject:

    total("state_stalls", "Commits the disk has had too long.", lambda state: state.journal.stalls),

It is then in /metrics and in deploy/reference/metrics.md. The tables of the service are in
`edge/metrics/`, those of the planner in `planner/edge/planner_metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from typing_extensions import override

S = TypeVar("S")
T = TypeVar("T")

PREFIX: Final = "select_service_"

SERIES_PER_STEP: Final = 16
"""Ranks or scopes looked at between two stops: some 5 µs each."""

Steps: TypeAlias = "Iterator[Metric | None]"
"""Families, and None where others may have their turn before the collector goes on.

Between two steps the state may change; what is read of one thing is read in one step.
"""


def paced(things: Iterable[T]) -> Iterator[T | None]:
    """Yield all of them, and None after every so many, which a collector passes on as a step."""
    for number, thing in enumerate(things, 1):
        yield thing
        if not number % SERIES_PER_STEP:
            yield None


class Collector(Protocol):
    """Reads counters at each scrape."""

    def collect(self) -> Steps:
        """Yield families, and None between the steps."""


# -- readings --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Buckets:
    """A reading of a histogram: values counted by size; one more count than bounds."""

    bounds: Sequence[float]
    counts: Sequence[float]
    total: float
    """The sum of the values."""

    def __add__(self, other: Buckets) -> Buckets:
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Buckets(self.bounds, counts, self.total + other.total)

    def cumulated(self) -> list[tuple[str, float]]:
        """Return (bound, values up to it)."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Sum:
    """A reading of a summary; of a gauge it is the mean."""

    count: int
    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.count + other.count, self.total + other.total)


Number: TypeAlias = "float | Buckets | Sum"
Reading: TypeAlias = "Number | Mapping[Any, Number] | None"
"""A number, numbers by the values of a row's own labels, or None where there is nothing to say."""


def _added(one: Reading, other: Reading) -> Reading:
    """Return the sum of two readings of a row; a mapping is copied, as it may change later."""
    if one is None or other is None:
        found = other if one is None else one
        return dict(found) if isinstance(found, Mapping) else found
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return _sum(one, other)
    sums = dict(one)
    for key, number in other.items():
        sums[key] = _sum(sums[key], number) if key in sums else number
    return sums


def _sum(one: Any, other: Any) -> Number:
    """Return the sum of two numbers of a kind: a row reads always the same."""
    found: Number = one + other
    return found


# -- rows and tables -------------------------------------------------------------------------------


class MetricRow(NamedTuple, Generic[S]):
    """One metric; made by `total`, `value`, `histogram` and `summary`."""

    kind: type[Any]
    name: str
    """Without the prefix, and without the `_total` that Prometheus adds to counters."""
    help: str
    read: Callable[[S], Reading]
    """Returns its number, or numbers by label values; series stand in the order of these."""
    labels: tuple[str, ...]
    """Its own, beside those of the table."""
    prefix: str | None
    """Instead of the table's."""


def total(
    name: str, text: str, read: Callable[[S], Reading], *labels: str, prefix: str | None = None
) -> MetricRow[S]:
    """Return the row of a counter, which only grows."""
    return MetricRow(CounterMetricFamily, name, text, read, labels, prefix)


def value(
    name: str, text: str, read: Callable[[S], Reading], *labels: str, prefix: str | None = None
) -> MetricRow[S]:
    """Return the row of a gauge."""
    return MetricRow(GaugeMetricFamily, name, text, read, labels, prefix)


def histogram(name: str, text: str, read: Callable[[S], Reading], *labels: str) -> MetricRow[S]:
    """Return the row of a histogram: it reads `Buckets`."""
    return MetricRow(HistogramMetricFamily, name, text, read, labels, None)


def summary(name: str, text: str, read: Callable[[S], Reading], *labels: str) -> MetricRow[S]:
    """Return the row of a summary: it reads a `Sum`."""
    return MetricRow(SummaryMetricFamily, name, text, read, labels, None)


class MetricTable(Collector, Generic[S]):
    """Rows that are read from the same sources, all from one source in one step."""

    def __init__(
        self,
        rows: Sequence[MetricRow[S]],
        sources: Callable[[], Iterable[tuple[Sequence[str], Iterable[S | None]] | None]],
        labels: tuple[str, ...] = (),
        *,
        own_first: bool = False,
        prefix: str = PREFIX,
    ) -> None:
        """Read nothing yet.

        Args:
            rows: in the order of the text.
            sources: return (label values, what is added up under them) for each series, and None
                where others may have their turn.
            labels: names of those label values; every row has them.
            own_first: the rows' own labels stand before them.
            prefix: of the names.
        """
        self._rows, self._sources, self._prefix = rows, sources, prefix
        self._labels, self._own_first = labels, own_first

    @override
    def collect(self) -> Steps:
        families = [self._family(row) for row in self._rows]
        for found in self._sources():
            if found is None:
                yield None
                continue
            labels, parts = found
            readings: list[Reading] = [None] * len(families)
            for part in parts:
                if part is None:
                    yield None
                    continue
                for at, row in enumerate(self._rows):
                    readings[at] = _added(readings[at], row.read(part))
            for row, family, reading in zip(self._rows, families, readings, strict=True):
                self._add(row, family, labels, reading)
        yield from families

    def _family(self, row: MetricRow[S]) -> Any:
        prefix = self._prefix if row.prefix is None else row.prefix
        assert not {*row.labels} & {*self._labels}, row.name
        return row.kind(prefix + row.name, row.help, labels=self._joined(row.labels, self._labels))

    def _joined(self, own: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
        return (*own, *labels) if self._own_first else (*labels, *own)

    def _add(self, row: MetricRow[S], family: Any, labels: Sequence[str], reading: Reading) -> None:
        if not isinstance(reading, Mapping):
            if reading is not None:
                _add(family, labels, reading)
            return
        for key in sorted(reading):
            own = (key,) if isinstance(key, str) else key
            _add(family, self._joined(own, labels), reading[key])


def table(
    rows: Sequence[MetricRow[S]], source: Callable[[], S | None], *, prefix: str = PREFIX
) -> MetricTable[S]:
    """Return rows that are read from one thing; None leaves them without series."""
    return MetricTable(rows, lambda: [((), [source()])], prefix=prefix)


def _add(family: Any, labels: Sequence[str], number: Number) -> None:
    """Add a series in the way of its kind."""
    if isinstance(number, Buckets):
        family.add_metric(labels, number.cumulated(), number.total)
    elif not isinstance(number, Sum):
        family.add_metric(labels, number)
    elif isinstance(family, SummaryMetricFamily):
        family.add_metric(labels, count_value=number.count, sum_value=number.total)
    else:
        family.add_metric(labels, number.total / number.count)
