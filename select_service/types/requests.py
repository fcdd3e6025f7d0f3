"""Questions: which worker should take this prompt, and what would it cost where."""

from typing import ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from select_service.types.prompts import PromptFields
from select_service.types.ranges import I64, U32, U64, Fraction, Milliseconds, Seconds, check_u64

CacheScope = Literal["gpu", "cpu", "disk", "any"]
CacheBasis = Literal["prompt", "cacheable"]


class PinnedWorker(Struct, frozen=True):
    """The only rank to consider."""

    worker_id: U64
    """The only worker to consider, e.g. `7`."""
    dp_rank: U32
    """Its rank, e.g. `0`."""

    def __post_init__(self) -> None:
        check_u64("worker_id", self.worker_id)


class RoutingConstraints(Struct, frozen=True):
    """Taints a candidate must have, and taints that make it cheaper."""

    required_taints: list[str] = []
    """Taints that a candidate must have, e.g. `["gpu-h100"]`."""
    preferred_taints: dict[str, float] = {}
    """Taints that make a candidate cheaper, with the weight of each."""


class SelectRequest(PromptFields, kw_only=True):
    """POST /select: which worker should take this prompt?"""

    is_pair: ClassVar[bool] = False  # `isinstance` costs ten times that

    selection_id: str | None = None
    reservation_id: str | None = None
    """Id to book under; a repeat with the same id gets the same answer. `/select` ignores it, e.g.
    `"5f0c7f0e-6a1c-4b58-a5c1-5d1c2a9b7c11"`."""
    expected_output_tokens: U32 | None = None
    priority_jump: float | None = None
    """Seconds that the request counts as waiting already, in a queue, e.g. `5.0`."""
    strict_priority: U32 | None = None
    """Level of the request in a queue; a higher one goes first, e.g. `1`."""
    pinned_worker: PinnedWorker | None = None
    """The only rank to consider."""
    allowed_worker_ids: list[U64] | None = None
    """The only workers to consider, e.g. `[7, 8]`."""
    routing_constraints: RoutingConstraints | UnsetType = UNSET
    """Taints that candidates must have, or that make them cheaper."""
    # admission
    slo_class: str | None = None
    """Service class of the request, for admission, e.g. `"standard"`."""
    priority: I64 | None = None
    """Priority that names the class with that number, e.g. `0`."""
    slo_ttft_ms: Milliseconds | None = None
    """Wanted time to first token, in milliseconds, e.g. `500.0`."""
    fairness_id: str | None = None
    """Who shares the fleet fairly; the tenant unless given, e.g. `"customer-7"`."""
    cache_hit_threshold: Fraction | None = None
    """Least share of the prompt that must be cached, 0 to 1, e.g. `0.5`."""
    cache_hit_scope: CacheScope | None = None
    """Which rank has to reach that share: `any`, or the `chosen` one."""
    cache_hit_basis: CacheBasis | None = None
    """What the share is of: the whole prompt, or all but its last block."""
    on_cache_threshold: Literal["reject", "fallback"] = "reject"
    """What happens where nobody reaches it: `reject`, or place it anyway (`fallback`)."""
    attempt: U32 = 0
    """How many refusals for the cache, or preemptions, the request has had, e.g. `0`."""
    session_id: str | None = None  # goes where its session's last request went, unless overloaded
    """Session whose last rank is chosen again, unless that is overloaded, e.g. `"chat-42"`."""
    explain: bool | UnsetType | None = UNSET
    """Whether the answer has the whole record of the decision."""


class SelectAndReserveRequest(SelectRequest, kw_only=True):
    """POST /select_and_reserve: the body of /select, booked in the same step."""

    lease_id: str | None = None
    """Lease under which the reservation lives, e.g. `"router-1"`."""
    ttl_s: Seconds | None = None
    """Without a lease: seconds since its last lifecycle call after which it ends, e.g. `300.0`."""


class SelectPairRequest(SelectAndReserveRequest, kw_only=True):
    """POST /select_pair: as /select_and_reserve; its `reservation_id` names the pair."""

    is_pair: ClassVar[bool] = True


class PotentialLoadsRequest(SelectRequest, kw_only=True):
    """POST /potential_loads; eligibility fields are accepted and have no effect."""


class OverlapScoresRequest(SelectRequest, kw_only=True):
    """POST /overlap_scores; eligibility fields are accepted and have no effect."""
