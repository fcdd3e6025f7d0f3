"""One row for each metric that is read as it stands: its name, kind, help, reading and labels.

A new one is a row in the table of its subject:

    total("state_stalls", "Commits the disk has had too long.", lambda state: state.journal.stalls),

It is then in /metrics and in deploy/reference/metrics.md. A reading is a number, a mapping of label
values to numbers, or None where there is nothing to say. What is summed over scopes or listed by
rank takes steps instead: see `scope_series.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from typing_extensions import override

from select_service.edge.metrics.families import PREFIX, Collector

__all__ = ["Reading", "Row", "Table", "total", "value"]

S = TypeVar("S")
Reading: TypeAlias = "float | Mapping[Any, float] | None"


class Row(NamedTuple, Generic[S]):
    """One metric, its name without the prefix and without `_total`."""

    kind: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    help: str
    read: Callable[[S], Reading]
    labels: tuple[str, ...]

    def family(self, source: S | None) -> Metric:
        """Return it with its series; without any if there is no source."""
        family = self.kind(PREFIX + self.name, self.help, labels=self.labels)
        reading = None if source is None else self.read(source)
        if isinstance(reading, Mapping):
            for values, number in reading.items():
                family.add_metric((values,) if isinstance(values, str) else values, number)
        elif reading is not None:
            family.add_metric((), reading)
        return family


def total(name: str, text: str, read: Callable[[S], Reading], *labels: str) -> Row[S]:
    """Return the row of a counter, which only grows; Prometheus adds `_total` to its name."""
    return Row(CounterMetricFamily, name, text, read, labels)


def value(name: str, text: str, read: Callable[[S], Reading], *labels: str) -> Row[S]:
    """Return the row of a gauge."""
    return Row(GaugeMetricFamily, name, text, read, labels)


class Table(Collector, Generic[S]):
    """Rows that are read from one thing, all in one step: they agree with each other."""

    def __init__(self, rows: tuple[Row[S], ...], source: Callable[[], S | None]) -> None:
        """Read nothing yet.

        Args:
            rows: in the order of the text.
            source: what they are read from; None leaves them without series.
        """
        self._rows, self._source = rows, source

    @override
    def collect(self) -> Iterator[Metric]:
        source = self._source()
        yield from [row.family(source) for row in self._rows]
