"""Which scopes have series of their own in /metrics: those with workers, up to a limit.

A scope without a worker has nothing to report, and names are cheap to invent: a worker may register
under one after another. Scopes beyond the limit share one name. A scope keeps its own or the shared
name until it is closed: otherwise counters would jump as its counts moved between series.
`exposition.py` uses this; the partitions of the core are before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from typing_extensions import override

from indexer.core.stream_counters import StreamCounters
from indexer.types import Scope
from select_service.metric_rows import SERIES_PER_STEP, Collector, paced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore
    from select_service.metric_rows import Steps

S = TypeVar("S")
Sources: TypeAlias = "Iterator[tuple[Sequence[str], Iterable[S | None]] | None]"
"""Label values with what is added up under them, and None between steps: see `MetricTable`."""

SCOPE: Final = ("model_name", "tenant_id")
RANK: Final = ("worker_id", "dp_rank", *SCOPE)
REST: Final = Scope("other", "other")


class ScopeGroup(NamedTuple):
    """Partitions whose numbers are added up under one name: nearly always a single one."""

    scope: Scope
    partitions: list[Partition]
    tallies: StreamCounters


def by_scope(
    groups: ScopeGroups, part: Callable[[Partition], S | None]
) -> Callable[[], Sources[S]]:
    """Return sources by scope: a part of every partition of a scope, read in steps.

    Args:
        groups: the scopes that have series.
        part: what the rows read of a partition; None where there is nothing to say.
    """

    def sources() -> Sources[S]:
        for group in groups.found:
            paced_parts = paced(group.partitions)
            yield group.scope, (None if one is None else part(one) for one in paced_parts)
            yield None

    return sources


class ScopeGroups(Collector):
    """Which scopes get series in the scrape under way: read once, for all that show scopes.

    Attributes:
        found: up to `scopes_max` scopes by themselves, and the rest together.
        in_use: how many scopes that are: those with a worker, or with a request that waits for one.
        unlisted: how many of them are of the rest.
    """

    def __init__(self, core: SelectionCore, scopes_max: int) -> None:
        self._core, self._scopes_max = core, scopes_max
        self.found: list[ScopeGroup] = []
        self.in_use = self.unlisted = 0
        self._named: dict[Partition, None] = {}
        self._rest: dict[Partition, None] = {}

    @override
    def collect(self) -> Steps:
        """Look which there are; says nothing. O(partitions + streams).

        A scope that happens to be called like the rest is always part of it: a series must not
        come twice.
        """
        yield from self._forget_closed()
        named: list[Partition] = []
        rest: list[Partition] = []
        for one in paced(list(self._core.partitions.values())):  # oldest first
            if one is None:
                yield None
            elif one.fleet_slots.present or one.pending_count:
                (named if self._has_name(one) else rest).append(one)
        self.in_use, self.unlisted = len(named) + len(rest), len(rest)
        tallies = yield from _tallies(self._core)
        groups = [
            ScopeGroup(one.scope, [one], tallies.get(one.scope) or StreamCounters())
            for one in named
        ]
        if rest:
            together = ScopeGroup(REST, rest, StreamCounters())
            for one in rest:
                if one.scope in tallies:
                    together.tallies.add(tallies[one.scope])
                    yield None
            groups.append(together)
        self.found = groups
        yield None

    def _has_name(self, one: Partition) -> bool:
        """Return whether a scope has series of its own; it is decided when it is seen first."""
        if one in self._named or one in self._rest:
            return one in self._named
        has_name = one.scope != REST and len(self._named) < self._scopes_max
        (self._named if has_name else self._rest)[one] = None
        return has_name

    def _forget_closed(self) -> Steps:
        """Let go of scopes that were given up; one of the same name is another."""
        for known in (self._named, self._rest):
            for one in paced(list(known)):
                if one is None:
                    yield None
                elif self._core.partitions.get(one.scope) is not one:
                    del known[one]


def _tallies(core: SelectionCore) -> Generator[None, None, dict[Scope, StreamCounters]]:
    """Return what every scope's streams have counted, closed ones included."""
    totals: dict[Scope, StreamCounters] = {}
    for number, (scope, counted) in enumerate(core.registry.tallied()):
        totals.setdefault(scope, StreamCounters()).add(counted)
        if not number % SERIES_PER_STEP:
            yield None
    return totals
