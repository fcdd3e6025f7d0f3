"""Demand for scopes without workers: how often each was asked for.

A scope without workers is dropped after a while, and its counters with it; a process that has just
started knows no scope at all. Whoever has scaled a fleet to zero must learn of the first request
that comes all the same: it is counted here. Names are cheap to make up, so those that never had a
worker here have a table of their own, which no tenant fills alone. `routing/read.py` adds to this,
`edge/metrics/demand_metrics.py` exports it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.types import CoreLimits


class UnservedDemand:
    """Requests by scope; a count only grows while its scope is in here.

    O(1); O(`unserved_scopes_max`) where a scope has to leave for another one.

    Attributes:
        evicted: scopes that had to leave for others.
        elsewhere: requests for scopes that have left, or whose names cannot be told.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        # the one that was asked for last is at the end
        self._known: dict[Scope, int] = {}
        self._strange: dict[Scope, int] = {}
        self.evicted = self.elsewhere = 0

    def note(self, scope: Scope, *, is_known: bool) -> None:
        """Count one more request for a scope.

        Args:
            scope: as asked for.
            is_known: it has had a worker here.
        """
        most = self._limits.name_length_max
        if any(len(name) > most or not name.isprintable() for name in scope):
            self.elsewhere += 1
            return
        count = self._strange.pop(scope, 0) + self._known.pop(scope, 0)
        table = self._known if is_known else self._strange
        while len(table) >= self._limits.unserved_scopes_max:
            self._evict(table, scope)
        table[scope] = count + 1

    def _evict(self, table: dict[Scope, int], newcomer: Scope) -> None:
        """Of the tenant that has most scopes in here, drop the one that was not asked for longest.

        A tenant that names many displaces its own, as soon as it has more than others.
        """
        shares = Counter(scope.tenant_id for scope in (*table, newcomer))
        most = max(shares[scope.tenant_id] for scope in table)
        victim = next(scope for scope in table if shares[scope.tenant_id] == most)
        self.elsewhere += table.pop(victim)
        self.evicted += 1

    def rows(self) -> list[tuple[Scope, int]]:
        """Return the counts by scope."""
        return [*self._known.items(), *self._strange.items()]
