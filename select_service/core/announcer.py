"""What our own callers do, put into words for replicas.

The desk begins, continues and ends reservations; here that becomes claims (`claims.py`) and the
events of contract 6.2, stamped with our number. A router id of 0 keeps silent: the desk asks
`speaks` first. What is not worth a message of its own is left to the next batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from indexer.core.hashing import unpack_u64
from select_service.core.claims import Claims
from select_service.core.replica_events import (
    AddRequest,
    AddRequestData,
    EventWorker,
    PrefillLoadHint,
    ReplicaEnvelope,
    ReplicaEvent,
    Stamp,
)
from select_service.core.replica_messages import ClaimRecord, Ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.partition import Partition
    from select_service.core.replica_events import Ending
    from select_service.core.replica_messages import Said
    from select_service.core.reservation import Reservation
    from select_service.types import CoreLimits


class Announcer:
    """Speaks for this process on the replica plane."""

    def __init__(self, limits: CoreLimits, router_id: int, epoch: int) -> None:
        self.claims = Claims(limits, router_id, epoch)
        self.speaks = router_id != 0

    # -- what the desk does --------------------------------------------------------------------

    def booked(self, partition: Partition, reservation: Reservation) -> ReplicaEnvelope:
        """Own a new reservation and return its admission; untracked prefill is not told."""
        hashes = partition.ledger.chain_of(reservation)
        stamp = msgspec.structs.replace(
            self.claims.stamp(),
            isl_tokens=reservation.isl_tokens,
            selection_id=reservation.selection_id,
        )
        self.own(partition, reservation, stamp.seq)
        track = reservation.track_prefill_tokens
        add = AddRequest(
            token_sequence=unpack_u64(hashes),
            track_prefill_tokens=track,
            expected_output_tokens=reservation.expected_output_tokens,
            prefill_load_hint=PrefillLoadHint(reservation.prefill_tokens) if track else None,
        )
        return self._envelope(partition, reservation, AddRequestData(add), stamp)

    def own(
        self,
        partition: Partition,
        reservation: Reservation,
        born: int,
        adopts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Claim a live reservation under this number; one from an earlier life keeps its own."""
        before = self.claims.own.by_id.get(reservation.reservation_id)
        if before is not None and before.reservation is not None:
            # Booked anew although its rank took the first one along and nobody has swept yet.
            self.dropped(before.reservation, reservation.created)
        worker, dp_rank = partition.rank_at(reservation.slot)
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
            adopts=list(adopts),
        )
        claim = self.claims.open(record, reservation)
        claim.prefill_done = reservation.prefill_done
        if reservation.output_blocks:
            claim.outputs[self.claims.router_id] = reservation.output_blocks
            claim.faded_at = reservation.faded_outputs
            claim.fraction = reservation.output_fraction

    def completed(self, partition: Partition, reservation: Reservation) -> ReplicaEnvelope:
        """Return the completion of a prefill, said of every claim on the id."""
        meant = self.claims.complete(reservation.reservation_id)
        stamp = self.claims.stamp(meant)
        return self._envelope(partition, reservation, "MarkPrefillCompleted", stamp)

    def freed(self, partition: Partition, reservation: Reservation, now: float) -> ReplicaEnvelope:
        """End every claim on the id and return the end of the reservation, which is still live."""
        meant = self.claims.alive(reservation.reservation_id)
        stamp = self.claims.stamp(meant)
        envelope = self._envelope(partition, reservation, "Free", stamp)
        if reservation.claim is not None:
            self.claims.untie(reservation.claim, b"")
        self.claims.end_all(reservation.reservation_id, meant, now)
        return envelope

    def freed_unbooked(self, reservation_id: str, now: float) -> Said | None:
        """End the claims on an id whose worker is not known here; None: there are none."""
        meant = self.claims.alive(reservation_id)
        if not meant:
            return None
        self.claims.end_all(reservation_id, meant, now)
        return self.claims.say([Ended(reservation_id, *claim.key) for claim in meant])

    def expires(self, reservation: Reservation) -> bool:
        """Tell whether time may end it: its owner is who watches the time, while it is there."""
        claim = reservation.claim
        claims = self.claims
        return claim is None or claim.owner == claims.router_id or claim.owner in claims.gone

    def orphan_expired(self, partition: Partition, reservation: Reservation) -> None:
        """Its owner is gone, and nobody has cared since; not said, as others watch it too.

        The claim stays: its owner may come back with it, and somebody may yet end it here.
        """
        claim = reservation.claim
        if claim is not None:
            self.claims.untie(claim, partition.ledger.chain_of(reservation))
            claim.aged = True
            self.claims.counters.orphans_expired += 1
            self.claims.homeless.append(reservation.reservation_id)

    def dropped(self, reservation: Reservation, now: float) -> None:
        """Its rank has gone. Ours ends with that; that of others waits for the rank."""
        claim = reservation.claim
        if claim is None:
            return
        self.claims.untie(claim, claim.hashes)
        if claim.owner == self.claims.router_id:
            self.claims.end_own(claim, now)
        self.claims.homeless.append(reservation.reservation_id)

    def adopted(self, partition: Partition, reservation: Reservation, now: float) -> bool:
        """Own a reservation whose owner is gone; a caller of ours cares for it."""
        claim = reservation.claim
        claims = self.claims
        if claim is None or claim.owner not in claims.gone:
            return False
        if reservation.reservation_id in claims.own.by_id:
            return False  # we own another claim on this id, which will be booked in its turn
        claims.adopt(claim, partition.ledger.chain_of(reservation), now)
        return True

    # -- words ---------------------------------------------------------------------------------

    def _envelope(
        self,
        partition: Partition,
        reservation: Reservation,
        data: AddRequestData | Ending,
        stamp: Stamp,
    ) -> ReplicaEnvelope:
        worker, dp_rank = partition.rank_at(reservation.slot)
        return ReplicaEnvelope(
            model_name=partition.scope.model_name,
            tenant_id=partition.scope.tenant_id,
            routing_group=partition.scope.tenant_id,
            block_size=partition.index.block_size,
            event=ReplicaEvent(
                request_id=reservation.reservation_id,
                worker=EventWorker(worker.worker_id, dp_rank),
                data=data,
                router_id=self.claims.router_id,
                lora_name=reservation.lora_name,
            ),
            select_service=stamp,
        )
