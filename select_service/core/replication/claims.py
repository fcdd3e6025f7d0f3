"""All claims on reservations, our own and those of others, and the state of each.

A claim is named (owner, born) and only grows until it has ended; its end is remembered for a while,
so statements may arrive in any order and any number of times. `Lifecycle` opens, grows and ends
claims on behalf of its callers, `apply_messages.py` on behalf of publishers; `resolver.py` books
the winner. Nothing here knows a ledger, a publisher's silence or a snapshot.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from select_service.core.changes import CLAIM, RESERVATION
from select_service.core.counters import ReplicaCounters
from select_service.core.replication.claim import Claim, ClaimSet, EarlyGrowth
from select_service.core.replication.claim_index import ClaimIndex
from select_service.core.replication.finished import FinishedClaims
from select_service.core.replication.lease_copies import LeaseCopies
from select_service.core.replication.messages import (
    NO_GROWTH,
    OUTPUT_BLOCKS_MAX,
    ClaimGrowth,
    ClaimRecord,
    Ended,
    Grown,
    Said,
)
from select_service.core.replication.statement_outbox import StatementOutbox
from select_service.core.replication.tombstones import Tombstone
from select_service.core.tenancy.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

    from indexer.types import Scope
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.replication.messages import Key
    from select_service.types import CoreLimits, LeaseState


def _other_names(claim: Claim) -> list[str]:
    """Return what a claim is called besides its reservation_id."""
    return [name for name in (claim.record.selection_id, claim.record.pair) if name is not None]


def _worker_of(claim: Claim) -> list[tuple[Scope, int]]:
    return [(claim.scope, claim.record.worker_id)]


class Claims:
    """All claims, the ends of claims, and our pending statements about them.

    `statement_outbox.py` holds those until they are sent. All operations O(1); with a
    router id of 0 no claims are kept at all.
    """

    def __init__(
        self, limits: CoreLimits, router_id: int, epoch: int, shares: Shares | None = None
    ) -> None:
        self.router_id = router_id
        self.outbox = StatementOutbox(router_id, epoch, limits.replica_output_interval_s)
        shares = shares or Shares(limits)
        self.early = EarlyGrowth(limits.replica_ended_max)
        self.endings = FinishedClaims(limits, shares, self.outbox.seq, self.early)
        self.tombstones, self.closings = self.endings.tombstones, self.endings.closings
        self.own = ClaimSet()
        self.sets = {router_id: self.own}  # by owner; one per known publisher
        self.homeless: list[str] = []  # ids that lost their booking; see `plane.py`
        self.gone: set[int] = set()  # silent owners; `publishers.py` decides when
        self.copies = LeaseCopies(limits, shares, self.is_silent)
        self.names: ClaimIndex[str] = ClaimIndex(_other_names)
        """Others' claims by selection_id and by pair, dead ones too."""
        self.counters = ReplicaCounters()
        self.adopted = 0
        self.of_id: dict[str, list[Claim]] = {}
        """Of all owners, dead ones too."""
        self.waiting: ClaimIndex[tuple[Scope, int]] = ClaimIndex(_worker_of)
        """Claims whose worker is not here: they are booked when it comes."""
        self._limits = limits

    # -- what is known -------------------------------------------------------------------------

    def alive(self, reservation_id: str) -> list[Claim]:
        """Return all claims on an id that have not ended."""
        return [one for one in self.of_id.get(reservation_id, ()) if not one.dead]

    def legs(self, pair: str) -> list[Claim]:
        """Return others' claims on the legs of a pair, dead ones too."""
        return [one for one in self.names.at(pair) if one.record.pair == pair]

    def is_silent(self, router_id: int) -> bool:
        """Tell whether no publisher with that id is heard."""
        return router_id in self.gone or router_id not in self.sets

    # -- our statements ------------------------------------------------------------------------

    def batch(self, limit: int) -> Said | None:
        """Return up to `limit` of the pending statements."""
        return self.outbox.batch(limit, self._grown, self.tombstones.message_of)

    def _grown(self, claim: Claim) -> Grown:
        self.note(claim)
        return Grown(claim.reservation_id, claim.owner, claim.born, claim.growth)

    # -- beginnings ----------------------------------------------------------------------------

    def open(self, record: ClaimRecord, reservation: LedgerReservation) -> Claim:
        """Own a reservation that our ledger has just booked under this number."""
        claim = Claim(self.router_id, record)
        self.own.add(claim)
        self.of_id.setdefault(claim.reservation_id, []).append(claim)
        self.tie(claim, reservation)
        return claim

    def learn(self, claim: Claim, now: float) -> bool:
        """Record what an owner claims; False if it is already known, or over."""
        name, born = claim.reservation_id, claim.born
        if self.tombstones.is_word_of_owner(name, claim.key):
            return False
        owners = self.sets[claim.owner]
        before = owners.by_id.get(name)
        if before is not None and before.born >= born:
            return False
        claim.dead = self.tombstones.has(name, claim.key)
        early = self.early.take(claim.key)
        if early is not None:
            claim.join(early[0])
            claim.reporters = early[1]
            if any(map(self.is_silent, early[1])):
                # its owner may have missed it, and cannot ask the reporters
                self.outbox.say_later(claim)
        self._inherit(claim)  # from `before`, too: perhaps no other replica knows its state
        if not claim.dead:
            self.copies.join(claim, now)
        if before is not None:
            self.forget(before)  # its owner states its end; a garbled id never has one
        owners.add(claim)
        claim.touched = now
        self.names.add(claim)
        self.of_id.setdefault(name, []).append(claim)
        return True

    def learn_again(self, claim: Claim, record: ClaimRecord, now: float) -> None:
        """Note that an owner restated a known claim: it is alive, and so is its lease."""
        if claim.dead:
            return
        claim.touched = now
        if claim.is_held and not record.held:  # the batch was done in an earlier life
            claim.grow(kept=True)
        if record.fingerprint and not claim.record.fingerprint:  # told by an older version before
            claim.record = msgspec.structs.replace(
                claim.record,
                fingerprint=record.fingerprint,
                answer=record.answer,
                batch=record.batch,
            )
        if record.pulled is not None and claim.record.pulled is None:  # as above
            claim.record = msgspec.structs.replace(claim.record, pulled=record.pulled)
            if claim.reservation is not None:
                claim.reservation.pulled = record.pulled
        claim.aged = claim.aged and claim.owner in self.gone
        if not claim.aged:
            self.copies.join(claim, now)
        if claim.lease is not None and record.lease is not None:
            ttl_s = self.copies.ttl(record.lease.ttl_s)
            if self.copies.is_later(claim.lease, ttl_s, record.lease.revision):
                self.copies.touch(claim.lease, now, ttl_s, record.lease.revision)

    def correct(self, claim: Claim, record: ClaimRecord, now: float) -> None:
        """Replace the facts of a claim by what its owner states now; it must not be booked.

        It remains the same claim, with its state and pending statements.
        """
        owned = self.sets[claim.owner]
        owned.remove(claim)
        self.waiting.remove(claim)
        self.copies.leave(claim)
        self.names.remove(claim)
        claim.learn_facts(record)
        claim.is_relayed = False
        self.names.add(claim)
        owned.add(claim)
        self._inherit(claim)
        self.counters.claims_corrected += 1

    def believe_owner(self, claim: Claim, record: ClaimRecord) -> bool:
        """Accept the owner's own terms for a claim known from a relay; True: they differ."""
        before = claim.record
        claim.is_relayed = False
        leases = [one and one.lease_id for one in (before.lease, record.lease)]
        if before.adopts != record.adopts:  # of a relayed one some of those in between were unknown
            claim.record = before = msgspec.structs.replace(before, adopts=record.adopts)
            self.copies.inherit(claim)
            self._inherit(claim)
        if before.ttl_s == record.ttl_s and leases[0] == leases[1]:
            return False
        self.copies.leave(claim)
        claim.record = msgspec.structs.replace(before, ttl_s=record.ttl_s, lease=record.lease)
        return True

    def age(self, claim: Claim) -> None:
        """Mark an orphan as expired. It stays known: its owner may come back with it."""
        claim.aged = True
        self.copies.leave(claim)
        self.waiting.remove(claim)
        self.note(claim)

    def _inherit(self, claim: Claim) -> None:
        """Apply the state of the claims it took over to a claim, and the other way round."""
        kin = self.kin_of(claim.reservation_id, claim.names)
        for one in kin:
            self._pass_on(one, claim)
        for one in kin:
            self._pass_on(claim, one)

    def _pass_on(self, claim: Claim, heir: Claim) -> None:
        """Apply the state of a claim to one that stands for the same reservation."""
        if heir.join(claim.growth):
            self.outbox.say_later(heir)
        if claim.growth != NO_GROWTH and (claim.noted or claim.owner == self.router_id):
            self.note(heir)  # what our callers have told us, we keep, also if its owner has heard

    def tie(self, claim: Claim, reservation: LedgerReservation) -> None:
        """Link a claim to the booking that carries its load."""
        owned = self.sets[claim.owner]
        owned.tied += owned.holds(claim) and claim.reservation is None
        claim.reservation = reservation
        claim.hashes = b""
        if claim.noted:
            self._mark(CLAIM, claim.reservation_id)
        reservation.claim = claim
        reservation.origin = "local" if claim.owner == self.router_id else claim.owner

    def untie(self, claim: Claim, hashes: bytes) -> None:
        """Unlink a claim from its booking."""
        if claim.reservation is not None:
            owned = self.sets.get(claim.owner)
            if owned is not None and owned.holds(claim):
                owned.tied -= 1
            claim.reservation.claim = None
            claim.reservation = None
        claim.hashes = hashes

    # -- growth --------------------------------------------------------------------------------

    def kin_of(self, reservation_id: str, names: set[Key]) -> list[Claim]:
        """Return the claims, dead ones too, that stand for the reservation with these names.

        Two replicas may adopt one orphan at once, and others may still know it by its old name: a
        statement about one of these claims applies to all.
        """
        claims = self.of_id.get(reservation_id, ())
        return [one for one in claims if not names.isdisjoint(one.names)]

    def grow_early(
        self, reservation_id: str, key: Key, growth: ClaimGrowth, reporter: int, now: float
    ) -> None:
        """Keep the growth of a claim we have not heard of yet."""
        if self.tombstones.has(reservation_id, key):
            return
        self.early.keep(key, growth, reporter, now)

    def keep(self, claims: list[Claim]) -> Said:
        """Let a batch that is done keep what it booked; return what is to be sent."""
        for claim in claims:
            claim.grow(kept=True)
        return self.outbox.say([self._grown(claim) for claim in claims])

    def complete(self, reservation_id: str) -> list[Claim]:
        """Complete the prefill of an id for our caller; returns the claims concerned."""
        claims = self.alive(reservation_id)
        for claim in claims:
            claim.grow(prefill_done=True)
            self.note(claim)
        return claims

    def note(self, claim: Claim) -> None:
        """Keep a claim on disk that is not ours, and retell its state in snapshots.

        Our callers tell us of its growth, or we count its id as freed while it is only out of sight
        here: what ends that must end this claim, too. Ours is kept like that from `set_aside`
        on, before with its booking.
        """
        if claim.owner != self.router_id:
            claim.noted = True
        if claim.noted:
            self._mark(CLAIM, claim.reservation_id)

    def set_aside(self, claim: Claim) -> None:
        """Note that a claim has lost its booking to another one on its id."""
        if claim.owner == self.router_id:
            claim.noted = True
            self._mark(CLAIM, claim.reservation_id)

    def _mark(self, kind: str, name: str) -> None:
        if self.endings.changes is not None:
            self.endings.changes.mark(kind, name)

    def noted(self, reservation_id: str) -> list[Claim]:
        """Return the living claims on an id that are kept on disk without a booking of ours."""
        return [
            one
            for one in self.alive(reservation_id)
            if one.noted
            and not (one.owner == self.router_id and (one.reservation is not None or one.is_held))
        ]

    def recall(self, record: ClaimRecord) -> None:
        """Own a claim of an earlier life whose id is booked by another claim, or was."""
        claim = Claim(self.router_id, record)
        name = claim.reservation_id
        if name in self.own.by_id or self.tombstones.has(name, claim.key):
            return
        claim.noted = True
        self.own.add(claim)
        self.of_id.setdefault(name, []).append(claim)

    def output(self, reservation_id: str, fraction: float | None, count: int) -> None:
        """Add output blocks for our caller."""
        for claim in self.alive(reservation_id):
            outputs = claim.growth.outputs
            ours = min(outputs.get(self.router_id, 0) + count, OUTPUT_BLOCKS_MAX)
            claim.grow(outputs={**outputs, self.router_id: ours})
            if fraction is not None:
                claim.grow(faded_at=claim.output_blocks, fraction=fraction)
            self.note(claim)
            self.outbox.say_outputs(claim)

    # -- ends ----------------------------------------------------------------------------------

    def end(
        self,
        claim: Claim,
        now: float,
        *,
        by_owner: bool = True,
        heir: Key | None = None,
        freed: bool = False,
    ) -> None:
        """End a claim. Its owner's set keeps it, dead, until the owner itself states the end."""
        claim.dead = True
        self.copies.leave(claim)
        if claim.noted:
            self._mark(CLAIM, claim.reservation_id)
        end = Tombstone(*claim.key, by_owner, heir=heir, freed=freed)
        self.endings.note(claim.reservation_id, end, now, kept=True)

    def end_own_said(
        self, claim: Claim, now: float, *, heir: Key | None = None, freed: bool = False
    ) -> None:
        """End our own claim, whose end is being published."""
        self.end(claim, now, heir=heir, freed=freed)
        self.forget(claim)

    def end_own(
        self, claim: Claim, now: float, *, heir: Key | None = None, freed: bool = False
    ) -> None:
        """End our own claim, and state so with the next batch."""
        self.end_own_said(claim, now, heir=heir, freed=freed)
        self.outbox.say_later(Ended(claim.reservation_id, *claim.key))

    def give_up(self, claim: Claim | None, now: float) -> None:
        """End our claim on an id that another claim has the booking of."""
        if claim is not None and claim.reservation is None and self.own.holds(claim):
            self.end_own(claim, now)

    def end_all(self, reservation_id: str, claims: list[Claim], now: float) -> None:
        """End all claims on an id as freed; the caller states that, now or with the next batch."""
        for claim in claims:
            ours = claim.owner == self.router_id
            self.end(claim, now, by_owner=ours, freed=True)
            self.note_freed_before(claim, now)
            self.outbox.drop(claim)
            if ours:
                self.forget(claim)
        self.endings.note_freed(reservation_id, now)

    def note_freed_before(self, claim: Claim, now: float) -> None:
        """Mark the claims it took over as freed, so that other heirs of theirs end, too."""
        for key in claim.record.adopts:
            self.endings.note(claim.reservation_id, Tombstone(*key, freed=True), now, kept=True)

    def forget(self, claim: Claim) -> None:
        """Remove a claim from its owner's set and from all our indexes."""
        self.sets[claim.owner].remove(claim)
        if claim.noted:
            self._mark(CLAIM, claim.reservation_id)
        self.copies.leave(claim)
        self.names.remove(claim)
        self.untie(claim, b"")  # also from a booking whose rank left and that is not swept yet
        self.outbox.drop(claim)
        self.waiting.remove(claim)
        of_id = self.of_id[claim.reservation_id]
        of_id.remove(claim)
        if not of_id:
            del self.of_id[claim.reservation_id]

    def adopt(
        self,
        old: Claim,
        hashes: bytes,
        now: float,
        *,
        ttl_s: float | None = None,
        lease: LeaseState | None = None,
    ) -> None:
        """Own an orphan of a lost owner from the next number on, on these terms."""
        reservation = old.reservation
        assert reservation is not None
        record = msgspec.structs.replace(
            old.succeeded(self.outbox.seq + 1), growth=old.growth, ttl_s=ttl_s, lease=lease
        )
        self.untie(old, b"")
        self.end(old, now, by_owner=False, heir=(self.router_id, record.born))
        claim = Claim(self.router_id, record, old.hashes_digest)
        self.own.add(claim)
        self.of_id[claim.reservation_id].append(claim)
        self.tie(claim, reservation)
        self.adopted += 1
        full = msgspec.structs.replace(record, hashes=hashes)
        said = self.outbox.say([full, self.tombstones.message_of(old.reservation_id, old.key)])
        self._mark(RESERVATION, old.reservation_id)
        changes = self.endings.changes
        self.outbox.say_when_durable(said, 0 if changes is None else changes.marks)

    def take_ready(self) -> list[Said]:
        """Return the adoptions to publish now.

        With state on disk each waits until it is there: told of an adoption, its former owner lets
        the reservation go, and it would be lost if we had forgotten it after a crash.
        """
        changes = self.endings.changes
        return self.outbox.take_ready(inf if changes is None else changes.durable)

    def adopted_lease(self, state: LeaseState) -> LeaseState:
        """Return a lease as it is opened here for orphans under it."""
        return msgspec.structs.replace(state, born=self.outbox.seq, adopted=True)

    def purge(self, now: float, limit: int) -> None:
        """Forget entries past their time, up to `limit` of each kind."""
        horizon = now - self._limits.replica_ended_s
        self.endings.purge(horizon, limit)
        self.early.purge(horizon, limit)
        self.copies.purge(horizon, limit)

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with claims; see `dict_compaction.py`."""
        yield from (self.of_id, self.names.by_key)
        yield from self.outbox.tables()
        yield from [one.by_id for one in self.sets.values()]

    def check(self) -> None:
        """Assert all invariants."""
        self.own.check()
        self.copies.check(
            one
            for some in self.sets.values()
            if some is not self.own
            for one in some.by_id.values()
        )
        assert all(one.lease is None for one in self.own.by_id.values())
        others = [some for some in self.sets.values() if some is not self.own]
        named = {one for some in others for one in some.by_id.values() if _other_names(one)}
        assert named == set(self.names)
        self.names.check()
        self.endings.check()
        self.early.check()
        for name, claims in self.of_id.items():
            assert claims, "no holder without claims"
            assert len({one.owner for one in claims}) == len(claims), "one claim an owner and id"
            booked = [one for one in claims if one.booked]
            assert len(booked) <= 1, "one booking an id"
            for claim in claims:
                assert claim.reservation_id == name
                assert not (claim.dead and claim.booked), "what has ended carries nothing"
                if claim.reservation is not None:
                    assert claim.reservation.claim is claim
        self.waiting.check()
        for claim in self.waiting:
            assert claim in self.of_id.get(claim.reservation_id, ()), "the forgotten wait not"
        for claim in self.own.by_id.values():
            assert not claim.dead, "we say of our own what ends"
            assert claim.owner == self.router_id
            assert claim in self.of_id[claim.reservation_id]
