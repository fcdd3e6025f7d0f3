"""Questions: which worker should take this prompt, and what would it cost where."""

from typing import ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from indexer.types import U64_MASK, Scope
from select_service.types.ranges import (
    I64,
    U32,
    U64,
    Fraction,
    HashList,
    Milliseconds,
    NonNegative,
    Seconds,
    TokenList,
    check_scope_names,
    check_u64,
)


class MmObject(Struct, frozen=True):
    """One media item inside a block; only its hash enters the block hash."""

    mm_hash: U64
    """Hash of the media item, which enters the hash of the block, e.g. `81093`."""
    offsets: list[tuple[U64, U64]]
    """Where the item's placeholders lie: first token, and token behind the last."""

    def __post_init__(self) -> None:
        check_u64("mm_hash", self.mm_hash)
        for start, end in self.offsets:
            check_u64("offsets", start)
            check_u64("offsets", end)


class BlockMmInfo(Struct, frozen=True):
    """The media items of one block."""

    mm_objects: list[MmObject]
    """The media items of the block."""


class MmRoutingInfo(Struct, frozen=True):
    """Tokens with media placeholders expanded for routing."""

    routing_token_ids: list[U32]
    """The prompt's tokens with media placeholders expanded; little-endian numbers of 4 bytes where
    they are packed, e.g. `[1, 32000, 32000]`."""
    block_mm_infos: list[BlockMmInfo | None] = []
    """For each block its media items; null: it has none."""


class RouterConfigOverride(Struct, frozen=True, kw_only=True):
    """Weights for this request only."""

    overlap_score_credit: Fraction | None = None
    prefill_load_scale: NonNegative | None = None
    overlap_score_weight: NonNegative | None = None
    """Old name of `prefill_load_scale`; 0 also sets the credit to 0, e.g. `1.0`."""
    router_temperature: NonNegative | None = None
    """0 picks the cheapest rank; above, cheaper ranks are only likelier, e.g. `0.0`."""
    track_prefill_tokens: bool | None = None
    assume_kv_reuse: bool | None = None  # false: none of a prompt's blocks is counted as shared
    """Whether the prompt's blocks are counted as shared with other requests."""
    shared_cache_multiplier: Fraction | None = None
    """Accepted, without effect, e.g. `0.0`."""


class PromptFields(Struct, kw_only=True):
    """What every prompt route takes: tokens, or hashes with their length.

    Once decoded, or `packed`, the long lists are little-endian numbers of 4 and 8 bytes each.
    """

    model_name: str = "default"
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    token_ids: TokenList | None = None
    """The prompt's tokens; little-endian numbers of 4 bytes where they are packed, e.g. `[1, 15043,
    3186]`."""
    mm_routing_info: MmRoutingInfo | None = None
    """The prompt's tokens, where it has media; takes the place of `token_ids`."""
    block_mm_infos: list[BlockMmInfo | None] | None = None
    """For each block its media items; null: it has none."""
    block_hashes: HashList | None = None
    sequence_hashes: HashList | None = None
    isl_tokens: U64 | None = None
    lora_name: str | None = None
    """Name of the LoRA adapter; its blocks are cached apart, e.g. `"sql-adapter"`."""
    cache_salt: str | None = None
    """Salt of the prompt's cache, as the engine gets it; blocks with another salt are cached apart,
    e.g. `"customer-7"`."""
    cache_namespace: str | None = None
    """Another name of `cache_salt`, e.g. `"customer-7"`."""
    is_eagle: bool | None = None
    """Whether blocks are hashed as for EAGLE; null: as the workers say."""
    router_config_override: RouterConfigOverride | None = None
    """Weights for this request only."""

    def __post_init__(self) -> None:
        isl_tokens = self.isl_tokens
        if isl_tokens is not None and not 0 <= isl_tokens <= U64_MASK:  # no frame for the rest
            check_u64("isl_tokens", isl_tokens)
        if self.routing_group is not UNSET:
            check_scope_names(self.tenant_id, self.routing_group)

    @property
    def scope(self) -> Scope:
        """The partition asked for; `routing_group` is another name of `tenant_id`."""
        tenant = self.tenant_id
        if tenant is UNSET:
            tenant = self.routing_group
        return Scope(self.model_name, "default" if tenant is UNSET else tenant)


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
    """Name that has a fair share of the fleet; the tenant unless given, e.g. `"customer-7"`."""
    cache_hit_threshold: Fraction | None = None
    """Least share of the prompt that must be cached, 0 to 1, e.g. `0.5`."""
    cache_hit_scope: CacheScope | None = None
    """Which rank has to reach that share: `any`, or the `chosen` one."""
    cache_hit_basis: CacheBasis | None = None
    """What the share is of: the whole prompt, or all but its last block."""
    on_cache_threshold: Literal["reject", "fallback"] = "reject"
    """What happens where no rank reaches it: `reject`, or place it anyway (`fallback`)."""
    attempt: U32 = 0
    """How many refusals for the cache, or preemptions, the request has had, e.g. `0`."""
    session_id: str | None = None  # goes where its session's last request went, unless overloaded
    """Session whose last rank is chosen again, unless that is overloaded; empty is none, e.g.
    `"chat-42"`."""
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
