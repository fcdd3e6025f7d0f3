"""What is booked: by whom, its lifecycle calls one by one and in batches, and their answers."""

from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from select_service.types.prompts import PromptFields
from select_service.types.ranges import U32, U64, Seconds, check_u64

Outcome: TypeAlias = Literal["completed", "failed", "cancelled"]
"""How a reservation ended: its engine did it, its engine failed (an error, no answer, no
connection), or its caller wanted it no longer. Not said: as `completed`, but nobody vouches."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class ReservationRequest(PromptFields, kw_only=True):
    """POST /reservations: book a rank the caller has chosen."""

    reservation_id: str
    worker_id: U64
    """Worker that the caller has chosen, e.g. `7`."""
    dp_rank: U32 | None = None
    expected_output_tokens: U32 | None = None
    effective_prefill_tokens: U64 | None = None
    """Tokens of the prompt that are left to compute; null: all of them, e.g. `128`."""
    track_prefill_tokens: bool | None = None
    selection_id: str | None = None
    lease_id: str | None = None
    """Lease under which the reservation lives, e.g. `"router-1"`."""
    ttl_s: Seconds | None = None
    """Without a lease: seconds since its last lifecycle call after which it ends, e.g. `300.0`."""

    def __post_init__(self) -> None:
        PromptFields.__post_init__(self)
        check_u64("worker_id", self.worker_id)
        check_u64("effective_prefill_tokens", self.effective_prefill_tokens)


class ReservationAnswer(Struct, frozen=True):
    """The answer of POST /reservations."""

    reservation_id: str
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str


class OutputBlockRequest(Struct, frozen=True, kw_only=True):
    """POST /reservations/{id}/output_block; the core checks the range of the fraction (400)."""

    decay_fraction: float | None = None
    """Weight of the reservation's output blocks from now on, 0 to 1; null: 1, e.g. `0.5`."""


class PrefillCompleteRequest(Struct, frozen=True, kw_only=True):
    """POST /reservations/{id}/prefill_complete; the body may be empty."""

    cached_tokens: U64 | None = None
    """Prompt tokens that the engine has found in its cache, e.g. `384`."""

    def __post_init__(self) -> None:
        check_u64("cached_tokens", self.cached_tokens)


OutputBlocks = Annotated[int, Meta(ge=1, le=1 << 16)]


class BatchPrefillComplete(Struct, kw_only=True, tag_field="op", tag="prefill_complete"):
    """As POST /reservations/{id}/prefill_complete."""

    reservation_id: str
    cached_tokens: U64 | None = None
    """Prompt tokens that the engine has found in its cache, e.g. `384`."""

    def __post_init__(self) -> None:
        check_u64("cached_tokens", self.cached_tokens)


class BatchOutputBlock(Struct, kw_only=True, tag_field="op", tag="output_block"):
    """As POST /reservations/{id}/output_block, `count` times, or until there are `total`."""

    reservation_id: str
    decay_fraction: float | None = None
    """Weight of the reservation's output blocks from now on, 0 to 1; null: 1, e.g. `0.5`."""
    count: OutputBlocks = 1
    """Output blocks to add, e.g. `1`."""
    total: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    """Output blocks of the whole reservation: safe to repeat, as `count` is not, e.g. `3`."""


class BatchFree(Struct, kw_only=True, tag_field="op", tag="free"):
    """As DELETE /reservations/{id}."""

    reservation_id: str
    cached_tokens: U64 | None = None
    """Prompt tokens that the engine has found in its cache, e.g. `384`."""
    outcome: Outcome | None = None
    """How the request ended; null: it is not said."""

    def __post_init__(self) -> None:
        check_u64("cached_tokens", self.cached_tokens)


Operation: TypeAlias = BatchPrefillComplete | BatchOutputBlock | BatchFree


class BatchRequest(Struct, kw_only=True):
    """POST /reservations/batch: lifecycle calls, carried out in order, each for itself."""

    operations: list[BatchPrefillComplete | BatchOutputBlock | BatchFree]
    """Calls to carry out, in order."""


class OperationResult(Struct, frozen=True, omit_defaults=True):
    """What a lifecycle call of a batch would have been answered on its own route."""

    status: int
    error: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    field: str | UnsetType = UNSET
    ended: bool | UnsetType = UNSET
    """With a 404: the reservation was live not long ago, so a repeat of the call is of no use."""


class BatchAnswer(Struct, frozen=True):
    """POST /reservations/batch: one result for each operation, in order."""

    results: list[OperationResult]
    """A result for each call, in order."""
