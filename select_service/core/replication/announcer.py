"""Turns what our own callers do into messages for replicas.

`Lifecycle` begins, continues and ends reservations; this module makes of that claims (`claims.py`)
and events of the reference's plane, stamped with our number. With a router id of 0 nothing is sent:
the `Lifecycle` checks `is_on` first. What does not warrant its own message goes with the next
batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from select_service.core.replication.claims import Claims
from select_service.core.replication.dynamo_events import (
    AddRequest,
    AddRequestData,
    EventWorker,
    Hashes,
    PrefillLoadHint,
    ReplicaEnvelope,
    ReplicaEvent,
    Stamp,
)
from select_service.core.replication.first_answers import packed_answer
from select_service.core.replication.messages import STAMPED, ClaimRecord
from select_service.types import LeaseState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.partition import Partition
    from select_service.core.replication.claim import Claim
    from select_service.core.replication.dynamo_events import Ending
    from select_service.core.replication.first_answers import FirstAnswer
    from select_service.core.tenancy.shares import Shares
    from select_service.types import CoreLimits


class Announcer:
    """Speaks for this process on the replica plane."""

    def __init__(
        self, limits: CoreLimits, router_id: int, epoch: int, shares: Shares | None = None
    ) -> None:
        self.claims = Claims(limits, router_id, epoch, shares)
        self.is_on = router_id != 0
        self._limits = limits

    # -- what `Lifecycle` calls ------------------------------------------------------------------

    def booked(
        self,
        partition: Partition,
        reservation: LedgerReservation,
        answer: FirstAnswer,
        *,
        held: bool = False,
    ) -> ReplicaEnvelope:
        """Own a new reservation and return its admission; untracked prefill tokens are not sent.

        `held`: a batch may yet take it back.
        """
        stamp = self.claims.outbox.stamp()
        claim = self.own(partition, reservation, stamp.seq, answer)
        if held:
            claim.record = msgspec.structs.replace(claim.record, held=True)
        facts = {name: getattr(claim.record, name) for name in STAMPED}
        stamp = msgspec.structs.replace(stamp, **facts)
        track = reservation.track_prefill_tokens
        add = AddRequest(
            token_sequence=Hashes(partition.ledger.chain_of(reservation)),
            track_prefill_tokens=track,
            expected_output_tokens=reservation.expected_output_tokens,
            prefill_load_hint=PrefillLoadHint(reservation.prefill_tokens) if track else None,
        )
        return self._envelope(partition, reservation, AddRequestData(add), stamp)

    def _ttl_told(self, reservation: LedgerReservation) -> float | None:
        """Return its own time to live, unless it is the default: replicas have one for orphans."""
        ttl_s = reservation.ttl_s
        is_usual = ttl_s == self._limits.reservation_ttl_s
        return None if reservation.lease is not None or is_usual else ttl_s

    def own(
        self,
        partition: Partition,
        reservation: LedgerReservation,
        born: int,
        answer: FirstAnswer | None,
        adopts: Sequence[tuple[int, int]] = (),
        outputs: Sequence[tuple[int, int]] = (),
    ) -> Claim:
        """Claim a live reservation under this number; one from an earlier life keeps its own.

        It got `answer`, and `adopts` claims of lost replicas. `outputs` are its output
        blocks by the router id that was told of them. Those routers will state theirs
        again, so counted as our own they would count twice. All are ours if the sum
        differs.
        """
        before = self.claims.own.by_id.get(reservation.reservation_id)
        if before is not None and before.reservation is not None:
            # Booked anew, although the first one was lost with its rank and is not swept yet.
            self.dropped(before.reservation, reservation.created)
        worker, dp_rank = partition.fleet_slots.rank_at(reservation.slot)
        # without an id of its client's there is no request that could be a repeat
        packed = packed_answer(answer) if reservation.fingerprint else b""
        record = ClaimRecord(
            reservation_id=reservation.reservation_id,
            born=born,
            model_name=partition.scope.model_name,
            tenant_id=partition.scope.tenant_id,
            block_size=partition.index.block_size,
            worker_id=worker.worker_id,
            dp_rank=dp_rank,
            hashes=partition.ledger.chain_of(reservation),
            prefill_tokens=reservation.prefill_tokens,
            isl_tokens=reservation.isl_tokens,
            track_prefill_tokens=reservation.track_prefill_tokens,
            expected_output_tokens=reservation.expected_output_tokens,
            lora_name=reservation.lora_name,
            selection_id=reservation.selection_id,
            ttl_s=self._ttl_told(reservation),
            lease=_lease_of(reservation),
            adopts=list(adopts),
            fairness_id=_fairness_told(partition, reservation),
            charged=reservation.charged,
            pair=reservation.pair,
            fingerprint=(packed and reservation.fingerprint) or b"",
            answer=packed,
            batch=reservation.batch if packed else None,
            session_id=reservation.session_id,
            session_version=reservation.session_version,
            pulled=reservation.pulled,
        )
        claim = self.claims.open(record, reservation)
        claim.grow(prefill_done=reservation.prefill_done)
        if reservation.output_blocks:
            by_replica = dict(outputs)
            if sum(by_replica.values()) != reservation.output_blocks:
                by_replica = {self.claims.router_id: reservation.output_blocks}
            faded_at, fraction = reservation.faded_outputs, reservation.output_fraction
            claim.grow(outputs=by_replica, faded_at=faded_at, fraction=fraction)
        return claim

    def completed(self, partition: Partition, reservation: LedgerReservation) -> ReplicaEnvelope:
        """Return the completion of a prefill, applied to every claim on the id."""
        meant = self.claims.complete(reservation.reservation_id)
        stamp = self.claims.outbox.stamp(meant)
        return self._envelope(partition, reservation, "MarkPrefillCompleted", stamp)

    def freed(
        self, partition: Partition, reservation: LedgerReservation, now: float
    ) -> ReplicaEnvelope:
        """End every claim on the id of a still live reservation; return the event of its end."""
        meant = self.claims.alive(reservation.reservation_id)
        stamp = self.claims.outbox.stamp(meant)
        envelope = self._envelope(partition, reservation, "Free", stamp)
        if reservation.claim is not None:
            self.claims.untie(reservation.claim, b"")
        self.claims.end_all(reservation.reservation_id, meant, now)
        return envelope

    def expired(
        self, partition: Partition, reservation: LedgerReservation, now: float
    ) -> ReplicaEnvelope:
        """End only our own claim, and return the event to publish.

        It was not renewed, or is taken back; the same id may live where others booked it.
        """
        claim = reservation.claim
        assert claim is not None
        stamp = msgspec.structs.replace(self.claims.outbox.stamp([claim]), lapsed=True)
        envelope = self._envelope(partition, reservation, "Free", stamp)
        self.claims.untie(claim, b"")
        self.claims.end_own_said(claim, now)
        self.claims.homeless.append(reservation.reservation_id)
        return envelope

    def completed_unbooked(self, claim: Claim) -> ReplicaEnvelope:
        """Return the completion of a prefill whose worker is not here; see `completed`."""
        meant = self.claims.complete(claim.reservation_id)
        return self._envelope_of(
            claim.record, "MarkPrefillCompleted", self.claims.outbox.stamp(meant)
        )

    def freed_unbooked(self, meant: list[Claim], now: float) -> ReplicaEnvelope:
        """End the claims on one id whose worker is not here; return the event of its end."""
        record = meant[0].record
        envelope = self._envelope_of(record, "Free", self.claims.outbox.stamp(meant))
        self.claims.end_all(record.reservation_id, meant, now)
        return envelope

    def expires(self, reservation: LedgerReservation) -> bool:
        """Tell whether a reservation may expire here: while its owner is alive, only there."""
        claim = reservation.claim
        claims = self.claims
        return claim is None or claim.owner == claims.router_id or claim.owner in claims.gone

    def orphan_expired(self, partition: Partition, reservation: LedgerReservation) -> None:
        """Age the claim of an orphan that was not renewed; not announced, as others watch it, too.

        The claim stays known: its owner may come back with it, and a caller may still end it here.
        """
        claim = reservation.claim
        if claim is not None:
            self.claims.untie(claim, partition.ledger.chain_of(reservation))
            self.claims.age(claim)
            self.claims.counters.orphans_expired += 1
            self.claims.homeless.append(reservation.reservation_id)

    def dropped(self, reservation: LedgerReservation, now: float) -> None:
        """Unlink the claim of a reservation whose rank has left.

        Our own claim ends with that; a claim of others waits for the rank.
        """
        claim = reservation.claim
        if claim is None:
            return
        self.claims.untie(claim, claim.hashes)
        if claim.owner == self.claims.router_id:
            self.claims.end_own(claim, now)
        else:
            self.claims.note(claim)
        self.claims.homeless.append(reservation.reservation_id)

    def may_adopt(self, reservation: LedgerReservation, *, is_lost: bool = False) -> bool:
        """Tell whether a booked reservation is an orphan that we can adopt.

        `is_lost`: its owner is alive, but has it no more.
        """
        claim = reservation.claim
        if claim is None or not (is_lost or claim.owner in self.claims.gone):
            return False
        if self.claims.closings.covers(claim):  # it is over, and about to be released
            return False
        # We have another claim on this id, which will be booked in its turn.
        return reservation.reservation_id not in self.claims.own.by_id

    def adopt(self, partition: Partition, reservation: LedgerReservation, now: float) -> None:
        """Own an orphan from now on, with its current lease or time to live."""
        claim = reservation.claim
        assert claim is not None
        self.claims.adopt(
            claim,
            partition.ledger.chain_of(reservation),
            now,
            ttl_s=self._ttl_told(reservation),
            lease=_lease_of(reservation),
        )

    # -- messages ------------------------------------------------------------------------------

    def _envelope(
        self,
        partition: Partition,
        reservation: LedgerReservation,
        data: AddRequestData | Ending,
        stamp: Stamp,
    ) -> ReplicaEnvelope:
        worker, dp_rank = partition.fleet_slots.rank_at(reservation.slot)
        at, name = EventWorker(worker.worker_id, dp_rank), reservation.reservation_id
        event = ReplicaEvent(name, at, data, self.claims.router_id, reservation.lora_name)
        return _enveloped(*partition.scope, partition.index.block_size, event, stamp)

    def _envelope_of(self, record: ClaimRecord, data: Ending, stamp: Stamp) -> ReplicaEnvelope:
        """Return the event of a reservation that is known by a claim only."""
        at, name = EventWorker(record.worker_id, record.dp_rank), record.reservation_id
        event = ReplicaEvent(name, at, data, self.claims.router_id, record.lora_name)
        return _enveloped(record.model_name, record.tenant_id, record.block_size, event, stamp)


def _enveloped(
    model_name: str, tenant_id: str, block_size: int, event: ReplicaEvent, stamp: Stamp
) -> ReplicaEnvelope:
    return ReplicaEnvelope(model_name, tenant_id, tenant_id, block_size, event, stamp)


def _fairness_told(partition: Partition, reservation: LedgerReservation) -> str:
    """Return whose share it uses; empty for its tenant's, which receivers know."""
    name = reservation.fairness_id
    return "" if name == partition.scope.tenant_id else name


def _lease_of(reservation: LedgerReservation) -> LeaseState | None:
    lease = reservation.lease
    if lease is None:
        return None
    return LeaseState(lease.lease_id, lease.owner, lease.ttl_s, revision=lease.revision)
