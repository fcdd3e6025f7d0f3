"""All claims on reservations, our own and those of others, and the state of each.

A claim is named (owner, born) and only grows until it has ended; its end is remembered for a while,
so statements may arrive in any order and any number of times. The desk opens, grows and ends claims
on behalf of its callers, `hearing.py` on behalf of publishers; `resolver.py` books the winner.
Nothing here knows a ledger, a publisher's silence or a snapshot.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from indexer.types import Scope
from select_service.core.counters import ReplicaCounters
from select_service.core.memory import Memory
from select_service.core.replicas.claim import Claim, ClaimSet
from select_service.core.replicas.claim_names import ClaimNames
from select_service.core.replicas.ends import Ends
from select_service.core.replicas.events import Stamp
from select_service.core.replicas.lease_copies import LeaseCopies
from select_service.core.replicas.messages import (
    OUTPUT_BLOCKS_MAX,
    OUTPUT_TELLERS_MAX,
    ClaimRecord,
    Closed,
    Ended,
    Grown,
    Growth,
    Renewed,
    Said,
)
from select_service.core.tenancy.parted import Parted
from select_service.core.tenancy.shares import Shares, prefix_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

    from select_service.core.books.reservation import Reservation
    from select_service.core.replicas.messages import Key, Statement
    from select_service.types import CoreLimits, LeaseState

SEQ_BITS: Final = 40
"""Bits for statements of one life; the epoch is above them, so numbers never repeat."""


def _name_digest(name: str) -> bytes:
    return xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass"))


class Claims:
    """All claims, the ends of claims, and our pending statements about them.

    All operations O(1); with a router id of 0 no claims are kept at all.
    """

    def __init__(
        self, limits: CoreLimits, router_id: int, epoch: int, shares: Shares | None = None
    ) -> None:
        self.router_id = router_id
        self.epoch = epoch
        self.seq = (epoch - 1) << SEQ_BITS
        self.own = ClaimSet()
        self.sets = {router_id: self.own}  # by owner; one per known publisher
        self.ready: list[Said] = []  # to be published in the next turn
        self.homeless: list[str] = []  # ids that lost their booking; see `plane.py`
        self.gone: set[int] = set()  # silent owners; `publishers.py` decides when
        shares = shares or Shares(limits)
        self.ends = Ends(limits.replica_ended_max, shares)
        self.copies = LeaseCopies(limits, shares)
        self.names = ClaimNames()  # of others' claims
        self.counters = ReplicaCounters()
        self.early_lost = 0  # growth of unknown claims, forgotten because of the limit
        self.adopted = 0
        self._of_id: dict[str, list[Claim]] = {}  # of all owners, dead ones too
        self._waiting: dict[tuple[Scope, int], dict[Claim, None]] = {}  # by absent worker
        self._early: OrderedDict[Key, tuple[Growth, float, set[int]]] = OrderedDict()
        freed = shares.bound("replica_freed_ids", lambda: limits.replica_ended_max, by_prefix=True)
        self._freed_here: Parted[Memory[bytes]] = Parted(shares, freed, Memory)
        """By the tenant that the id is of: `_name_digest`."""
        # claims that grew, and ids of ended ones, to be stated
        self._unsaid: dict[Key, Claim | str] = {}
        self._outputs: dict[Key, Claim | str] = {}  # claims that filled blocks; stated together
        self._lease_news: dict[str, Renewed | Closed] = {}  # one per lease; see `say_of_lease`
        self._outputs_said_at = 0.0
        self._limits = limits

    # -- what is known -------------------------------------------------------------------------

    def alive(self, reservation_id: str) -> list[Claim]:
        """Return all claims on an id that have not ended."""
        return [one for one in self._of_id.get(reservation_id, ()) if not one.dead]

    def knows(self, reservation_id: str) -> bool:
        """Tell whether there may be a claim on an id, or on a leg of that pair. O(1)."""
        return reservation_id in self._of_id or reservation_id in self.names.by_name

    def is_silent(self, router_id: int) -> bool:
        """Tell whether no publisher with that id is heard."""
        return router_id in self.gone or router_id not in self.sets

    @property
    def ended_bytes(self) -> int:
        """The memory that remembered ends take."""
        return self.ends.nbytes + sum(row.nbytes for row in self._freed_here.rows)

    # -- our statements ------------------------------------------------------------------------

    def stamp(self, of: Iterable[Claim] = ()) -> Stamp:
        """Number the statement that is about to be published."""
        self.seq += 1
        return Stamp(self.epoch, self.seq, [one.key for one in of])

    def say(self, items: list[Statement]) -> Said:
        """Put statements under the next number."""
        self.seq += 1
        return Said(self.router_id, self.epoch, self.seq, items)

    def say_later(self, what: Claim | Ended) -> None:
        """Queue growth or an end for the next batch, once however often it changed.

        The statement will have the state at that time, including further growth and the heir.
        """
        if isinstance(what, Claim):
            self._unsaid.setdefault(what.key, what)
        else:
            self._unsaid[what.owner, what.born] = what.reservation_id

    def say_of_lease(self, what: Renewed | Closed) -> None:
        """Queue a statement for the next batch, one per lease; a close is not replaced."""
        if not isinstance(self._lease_news.get(what.lease_id), Closed):
            self._lease_news[what.lease_id] = what

    def release_outputs(self, now: float) -> None:
        """Periodically queue the claims that filled output blocks.

        A stream fills several blocks a second, and others' view of its load is off by at most those
        few. The reference's plane has no output blocks at all.
        """
        if now - self._outputs_said_at >= self._limits.replica_output_interval_s:
            self._outputs_said_at = now
            if self._outputs:
                self._outputs.update(self._unsaid)  # at C speed, however many
                self._unsaid, self._outputs = self._outputs, {}

    @property
    def unsaid_count(self) -> int:
        """The number of pending statements."""
        return len(self._unsaid) + len(self._lease_news)

    def batch(self, limit: int) -> Said | None:
        """Return up to `limit` of the pending statements."""
        news = [self._lease_news.pop(name) for name in list(islice(self._lease_news, limit))]
        items: list[Statement] = [*news]
        for key in list(islice(self._unsaid, limit - len(items))):
            what = self._unsaid.pop(key)
            if isinstance(what, str):
                items.append(self.ends.told(what, key))
            elif not what.dead:
                what.noted = what.owner != self.router_id
                items.append(Grown(what.reservation_id, what.owner, what.born, what.growth()))
        return self.say(items) if items else None

    # -- beginnings ----------------------------------------------------------------------------

    def open(self, record: ClaimRecord, reservation: Reservation) -> Claim:
        """Own a reservation that our ledger has just booked under this number."""
        claim = Claim(self.router_id, record)
        self.own.add(claim)
        self._of_id.setdefault(claim.reservation_id, []).append(claim)
        self.tie(claim, reservation)
        return claim

    def learn(self, claim: Claim, now: float) -> bool:
        """Record what an owner claims; False if it is already known, or over."""
        name, born = claim.reservation_id, claim.born
        if self.ends.is_word_of_owner(name, claim.key):
            return False
        owners = self.sets[claim.owner]
        before = owners.by_id.get(name)
        if before is not None:
            if before.born >= born:
                return False
            self.forget(before)  # its owner states its end; a garbled id never has one
        claim.dead = self.ends.has(name, claim.key)
        early = self._early.pop(claim.key, None)
        if early is not None:
            claim.join(early[0])
            claim.tellers = early[2]
            if any(map(self.is_silent, early[2])):
                self.say_later(claim)  # its owner may have missed it, and cannot ask the tellers
        self._inherit(claim, now)
        owners.add(claim)
        claim.touched = now
        self.names.add(claim)
        self._of_id.setdefault(name, []).append(claim)
        if not claim.dead:
            self.copies.join(claim, now)
        return True

    def learn_again(self, claim: Claim, record: ClaimRecord, now: float) -> None:
        """Note that an owner restated a known claim: it is alive, and so is its lease."""
        if claim.dead:
            return
        claim.touched = now
        if record.fingerprint and not claim.record.fingerprint:  # told by an older version before
            claim.record = msgspec.structs.replace(
                claim.record,
                fingerprint=record.fingerprint,
                answer=record.answer,
                wave=record.wave,
            )
        claim.aged = claim.aged and claim.owner in self.gone
        if not claim.aged:
            self.copies.join(claim, now)
        if claim.lease is not None and record.lease is not None:
            ttl_s = self.copies.ttl(record.lease.ttl_s)
            if ttl_s not in (None, claim.lease.lease_ttl_s):
                self.copies.touch(claim.lease, now, ttl_s)

    def correct(self, claim: Claim, record: ClaimRecord, now: float) -> None:
        """Replace the facts of a claim by what its owner states now; it must not be booked.

        It remains the same claim, with its state and pending statements.
        """
        owned = self.sets[claim.owner]
        owned.remove(claim)
        self._waits_no_more(claim)
        self.copies.leave(claim)
        self.names.remove(claim)
        claim.learn_facts(record)
        claim.hearsay = False
        self.names.add(claim)
        owned.add(claim)
        self._inherit(claim, now)
        self.counters.claims_corrected += 1

    def believe_owner(self, claim: Claim, record: ClaimRecord) -> bool:
        """Accept the owner's own terms for a claim known by hearsay; True: they differ."""
        before = claim.record
        claim.hearsay = False
        leases = [one and one.lease_id for one in (before.lease, record.lease)]
        if before.ttl_s == record.ttl_s and leases[0] == leases[1]:
            return False
        self.copies.leave(claim)
        claim.record = msgspec.structs.replace(before, ttl_s=record.ttl_s, lease=record.lease)
        return True

    def age(self, claim: Claim) -> None:
        """Mark an orphan as expired. It stays known: its owner may come back with it."""
        claim.aged = True
        self.copies.leave(claim)
        self._waits_no_more(claim)

    def _inherit(self, claim: Claim, now: float) -> None:
        """Apply the state of the claims it took over to a claim, and the other way round."""
        for kin in self.kin_of(claim.reservation_id, claim.names):
            if kin.join(claim.growth()):
                self.say_later(kin)
            if claim.join(kin.growth()):
                self.say_later(claim)
        name = claim.reservation_id
        for key in claim.record.adopts:
            if not claim.dead and (self.ends.was_freed(name, key) or self._freed_since(claim, key)):
                self.end(claim, now, by_owner=False, freed=True)

    def _freed_since(self, claim: Claim, ancestor: Key) -> bool:
        """Whether a caller freed its id when we knew only that this ancestor had ended."""
        since = self.ends.since(claim.reservation_id, ancestor)
        if since is None:
            return False
        names = claim.reservation_id, claim.record.selection_id
        freed = [self._freed_at(name) for name in names if name is not None]
        return any(at is not None and at >= since for at in freed)

    def _freed_at(self, name: str) -> float | None:
        digest = _name_digest(name)
        found = (row.at(digest) for _, row in self._freed_here.where(prefix_in(name)))
        return next((at for at in found if at is not None), None)

    def tie(self, claim: Claim, reservation: Reservation) -> None:
        """Link a claim to the booking that carries its load."""
        owned = self.sets[claim.owner]
        owned.tied += owned.holds(claim) and claim.reservation is None
        claim.reservation = reservation
        claim.hashes = b""
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

    def wait(self, claim: Claim) -> None:
        """Let a claim wait for its absent worker, until `waited_for` or until it is forgotten."""
        where = claim.scope, claim.record.worker_id
        self._waiting.setdefault(where, {})[claim] = None

    def waited_for(self, scope: Scope, worker_id: int) -> Iterator[str]:
        """Return the ids of the claims that waited for this worker, which has come."""
        return (claim.reservation_id for claim in self._waiting.pop((scope, worker_id), ()))

    def waiting(self) -> list[Claim]:
        """Return all claims whose worker is absent. O(those)."""
        return [claim for some in self._waiting.values() for claim in some]

    def _waits_no_more(self, claim: Claim) -> None:
        where = claim.scope, claim.record.worker_id
        waiting = self._waiting.get(where)
        if waiting is not None:
            waiting.pop(claim, None)
            if not waiting:
                del self._waiting[where]

    # -- growth --------------------------------------------------------------------------------

    def kin_of(self, reservation_id: str, names: set[Key]) -> list[Claim]:
        """Return the claims, dead ones too, that stand for the reservation with these names.

        Two replicas may adopt one orphan at once, and others may still know it by its old name: a
        statement about one of these claims applies to all.
        """
        claims = self._of_id.get(reservation_id, ())
        return [one for one in claims if not names.isdisjoint(one.names)]

    def grow_early(
        self, reservation_id: str, key: Key, growth: Growth, teller: int, now: float
    ) -> None:
        """Keep the growth of a claim we have not heard of yet."""
        if self.ends.has(reservation_id, key):
            return
        before = self._early.pop(key, None)
        tellers = {teller}
        if before is not None:
            growth = _joined(before[0], growth)
            tellers |= before[2]
        self._early[key] = (growth, now, tellers)
        if len(self._early) > self._limits.replica_ended_max:
            self._early.popitem(last=False)
            self.early_lost += 1

    def complete(self, reservation_id: str) -> list[Claim]:
        """Complete the prefill of an id for our caller; returns the claims concerned."""
        claims = self.alive(reservation_id)
        for claim in claims:
            claim.prefill_done = True
            claim.noted = claim.owner != self.router_id
        return claims

    def output(self, reservation_id: str, fraction: float | None, count: int) -> None:
        """Add output blocks for our caller."""
        for claim in self.alive(reservation_id):
            ours = claim.outputs.get(self.router_id, 0) + count
            claim.outputs[self.router_id] = min(ours, OUTPUT_BLOCKS_MAX)
            if fraction is not None:
                claim.faded_at, claim.fraction = claim.output_blocks, fraction
            claim.noted = claim.owner != self.router_id
            self._outputs.setdefault(claim.key, claim)

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
        self.note_end(
            claim.reservation_id, claim.key, now, by_owner=by_owner, heir=heir, freed=freed
        )

    def note_end(
        self,
        reservation_id: str,
        key: Key,
        now: float,
        *,
        by_owner: bool,
        heir: Key | None = None,
        freed: bool = False,
    ) -> None:
        """Remember that a claim is over, whether or not we ever heard of it."""
        self.ends.note(reservation_id, key, now, by_owner=by_owner, heir=heir, freed=freed)
        self._early.pop(key, None)

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
        self.say_later(Ended(claim.reservation_id, *claim.key))

    def note_freed(self, name: str, now: float) -> None:
        """Remember that our caller freed this name, including claims we have yet to hear of.

        An adoption states that the old claim has ended, and who owns the new one. We may have heard
        only the first, elsewhere; then we know of no claim that could be ended.
        """
        freed, digest, prefix = self._freed_here, _name_digest(name), prefix_in(name)
        for holder, row in freed.where(prefix):
            if row.discard(digest):
                freed.left(holder)
        holder, row = freed.place(prefix)
        row.put(digest, now)
        freed.took(holder)
        crowded = freed.crowded(holder)
        if crowded is not None:
            holder, row = crowded
            row.pop_oldest(inf)
            freed.left(holder)

    def end_all(self, reservation_id: str, claims: list[Claim], now: float) -> None:
        """End all claims on an id for our caller; that is being published."""
        self.note_freed(reservation_id, now)
        for claim in claims:
            ours = claim.owner == self.router_id
            self.end(claim, now, by_owner=ours, freed=True)
            self.note_freed_before(claim, now)
            self._unsaid.pop(claim.key, None)
            if ours:
                self.forget(claim)

    def note_freed_before(self, claim: Claim, now: float) -> None:
        """Mark the claims it took over as freed, so that other heirs of theirs end, too."""
        for key in claim.record.adopts:
            self.note_end(claim.reservation_id, key, now, by_owner=False, freed=True)

    def forget(self, claim: Claim) -> None:
        """Remove a claim from its owner's set and from all our indexes."""
        self.sets[claim.owner].remove(claim)
        self.copies.leave(claim)
        self.names.remove(claim)
        self.untie(claim, b"")  # also from a booking whose rank left and that is not swept yet
        self._unsaid.pop(claim.key, None)
        self._waits_no_more(claim)
        of_id = self._of_id[claim.reservation_id]
        of_id.remove(claim)
        if not of_id:
            del self._of_id[claim.reservation_id]

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
            old.succeeded(self.seq + 1), growth=old.growth(), ttl_s=ttl_s, lease=lease
        )
        self.untie(old, b"")
        self.end(old, now, by_owner=False, heir=(self.router_id, record.born))
        claim = Claim(self.router_id, record, old.hashes_digest)
        self.own.add(claim)
        self._of_id[claim.reservation_id].append(claim)
        self.tie(claim, reservation)
        self.adopted += 1
        full = msgspec.structs.replace(record, hashes=hashes)
        self.ready.append(self.say([full, self.ends.told(old.reservation_id, old.key)]))

    def purge(self, now: float, limit: int) -> None:
        """Forget entries past their time, up to `limit` of each kind."""
        horizon = now - self._limits.replica_ended_s
        self.ends.purge(horizon, limit)
        left = limit
        for holder, row in self._freed_here.turns(limit):
            while left and row.pop_oldest(horizon) is not None:
                self._freed_here.left(holder)
                left -= 1
        for _ in range(limit):
            if not self._early or next(iter(self._early.values()))[1] > horizon:
                break
            self._early.popitem(last=False)

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with claims; see `slimming.py`."""
        yield from (self._of_id, self._unsaid, self._outputs, self.names.by_name)
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
        self.names.check({one for some in others for one in some.by_id.values()})
        self.ends.check()
        assert len(self._early) <= self._limits.replica_ended_max
        self._freed_here.check()
        assert len(self._freed_here) <= self._limits.replica_ended_max
        for name, claims in self._of_id.items():
            assert claims, "nobody claims nothing"
            assert len({one.owner for one in claims}) == len(claims), "one claim an owner and id"
            booked = [one for one in claims if one.booked]
            assert len(booked) <= 1, "one booking an id"
            for claim in claims:
                assert claim.reservation_id == name
                assert not (claim.dead and claim.booked), "what has ended carries nothing"
                if claim.reservation is not None:
                    assert claim.reservation.claim is claim
        for waiting in self._waiting.values():
            assert waiting, "nobody waits for nothing"
            for claim in waiting:
                assert claim in self._of_id.get(claim.reservation_id, ()), "the forgotten wait not"
        for claim in self.own.by_id.values():
            assert not claim.dead, "we say of our own what ends"
            assert claim.owner == self.router_id
            assert claim in self._of_id[claim.reservation_id]


def _joined(one: Growth, other: Growth) -> Growth:
    outputs = dict(one.outputs)
    for router_id, count in other.outputs.items():
        if router_id in outputs or len(outputs) < OUTPUT_TELLERS_MAX:
            outputs[router_id] = max(outputs.get(router_id, 0), count)
    faded_at, minus = max((one.faded_at, -one.fraction), (other.faded_at, -other.fraction))
    return Growth(one.prefill_done or other.prefill_done, outputs, faded_at, -minus)
