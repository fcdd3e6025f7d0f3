"""What replicas tell each other about reservations, in the reference's envelope (contract 6.2).

Shapes, and the one who fills them. `desk.py` says when an event is due, `edge/replica_sync.py`
puts it on the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from indexer.core.hashing import unpack_u64

if TYPE_CHECKING:
    from select_service.core.partition import Partition
    from select_service.core.reservation import Reservation

TOPIC: Final = b"dynamo.slot-tracker.v1"

Ending: TypeAlias = Literal["MarkPrefillCompleted", "Free"]


class Duration(Struct, frozen=True):
    """A span of time as the reference writes it."""

    secs: int
    nanos: int


class PrefillLoadHint(Struct, frozen=True):
    """Prefill tokens the booking put on the rank."""

    initial_effective_prefill_tokens: int
    expected_prefill_duration: Duration | None = None


class AddRequest(Struct, frozen=True):
    """A booking: its sequence hashes as unsigned 64 bit."""

    token_sequence: list[int] | None = None
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    prefill_load_hint: PrefillLoadHint | None = None


class AddRequestData(Struct, frozen=True):
    """The tagged form of an admission on the wire."""

    AddRequest: AddRequest


class EventWorker(Struct, frozen=True):
    """The rank a reservation is booked on."""

    worker_id: int
    dp_rank: int


class ReplicaEvent(Struct, frozen=True):
    """One admission, prefill completion or free."""

    request_id: str
    worker: EventWorker
    data: AddRequestData | Ending
    router_id: int
    lora_name: str | None = None


class Stamp(Struct, frozen=True, omit_defaults=True):
    """What we add to the reference's envelope; foreign readers skip it.

    `seq` numbers everything a publisher states, `of` names the claims that are meant, each by its
    owner and the owner's seq at its booking.
    """

    epoch: int
    seq: int
    of: list[tuple[int, int]] = []


class ReplicaEnvelope(Struct, frozen=True):
    """One message of the replica plane; both names of the scope are sent (contract 6.2)."""

    model_name: str
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    block_size: int = 0
    event: ReplicaEvent | None = None
    select_service: Stamp | UnsetType = UNSET


class Announcer:
    """Speaks for this process on the replica plane; a router id of 0 keeps silent."""

    def __init__(self, router_id: int) -> None:
        self.router_id = router_id

    def booked(
        self, partition: Partition, reservation: Reservation, stamp: Stamp
    ) -> ReplicaEnvelope:
        """Return the admission of a reservation; untracked prefill tokens are not told."""
        track = reservation.track_prefill_tokens
        add = AddRequest(
            token_sequence=unpack_u64(partition.ledger.chain_of(reservation)),
            track_prefill_tokens=track,
            expected_output_tokens=reservation.expected_output_tokens,
            prefill_load_hint=PrefillLoadHint(reservation.prefill_tokens) if track else None,
        )
        return self._envelope(partition, reservation, AddRequestData(add), stamp)

    def ended(
        self, partition: Partition, reservation: Reservation, what: Ending, stamp: Stamp
    ) -> ReplicaEnvelope:
        """Return the completion of a prefill, or the end of a reservation."""
        return self._envelope(partition, reservation, what, stamp)

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
                router_id=self.router_id,
                lora_name=reservation.lora_name,
            ),
            select_service=stamp,
        )
