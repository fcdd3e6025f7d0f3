"""Which scopes have series of their own in /metrics: those with workers, and not too many.

A scope without a worker has nothing to tell, and names are cheap to make up: a worker may come
under one after the other. Scopes beyond the limit share one name. `exposition.py` stands behind it,
the partitions of the core before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.core.tallies import Tallies
from indexer.types import Scope

if TYPE_CHECKING:
    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore

__all__ = ["ScopeGroup", "groups_of", "in_use"]

REST: Final = Scope("other", "other")


class ScopeGroup(NamedTuple):
    """Partitions whose numbers are added up under one name: nearly always a single one."""

    scope: Scope
    partitions: list[Partition]
    tallies: Tallies


def in_use(core: SelectionCore) -> list[Partition]:
    """Return the partitions with a worker, or with a request that waits for one; oldest first."""
    return [one for one in core.partitions.values() if one.seating.present or one.pending_count]


def groups_of(core: SelectionCore, scopes_max: int) -> list[ScopeGroup]:
    """Return who gets series: `scopes_max` scopes by themselves, and the rest together.

    A scope that happens to be called like the rest is always part of it: a series must not come
    twice. O(partitions + streams).
    """
    partitions = in_use(core)
    named = [one for one in partitions if one.scope != REST][:scopes_max]
    tallies = core.registry.tallies_by_scope()
    groups = [ScopeGroup(one.scope, [one], tallies.get(one.scope) or Tallies()) for one in named]
    if len(named) < len(partitions):
        alone = {one.scope for one in named}
        rest = ScopeGroup(REST, [one for one in partitions if one.scope not in alone], Tallies())
        for one in rest.partitions:
            if one.scope in tallies:
                rest.tallies.add(tallies[one.scope])
        groups.append(rest)
    return groups
