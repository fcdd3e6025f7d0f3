"""What is over on the replica plane: ended claims, names that callers freed, closed leases.

An end that was acknowledged is final, whatever restarts, so all three are remembered for a while
and kept on disk (`durable_rows.py`). Only `claims.py` and `shared_leases.py` write here.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from select_service.core.changes import CLOSING, END
from select_service.core.ledger.freed_ids import key_of
from select_service.core.replication.messages import OUTPUT_TELLERS_MAX, Closed
from select_service.core.replication.tombstones import Tombstones
from select_service.core.tenancy.shares import prefix_in
from select_service.core.tenancy.tenant_expiring_map import TenantExpiringMap
from select_service.core.tenancy.tenant_memory import TenantMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from select_service.core.changes import Changes
    from select_service.core.replication.claim import Claim, EarlyGrowth
    from select_service.core.replication.messages import Key
    from select_service.core.replication.tombstones import Tombstone
    from select_service.core.tenancy.shares import Shares
    from select_service.types import CoreLimits

_ORDER_BYTES: Final = 8


class FinishedClaims:
    """All that is over. All operations O(1), or O(claims taken over).

    Attributes:
        order: numbers what we hear of ends and what our callers free, through all lives.
        changes: set if the state is kept on disk.
    """

    def __init__(self, limits: CoreLimits, shares: Shares, order: int, early: EarlyGrowth) -> None:
        self.order = order
        self._early = early
        self.changes: Changes | None = None
        self.tombstones = Tombstones(limits.replica_ended_max, shares)
        self.closings = ClosedLeases(limits.ended_leases_max, shares, partial(self._mark, CLOSING))
        bound = shares.bound("replica_freed_ids", lambda: limits.replica_ended_max, by_prefix=True)
        self._freed_here: TenantExpiringMap[str] = TenantExpiringMap(shares, bound)
        """By the tenant that the name is of: `key_of` it → the order of that, packed."""

    @property
    def nbytes(self) -> int:
        """The memory that remembered ends take."""
        return self.tombstones.nbytes + self._freed_here.nbytes

    def _mark(self, kind: str, name: str) -> None:
        if self.changes is not None:
            self.changes.mark(kind, name)

    # -- claims --------------------------------------------------------------------------------

    def note(self, reservation_id: str, end: Tombstone, now: float, *, kept: bool = False) -> None:
        """Remember that a claim is over, whether or not we ever heard of it.

        `kept`: on disk, too, as its end concerns a caller of ours or a booking here. An end that
        was kept in an earlier life has its order; others get one now.
        """
        if not end.since:
            self.order += 1
            end.since = self.order
        for freed_key in self.tombstones.note(reservation_id, end, now, kept=kept):
            self._mark(END, freed_key)
        self._early.take((end.owner, end.born))

    # -- names ---------------------------------------------------------------------------------

    def note_freed(self, name: str, now: float) -> None:
        """Remember that our caller freed this name, including claims we have yet to hear of.

        An adoption states that the old claim has ended, and the owner of the new one. We may have
        heard only the first, elsewhere; then we know of no claim that could be ended.
        """
        self.order += 1
        self.recall_freed(name, self.order, now)
        self._mark(END, key_of(name))

    def recall_freed(self, name: str, order: int, now: float) -> None:
        """Remember that a name, or `key_of` it, was freed here, now or in an earlier life."""
        packed = order.to_bytes(_ORDER_BYTES)
        lost = self._freed_here.put(prefix_in(name), key_of(name), now, packed)
        if lost is not None:
            self._mark(END, lost[0])

    def _freed_at(self, name: str) -> int:
        packed = self._freed_here.get(prefix_in(name), key_of(name))
        return 0 if packed is None else int.from_bytes(packed)

    def kept_order(self, freed_key: str) -> int:
        """Return the order in which a caller last freed a name here; 0: no caller did. O(rows)."""
        found = (row.get(freed_key) for row in self._freed_here.rows)
        return max((0 if one is None else int.from_bytes(one) for one in found), default=0)

    def is_freed(self, claim: Claim) -> bool:
        """Tell whether a claim is over with one that it took over, or with its lease."""
        name = claim.reservation_id
        return self.closings.covers(claim) or any(
            self.tombstones.was_freed(name, key) or self._freed_since(claim, key)
            for key in claim.record.adopts
        )

    def _freed_since(self, claim: Claim, ancestor: Key) -> bool:
        """Whether a caller freed its id when we knew only that this ancestor had ended."""
        since = self.tombstones.since(claim.reservation_id, ancestor)
        if since is None:
            return False
        names = claim.reservation_id, claim.record.selection_id
        return any(self._freed_at(name) > since for name in names if name is not None)

    # -- leases --------------------------------------------------------------------------------

    def note_closed(self, lease_id: str, up_to: Mapping[int, int], now: float) -> bool:
        """Remember that a lease was closed, see `ClosedLeases`; False if that was known."""
        is_new = self.closings.note(lease_id, up_to, now)
        if is_new:
            self._mark(CLOSING, lease_id)
        return is_new

    # -- time ----------------------------------------------------------------------------------

    def purge(self, horizon: float, limit: int) -> None:
        """Forget what was last heard before `horizon`, up to `limit` of each kind."""
        self.closings.purge(horizon, limit)
        for freed_key in self.tombstones.purge(horizon, limit):
            self._mark(END, freed_key)
        for freed_key, _ in self._freed_here.expire(horizon, limit):
            self._mark(END, freed_key)

    def check(self) -> None:
        """Assert all invariants."""
        self.tombstones.check()
        self.closings.check()
        self._freed_here.check()
        assert len(self._freed_here) <= self._freed_here.bound.most


# Leases that a client closed at any replica: what is over with that, wherever it lives. A close is
# final for the reservations that the closing replica knew under the lease, and for those that took
# them over: all claims up to a number of each owner. The same lease id may be opened anew later,
# and what is booked under it then has higher numbers. ClosedLeases are remembered for a while, and
# every snapshot retells them.

CLOSINGS_PER_PART: Final = 64
"""In one part of a snapshot."""


class ClosedLeases:
    """The closed leases by id, in the order last heard. All operations O(owners of the lease)."""

    def __init__(
        self, closings_max: int, shares: Shares, on_forgotten: Callable[[str], None]
    ) -> None:
        self._known: TenantMemory[str, tuple[dict[int, int], float]] = TenantMemory(
            shares,
            "replica_closings",
            lambda: closings_max,
            by_prefix=True,
            on_forgotten=on_forgotten,
        )
        """By owner the last claim that ended with the lease, and when that was heard."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def lost(self) -> int:
        """Forgotten early, because of the limit."""
        return self._known.lost

    def find(self, lease_id: str) -> dict[int, int] | None:
        """Return by owner the last claim that ended with a lease; None: it was not closed."""
        found = self._known.get(prefix_in(lease_id), lease_id)
        return None if found is None else found[0]

    def covers(self, claim: Claim) -> bool:
        """Tell whether a claim, or one that it took over, ended with its lease."""
        lease = claim.record.lease
        up_to = None if lease is None or not self._known else self.find(lease.lease_id)
        return up_to is not None and any(born <= up_to.get(one, -1) for one, born in claim.names)

    def message_of(self, lease_id: str) -> Closed:
        """Return the statement that a lease, which was closed, is."""
        up_to = self.find(lease_id) or {}
        return Closed(lease_id, list(up_to), list(up_to.values()))

    def retold(self) -> Iterator[list[Closed]]:
        """Yield the statements of all closings known now; the table may change meanwhile."""
        names = iter([name for name, _ in self._known.items()])
        while some := list(islice(names, CLOSINGS_PER_PART)):
            yield [self.message_of(name) for name in some if self.find(name) is not None]

    def note(self, lease_id: str, up_to: Mapping[int, int], now: float) -> bool:
        """Remember that a lease was closed; False if that was known."""
        known = self.find(lease_id) or {}
        grown = {one: born for one, born in up_to.items() if born > known.get(one, -1)}
        known |= grown
        for one in list(known)[: max(0, len(known) - OUTPUT_TELLERS_MAX)]:
            del known[one]
        self._known.put(prefix_in(lease_id), lease_id, (known, now))
        return bool(grown)

    def purge(self, horizon: float, limit: int) -> None:
        """Forget up to `limit` closings last heard before `horizon`."""
        self._known.purge(lambda closing: closing[1] <= horizon, limit)

    def check(self) -> None:
        """Assert all invariants."""
        self._known.check()
        assert all(up_to for up_to, _ in self._known.values())
