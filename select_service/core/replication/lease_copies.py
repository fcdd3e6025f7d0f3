"""Leases of other replicas, as far as their claims name them, and the claims under each.

A copy has one time to live for all claims under one lease id, of all owners: renewing a lease
anywhere keeps them all, at the same cost however many there are. Nothing here knows which owners
are alive: `shared_leases.py` asks for the copies that were not renewed, and decides what to do.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from select_service.core.changes import LEASE_TERMS
from select_service.core.ledger.deadlines import Deadlines, deadline_of, rounded_up
from select_service.core.ledger.leases import REVISIONS_APART
from select_service.core.replication.claim import LeaseCopy
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.types import LeaseRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from select_service.core.changes import Changes
    from select_service.core.replication.claim import Claim
    from select_service.core.replication.messages import ClaimRecord
    from select_service.types import CoreLimits, LeaseState

_REVISIONS: Final = 1 << 63
"""No life of a replica has numbers beyond (see `SEQ_BITS`): such ones are garbled."""

LeaseTerms: TypeAlias = tuple[float, int]
"""A time to live and its revision."""


class LeaseCopies:
    """Copies by lease id, owner and deadline."""

    def __init__(
        self,
        limits: CoreLimits,
        shares: Shares | None = None,
        is_silent: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._limits = limits
        self._is_silent = is_silent  # whether a publisher has left
        shares = shares or Shares(limits)
        self._tenants = shares.bound(
            "lease_copies_max", lambda: limits.lease_copies_max, by_prefix=True
        )
        self._by_id: dict[str, LeaseCopy] = {}
        self._by_owner: dict[str, dict[str, LeaseCopy]] = {}
        self._deadlines: Deadlines[LeaseCopy] = Deadlines()
        self.adopted_from: dict[str, None] = {}  # leases with an orphan that is now ours
        self.recalled: OrderedDict[str, tuple[LeaseTerms, float]] = OrderedDict()
        """Given by our callers, and when that was restored or last renewed, oldest first.

        Without a copy, and counted among these: all that we knew of under a lease has ended, or it
        was in an earlier life.
        """
        self.latest_revision = 0  # that was heard
        self.changes: Changes | None = None  # set if the state is kept on disk
        self.refused = 0  # since start

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LeaseCopy]:
        return iter(self._by_id.values())

    def find(self, lease_id: str) -> LeaseCopy | None:
        """Return the copy of a lease, None if no living claim names it."""
        return self._by_id.get(lease_id)

    def join(self, claim: Claim, now: float) -> None:
        """Put a living claim of another replica under its lease, and renew the lease. O(1)."""
        terms = claim.record.lease
        if terms is None or claim.lease is not None:
            return
        self.note_revision(terms.revision)
        ttl_s = self.ttl(terms.ttl_s)
        copy = self._by_id.get(terms.lease_id)
        if ttl_s is None or (copy is None and not self._has_room_for(terms)):
            self.refused += 1
            return
        if copy is None:
            copy = LeaseCopy(terms.lease_id, terms.owner, now)
            self._by_id[copy.lease_id] = copy
            self._tenants.take(prefix_in(copy.lease_id))
            self._by_owner.setdefault(copy.owner, {})[copy.lease_id] = copy
            self.touch(copy, now, ttl_s, terms.revision)
            self._take_recalled(copy, now)
        else:
            copy.closed = False  # it is in use again
            self.touch(copy, now, ttl_s, terms.revision)
        copy.claims.setdefault(claim.owner, OrderedDict())[claim] = None
        first = (*claim.record.adopts, claim.key)[:1]
        most = self._limits.replica_publishers_max
        copy.latest.note(claim.owner, first, most, self._is_silent)
        claim.lease = copy
        self.inherit(claim)
        claim.record = msgspec.structs.replace(claim.record, lease=copy.state)  # share the names

    def note_revision(self, revision: int) -> None:
        """Note that a lease has this revision, or had it; O(1)."""
        if revision < _REVISIONS:
            self.latest_revision = max(revision, self.latest_revision)

    def inherit(self, claim: Claim) -> None:
        """Note the claims that one under a lease took over."""
        if claim.lease is not None:
            most = self._limits.replica_publishers_max
            ancestors, adopts = claim.lease.ancestors, claim.record.adopts
            ancestors.note(claim.owner, adopts, most, self._is_silent)

    def _has_room_for(self, terms: LeaseState) -> bool:
        longest = self._limits.lease_name_length_max
        short = 0 < len(terms.lease_id) <= longest and 0 < len(terms.owner) <= longest
        if not short:
            return False
        prefix = prefix_in(terms.lease_id)
        has_room = terms.lease_id in self.recalled or self._tenants.has_room(prefix)
        if not has_room:
            self._tenants.refuse(prefix)
        return has_room

    def ttl(self, ttl_s: float | None) -> float | None:
        """Return a stated time to live in the form used here; None: it is out of bounds."""
        if ttl_s is None or not 0.0 < ttl_s <= self._limits.reservation_ttl_max_s:
            return None
        return rounded_up(ttl_s)

    def orphan_ttl(self, record: ClaimRecord, default_s: float) -> float:
        """Return how long a claim lives without a copy of its lease, as told by its owner."""
        ttl_s = self.ttl(record.ttl_s if record.lease is None else record.lease.ttl_s)
        return default_s if ttl_s is None else ttl_s

    def leave(self, claim: Claim) -> None:
        """Remove a claim that has ended or aged; idempotent. O(1)."""
        copy, claim.lease = claim.lease, None
        if copy is None:
            return
        of_owner = copy.claims[claim.owner]
        del of_owner[claim]
        if of_owner:
            return
        del copy.claims[claim.owner]
        if not copy.claims:
            self._deadlines.remove(copy)
            del self._by_id[copy.lease_id]
            has_room = len(self.recalled) < self._limits.lease_copies_max // 2  # copies need some
            if copy.is_changed_here and not copy.closed and has_room:
                # it may be open without load
                self.recalled[copy.lease_id] = (copy.lease_ttl_s, copy.revision), copy.seen_at
            else:
                self._forget_change(copy)
                self._tenants.give(prefix_in(copy.lease_id))
            leases = self._by_owner[copy.owner]
            del leases[copy.lease_id]
            if not leases:
                del self._by_owner[copy.owner]

    @staticmethod
    def is_later(copy: LeaseCopy, ttl_s: float | None, revision: int) -> bool:
        """Tell whether a time to live (see `ttl`) of this revision takes the place of a copy's."""
        if ttl_s is None:
            return False
        if not (revision or copy.revision):  # all of older versions: what was said last
            return ttl_s != copy.lease_ttl_s
        return (revision, ttl_s) > (copy.revision, copy.lease_ttl_s)

    def touch(
        self, copy: LeaseCopy, now: float, ttl_s: float | None = None, revision: int = 0
    ) -> None:
        """Renew a copy, for `ttl_s` (see `ttl`) from now if that is later. O(1)."""
        if ttl_s is not None and self.is_later(copy, ttl_s, revision):
            self.note_revision(revision)
            copy.lease_ttl_s, copy.revision = ttl_s, revision
            self._forget_change(copy)
        copy.ageing = False
        copy.seen_at = now
        self._let_expire(copy, copy.lease_ttl_s, now)

    def look_again(self, copy: LeaseCopy, now: float) -> None:
        """Check an unrenewed copy again soon, as its time is not up yet. O(1)."""
        self._let_expire(copy, self._limits.replica_heartbeat_s, now)

    def change(self, copy: LeaseCopy, ttl_s: float, revision: int, now: float) -> None:
        """Renew a copy for a caller of ours that has changed its time to live. O(1)."""
        self.touch(copy, now, ttl_s, revision)
        copy.is_changed_here = True
        self._mark(copy.lease_id)

    def _forget_change(self, copy: LeaseCopy) -> None:
        if copy.is_changed_here:
            copy.is_changed_here = False
            self._mark(copy.lease_id)

    def _mark(self, lease_id: str) -> None:
        if self.changes is not None:
            self.changes.mark(LEASE_TERMS, lease_id)

    # -- on disk -------------------------------------------------------------------------------

    def terms(self, lease_id: str) -> LeaseTerms | None:
        """Return what our callers gave a lease last, None: nothing that counts."""
        copy = self._by_id.get(lease_id)
        if copy is not None and copy.is_changed_here:
            return copy.lease_ttl_s, copy.revision
        return self.recalled[lease_id][0] if lease_id in self.recalled else None

    def recall(self, lease_id: str, terms: LeaseTerms, now: float) -> bool:
        """Know what our callers gave a lease in an earlier life; False if there is no room."""
        prefix = prefix_in(lease_id)
        if lease_id in self.recalled or not self._tenants.has_room(prefix):
            return False
        self.recalled[lease_id] = terms, now
        self.note_revision(terms[1])
        self._tenants.take(prefix)
        copy = self._by_id.get(lease_id)
        if copy is not None:
            self._take_recalled(copy, now)
        return True

    def _take_recalled(self, copy: LeaseCopy, now: float) -> None:
        terms, _ = self.recalled.pop(copy.lease_id, (None, 0.0))
        if terms is None:
            return
        self._tenants.give(prefix_in(copy.lease_id))
        if (copy.revision, copy.lease_ttl_s) > terms[::-1]:
            self._mark(copy.lease_id)
        else:  # the same may be from another replica that has heard us, unlike the owner
            self.change(copy, *terms, now)

    def purge(self, horizon: float, limit: int) -> None:
        """Forget what was recalled before `horizon` and whose lease was not named since."""
        for _ in range(min(limit, len(self.recalled))):
            lease_id, (_, at) = next(iter(self.recalled.items()))
            if at > horizon:
                break
            self._forget_recalled(lease_id)

    def hear_closed(self, lease_id: str, revision: int) -> None:
        """Forget what our callers gave a lease that was closed with this revision, or a later one.

        Here it may have a later revision than where it was closed; the next lease's are far above.
        """
        if lease_id in self.recalled and self.recalled[lease_id][0][1] < revision + REVISIONS_APART:
            self._forget_recalled(lease_id)

    def _forget_recalled(self, lease_id: str) -> None:
        del self.recalled[lease_id]
        self._tenants.give(prefix_in(lease_id))
        self._mark(lease_id)

    def _let_expire(self, copy: LeaseCopy, ttl_s: float, now: float) -> None:
        copy.touched = now
        self._deadlines.restart(copy, ttl_s)

    def due(self, now: float, limit: int) -> list[LeaseCopy]:
        """Return up to `limit` unrenewed copies; each again until it is touched or empty."""
        return self._deadlines.due(now, limit)

    # -- reading -------------------------------------------------------------------------------

    def record(self, copy: LeaseCopy, now: float) -> LeaseRecord:
        """Describe a copy for its owner."""
        return LeaseRecord(
            copy.lease_id,
            copy.owner,
            copy.lease_ttl_s,
            max(0.0, deadline_of(copy) - now),
            sum(map(len, copy.claims.values())),
            sorted(copy.claims),
        )

    def listed(
        self, owner: str | None, limit: int, now: float, prefixes: tuple[str, ...] | None = None
    ) -> tuple[list[LeaseRecord], int]:
        """Describe the first `limit` leases, of one owner or all, and return the total."""
        chosen = self._by_id if owner is None else self._by_owner.get(owner, {})
        if prefixes is not None:
            chosen = {name: one for name, one in chosen.items() if name.startswith(prefixes)}
        return [self.record(copy, now) for copy in islice(chosen.values(), limit)], len(chosen)

    def check(self, claims: Iterable[Claim]) -> None:
        """Assert all invariants, given all claims of others; O(everything)."""
        self._deadlines.check(self._by_id.values())
        self._tenants.check(map(prefix_in, [*self._by_id, *self.recalled]))
        under = {claim for copy in self for some in copy.claims.values() for claim in some}
        assert under == {claim for claim in claims if claim.lease is not None}
        for lease_id, copy in self._by_id.items():
            assert copy.lease_id == lease_id
            assert self._by_owner[copy.owner][lease_id] is copy
            assert copy.claims, "a copy without claims is forgotten"
            for owner, some in copy.claims.items():
                assert some
                assert lease_id not in self.recalled
                for claim in some:
                    assert claim.lease is copy
                    assert claim.owner == owner
                    assert not claim.dead
                    assert not claim.aged
        assert sum(map(len, self._by_owner.values())) == len(self._by_id)
