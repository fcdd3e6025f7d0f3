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
    dp_rank: U32

    def __post_init__(self) -> None:
        check_u64("worker_id", self.worker_id)


class RoutingConstraints(Struct, frozen=True):
    """Taints a candidate must have, and taints that make it cheaper."""

    required_taints: list[str] = []
    preferred_taints: dict[str, float] = {}


class SelectRequest(PromptFields, kw_only=True):
    """POST /select: which worker should take this prompt?"""

    is_pair: ClassVar[bool] = False  # `isinstance` costs ten times that

    selection_id: str | None = None
    reservation_id: str | None = None  # ignored and not echoed on /select
    expected_output_tokens: U32 | None = None
    priority_jump: float | None = None
    strict_priority: U32 | None = None
    pinned_worker: PinnedWorker | None = None
    allowed_worker_ids: list[U64] | None = None
    routing_constraints: RoutingConstraints | UnsetType = UNSET
    # admission
    slo_class: str | None = None
    priority: I64 | None = None  # names the class of that priority
    slo_ttft_ms: Milliseconds | None = None
    fairness_id: str | None = None  # who shares fairly; the tenant unless given
    cache_hit_threshold: Fraction | None = None
    cache_hit_scope: CacheScope | None = None
    cache_hit_basis: CacheBasis | None = None
    on_cache_threshold: Literal["reject", "fallback"] = "reject"
    attempt: U32 = 0  # refusals for the cache, or preemptions, it has behind it
    session_id: str | None = None  # goes where its session's last request went, unless overloaded
    explain: bool | UnsetType | None = UNSET  # with the whole decision in the answer


class SelectAndReserveRequest(SelectRequest, kw_only=True):
    """POST /select_and_reserve: the body of /select, booked in the same step."""

    lease_id: str | None = None  # lives as long as this lease is renewed
    ttl_s: Seconds | None = None  # without a lease: since the last lifecycle call


class SelectPairRequest(SelectAndReserveRequest, kw_only=True):
    """POST /select_pair: as /select_and_reserve; its `reservation_id` names the pair."""

    is_pair: ClassVar[bool] = True


class PotentialLoadsRequest(SelectRequest, kw_only=True):
    """POST /potential_loads; eligibility fields are accepted and have no effect."""


class OverlapScoresRequest(SelectRequest, kw_only=True):
    """POST /overlap_scores; eligibility fields are accepted and have no effect."""
