"""Leases that a client closed at any replica: what is over with that, wherever it lives.

A close is final for the reservations that the closing replica knew under the lease, and for those
that took them over: all claims up to a number of each owner. The same lease id may be opened anew
later, and what is booked under it then has higher numbers. ClosedLeases are remembered for a while,
and every snapshot retells them. Only `claims.py` writes here.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from select_service.core.replication.messages import OUTPUT_TELLERS_MAX, Closed
from select_service.core.tenancy.shares import prefix_in
from select_service.core.tenancy.tenant_parts import TenantParts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from select_service.core.replication.claim import Claim
    from select_service.core.tenancy.shares import Party, Shares

CLOSINGS_PER_PART: Final = 64
"""In one part of a snapshot."""


_Row: TypeAlias = "OrderedDict[str, tuple[dict[int, int], float]]"


class ClosedLeases:
    """The closed leases by id, in the order last heard. All operations O(owners of the lease).

    Attributes:
        lost: forgotten early, because of the limit.
    """

    def __init__(self, closings_max: int, shares: Shares) -> None:
        self.lost = 0
        bound = shares.bound("replica_closings", lambda: closings_max, by_prefix=True)
        self._holder: Party = None  # of the last one noted
        self._rows: TenantParts[_Row] = TenantParts(shares, bound, OrderedDict)
        """By the tenant that the lease is of."""

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, lease_id: str) -> dict[int, int] | None:
        """Return by owner the last claim that ended with a lease; None: it was not closed."""
        found = (row.get(lease_id) for _, row in self._rows.where(prefix_in(lease_id)))
        return next((one[0] for one in found if one is not None), None)

    def covers(self, claim: Claim) -> bool:
        """Tell whether a claim, or one that it took over, ended with its lease."""
        lease = claim.record.lease
        up_to = None if lease is None or not self._rows.bound.total else self.find(lease.lease_id)
        return up_to is not None and any(born <= up_to.get(one, -1) for one, born in claim.names)

    def told(self, lease_id: str) -> Closed:
        """Return the statement that a lease, which was closed, is."""
        up_to = self.find(lease_id) or {}
        return Closed(lease_id, list(up_to), list(up_to.values()))

    def retold(self) -> Iterator[list[Closed]]:
        """Yield the statements of all closings known now; the table may change meanwhile."""
        names = iter([name for row in self._rows.rows for name in row])
        while some := list(islice(names, CLOSINGS_PER_PART)):
            yield [self.told(name) for name in some if self.find(name) is not None]

    def note(self, lease_id: str, up_to: Mapping[int, int], now: float) -> bool:
        """Remember that a lease was closed; False if that was known."""
        known = self.find(lease_id) or {}
        self._discard(lease_id)
        news = {one: born for one, born in up_to.items() if born > known.get(one, -1)}
        known |= news
        for one in list(known)[: max(0, len(known) - OUTPUT_TELLERS_MAX)]:
            del known[one]
        self._holder, row = self._rows.place(prefix_in(lease_id))
        row[lease_id] = known, now
        self._rows.took(self._holder)
        return bool(news)

    def _discard(self, lease_id: str) -> None:
        for holder, row in self._rows.where(prefix_in(lease_id)):
            if row.pop(lease_id, None) is not None:
                self._rows.left(holder)

    def forget_excess(self) -> str | None:
        """Forget a closing if the last one had no room; return its lease, None if it had."""
        crowded = self._rows.crowded(self._holder)
        if crowded is None:
            return None
        self.lost += 1
        return self._forget_oldest(*crowded)

    def _forget_oldest(self, holder: Party, row: _Row) -> str:
        lease_id, _ = row.popitem(last=False)
        self._rows.left(holder)
        return lease_id

    def purge(self, horizon: float, limit: int) -> Iterator[str]:
        """Forget up to `limit` closings last heard before `horizon`; yields their leases."""
        left = limit
        for holder, row in self._rows.turns(limit):
            while left and row and next(iter(row.values()))[1] <= horizon:
                left -= 1
                yield self._forget_oldest(holder, row)

    def check(self) -> None:
        """Assert all invariants."""
        self._rows.check()
        assert len(self._rows) <= self._rows.bound.most
        assert all(up_to for row in self._rows.rows for up_to, _ in row.values())
