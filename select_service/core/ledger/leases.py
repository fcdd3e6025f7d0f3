"""The owners of reservations, and until when: leases, renewed and ended as a whole.

A reservation under a lease has no deadline of its own, so that a renewal costs the same whatever
the lease holds. This module knows which reservations are under which lease; `lifecycle.py` calls
it, and frees what a lease leaves behind a few at a time. An ended lease is remembered for a while,
so that its owner learns what happened instead of renewing in vain.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from indexer.types import U64_MASK
from select_service.core.changes import LEASE
from select_service.core.ledger.deadlines import Deadlines, deadline_of, rounded_up
from select_service.core.ledger.reservation import Lease
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_memory import TenantMemory
from select_service.errors import (
    InvalidField,
    LeaseClosed,
    LeaseConflict,
    LeaseExpired,
    LeaseNotFound,
    LeaseReopened,
    NameRefused,
    TooManyLeases,
)
from select_service.types import LeaseList, LeaseRecord, LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

    from select_service.core.changes import Changes
    from select_service.core.ledger.reservation import LedgerReservation, SlotGeneration
    from select_service.types import CoreLimits

ENDED_MEMORY_S: Final = 600.0
LISTED_MAX: Final = 500
"""Records in one answer of GET /leases, whatever limit is requested; 0.3 ms of event loop."""

Ending: TypeAlias = Literal["closed", "expired"]
"""Also the form kept on disk."""


REVISIONS_APART: Final = 1 << 10
"""Between the revisions of two leases; replicas that are cut off change one lease less often."""


def opening_revision(born: int, *latest: int) -> int:
    """Return the revision to open a lease with: above those of a lease that had this id before.

    Replicas may yet state what those were given; their numbers follow from other replicas' ones.

    `latest` are the highest revisions known, `born` is our last statement to replicas.
    """
    return min(max(born, max(latest) + REVISIONS_APART), U64_MASK)


def next_revision(revision: int) -> int:
    """Return the revision of a changed time to live; see `LeaseState`."""
    return min(revision + 1, U64_MASK)  # replicas cannot be sent more


class Leases:
    """Open leases by id, owner and deadline; ended ones by id, and by what they leave behind."""

    def __init__(self, limits: CoreLimits, shares: Shares | None = None) -> None:
        self._limits = limits
        shares = shares or Shares(limits)
        self._tenants = shares.bound("leases_max", lambda: limits.leases_max, by_prefix=True)
        self._open: dict[str, Lease] = {}
        self._by_owner: dict[str, dict[str, Lease]] = {}
        self._deadlines: Deadlines[Lease] = Deadlines()
        self._ended: TenantMemory[str, tuple[Ending, float]] = TenantMemory(
            shares,
            "ended_leases_max",
            lambda: limits.ended_leases_max,
            by_prefix=True,
            on_forgotten=self._changed,
        )
        self._leaving: dict[Lease, None] = {}  # ended, with reservations still to free
        self.latest_revision = 0  # of all there were here
        self.changes: Changes | None = None  # set if the state is kept on disk
        self.opened = self.renewed = self.closed = self.expired = self.refused = 0  # since start
        self.reopening = 0  # refused because they came too soon after closing

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    @property
    def ended_count(self) -> int:
        """Number of ended leases remembered."""
        return len(self._ended)

    # -- begin and go on -----------------------------------------------------------------------

    def open(
        self,
        lease_id: str,
        owner: str,
        ttl_s: float,
        now: float,
        *,
        born: int = 0,
        revision: int = 0,
    ) -> Lease:
        """Open a lease, or renew the one this owner already has under this id. O(1).

        It opens with `revision`, see `opening_revision`; 0: with `born`, our last statement
        to replicas.

        Raises:
            InvalidField: a name is too long or empty, or the time to live is out of bounds.
            LeaseConflict: the id is another owner's.
            LeaseReopened: it was closed a moment ago; what is booked under it would not be freed.
            TooManyLeases: the limit on open leases is reached.
        """
        self._check_name("owner", owner)
        self._check_name("lease_id", lease_id)
        ttl_s = self.checked_ttl(ttl_s)
        known = self._open.get(lease_id)
        if known is not None:
            if known.owner != owner:
                raise LeaseConflict(lease_id)
            self.touch(known, now, ttl_s)
            return known
        self._check_not_closed(lease_id, now)
        state = LeaseState(lease_id, owner, ttl_s, born, first_revision=revision)
        lease = self.admit(state, now)
        if lease is None:
            crowded = self._tenants.refuse(prefix_in(lease_id))
            full = TooManyLeases(self._limits.leases_max, crowded)
            full.retry_after_s = max(0.0, self._deadlines.earliest() - now)
            raise full
        return lease

    def _check_not_closed(self, lease_id: str, now: float) -> None:
        """Refuse an id its owner has just closed. An expired lease may be opened again."""
        how, at = self._ended.get(prefix_in(lease_id), lease_id) or ("expired", now)
        left = at + self._limits.lease_reopen_s - now
        if how == "closed" and left > 0.0:
            self.reopening += 1
            raise LeaseReopened(lease_id, left)

    def admit(self, state: LeaseState, now: float) -> Lease | None:
        """Open a lease whose id is not open; None if the limit is reached. O(1)."""
        if not self._tenants.has_room(prefix_in(state.lease_id)):
            self.refused += 1
            return None
        self.opened += 1
        return self.restore(state, now)

    def restore(self, state: LeaseState, now: float) -> Lease:
        """Restore a lease from its record, with its whole time to live ahead.

        Its id must not be open. Nothing is under it yet: see `join`.
        """
        assert state.lease_id not in self._open
        lease = Lease(state, now)
        self._open[lease.lease_id] = lease
        self.latest_revision = max(lease.revision, self.latest_revision)
        self._by_owner.setdefault(lease.owner, {})[lease.lease_id] = lease
        self._deadlines.add(lease, state.ttl_s)
        self._tenants.take(prefix_in(lease.lease_id))
        self._ended.pop(prefix_in(lease.lease_id), lease.lease_id)
        self._changed(lease.lease_id)
        return lease

    def _changed(self, lease_id: str) -> None:
        """Note that a lease opened, ended or changed its time to live; renewals are not kept."""
        if self.changes is not None:
            self.changes.mark(LEASE, lease_id)

    def _check_name(self, field: str, text: str) -> None:
        longest = self._limits.lease_name_length_max
        if not 0 < len(text) <= longest:
            limit = "lease_name_length_max" if text else None
            why = f"{field} must have 1 to {longest} characters"
            raise InvalidField(why, field=field, limit=limit)
        if not text.isprintable():
            raise NameRefused(field, longest)

    def checked_ttl(self, ttl_s: float) -> float:
        """Return a time to live as it is used here.

        Raises:
            InvalidField: it is out of bounds.
        """
        least, most = self._limits.lease_ttl_min_s, self._limits.lease_ttl_max_s
        if not least <= ttl_s <= most:
            raise InvalidField(f"ttl_s must be between {least:g} and {most:g}", field="ttl_s")
        return rounded_up(ttl_s)

    def find(self, lease_id: str) -> Lease | None:
        """Return an open lease, None if there is none."""
        return self._open.get(lease_id)

    def get(self, lease_id: str) -> Lease:
        """Return an open lease.

        Raises:
            LeaseNotFound: there is none; LeaseExpired, LeaseClosed if there was one lately.
        """
        lease = self._open.get(lease_id)
        if lease is not None:
            return lease
        how = self.ending(lease_id)
        if how is None:
            raise LeaseNotFound(lease_id)
        raise LeaseExpired(lease_id) if how == "expired" else LeaseClosed(lease_id)

    def renew(self, lease_id: str, ttl_s: float | None, now: float) -> Lease:
        """Renew a lease, optionally with a new time to live. O(1).

        Raises:
            InvalidField: the time to live is out of bounds.
            LeaseNotFound: as in `get`.
        """
        ttl_s = None if ttl_s is None else self.checked_ttl(ttl_s)
        lease = self.get(lease_id)
        self.touch(lease, now, ttl_s)
        self.renewed += 1
        return lease

    def touch(
        self, lease: Lease, now: float, ttl_s: float | None = None, revision: int | None = None
    ) -> None:
        """Note a sign of life; ignored for an ended lease. O(1).

        `ttl_s` None: as before. `revision` None: the next one, if the time to live differs.
        """
        if not lease.is_open:
            return
        lease.touched = now
        before = lease.revision, lease.ttl_s
        self._deadlines.restart(lease, lease.ttl_s if ttl_s is None else ttl_s)
        if lease.ttl_s != before[1]:
            lease.revision = next_revision(lease.revision)
        if revision is not None:
            lease.revision = revision
        if before != (lease.revision, lease.ttl_s):
            self.latest_revision = max(lease.revision, self.latest_revision)
            self._changed(lease.lease_id)

    # -- reservations of a lease ---------------------------------------------------------------

    def join(self, lease: Lease, reservation: LedgerReservation) -> None:
        """Let a reservation live and end with an open lease."""
        assert lease.is_open
        assert not reservation.ttl_s, "it has no deadline of its own"
        reservation.lease = lease
        generation = lease.reservations[reservation] = reservation.generation
        lease.by_generation[generation] = lease.by_generation.get(generation, 0) + 1

    def inherit(
        self,
        lease: Lease,
        adopts: Sequence[tuple[int, int]],
        is_silent: Callable[[int], bool],
    ) -> None:
        """Note the claims of replicas that a reservation under it took over, the last one last.

        The owner of that one sent us those before; `is_silent` says whether it has left.
        """
        if adopts:
            most = self._limits.replica_publishers_max
            lease.ancestors.note(adopts[-1][0], adopts, most, is_silent)

    def leave(self, reservation: LedgerReservation) -> None:
        """Remove an ended reservation from its lease; idempotent."""
        lease = reservation.lease
        if lease is not None:
            reservation.lease = None
            generation = lease.reservations.pop(reservation)
            lease.by_generation[generation] -= 1
            if not lease.by_generation[generation]:
                del lease.by_generation[generation]
            if not lease.is_open and not lease.reservations:
                del self._leaving[lease]

    # -- end -----------------------------------------------------------------------------------

    def end(self, lease: Lease, how: Ending, now: float) -> None:
        """End a lease; its reservations are still to be freed: `left_behind`."""
        lease.is_open = False
        self._deadlines.remove(lease)
        del self._open[lease.lease_id]
        self._tenants.give(prefix_in(lease.lease_id))
        of_owner = self._by_owner[lease.owner]
        del of_owner[lease.lease_id]
        if not of_owner:
            del self._by_owner[lease.owner]
        if lease.reservations:
            self._leaving[lease] = None
        self.remember_ended(lease.lease_id, how, now)
        if how == "expired":
            self.expired += 1
        else:
            self.closed += 1

    def close(self, lease_id: str, now: float) -> Lease | None:
        """End a lease for its owner; None if it has already ended.

        Raises:
            LeaseNotFound: it was never open.
        """
        lease = self._open.get(lease_id)
        if lease is None:
            if self.ending(lease_id) is not None:
                return None
            raise LeaseNotFound(lease_id)
        self.end(lease, "closed", now)
        return lease

    def expire(self, now: float, limit: int) -> int:
        """End up to `limit` leases that were not renewed; return how many."""
        due = self._deadlines.due(now, limit)
        for lease in due:
            self.end(lease, "expired", now)
        return len(due)

    def next_expiry(self) -> float:
        """When `expire` may next have something to do; infinity if nothing can expire."""
        return self._deadlines.next()

    def left_behind(self, lease: Lease | None = None) -> LedgerReservation | None:
        """Return a reservation left by an ended lease (None: by any), until it `leave`s."""
        if lease is None:
            lease = next(iter(self._leaving), None)
        return None if lease is None else next(iter(lease.reservations), None)

    def remember_ended(self, lease_id: str, how: Ending, now: float) -> None:
        """Record the end of a lease that is not open, here or, as its owner reports, elsewhere."""
        assert lease_id not in self._open
        self._ended.put(prefix_in(lease_id), lease_id, (how, now))
        self._changed(lease_id)

    def recall_ended(self, lease_id: str, how: Ending, now: float) -> bool:
        """Restore an end from before a restart; False if there is no room for it."""
        if not self._ended.has_room(prefix_in(lease_id)) or lease_id in self._open:
            return False
        self.remember_ended(lease_id, how, now)
        return True

    def ending(self, lease_id: str) -> Ending | None:
        """Return how a lease ended, None if it has not, or it is no longer remembered."""
        entry = self._ended.get(prefix_in(lease_id), lease_id)
        return None if entry is None else entry[0]

    def purge_ended(self, now: float, limit: int) -> int:
        """Forget up to `limit` leases that ended more than ten minutes ago; return how many."""
        return self._ended.purge(lambda ended: now - ended[1] >= ENDED_MEMORY_S, limit)

    # -- reading -------------------------------------------------------------------------------

    def record(self, lease: Lease, now: float) -> LeaseRecord:
        """Describe an open lease for its owner."""
        left = max(0.0, deadline_of(lease) - now)
        return LeaseRecord(lease.lease_id, lease.owner, lease.ttl_s, left, lease.live)

    def listed(
        self, owner: str | None, limit: int, now: float, prefixes: tuple[str, ...] | None = None
    ) -> LeaseList:
        """Describe the first `limit` open leases, of one owner or of all, oldest first."""
        chosen = self._open if owner is None else self._by_owner.get(owner, {})
        if prefixes is not None:
            chosen = {name: one for name, one in chosen.items() if name.startswith(prefixes)}
        first = islice(chosen.values(), min(limit, LISTED_MAX))
        return LeaseList([self.record(lease, now) for lease in first], len(chosen))

    def states(self) -> Iterator[LeaseState]:
        """Return every open lease in the form that `restore` takes."""
        return (self.state(lease) for lease in self._open.values())

    def state(self, lease: Lease) -> LeaseState:
        """Return what must be kept of a lease to restore it."""
        return LeaseState(
            lease.lease_id,
            lease.owner,
            lease.ttl_s,
            lease.born,
            lease.adopted,
            lease.revision,
            lease.first_revision,
        )

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with leases; see `dict_compaction.py`."""
        yield from (self._open, self._by_owner)

    def check(self) -> None:
        """Assert all invariants; O(everything)."""
        self._deadlines.check(self._open.values())
        self._tenants.check(map(prefix_in, self._open))
        self._ended.check()
        ended = {lease_id for lease_id, _ in self._ended.items()}
        assert len(ended) == len(self._ended), "ended once"
        assert not ended & self._open.keys(), "open and ended at once"
        owned = {lease for leases in self._by_owner.values() for lease in leases.values()}
        assert owned == set(self._open.values())
        for lease in self._open.values():
            assert lease.is_open
            assert lease.lease_id in self._by_owner[lease.owner]
        for lease in self._leaving:
            assert not lease.is_open
            assert lease.reservations, "an ended lease is forgotten with its last reservation"
        for lease in (*self._open.values(), *self._leaving):
            counts: dict[SlotGeneration, int] = {}
            for reservation, generation in lease.reservations.items():
                counts[generation] = counts.get(generation, 0) + 1
                assert not reservation.live or reservation.generation is generation
                assert reservation.lease is lease
                assert not reservation.ttl_s
            assert lease.by_generation == counts
