"""The reference's own selectors on the replica plane, as far as they can be supported.

They number and repeat nothing, and have no snapshots. What they book is thus a reservation without
a claim, which yields to any claim of ours. Their statements about our reservations are repeated
under our own number, as other replicas of ours may have missed them. Two of their events may change
places: 1.3.1 publishes each in a task of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct

from select_service.core.expiring_map import ExpiringMap
from select_service.core.ledger.freed_ids import key_of
from select_service.core.replication.claim import Claim
from select_service.core.replication.dynamo_events import AddRequestData
from select_service.core.replication.messages import STAMPED, ClaimRecord, Ended
from select_service.types import ReplicaStatus

if TYPE_CHECKING:
    from select_service.core.counters import ReplicaCounters
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.partition import Partition
    from select_service.core.replication.claims import Claims
    from select_service.core.replication.dynamo_events import (
        Ending,
        ReplicaEnvelope,
        ReplicaEvent,
        Stamp,
    )
    from select_service.core.replication.resolver import Resolver
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.types import CoreLimits


class _DynamoPeer(Struct):
    peer: str
    heard_at: float


class _Fading(Struct):
    """A prefill with an expected duration, as stated by the selector that booked it."""

    partition: Partition
    tokens: int
    duration_s: float
    since: float | None = None  # when it became the oldest one of its rank


class EarlyEndings:
    """What was stated of reservations whose admission has not come yet. All operations O(1).

    Attributes:
        lost: forgotten because of the limit.
    """

    def __init__(self, count_max: int) -> None:
        self.lost = 0
        self._count_max = count_max
        self._known: ExpiringMap[str] = ExpiringMap()

    @property
    def nbytes(self) -> int:
        """Their size in memory."""
        return self._known.nbytes

    def keep(self, router_id: int, reservation_id: str, ending: Ending, now: float) -> None:
        """Remember an ending; nothing follows a `Free`."""
        key = _early_key(router_id, reservation_id)
        if self._known.get(key) != b"Free":
            self._known.put(key, now, ending.encode())
        if len(self._known) > self._count_max:
            self._known.pop_oldest(inf)
            self.lost += 1

    def take(self, router_id: int, reservation_id: str) -> bytes | None:
        """Return the ending of a reservation whose admission has come, and forget it."""
        key = _early_key(router_id, reservation_id)
        ending = self._known.get(key)
        self._known.discard(key)
        return ending

    def purge(self, horizon: float, limit: int) -> None:
        """Forget up to `limit` endings heard by `horizon`."""
        for _ in range(limit):
            if self._known.pop_oldest(horizon) is None:
                break


def _early_key(router_id: int, reservation_id: str) -> str:
    return f"{router_id} {key_of(reservation_id)}"


class DynamoPeers:
    """Selectors that do not number their statements.

    Attributes:
        early: their endings that overtook an admission.
    """

    def __init__(
        self,
        limits: CoreLimits,
        claims: Claims,
        lifecycle: Lifecycle,
        resolver: Resolver,
        counters: ReplicaCounters,
    ) -> None:
        self._limits = limits
        self._claims = claims
        self._lifecycle = lifecycle
        self._resolver = resolver
        self._counters = counters
        self._known: OrderedDict[int, _DynamoPeer] = OrderedDict()
        self._fading: dict[LedgerReservation, _Fading] = {}
        self.early = EarlyEndings(limits.replica_ended_max)

    def apply(self, peer: str, envelope: ReplicaEnvelope, event: ReplicaEvent, now: float) -> None:
        """Apply one of their events."""
        dynamo_peer = self._known.pop(event.router_id, None) or _DynamoPeer(peer, now)
        dynamo_peer.peer, dynamo_peer.heard_at = peer, now
        self._known[event.router_id] = dynamo_peer
        if len(self._known) > self._limits.replica_publishers_max:
            self._known.popitem(last=False)
        if isinstance(event.data, AddRequestData):
            self._book_foreign(envelope, event, event.data, now)
        elif not self._is_live(event.request_id):
            self.early.keep(event.router_id, event.request_id, event.data, now)
        elif event.data == "Free":
            self._end_as_told(event.request_id, now)
            self._resolver.free_unclaimed(event.request_id, now)
        else:
            for claim in self._claims.complete(event.request_id):
                self._claims.outbox.say_later(claim)
                if claim.booked:
                    self._resolver.follow(claim, now)
                self._resolver.touch(claim, now)
            self._resolver.complete_unclaimed(event.request_id, now)

    def _is_live(self, reservation_id: str) -> bool:
        if self._lifecycle.bookings.live(reservation_id) is not None:
            return True
        return bool(self._claims.alive(reservation_id))

    def _end_as_told(self, reservation_id: str, now: float) -> None:
        """End the claims on an id as if a caller freed it here, and tell owners that missed it."""
        claims = self._claims
        meant = claims.alive(reservation_id)
        for claim in meant:
            self._resolver.touch(claim, now)
            self._resolver.unbook(claim, now)
        if meant:
            claims.end_all(reservation_id, meant, now)
        for claim in meant:
            claims.outbox.say_later(Ended(reservation_id, *claim.key))

    def _book_foreign(
        self, envelope: ReplicaEnvelope, event: ReplicaEvent, data: AddRequestData, now: float
    ) -> None:
        early = self.early.take(event.router_id, event.request_id)
        if early == b"Free" or self._is_live(event.request_id):
            self._counters.ignored += 1  # the reference books twice, and leaks the first booking
            return
        record = claimed(envelope, event, data, None)
        claim = Claim(event.router_id, record)
        place = self._resolver.place_of(claim)
        if place is None:
            self._counters.dropped += 1
            return
        reservation = self._lifecycle.learn(
            *place, record, claim.hashes, event.router_id, now, is_new=early is None
        )
        if early is not None:
            self._resolver.complete_unclaimed(event.request_id, now)
        hint = data.AddRequest.prefill_load_hint
        span = None if hint is None else hint.expected_prefill_duration
        if record.prefill_tokens and span is not None:
            duration_s = span.secs + span.nanos / 1e9
            self._fading[reservation] = _Fading(place[0], record.prefill_tokens, duration_s)
        self._counters.booked += 1

    def tick(self, now: float) -> None:
        """Follow prefills, and forget endings past their time."""
        self._fade(now)
        horizon = now - self._limits.replica_ended_s
        self.early.purge(horizon, self._limits.expired_per_turn_max)

    def _fade(self, now: float) -> None:
        """Reduce the oldest prefill of a rank to what remains of its expected duration.

        Visits a few per call, in turn.
        """
        for _ in range(min(len(self._fading), self._limits.replica_resolved_per_turn_max)):
            reservation = next(iter(self._fading))
            fading = self._fading.pop(reservation)
            if not reservation.live or reservation.prefill_done:
                continue
            self._fading[reservation] = fading  # moved to the end
            there = fading.partition.ledger.reservations_on(reservation.slot)
            if next(one for one in there if not one.prefill_done) is not reservation:
                continue
            if fading.since is None:
                fading.since = now
            done = 1.0 if not fading.duration_s else (now - fading.since) / fading.duration_s
            left = round(fading.tokens * max(0.0, 1.0 - done))
            if left != reservation.prefill_tokens:
                fading.partition.ledger.fade_prefill(reservation, left)
                self._resolver.touched[fading.partition] = None

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return a row for each."""
        return [
            ReplicaStatus(
                router_id=router_id,
                peer=one.peer,
                state="foreign",
                epoch=0,
                seq=0,
                missing=0,
                claims=0,
                unbooked=0,
                heard_s_ago=now - one.heard_at,
                pulls=0,
                pulls_failed=0,
            )
            for router_id, one in self._known.items()
        ]


def claimed(
    envelope: ReplicaEnvelope, event: ReplicaEvent, data: AddRequestData, stamp: Stamp | None
) -> ClaimRecord:
    """Return the claim in an admission (6.4: tokens only when tracked)."""
    add = data.AddRequest
    hint = add.prefill_load_hint
    tracked = add.track_prefill_tokens and hint is not None
    scope = envelope.tenant_id if envelope.tenant_id is not UNSET else envelope.routing_group
    assert scope is not UNSET
    facts = {} if stamp is None else {name: getattr(stamp, name) for name in STAMPED}
    return ClaimRecord(
        reservation_id=event.request_id,
        born=0 if stamp is None else stamp.seq,
        model_name=envelope.model_name,
        tenant_id=scope,
        block_size=envelope.block_size,
        worker_id=event.worker.worker_id,
        dp_rank=event.worker.dp_rank,
        hashes=b"" if add.token_sequence is None else add.token_sequence.packed,
        prefill_tokens=hint.initial_effective_prefill_tokens if tracked and hint else 0,
        track_prefill_tokens=add.track_prefill_tokens,
        expected_output_tokens=add.expected_output_tokens,
        lora_name=event.lora_name,
        **facts,
    )
