"""What publishers say, understood: views follow it, claims are booked, gaps are healed.

Whatever is heard changes claims (`claims.py`); then the id at stake is *resolved*: of the claims on
it that have not ended and whose rank is here, that of the lowest router id is in the ledger, with
all that became of it. Resolving the same claims always gives the same booking, whatever the order
they came in. What a publisher said and we missed is fetched as its snapshot.

The reference's own selectors speak without numbers; what they say holds as far as it goes
(contract 6.4), and yields to a claim of ours.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from indexer.core.hashing import pack_u64
from indexer.types import HASH_BYTES, Scope
from select_service.core.bookings import Booking
from select_service.core.claims import Claim, ClaimSet
from select_service.core.effects import Effects, Pull
from select_service.core.replica_events import AddRequestData
from select_service.core.replica_messages import (
    ClaimRecord,
    Ended,
    Grown,
    Growth,
    Hearsay,
    Heartbeat,
    Said,
    SnapshotEnd,
    SnapshotHead,
)
from select_service.core.replica_view import Incoming, View
from select_service.types import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.claims import Claims
    from select_service.core.desk import Desk
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition
    from select_service.core.replica_events import ReplicaEnvelope, ReplicaEvent, Stamp
    from select_service.core.replica_messages import ReplicaMessage, SnapshotPart
    from select_service.types import CoreLimits

_BATCHES_PER_TURN = 4
_LOOKS_PER_STEP = 64
_DONE = Growth(prefill_done=True)


@dataclass(slots=True)
class ReplicaCounters:
    """Monotonic counts of the replica plane."""

    heard: int = 0  # messages, but for our own
    repeated: int = 0  # statements heard before
    dropped: int = 0  # foreign events for a scope, block size or rank that is not here
    ignored: int = 0  # foreign events for an id that is live already, or is not
    booked: int = 0  # reservations learnt
    freed: int = 0  # reservations ended by somebody else, or given up for another claim
    orphans_expired: int = 0
    digests_differed: int = 0
    snapshots_given: int = 0
    claims_refused: int = 0  # beyond `replica_claims_max`, or malformed
    publishers_refused: int = 0


@dataclass(slots=True)
class _Foreigner:
    peer: str
    heard_at: float
    claims: int = 0


class Replicas:
    """All publishers heard of, and the way from their words into our ledger."""

    def __init__(
        self, limits: CoreLimits, claims: Claims, desk: Desk, membership: Membership
    ) -> None:
        self.counters = ReplicaCounters()
        self.views: dict[int, View] = {}
        self.http_port = 0
        self.url: str | None = None
        self.touched: dict[Partition, None] = {}  # where load has become less
        self._limits = limits
        self._claims = claims
        self._desk = desk
        self._membership = membership
        self._foreigners: OrderedDict[int, _Foreigner] = OrderedDict()
        self._waiting: dict[tuple[Scope, int], dict[str, None]] = {}  # ids whose worker is away
        self._again: dict[str, None] = {}  # ids to resolve, a few each turn
        self._chores: list[Iterator[None]] = []  # long work, done in slices
        self._beat_at: float | None = None

    # -- what is heard -------------------------------------------------------------------------

    def heard(self, peer: str, message: ReplicaMessage, now: float) -> None:
        """Take in one message."""
        router_id = _speaker(message)
        if router_id == self._claims.router_id:
            return
        self.counters.heard += 1
        if isinstance(message, Heartbeat):
            view = self._view(router_id, message.epoch, peer, now)
            if view is not None:
                view.http_port, view.url = message.http_port, message.url
                if not view.announced(message, now, self._limits):
                    self.counters.digests_differed += 1
                view.greet(message, now, self._limits)
        elif isinstance(message, Said):
            view = self._view(router_id, message.epoch, peer, now)
            if view is not None and self._is_news(view, message.seq, now):
                for item in message.items:
                    self._apply(view, item, now)
        else:
            self._heard_envelope(peer, message, now)

    def _view(self, router_id: int, epoch: int, peer: str, now: float) -> View | None:
        view = self.views.get(router_id)
        if view is None:
            if len(self.views) >= self._limits.replica_publishers_max:
                self.counters.publishers_refused += 1
                return None
            view = self._open_view(router_id, epoch, now)
        view.heard_at = now
        view.peer = peer
        if view.gone:
            view.gone = False
            self._claims.gone.discard(router_id)
            view.doubt()  # we may have let its claims expire
        return view

    def _open_view(self, router_id: int, epoch: int, now: float) -> View:
        claims = self._claims.sets.setdefault(router_id, ClaimSet())
        view = self.views[router_id] = View(router_id, epoch, claims, now)
        return view

    def _is_news(self, view: View, seq: int, now: float) -> bool:
        news = view.hear(seq, now, self._limits)
        self.counters.repeated += not news
        return news

    def _heard_envelope(self, peer: str, envelope: ReplicaEnvelope, now: float) -> None:
        event, stamp = envelope.event, envelope.select_service
        if event is None:
            return
        if stamp is UNSET:
            self._heard_foreigner(peer, envelope, event, now)
            return
        view = self._view(event.router_id, stamp.epoch, peer, now)
        if view is None or not self._is_news(view, stamp.seq, now):
            return
        if isinstance(event.data, AddRequestData):
            self._apply(view, _claimed(envelope, event, event.data, stamp), now)
        elif event.data == "Free":
            for owner, born in stamp.of:
                self._ended(view, Ended(event.request_id, owner, born), now)
            self._free_unclaimed(event.request_id, now)
        else:
            for owner, born in stamp.of:
                self._grown(view, Grown(event.request_id, owner, born, _DONE), now, live=True)
            self._complete_unclaimed(event.request_id, now)

    def _apply(self, view: View, item: ClaimRecord | Grown | Ended, now: float) -> None:
        if isinstance(item, ClaimRecord):
            self._claimed(view, item, now)
        elif isinstance(item, Grown):
            self._grown(view, item, now, live=True)
        else:
            self._ended(view, item, now)

    def _claimed(self, view: View, record: ClaimRecord, now: float) -> None:
        if len(record.hashes) % HASH_BYTES or len(view.claims) >= self._limits.replica_claims_max:
            self.counters.claims_refused += 1
            return
        claim = view.claims.find(record.reservation_id, record.born)
        if claim is None:
            claim = Claim(view.router_id, record)
            if not self._claims.learn(claim, now):
                return
        else:
            claim.join(record.growth)
        if claim.dead:  # its owner has missed the end of it
            self._claims.say_later(Ended(claim.reservation_id, *claim.key))
        self.resolve(claim.reservation_id, now)

    def _grown(self, view: View, item: Grown, now: float, *, live: bool) -> None:
        key = item.owner, item.born
        owners = self._claims.sets.get(item.owner)
        claim = None if owners is None else owners.find(item.reservation_id, item.born)
        if claim is None:
            self._claims.grow_early(key, item.growth, view.router_id, now)
            return
        news = claim.join(item.growth)
        if news and item.owner == self._claims.router_id:
            self._claims.say_later(claim)  # for those who missed who said it to us
        elif news and item.owner != view.router_id:
            claim.tellers = (claim.tellers or set()) | {view.router_id}
        if claim.booked:
            self._follow(claim, now)
            if news or live:  # a sign of life
                self._touch(claim, now)

    def _ended(self, view: View, item: Ended, now: float) -> None:
        claims, key = self._claims, (item.owner, item.born)
        owners = claims.sets.get(item.owner)
        claim = None if owners is None else owners.find(item.reservation_id, item.born)
        by_owner = item.owner in (view.router_id, claims.router_id)
        if claim is None:
            claims.note_end(item.reservation_id, key, now, by_owner=by_owner)
            return
        if item.owner == claims.router_id:
            self._unbook(claim, now)
            claims.end_own(claim, now)
        else:
            self._unbook(claim, now)
            claims.end(claim, now, by_owner=by_owner)
            if by_owner:
                claims.forget(claim)
        self.resolve(item.reservation_id, now)

    # -- the reference's selectors (6.4) -------------------------------------------------------

    def _heard_foreigner(
        self, peer: str, envelope: ReplicaEnvelope, event: ReplicaEvent, now: float
    ) -> None:
        foreigner = self._foreigners.pop(event.router_id, None) or _Foreigner(peer, now)
        foreigner.peer, foreigner.heard_at = peer, now
        self._foreigners[event.router_id] = foreigner
        if len(self._foreigners) > self._limits.replica_publishers_max:
            self._foreigners.popitem(last=False)
        if event.data == "Free":
            self._end_as_told(event.request_id, now)
            self._free_unclaimed(event.request_id, now)
        elif event.data == "MarkPrefillCompleted":
            for claim in self._claims.complete(event.request_id):
                self._claims.say_later(claim)
                if claim.booked:
                    self._follow(claim, now)
            self._complete_unclaimed(event.request_id, now)
        else:
            self._book_foreign(envelope, event, now)

    def _end_as_told(self, reservation_id: str, now: float) -> None:
        """A foreigner has freed an id of ours: its owner may not have heard it."""
        claims = self._claims
        for claim in claims.alive(reservation_id):
            self._unbook(claim, now)
            if claim.owner == claims.router_id:
                claims.end_own(claim, now)
            else:
                claims.end(claim, now, by_owner=False)
                claims.say_later(Ended(reservation_id, *claim.key))

    def _book_foreign(self, envelope: ReplicaEnvelope, event: ReplicaEvent, now: float) -> None:
        name = event.request_id
        assert isinstance(event.data, AddRequestData)
        if self._desk.bookings.live(name) is not None or self._claims.alive(name):
            self.counters.ignored += 1  # D13
            return
        record = _claimed(envelope, event, event.data, None)
        claim = Claim(event.router_id, record)
        seat = self._seat(claim)
        if seat is None:
            self.counters.dropped += 1
            return
        self._desk.learn(*seat, record, claim.hashes, event.router_id, now)
        self.counters.booked += 1

    def _free_unclaimed(self, reservation_id: str, now: float) -> None:
        booking = self._desk.bookings.live(reservation_id)
        if booking is not None and booking.reservation.claim is None:
            self._release(booking, now)

    def _complete_unclaimed(self, reservation_id: str, now: float) -> None:
        booking = self._desk.bookings.live(reservation_id)
        if booking is not None and booking.reservation.claim is None:
            booking.partition.ledger.prefill_complete(booking.reservation, now)
            self.touched[booking.partition] = None

    # -- the winner is booked ------------------------------------------------------------------

    def resolve(self, reservation_id: str, now: float) -> None:
        """Make the ledger say what the claims on an id say."""
        winner, seat = self._winner(reservation_id, now)
        booking = self._desk.bookings.live(reservation_id)
        if winner is None or seat is None:
            return
        if booking is not None:
            if booking.reservation.claim is winner:
                self._follow(winner, now)
                return
            self._give_up(booking, now)
        partition, slot = seat
        origin = "local" if winner.owner == self._claims.router_id else winner.owner
        reservation = self._desk.learn(partition, slot, winner.record, winner.hashes, origin, now)
        self._claims.tie(winner, reservation)
        self.counters.booked += 1
        self._follow(winner, now)

    def _winner(
        self, reservation_id: str, now: float
    ) -> tuple[Claim | None, tuple[Partition, int] | None]:
        """Return the claim that counts, of those that could be booked here."""
        claims = self._claims
        for claim in sorted(claims.alive(reservation_id), key=lambda one: one.owner):
            seat = self._seat(claim)
            lost = claim.reservation is not None and not claim.booked
            if claim.owner == claims.router_id and (seat is None or lost):
                self._unbook(claim, now)
                claims.end_own(claim, now)  # with its rank, as any reservation
            elif seat is not None:
                if lost:  # the rank has gone and come back
                    claims.untie(claim, self._chain(claim))
                return claim, seat
            else:
                where = claim.scope, claim.record.worker_id
                self._waiting.setdefault(where, {})[reservation_id] = None
        return None, None

    def _chain(self, claim: Claim) -> bytes:
        """The hashes of a claim whose rank has gone, swept or not."""
        partition = self._membership.partitions[claim.scope]
        assert claim.reservation is not None
        return claim.hashes or partition.ledger.blocks.chain(claim.reservation.chain)

    def _seat(self, claim: Claim) -> tuple[Partition, int] | None:
        partition = self._membership.partitions.get(claim.scope)
        if partition is None or partition.index.block_size != claim.record.block_size:
            return None
        worker = partition.workers.get(claim.record.worker_id)
        if worker is None or claim.record.dp_rank not in worker.slots:
            return None
        return partition, worker.slots[claim.record.dp_rank]

    def _follow(self, claim: Claim, now: float) -> None:
        """Let a booking be what its claim has become."""
        reservation = claim.reservation
        assert reservation is not None
        partition = self._membership.partitions[claim.scope]
        ledger = partition.ledger
        if claim.prefill_done and not reservation.prefill_done:
            ledger.prefill_complete(reservation, now)
            self.touched[partition] = None
        outputs = sum(claim.outputs.values())
        faded = claim.faded_at if claim.fraction != 1.0 else 0
        seen = reservation.output_blocks, reservation.faded_outputs, reservation.output_fraction
        if seen != (outputs, faded, claim.fraction):
            ledger.learn_outputs(reservation, outputs, claim.faded_at, claim.fraction)

    def _touch(self, claim: Claim, now: float) -> None:
        booking = self._desk.bookings.live(claim.reservation_id)
        assert booking is not None
        booking.partition.ledger.touch(booking.reservation, now)
        self._desk.renew_lease(booking, now)
        self._desk.bookings.touched(booking)

    def _unbook(self, claim: Claim, now: float) -> None:
        if not claim.booked:
            if claim.reservation is not None:
                self._claims.untie(claim, claim.hashes)
            return
        booking = self._desk.bookings.live(claim.reservation_id)
        assert booking is not None
        assert booking.reservation is claim.reservation
        self._claims.untie(claim, b"")
        self._release(booking, now)

    def _give_up(self, booking: Booking, now: float) -> None:
        """Another claim counts; this one stays a claim, with its hashes."""
        claim = booking.reservation.claim
        if claim is not None:
            self._claims.untie(claim, booking.partition.ledger.chain_of(booking.reservation))
        self._release(booking, now)

    def _release(self, booking: Booking, now: float) -> None:
        self._desk.release(booking, now)
        self.counters.freed += 1
        self.touched[booking.partition] = None

    def worker_came(self, scope: Scope, worker_id: int) -> None:
        """Claims on this worker may be booked now."""
        self._again.update(self._waiting.pop((scope, worker_id), {}))

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float, effects: Effects) -> bool:
        """Say what has to be said, note who is silent, settle and resolve a few; more to do?"""
        self._look_around(now)
        more = self._settle(now)
        claims = self._claims
        effects.published += claims.ready
        claims.ready.clear()
        for _ in range(_BATCHES_PER_TURN):
            said = claims.batch(self._limits.replica_items_per_message_max)
            if said is None:
                break
            effects.published.append(said)
        if claims.unsaid_count:
            return True  # a heartbeat must not speak of what has not been said
        if self._beat_at is None or now - self._beat_at >= self._limits.replica_heartbeat_s:
            self._beat_at = now
            effects.published.append(self._heartbeat())
        claims.purge(now, self._limits.expired_per_turn_max)
        for view in self.views.values():
            if view.wants_pull(now, self._limits):
                view.pulling_since = now
                view.pulls += 1
                effects.pulls.append(Pull(view.peer, view.router_id, view.http_port, view.url))
        return more

    def _heartbeat(self) -> Heartbeat:
        claims = self._claims
        return Heartbeat(
            claims.router_id,
            claims.epoch,
            claims.seq,
            len(claims.own),
            claims.own.digest,
            self.http_port,
            self.url,
        )

    def _look_around(self, now: float) -> None:
        for router_id, view in list(self.views.items()):
            silent_s = now - view.heard_at
            if not view.gone and silent_s > self._limits.replica_timeout_s:
                view.gone = True
                view.pulling_since = view.incoming = None
                self._claims.gone.add(router_id)
                self._chores.append(self._repeat_last_words(view))
            if view.gone and not view.claims and silent_s > self._limits.replica_ended_s:
                del self.views[router_id], self._claims.sets[router_id]
                self._claims.gone.discard(router_id)

    def _repeat_last_words(self, gone: View) -> Iterator[None]:
        """What it said about claims of others, they may have missed, and cannot ask it again."""
        for view in list(self.views.values()):
            for number, claim in enumerate(list(view.claims.by_id.values())):
                if view.gone or view is gone:
                    break
                if claim.dead:
                    self._claims.say_later(Ended(claim.reservation_id, *claim.key))
                elif claim.tellers and gone.router_id in claim.tellers:
                    self._claims.say_later(claim)
                if number % _LOOKS_PER_STEP == 0:
                    yield

    def _settle(self, now: float) -> bool:
        """Do a slice of what is left over; True while there is more."""
        claims = self._claims
        budget = self._limits.replica_resolved_per_turn_max
        while budget > 0 and self._chores:
            budget -= 1
            if next(self._chores[0], self) is self:
                self._chores.pop(0)
        for _ in range(min(len(claims.homeless), budget)):
            self._again[claims.homeless.pop()] = None
        while budget > 0 and self._again:
            budget -= 1
            name = next(iter(self._again))
            del self._again[name]
            self.resolve(name, now)
        return bool(self._again or self._chores or claims.homeless)

    # -- snapshots -----------------------------------------------------------------------------

    def snapshot(self, now: float) -> Iterator[SnapshotPart]:
        """Yield what we know; what changes between two parts has a number above the head's.

        Claims of publishers we do not hear either go along: who asks may have come too late. One
        that restarts under another name is back before anybody calls the old one gone, hence two
        heartbeats.
        """
        claims = self._claims
        silent_since = now - 2 * self._limits.replica_heartbeat_s
        self.counters.snapshots_given += 1
        own = list(claims.own.by_id.values())
        yield SnapshotHead(claims.router_id, claims.epoch, claims.seq)
        given = 0
        for claim in own:
            if not claim.dead:
                given += 1
                yield self._record(claim)
        yield from claims.endings()
        for view in list(self.views.values()):
            for claim in list(view.claims.by_id.values()):
                if claim.dead:
                    continue
                if view.gone or view.heard_at < silent_since:
                    yield Hearsay(claim.owner, self._record(claim))
                elif claim.noted:
                    yield Grown(claim.reservation_id, *claim.key, claim.growth())
        yield SnapshotEnd(given)

    def _record(self, claim: Claim) -> ClaimRecord:
        hashes = claim.hashes
        if claim.booked and claim.reservation is not None:
            partition = self._membership.partitions[claim.scope]
            hashes = partition.ledger.chain_of(claim.reservation)
        return msgspec.structs.replace(claim.record, hashes=hashes, growth=claim.growth())

    def begin(self, router_id: int, head: SnapshotHead, now: float) -> bool:
        """A snapshot comes in; False when it is not whose we asked for."""
        view = self.views.get(router_id)
        if view is None or head.router_id != router_id or view.pulling_since is None:
            return False
        view.pulling_since = now
        view.incoming = Incoming(head.seq)
        return True

    def part(self, router_id: int, part: SnapshotPart, now: float) -> None:
        """Take in one part of it."""
        view = self.views.get(router_id)
        if view is None or view.incoming is None:
            return
        view.pulling_since = now  # it goes on
        if isinstance(part, SnapshotEnd):
            view.incoming.promised = part.claims
        elif isinstance(part, ClaimRecord):
            view.incoming.seen.add(part.born)
            self._claimed(view, part, now)
        elif isinstance(part, Grown):
            self._grown(view, part, now, live=False)
        elif isinstance(part, Ended):
            self._ended(view, part, now)
        elif isinstance(part, Hearsay):
            self._hearsay(view, part, now)

    def _hearsay(self, teller: View, part: Hearsay, now: float) -> None:
        """Believe what is said about somebody we do not hear ourselves."""
        owner = part.owner
        view = self.views.get(owner)
        if owner == self._claims.router_id or (view is not None and not view.gone):
            claim = part.claim  # they are heard here, but what became of it may be news
            grown = Grown(claim.reservation_id, owner, claim.born, claim.growth)
            self._grown(teller, grown, now, live=False)
            return
        if view is None:
            if len(self.views) >= self._limits.replica_publishers_max:
                self.counters.publishers_refused += 1
                return
            view = self._open_view(owner, 1, now)
            view.gone = True
            view.doubt()
            self._claims.gone.add(owner)
        self._claimed(view, part.claim, now)

    def end(self, router_id: int, now: float, *, complete: bool) -> None:
        """It has come to its end, or has broken off."""
        view = self.views.get(router_id)
        if view is None:
            return
        incoming = view.incoming
        if not complete or incoming is None or incoming.promised != len(incoming.seen):
            view.pulled(None, now, self._limits)
            return
        view.incoming = None
        self._chores.append(self._forget_unseen(view, incoming, now))

    def _forget_unseen(self, view: View, incoming: Incoming, now: float) -> Iterator[None]:
        """What the publisher owned before the snapshot, and not in it, has ended."""
        for number, claim in enumerate(list(view.claims.by_id.values())):
            if claim.born <= incoming.seq and claim.born not in incoming.seen:
                if view.claims.find(claim.reservation_id, claim.born) is claim:
                    self._ended(view, Ended(claim.reservation_id, *claim.key), now)
                yield
            elif number % _LOOKS_PER_STEP == 0:
                yield
        view.pulled(incoming.seq, now, self._limits)

    # -- inspection ----------------------------------------------------------------------------

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return every publisher heard of, by router id."""
        rows = [
            ReplicaStatus(
                router_id=view.router_id,
                peer=view.peer,
                state=view.state,
                epoch=view.epoch,
                seq=view.high,
                missing=len(view.missing),
                claims=len(view.claims),
                unbooked=len(view.claims) - view.claims.tied,
                heard_s_ago=now - view.heard_at,
                pulls=view.pulls,
                pulls_failed=view.pulls_failed,
            )
            for view in self.views.values()
        ]
        rows += [
            ReplicaStatus(router_id, one.peer, "foreign", 0, 0, 0, 0, 0, now - one.heard_at, 0, 0)
            for router_id, one in self._foreigners.items()
        ]
        return sorted(rows, key=lambda row: row.router_id)

    def check(self) -> None:
        """State every promise."""
        self._claims.check()
        for router_id, view in self.views.items():
            assert self._claims.sets[router_id] is view.claims
            view.claims.check()
            assert view.gone == (router_id in self._claims.gone)
        for view in self.views.values():
            for claim in view.claims.by_id.values():
                assert claim.owner == view.router_id
                assert not (claim.booked and self._seat(claim) is None)


def _speaker(message: ReplicaMessage) -> int:
    if isinstance(message, Heartbeat | Said):
        return message.router_id
    return 0 if message.event is None else message.event.router_id


def _claimed(
    envelope: ReplicaEnvelope, event: ReplicaEvent, data: AddRequestData, stamp: Stamp | None
) -> ClaimRecord:
    """What an admission says, as a claim (6.4: tokens only when tracked)."""
    add = data.AddRequest
    hint = add.prefill_load_hint
    tracked = add.track_prefill_tokens and hint is not None
    scope = envelope.tenant_id if envelope.tenant_id is not UNSET else envelope.routing_group
    assert scope is not UNSET
    return ClaimRecord(
        reservation_id=event.request_id,
        born=0 if stamp is None else stamp.seq,
        model_name=envelope.model_name,
        tenant_id=scope,
        block_size=envelope.block_size,
        worker_id=event.worker.worker_id,
        dp_rank=event.worker.dp_rank,
        hashes=pack_u64(add.token_sequence or ()),
        prefill_tokens=hint.initial_effective_prefill_tokens if tracked and hint else 0,
        isl_tokens=0 if stamp is None else stamp.isl_tokens,
        track_prefill_tokens=add.track_prefill_tokens,
        expected_output_tokens=add.expected_output_tokens,
        lora_name=event.lora_name,
        selection_id=None if stamp is None else stamp.selection_id,
    )
