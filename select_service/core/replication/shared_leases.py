"""Leases across replicas: a client may renew or close its lease at any of them.

The replica that has it open receives that, and does so. Claims that a lost owner leaves under it
are adopted by the replica the client turns to, age with the lease if it turns to none, and are
freed when the lease is closed, all in slices. `leases.py` keeps the leases open here,
`lease_copies.py` those known through others; `apply_messages.py` and `service.py` call this module.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from indexer.types import HASH_BYTES
from select_service.core.ledger.deadlines import deadline_of
from select_service.core.ledger.leases import LISTED_MAX, next_revision, opening_revision
from select_service.core.replication.messages import CLOSED_REVISION, Closed, Ended, Renewed
from select_service.errors import LeaseConflict
from select_service.types import LeaseList

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from select_service.core.ledger.reservation import Lease
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.core.replication.claim import Claim, LeaseCopy
    from select_service.core.replication.claims import Claims
    from select_service.core.replication.resolver import Resolver
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.types import CoreLimits, LeaseRecord, LeaseState


ADOPTION_STEPS: Final = 2
"""The cost of adopting and announcing an orphan, in visited claims."""

BLOCKS_TOLD_PER_STEP: Final = 256


class SharedLeases:
    """Callers' requests on leases, and replicas' statements on them."""

    def __init__(
        self, limits: CoreLimits, claims: Claims, lifecycle: Lifecycle, resolver: Resolver
    ) -> None:
        self.chores: list[Iterator[None]] = []  # long work, done by `plane.py` in slices
        self._unsettled: dict[str, bool] = {}
        """Closed leases with something left to end, and whether ours has been dealt with."""
        self._limits = limits
        self._claims = claims
        self._copies = claims.copies
        self._lifecycle = lifecycle
        self._leases = lifecycle.leases
        self._resolver = resolver
        self.now = 0.0  # of the turn a chore runs in

    # -- callers -------------------------------------------------------------------------------

    def open(self, lease_id: str, owner: str, ttl_s: float, now: float) -> LeaseRecord:
        """Open a lease here, or renew the one this owner has under this id, here or elsewhere.

        Raises:
            ServiceError: as `Leases.open`, also when it is another owner's elsewhere.
        """
        copy = self._copies.find(lease_id)
        if copy is not None and copy.owner != owner:
            raise LeaseConflict(lease_id)
        born = self._claims.outbox.seq
        revision = opening_revision(
            born, self._leases.latest_revision, self._copies.latest_revision
        )
        lease = self._leases.open(lease_id, owner, ttl_s, now, born=born, revision=revision)
        if copy is not None:
            copy.closed = False
            self._care_for(copy, now, lease.ttl_s)
        if copy is not None or (lease.is_changed and self._claims.router_id):
            self._lifecycle.renewal.tell_of(lease_id)
        return self._leases.record(lease, now)

    def renew(self, lease_id: str, ttl_s: float | None, now: float) -> LeaseRecord:
        """Renew everything under a lease, whichever replica has it open.

        Returns:
            What is known of it here; `reservations` counts those of all replicas.

        Raises:
            InvalidField: a time to live out of bounds.
            LeaseNotFound: no replica has it, as far as is known here.
        """
        copy, lease = self._copies.find(lease_id), self._leases.find(lease_id)
        if lease is not None or copy is None or copy.closed:
            lease = self._leases.renew(lease_id, ttl_s, now)
            ttl_s = None if ttl_s is None else lease.ttl_s
        elif ttl_s is not None:
            ttl_s = self._leases.checked_ttl(ttl_s)
        if copy is None:
            assert lease is not None
            if self._claims.router_id:  # though none is known: it may be open without load
                self._lifecycle.renewal.tell_of(lease_id)
            return self._leases.record(lease, now)
        elsewhere = self._copies.record(copy, now).reservations
        lease = self._care_for(copy, now, ttl_s)
        self._lifecycle.renewal.tell_of(lease_id)
        if lease is None:
            return self._copies.record(copy, now)
        record = self._leases.record(lease, now)
        return msgspec.structs.replace(record, reservations=record.reservations + elsewhere)

    def _care_for(self, copy: LeaseCopy, now: float, ttl_s: float | None) -> Lease | None:
        """Keep everything under it alive, adopting orphans; return the lease if it is open here."""
        lease = self._leases.find(copy.lease_id)
        if ttl_s is None:
            self._copies.touch(copy, now)
        else:
            self._give(copy, lease, ttl_s, now)
        copy.renewed_at = copy.announced_at = now
        if not any(router_id in self._claims.gone for router_id in copy.claims):
            return lease
        if lease is None:
            lease = self._leases.admit(self._claims.adopted_lease(copy.state), now)
            self._claims.counters.leases_adopted += lease is not None
        if lease is not None:  # otherwise they are at least kept alive
            self._adopt(copy)
        return lease

    def _give(self, copy: LeaseCopy, lease: Lease | None, ttl_s: float, now: float) -> None:
        """Give a lease the time to live that a caller wants: it counts before all others known."""
        revision = copy.revision if lease is None else max(copy.revision, lease.revision)
        if ttl_s != copy.lease_ttl_s:
            revision = next_revision(revision)
        if (revision, ttl_s) == (copy.revision, copy.lease_ttl_s):
            self._copies.touch(copy, now)
        else:
            self._copies.change(copy, ttl_s, revision, now)
        if lease is not None:
            self._leases.touch(lease, now, ttl_s, revision)

    def close(self, lease_id: str, now: float) -> Lease | None:
        """End a lease here and wherever it is known; return the one here, if there was one to end.

        Raises:
            LeaseNotFound: it was never open, as far as anybody remembers.
        """
        copy, lease = self._copies.find(lease_id), self._leases.find(lease_id)
        claims = self._claims
        if not claims.router_id:
            return self._leases.close(lease_id, now)
        up_to = self._known_under(copy, lease)
        if up_to:
            claims.endings.note_closed(lease_id, up_to, now)
            self._copies.hear_closed(lease_id, up_to[CLOSED_REVISION])
            self._unsettled[lease_id] = False
        if claims.closings.find(lease_id) is not None:  # perhaps again: some may have missed it
            claims.outbox.say_of_lease(claims.closings.message_of(lease_id))
        if copy is not None:
            copy.closed = True
            if lease is None:
                self._leases.remember_ended(lease_id, "closed", now)
        return self._leases.close(lease_id, now)

    def _known_under(self, copy: LeaseCopy | None, lease: Lease | None) -> dict[int, int]:
        """Return by owner the last claim known under a lease, heirs included; see `Closed`.

        Another replica may have taken over the same ones, which we have yet to hear; and one whose
        claims have all ended may still have the lease open.
        """
        known: dict[int, int] = {}
        claims = self._claims
        ended: list[Iterable[tuple[int, int]]] = []
        if copy is not None:
            living = [(one, claims.sets[one].highest) for one in copy.claims]
            ended += [copy.latest.items(), copy.ancestors.items(), living]
        if lease is not None:
            ended += [lease.ancestors.items(), [(claims.router_id, claims.outbox.seq)]]
        for owner, born in chain.from_iterable(ended):
            known[owner] = max(born, known.pop(owner, 0))  # the most important ones last
        if known:
            known[CLOSED_REVISION] = max(one.revision for one in (copy, lease) if one is not None)
        return known

    def listed(
        self, owner: str | None, limit: int, now: float, prefixes: tuple[str, ...] | None = None
    ) -> LeaseList:
        """Describe open leases, oldest first, then those known through others.

        O(all leases) if filtered by `prefixes` of their ids.
        """
        limit = min(limit, LISTED_MAX)
        here = self._leases.listed(owner, limit, now, prefixes)
        there, total = self._copies.listed(owner, limit - len(here.leases), now, prefixes)
        return LeaseList([*here.leases, *there], here.total + total)

    # -- statements of replicas ----------------------------------------------------------------

    def renewed(self, said: Renewed, now: float, *, live: bool = False) -> None:
        """Apply a renewal that came in at another replica; `live`: just now."""
        lease, copy = self._leases.find(said.lease_id), self._copies.find(said.lease_id)
        ttl_s, revision, at = self._copies.ttl(said.ttl_s), said.revision, now - said.age_s
        self._copies.note_revision(revision)
        fits = ttl_s is not None and ttl_s <= self._limits.lease_ttl_max_s
        if lease is not None:
            if fits and revision and (revision, ttl_s) > (lease.revision, lease.ttl_s):
                self._leases.touch(lease, now, ttl_s, revision)
                self._claims.counters.leases_renewed += 1
            elif live and fits and revision and not lease.is_changed and ttl_s != lease.ttl_s:
                # both were opened without a word of the other, so their revisions do not compare
                self._leases.touch(lease, now, ttl_s)
                self._claims.counters.leases_renewed += 1
                self._lifecycle.renewal.tell_of(said.lease_id)
            elif at > lease.touched:
                self._leases.touch(lease, now, ttl_s if fits and not revision else None)
                self._claims.counters.leases_renewed += 1
        if copy is not None:
            is_later = revision and self._copies.is_later(copy, ttl_s, revision)
            if is_later or at > copy.seen_at:
                self._copies.touch(copy, now, ttl_s, revision)

    def closed(self, said: Closed, now: float) -> None:
        """Apply a close that came in at another replica; housekeeping frees what is under ours."""
        if not said.up_to:  # of an older version
            if self._claims.router_id in said.router_ids:
                self._end_ours_closed(said.lease_id, now)
            return
        up_to = dict(zip(said.router_ids, said.up_to, strict=False))
        if self.recall_closed(said.lease_id, up_to, now):
            self._settle(said.lease_id, now)

    def recall_closed(self, lease_id: str, up_to: dict[int, int], now: float) -> bool:
        """Remember a close, perhaps from an earlier life; True if it was not known.

        What it ends is ended in the next turns.
        """
        if not self._claims.endings.note_closed(lease_id, up_to, now):
            return False
        self._copies.note_revision(max(up_to.values()))  # older versions do not tell its own
        if CLOSED_REVISION in up_to:
            self._copies.hear_closed(lease_id, up_to[CLOSED_REVISION])
        self._unsettled[lease_id] = False
        return True

    def _end_ours_closed(self, lease_id: str, now: float) -> None:
        lease = self._leases.find(lease_id)
        if lease is not None:
            self._leases.end(lease, "closed", now)
            self._claims.counters.leases_closed += 1

    # -- our statements ------------------------------------------------------------------------

    def retold(self, now: float) -> Iterator[Renewed]:
        """Yield our callers' recent renewals, for replicas that missed them."""
        for copy in list(self._copies):
            age_s = now - copy.renewed_at
            if copy.is_changed_here:
                yield Renewed(copy.lease_id, copy.lease_ttl_s, age_s, copy.revision)
            elif age_s < copy.lease_ttl_s:
                yield Renewed(copy.lease_id, age_s=age_s)
        for lease_id, (terms, _) in list(self._copies.recalled.items()):
            yield Renewed(lease_id, terms[0], inf, terms[1])
        for lease in list(self._leases):
            if lease.is_changed:
                yield Renewed(lease.lease_id, lease.ttl_s, now - lease.touched, lease.revision)

    def terms(self, claim: Claim) -> LeaseState | None:
        """Return the lease of a claim with its current time to live."""
        if claim.lease is not None:
            return claim.lease.state
        terms = claim.record.lease
        if terms is None or claim.owner != self._claims.router_id:
            return terms
        lease = self._leases.find(terms.lease_id)
        return terms if lease is None else self._leases.state(lease)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Adopt the rest of a lease once one orphan is ours, and handle copies without renewals.

        While a replica has such a lease open, it watches the time.
        """
        self.now = now
        while self._copies.adopted_from:
            copy = self._copies.find(self._copies.adopted_from.popitem()[0])
            if copy is not None:
                self._adopt(copy)
        for lease_id in list(self._unsettled):
            self._settle(lease_id, now)
        for copy in self._copies.due(now, self._limits.expired_per_turn_max):
            self._copies.look_again(copy, now)
            lease = self._leases.find(copy.lease_id)
            if not copy.claims.keys() <= self._claims.gone:
                # an owner watches it, and would announce its end; we own the unbooked claims
                # ourselves
                if lease is None and not copy.ending:
                    copy.ending = True
                    self.chores.append(self._end_ours(copy))
            elif lease is not None:
                # announcing an adoption keeps the lease alive elsewhere: a lease about to expire
                # here, too, would outlive its owner by another time to live
                if deadline_of(lease) - now > self._limits.replica_heartbeat_s:
                    self._adopt(copy)
            elif not copy.ageing:
                copy.ageing = True
                self._claims.counters.leases_missed += 1
                self.chores.append(self._age_out(copy))

    def _adopt(self, copy: LeaseCopy) -> None:
        if not copy.adopting:
            copy.adopting = True
            self.chores.append(self._adopt_orphans(copy))

    def _adopt_orphans(self, copy: LeaseCopy) -> Iterator[None]:
        """Adopt its booked orphans, one per step."""
        for claim in self._orphans(copy):
            if self._leases.find(copy.lease_id) is None:
                break  # it has ended meanwhile
            booking = self._booking(claim)
            steps = 1
            if booking is not None and self._lifecycle.announcer.may_adopt(booking.reservation):
                blocks = len(booking.partition.ledger.chain_of(booking.reservation)) // HASH_BYTES
                steps = ADOPTION_STEPS + blocks // BLOCKS_TOLD_PER_STEP
                self._lifecycle.renewal.adopt(booking, self.now)
            for _ in range(steps):
                yield
        copy.adopting = False

    def _age_out(self, copy: LeaseCopy) -> Iterator[None]:
        """Release its orphans; not announced, as others watch the time, too."""
        for claim in self._orphans(copy):
            if not copy.ageing:
                break  # its client has renewed it after all
            booking = self._booking(claim)
            if booking is None:
                self._claims.age(claim)
                yield
                continue
            for _ in range(self._lifecycle.let_go(booking, self.now)):
                yield
            self._resolver.touched[booking.partition] = None
        copy.ageing = False

    def _end_ours(self, copy: LeaseCopy) -> Iterator[None]:
        """End our claims on the same ids that were not the booked ones when our lease ended.

        Nothing ended them with it, and while they live the others wait for us.
        """
        for router_id in sorted(copy.claims):
            for claim in _in_turn(copy, router_id):
                own = self._claims.own.by_id.get(claim.reservation_id)
                if own is not None and self._resolver.is_over(own):
                    self._resolver.unbook(own, self.now)
                    self._claims.end_own(own, self.now)
                yield
        copy.ending = False

    def _settle(self, lease_id: str, now: float) -> None:
        """End what is left under a closed lease, as far as that is ours to do: orphans and heirs.

        Living owners end theirs; until then it stays here, as each of them may yet be lost.
        """
        up_to = self._claims.closings.find(lease_id) or {}
        copy, lease = self._copies.find(lease_id), self._leases.find(lease_id)
        if not self._unsettled[lease_id]:
            self._unsettled[lease_id] = True
            if lease is not None and lease.born < up_to.get(self._claims.router_id, 0):
                self._end_ours_closed(lease_id, now)
            elif lease is not None:
                self.chores.append(self._free_heirs(lease))
            if copy is not None:  # otherwise it was opened anew
                copy.closed |= all(born <= up_to.get(one, -1) for one, born in copy.latest.items())
        if copy is None:
            del self._unsettled[lease_id]
            return
        if not copy.freeing and not self._claims.gone.isdisjoint(copy.claims):
            copy.freeing = True
            self.chores.append(self._free_orphans(copy))

    def _free_orphans(self, copy: LeaseCopy) -> Iterator[None]:
        """Free its orphans: a client closed the lease, and nothing else will end them."""
        for claim in self._orphans(copy):
            if self._claims.closings.covers(claim):
                self._free(claim)
            yield
        copy.freeing = False

    def _free_heirs(self, lease: Lease) -> Iterator[None]:
        """Free what we took over from replicas where the lease was closed.

        What our callers have booked under it stays, unless they closed it here.
        """
        for reservation in list(lease.reservations):
            claim = reservation.claim
            if claim is not None and self._claims.closings.covers(claim):
                self._free(claim)
            yield
        if lease.is_open and lease.adopted and not lease.reservations:
            self._end_ours_closed(lease.lease_id, self.now)

    def _free(self, claim: Claim) -> None:
        name, key = claim.reservation_id, claim.key
        self._resolver.unbook(claim, self.now)
        self._claims.end_all(name, [claim], self.now)
        self._claims.outbox.say_later(Ended(name, *key))
        self._claims.homeless.append(name)

    def _orphans(self, copy: LeaseCopy) -> Iterator[Claim]:
        """Yield each claim of lost owners; the caller may remove it."""
        for router_id in sorted(copy.claims):
            for claim in _in_turn(copy, router_id):
                if router_id not in self._claims.gone:
                    break
                yield claim

    def _booking(self, claim: Claim) -> LiveReservation | None:
        return self._lifecycle.bookings.live(claim.reservation_id) if claim.booked else None


def _in_turn(copy: LeaseCopy, router_id: int) -> Iterator[Claim]:
    """Yield each present claim of one owner, without those added later.

    Any may be removed meanwhile.
    """
    for _ in range(len(copy.claims.get(router_id, ()))):
        claims = copy.claims.get(router_id)
        if not claims:
            return
        claim = next(iter(claims))
        claims.move_to_end(claim)
        yield claim
