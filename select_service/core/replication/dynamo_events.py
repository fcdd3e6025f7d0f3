"""Messages about reservations in the reference's envelope.

Shapes only. `announcer.py` fills them, `message_codec.py` encodes and decodes them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from indexer.types import PackedHashes
from select_service.types import LeaseState, PulledBlocks
from select_service.types.admission import ChargedRequest

TOPIC: Final = b"dynamo.slot-tracker.v1"

# Fields we read are range-checked as strictly as by the reference: one number below 0 would stay in
# the load of a rank for as long as its claim lives. MessagePack itself ends at 64 bits.
U64: TypeAlias = Annotated[int, Meta(ge=0)]
U32: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
EpochNumber: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]  # its statements fit in 64 bits

TEXT_CHARS_MAX: Final = 65_536
"""Limit of any id or name from a replica: above what the length flags let clients choose, plus what
is put before a tenant's. A message may be megabytes, and its names are stored."""

Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]

ANSWER_BYTES_MAX: Final = 65_536
"""Limit of a packed first answer (`first_answers.py`); one rank more is some 5 bytes more."""

Fingerprint: TypeAlias = Annotated[bytes, Meta(max_length=16)]
PackedAnswer: TypeAlias = Annotated[bytes, Meta(max_length=ANSWER_BYTES_MAX)]

Ending: TypeAlias = Literal["MarkPrefillCompleted", "Free"]


class Duration(Struct, frozen=True):
    """A duration as the reference writes it."""

    secs: int
    nanos: int


class PrefillLoadHint(Struct, frozen=True):
    """Prefill tokens the booking put on the rank."""

    initial_effective_prefill_tokens: int
    expected_prefill_duration: Duration | None = None


class Hashes:
    """Sequence hashes, packed as everywhere here; they are numbers only on the wire."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedHashes) -> None:
        self.packed = packed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashes) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"Hashes({self.packed!r})"


class AddRequest(Struct, frozen=True):
    """A booking; its sequence hashes are unsigned 64-bit numbers."""

    token_sequence: Hashes | None = None
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
    """Our addition to the reference's envelope; foreign readers skip it.

    `seq` numbers all statements of a publisher, `of` names the claims concerned, each by its owner
    and the owner's seq at its booking.
    """

    epoch: EpochNumber
    seq: U64
    of: list[tuple[U64, U64]] = []
    isl_tokens: U64 = 0  # of an admission
    selection_id: str | None = None  # of an admission
    ttl_s: float | None = None  # of an admission; None: the default
    lease: LeaseState | None = None  # of an admission: the lease it lives under
    fairness_id: str = ""  # of an admission: whose share of the pool it uses; empty: its tenant's
    charged: ChargedRequest | None = None  # of an admission: to the account of its tenant
    # of an end: its time was up, which may differ at a replica that adopted it
    lapsed: bool = False
    pair: str | None = None  # of an admission: the pair it is a leg of
    # of an admission: of its request's body, and the first answer; empty: it cannot be repeated
    fingerprint: Fingerprint = b""
    answer: PackedAnswer = b""
    batch: tuple[U64, U64] | None = None  # of an admission: its group there, shared tokens
    held: bool = False  # of an admission: by a batch that may take it back
    session_id: Text | None = None  # of an admission
    session_version: U32 = 0  # of an admission: of that session's rank
    pulled: PulledBlocks | None = None  # of an admission: come from another rank


class ReplicaEnvelope(Struct, frozen=True):
    """One message of the replica plane; both names of the scope are sent."""

    model_name: str
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    block_size: int = 0
    event: ReplicaEvent | None = None
    select_service: Stamp | UnsetType = UNSET
