"""Which scopes have series of their own in /metrics: those with workers, and not too many.

A scope without a worker has nothing to tell, and names are cheap to make up: a worker may come
under one after the other. Scopes beyond the limit share one name. `exposition.py` stands behind it,
the partitions of the core before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from typing_extensions import override

from indexer.core.tallies import Tallies
from indexer.types import Scope
from select_service.edge.metrics.families import ROWS_PER_STEP, Collector

if TYPE_CHECKING:
    from collections.abc import Generator

    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore
    from select_service.edge.metrics.families import Steps

__all__ = ["ScopeGroup", "ScopeGroups", "in_use"]

REST: Final = Scope("other", "other")


class ScopeGroup(NamedTuple):
    """Partitions whose numbers are added up under one name: nearly always a single one."""

    scope: Scope
    partitions: list[Partition]
    tallies: Tallies


def in_use(core: SelectionCore) -> list[Partition]:
    """Return the partitions with a worker, or with a request that waits for one; oldest first."""
    return [one for one in core.partitions.values() if one.seating.present or one.pending_count]


class ScopeGroups(Collector):
    """Who gets series in the scrape under way: read once, by all who tell of scopes.

    Attributes:
        found: `scopes_max` scopes by themselves, and the rest together.
    """

    def __init__(self, core: SelectionCore, scopes_max: int) -> None:
        self._core, self._scopes_max = core, scopes_max
        self.found: list[ScopeGroup] = []

    @override
    def collect(self) -> Steps:
        """Look who there is; says nothing. O(partitions + streams).

        A scope that happens to be called like the rest is always part of it: a series must not
        come twice.
        """
        partitions = in_use(self._core)
        named = [one for one in partitions if one.scope != REST][: self._scopes_max]
        tallies = yield from _tallies(self._core)
        groups = [
            ScopeGroup(one.scope, [one], tallies.get(one.scope) or Tallies()) for one in named
        ]
        if len(named) < len(partitions):
            alone = {one.scope for one in named}
            rest = ScopeGroup(
                REST, [one for one in partitions if one.scope not in alone], Tallies()
            )
            for one in rest.partitions:
                if one.scope in tallies:
                    rest.tallies.add(tallies[one.scope])
                    yield None
            groups.append(rest)
        self.found = groups
        yield None


def _tallies(core: SelectionCore) -> Generator[None, None, dict[Scope, Tallies]]:
    """Return what every scope's streams have counted, closed ones included."""
    totals: dict[Scope, Tallies] = {}
    for number, (scope, counted) in enumerate(core.registry.tallied()):
        totals.setdefault(scope, Tallies()).add(counted)
        if not number % ROWS_PER_STEP:
            yield None
    return totals
