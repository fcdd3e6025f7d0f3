"""What replicas tell each other about reservations, in the reference's envelope (contract 6.2).

Shapes only: `edge/replica_sync.py` puts them on the wire, `core/service.py` decides when one is due.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

TOPIC = b"dynamo.slot-tracker.v1"


class PrefillLoadHint(Struct, frozen=True):
    """Prefill tokens the booking put on the rank."""

    initial_effective_prefill_tokens: int
    expected_prefill_duration: None = None


class AddRequest(Struct, frozen=True):
    """A booking: its sequence hashes as unsigned 64 bit."""

    token_sequence: list[int] | None
    track_prefill_tokens: bool
    expected_output_tokens: int | None
    prefill_load_hint: PrefillLoadHint | None


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
    data: AddRequestData | Literal["MarkPrefillCompleted", "Free"]
    router_id: int
    lora_name: str | None


class ReplicaEnvelope(Struct, frozen=True):
    """One message of the replica plane; both names of the scope are sent (contract 6.2)."""

    model_name: str
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    block_size: int = 0
    event: ReplicaEvent | None = None
