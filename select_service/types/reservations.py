"""What is booked, its lifecycle calls one by one and in batches, and their answers."""

from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from select_service.types.ranges import U32, U64, Seconds, check_u64
from select_service.types.requests import PromptFields

Outcome: TypeAlias = Literal["completed", "failed", "cancelled"]
"""How a reservation ended: its engine did it, its engine failed (an error, no answer, no
connection), or its caller wanted it no longer. Not said: as `completed`, but unconfirmed."""

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


class LeaseRequest(Struct, kw_only=True):
    """POST /leases: open one, or renew one's own under the same id."""

    owner: str
    ttl_s: Seconds
    """Seconds without a renewal after which the lease ends, e.g. `30.0`."""
    lease_id: str | None = None
    """Id of the lease, chosen by the client so that the call is safe to repeat; null: one is made,
    e.g. `"router-1"`."""


class LeaseRenewal(Struct, kw_only=True):
    """POST /leases/{id}/renew."""

    ttl_s: Seconds | None = None
    """Another time to live from now on, in seconds; null: as before, e.g. `30.0`."""


class LeaseState(Struct, frozen=True, omit_defaults=True):
    """What must be kept of a lease to put it back."""

    lease_id: str
    owner: str
    ttl_s: float
    born: int = 0
    """The last statement to replicas before it was opened: what is under it has higher numbers."""
    adopted: bool = False
    """It was opened for what another replica had left under this id."""
    revision: U64 = 0
    """Grows with each change of `ttl_s` by a client: the highest one counts."""
    first_revision: U64 = 0
    """The one it was opened with; 0: `born`."""


class LeaseRecord(Struct, frozen=True):
    """An open lease as the lease routes answer it."""

    lease_id: str
    owner: str
    ttl_s: float
    """Seconds without a renewal after which it ends, rounded up to three digits, e.g. `30.0`."""
    expires_in_s: float
    """Seconds until it ends, unless it is renewed, e.g. `21.4`."""
    reservations: int
    router_ids: list[int] | UnsetType = UNSET
    """Replicas by whose reservations it is known; absent: it is open here, e.g. `[81093]`."""


class LeaseList(Struct, frozen=True):
    """GET /leases: oldest first, as many as fit, and how many there are."""

    leases: list[LeaseRecord]
    """Open leases, oldest first."""
    total: int
    """Number of open leases, e.g. `1`."""
