"""The nouns of the service: requests as validated, answers as sent, settings of the router.

Requests and answers are msgspec Structs: the same definition decodes the wire, types the core and
generates /openapi.json. Ranges that JSON cannot express (u64) are checked in `__post_init__`.
Nothing here decides; `edge/codec/json_codec.py` stands before it, `core/service.py` after it.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from indexer.core.curve_key import is_curve_key
from indexer.types import U64_MASK, Scope, WorkerRank
from select_service.decision_types import Decision
from select_service.doctor_types import Finding
from select_service.policy_types import Policy

__all__ = [
    "Advice",
    "Answer",
    "BatchAnswer",
    "BatchFree",
    "BatchOutputBlock",
    "BatchPrefillComplete",
    "BatchRequest",
    "BestWorker",
    "BlockMmInfo",
    "BriefReady",
    "CacheBasis",
    "CacheHit",
    "CacheScope",
    "CacheThreshold",
    "CoreLimits",
    "KvRankState",
    "LeaseList",
    "LeaseRecord",
    "LeaseRenewal",
    "LeaseRequest",
    "LeaseState",
    "LoadRow",
    "MmObject",
    "MmRoutingInfo",
    "Operation",
    "OperationResult",
    "OutputBlockRequest",
    "Overlap",
    "OverlapRow",
    "OverlapScores",
    "OverlapScoresRequest",
    "PairLeg",
    "PairSelection",
    "PinnedWorker",
    "PotentialLoadsRequest",
    "PrefillCandidate",
    "PromptFields",
    "Ready",
    "ReservationAnswer",
    "ReservationRequest",
    "Role",
    "RouterConfig",
    "RouterConfigOverride",
    "RoutingConstraints",
    "Scope",
    "ScopeLoads",
    "SelectAndReserveRequest",
    "SelectPairRequest",
    "SelectRequest",
    "Selection",
    "SharedCache",
    "StateStatus",
    "WorkerPatch",
    "WorkerRank",
    "WorkerRecord",
    "WorkerSpec",
]

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # upper bound: `__post_init__` (JSON schema has no u64)
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Meta(ge=0.0)]
Seconds = Annotated[float, Meta(gt=0.0)]
Milliseconds = Annotated[float, Meta(gt=0.0)]
CacheScope = Literal["gpu", "cpu", "disk", "any"]
CacheBasis = Literal["prompt", "cacheable"]
Role = Literal["prefill", "decode", "aggregated"]
Inflight = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
# The numbers of long lists are read without their bounds: packing checks all of them at once.
AnyHash = Annotated[int, Meta(extra_json_schema={"minimum": -(1 << 63)})]
"""Signed or unsigned, 64 bits; packed modulo 2^64."""
Token = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": (1 << 32) - 1})]
# What the core takes and what JSON may hold: callers in the same process may pass lists, or packed
# little-endian numbers as the codec does; a JSON decoder must not read a string as the latter.
if TYPE_CHECKING:
    HashList: TypeAlias = list[int] | bytes
    TokenList: TypeAlias = list[int] | bytes
else:
    HashList = list[AnyHash]
    TokenList = list[Token]


def _u64(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= U64_MASK:  # embedding constructs without a codec
        bound = "at least 0" if value < 0 else "at most 2^64-1"
        raise ValueError(f"{name} must be {bound}")


def _curve_key(key: str | None) -> None:
    if key is not None and not is_curve_key(key):
        raise ValueError("curve_public_key must be 40 characters of Z85")


# -- workers -----------------------------------------------------------------------------------


class WorkerSpec(Struct, kw_only=True):
    """Body of POST /workers: a whole record; what is absent becomes null."""

    worker_id: U64
    model_name: str = "default"
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    endpoint: str | None = None
    block_size: U32 | None = None
    data_parallel_start_rank: U32 | None = None
    data_parallel_size: U32 | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[str, str] = {}
    replay_endpoint: str | None = None
    max_num_batched_tokens: U64 | None = None
    total_kv_blocks: U64 | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Literal["required", "preferred"] | None = None
    kv_transfer_preferred_weight: float | None = None
    # additions of this product
    max_inflight: Inflight | None = None  # N: requests it is given at a time
    max_queued: U32 | None = None  # Q: requests that may wait for it
    role: Role | None = None
    curve_public_key: str | None = None  # of its event and replay sockets, where they encrypt

    def __post_init__(self) -> None:
        _u64("worker_id", self.worker_id)
        _curve_key(self.curve_public_key)
        _u64("max_num_batched_tokens", self.max_num_batched_tokens)
        _u64("total_kv_blocks", self.total_kv_blocks)
        _one_scope_name(self.tenant_id, self.routing_group)


class WorkerPatch(Struct, kw_only=True):
    """Body of PATCH /workers/{id}: what is present and not null replaces; nothing can be unset."""

    endpoint: str | None = None
    block_size: U32 | None = None
    data_parallel_start_rank: U32 | None = None
    data_parallel_size: U32 | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[str, str] | None = None
    replay_endpoint: str | None = None
    max_num_batched_tokens: U64 | None = None
    total_kv_blocks: U64 | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: list[str] | None = None
    topology_domains: dict[str, str] | None = None
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Literal["required", "preferred"] | None = None
    kv_transfer_preferred_weight: float | None = None
    max_inflight: Inflight | None = None
    max_queued: U32 | None = None
    role: Role | None = None
    curve_public_key: str | None = None

    # named in a PATCH, and ignored whatever they are
    worker_id: Any = None
    model_name: Any = None
    tenant_id: Any = None
    routing_group: Any = None

    def __post_init__(self) -> None:
        _curve_key(self.curve_public_key)
        _u64("max_num_batched_tokens", self.max_num_batched_tokens)
        _u64("total_kv_blocks", self.total_kv_blocks)


class KvRankState(Struct, frozen=True):
    """What is doubtful about one rank's index."""

    dp_rank: int
    kv_state: Literal["current", "uncertain"]
    lost_batches: int


class WorkerRecord(Struct, kw_only=True, frozen=True):
    """A worker as every worker route answers it, fields in the wire's order."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: Literal["incomplete", "schedulable", "draining", "unschedulable"]
    endpoint: str | None
    kv_events_endpoint: str | None
    kv_events_endpoints: dict[str, str] | UnsetType = UNSET
    replay_endpoint: str | None
    block_size: int | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    stable_routing_id: str | None
    is_eagle: bool | None
    taints: list[str]
    topology_domains: dict[str, str]
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    kv_transfer_preferred_weight: float | None
    not_schedulable_reasons: list[str] | UnsetType = UNSET
    # additions of this product
    kv_state: Literal["uncertain"] | UnsetType = UNSET
    kv_ranks: list[KvRankState] | UnsetType = UNSET
    source: str = "api"  # or "file", "kubernetes": who registered it, and may change it
    max_inflight: int | UnsetType = UNSET
    max_queued: int | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    curve_public_key: str | UnsetType = UNSET


class StateStatus(Struct, frozen=True):
    """How it stands with the state directory."""

    epoch: int  # lives of the process that used it
    durability: Literal["strict", "relaxed"]
    writable: bool
    pending: int  # changes not on disk yet
    restored: dict[str, int]  # by kind, at the start
    dropped: dict[str, int]  # what they referred to was gone
    damage: list[str] = []  # found at the start; the damaged files lie beside, as `.corrupt`
    rows_saved: int = 0
    rows_lost: int = 0


class Ready(Struct, frozen=True):
    """GET /ready."""

    ready: bool
    schedulable_workers: int
    workers: list[WorkerRecord]
    waiting_for: list[str] = []  # what is missing until it is ready; an addition of this product
    state: StateStatus | UnsetType = UNSET  # with --state-dir
    findings: list[Finding] | UnsetType = UNSET  # with ?verbose=true; the gravest first
    findings_left_out: int | UnsetType = UNSET  # beyond `--doctor-findings-max`


class BriefReady(Struct, frozen=True):
    """GET /ready to those who have no token, where tokens are asked for."""

    ready: bool


# -- prompts and requests ----------------------------------------------------------------------


class MmObject(Struct, frozen=True):
    """One media item inside a block; only its hash enters the block hash."""

    mm_hash: U64
    offsets: list[tuple[U64, U64]]

    def __post_init__(self) -> None:
        _u64("mm_hash", self.mm_hash)
        for start, end in self.offsets:
            _u64("offsets", start)
            _u64("offsets", end)


class BlockMmInfo(Struct, frozen=True):
    """The media items of one block."""

    mm_objects: list[MmObject]


class MmRoutingInfo(Struct, frozen=True):
    """Tokens with media placeholders expanded for routing."""

    routing_token_ids: list[U32]
    block_mm_infos: list[BlockMmInfo | None] = []


class RouterConfigOverride(Struct, frozen=True, kw_only=True):
    """Weights for this request only."""

    overlap_score_credit: Fraction | None = None
    prefill_load_scale: NonNegative | None = None
    overlap_score_weight: NonNegative | None = (
        None  # deprecated: prefill_load_scale; 0 zeroes credit
    )
    router_temperature: NonNegative | None = None
    track_prefill_tokens: bool | None = None
    assume_kv_reuse: bool | None = None  # no effect
    shared_cache_multiplier: Fraction | None = None  # no effect


class PinnedWorker(Struct, frozen=True):
    """The only rank to consider."""

    worker_id: U64
    dp_rank: U32

    def __post_init__(self) -> None:
        _u64("worker_id", self.worker_id)


class RoutingConstraints(Struct, frozen=True):
    """Taints a candidate must have, and taints that make it cheaper."""

    required_taints: list[str] = []
    preferred_taints: dict[str, float] = {}


def _one_scope_name(tenant_id: str | UnsetType, routing_group: str | UnsetType) -> None:
    if tenant_id is not UNSET and routing_group is not UNSET and tenant_id != routing_group:
        raise ValueError("routing_group and tenant_id name the same thing and must be equal")


class PromptFields(Struct, kw_only=True):
    """What every prompt route takes: tokens, or hashes with their length.

    Once decoded, or `packed`, the long lists are little-endian numbers of 4 and 8 bytes each.
    """

    model_name: str = "default"
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    token_ids: TokenList | None = None
    mm_routing_info: MmRoutingInfo | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None
    block_hashes: HashList | None = None
    sequence_hashes: HashList | None = None
    isl_tokens: U64 | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    cache_namespace: str | None = None  # alias of cache_salt (1.5+)
    is_eagle: bool | None = None
    router_config_override: RouterConfigOverride | None = None

    def __post_init__(self) -> None:
        isl_tokens = self.isl_tokens
        if isl_tokens is not None and not 0 <= isl_tokens <= U64_MASK:  # no frame for the rest
            _u64("isl_tokens", isl_tokens)
        if self.routing_group is not UNSET:
            _one_scope_name(self.tenant_id, self.routing_group)

    @property
    def scope(self) -> Scope:
        """The partition asked for; `routing_group` is another name of `tenant_id`."""
        tenant = self.tenant_id
        if tenant is UNSET:
            tenant = self.routing_group
        return Scope(self.model_name, "default" if tenant is UNSET else tenant)


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
    """POST /select_and_reserve: the same, and booked in one step."""

    lease_id: str | None = None  # lives as long as this lease is renewed
    ttl_s: Seconds | None = None  # without a lease: since the last lifecycle call


class SelectPairRequest(SelectAndReserveRequest, kw_only=True):
    """POST /select_pair: as /select_and_reserve; its `reservation_id` names the pair."""

    is_pair: ClassVar[bool] = True


class ReservationRequest(PromptFields, kw_only=True):
    """POST /reservations: book a rank the caller has chosen."""

    reservation_id: str
    worker_id: U64
    dp_rank: U32 | None = None
    expected_output_tokens: U32 | None = None
    effective_prefill_tokens: U64 | None = None
    track_prefill_tokens: bool | None = None
    selection_id: str | None = None
    lease_id: str | None = None  # lives as long as this lease is renewed
    ttl_s: Seconds | None = None  # without a lease: since the last lifecycle call

    def __post_init__(self) -> None:
        PromptFields.__post_init__(self)
        _u64("worker_id", self.worker_id)
        _u64("effective_prefill_tokens", self.effective_prefill_tokens)


class PotentialLoadsRequest(SelectRequest, kw_only=True):
    """POST /potential_loads; eligibility fields are accepted and have no effect."""


class OverlapScoresRequest(SelectRequest, kw_only=True):
    """POST /overlap_scores; eligibility fields are accepted and have no effect."""


class OutputBlockRequest(Struct, frozen=True, kw_only=True):
    """POST /reservations/{id}/output_block; the core checks the range of the fraction (400)."""

    decay_fraction: float | None = None


class PrefillCompleteRequest(Struct, frozen=True, kw_only=True):
    """POST /reservations/{id}/prefill_complete, where anything is told at all."""

    cached_tokens: U64 | None = None  # tokens the engine has found cached, as it reports it

    def __post_init__(self) -> None:
        _u64("cached_tokens", self.cached_tokens)


class LeaseRequest(Struct, kw_only=True):
    """POST /leases: open one, or renew one's own under the same id."""

    owner: str
    ttl_s: Seconds
    lease_id: str | None = None  # chosen by the client: safe to repeat


class LeaseRenewal(Struct, kw_only=True):
    """POST /leases/{id}/renew."""

    ttl_s: Seconds | None = None  # from now on


OutputBlocks = Annotated[int, Meta(ge=1, le=1 << 16)]


class BatchPrefillComplete(Struct, kw_only=True, tag_field="op", tag="prefill_complete"):
    """As POST /reservations/{id}/prefill_complete."""

    reservation_id: str
    cached_tokens: U64 | None = None

    def __post_init__(self) -> None:
        _u64("cached_tokens", self.cached_tokens)


class BatchOutputBlock(Struct, kw_only=True, tag_field="op", tag="output_block"):
    """As POST /reservations/{id}/output_block, `count` times, or until there are `total`."""

    reservation_id: str
    decay_fraction: float | None = None
    count: OutputBlocks = 1
    total: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    """Of the whole reservation: safe to repeat, as `count` is not."""


class BatchFree(Struct, kw_only=True, tag_field="op", tag="free"):
    """As DELETE /reservations/{id}."""

    reservation_id: str


Operation: TypeAlias = BatchPrefillComplete | BatchOutputBlock | BatchFree


class BatchRequest(Struct, kw_only=True):
    """POST /reservations/batch: lifecycle calls, carried out in order, each for itself."""

    operations: list[BatchPrefillComplete | BatchOutputBlock | BatchFree]


# -- answers -----------------------------------------------------------------------------------


class Overlap(Struct, frozen=True):
    """Matched tokens of the selected worker, cumulative per tier."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class CacheHit(Struct, frozen=True, kw_only=True):
    """How a selection stands to its cache-hit threshold."""

    best_hit_rate: float | None  # of all candidates; null: the prompt is empty
    threshold: float
    threshold_source: Literal["request", "global", "loop_guard"]


class BestWorker(Struct, frozen=True):
    """Who came nearest to a cache-hit threshold."""

    worker_id: int
    dp_rank: int
    endpoint: str | None


class PrefillCandidate(Struct, frozen=True, kw_only=True):
    """The rank that should compute a prompt whose request decodes elsewhere."""

    worker_id: int
    dp_rank: int
    endpoint: str | None
    effective_prefill_tokens: int


class Advice(Struct, frozen=True, kw_only=True):
    """Whether one worker or a pair should serve a request: `core/pricing/pairing.py` says why."""

    mode: Literal["aggregated", "disaggregated"]
    reason: str
    prefill: PrefillCandidate | None  # of the pair, when that is advised
    aggregated_cost: float | None  # of the best worker, in blocks; null: there is none
    disaggregated_cost: float | None  # of the best pair, its transfer included; null likewise


class CacheThreshold(Struct, kw_only=True):
    """The answer of /select and /select_and_reserve when nobody holds enough of the prompt."""

    selection_id: str | UnsetType = UNSET
    finish_reason: Literal["cache_threshold"] = "cache_threshold"
    model_name: str
    tenant_id: str
    best_hit_rate: float
    threshold: float
    threshold_source: Literal["request", "global", "loop_guard"]
    best_worker: BestWorker
    advice: Advice | UnsetType = UNSET  # where workers have roles
    decision: Decision | UnsetType = UNSET  # when it was to be explained


class Selection(Struct, kw_only=True):
    """The answer of /select and /select_and_reserve."""

    selection_id: str | UnsetType = UNSET
    reservation_id: str | UnsetType = UNSET
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str | None
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    needs_prefill: bool | UnsetType = UNSET  # nobody reached the threshold, and it goes anyway
    cache_hit: CacheHit | UnsetType = UNSET  # when a cache-hit threshold was in force
    # the booking facts (/select_and_reserve only)
    sequence_hashes: list[int] | UnsetType = UNSET  # signed 64 bit
    isl_tokens: int | UnsetType = UNSET
    track_prefill_tokens: bool | UnsetType = UNSET
    potential_decode_blocks: int | UnsetType = UNSET
    advice: Advice | UnsetType = UNSET  # where workers have roles
    decision: Decision | UnsetType = UNSET  # when it was to be explained


class PairLeg(Struct, frozen=True, kw_only=True):
    """One of the two ranks that serve a request together, or the only one."""

    reservation_id: str
    worker_id: int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    effective_prefill_tokens: int  # 0 of a decode leg whose prompt is computed elsewhere
    potential_decode_blocks: int  # 0 of a prefill leg; with this prompt, before it was booked


class PairSelection(Struct, kw_only=True):
    """The answer of /select_pair."""

    selection_id: str | UnsetType = UNSET
    reservation_id: str  # of the pair: lifecycle calls under it reach the leg they mean
    model_name: str
    tenant_id: str
    block_size: int
    mode: Literal["aggregated", "disaggregated"]
    reason: str
    prefill: PairLeg | None  # send it there first; null: `decode` does both
    decode: PairLeg
    transfer_blocks: int  # to be moved from the one to the other
    isl_tokens: int
    track_prefill_tokens: bool
    aggregated_cost: float | None  # of the best worker alone, in blocks; null: there is none
    disaggregated_cost: float | None  # of the best pair, its transfer included; null likewise
    decision: Decision | UnsetType = UNSET  # when it was to be explained


Answer: TypeAlias = Selection | CacheThreshold | PairSelection
"""Of whatever verb looks for workers, to a request that need not wait."""


class ReservationAnswer(Struct, frozen=True):
    """The answer of POST /reservations."""

    reservation_id: str
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str | None


class LeaseState(Struct, frozen=True):
    """What must be kept of a lease to put it back."""

    lease_id: str
    owner: str
    ttl_s: float


class LeaseRecord(Struct, frozen=True):
    """An open lease as the lease routes answer it."""

    lease_id: str
    owner: str
    ttl_s: float  # as asked for, rounded up to three significant digits
    expires_in_s: float
    reservations: int
    router_ids: list[int] | UnsetType = UNSET
    """Replicas it is known through, by whose reservations; absent: it is open here."""


class LeaseList(Struct, frozen=True):
    """GET /leases: oldest first, as many as fit, and how many there are."""

    leases: list[LeaseRecord]
    total: int


class OperationResult(Struct, frozen=True, omit_defaults=True):
    """What a lifecycle call of a batch would have been answered on its own route."""

    status: int
    error: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    field: str | UnsetType = UNSET


class BatchAnswer(Struct, frozen=True):
    """POST /reservations/batch: one result for each operation, in order."""

    results: list[OperationResult]


class LoadRow(Struct, frozen=True):
    """Load of one rank, now (/loads) or with a prompt added (/potential_loads)."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class ScopeLoads(Struct, frozen=True):
    """One element of GET /loads."""

    model_name: str
    tenant_id: str
    loads: list[LoadRow]
    pending_count: int
    pending_isl_tokens: int


class OverlapRow(Struct, frozen=True):
    """Matched blocks of one rank."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    shared_beyond_device_blocks: int | None
    router_credit_blocks: float


class SharedCache(Struct, frozen=True):
    """Kept for compatibility; this service has no shared cache."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[list[int]] = []
    error: str | None = None


class OverlapScores(Struct, frozen=True):
    """The answer of POST /overlap_scores."""

    block_size: int
    num_blocks: int
    workers: list[OverlapRow]
    shared_cache: SharedCache


class IndexFreshness(Struct, frozen=True, kw_only=True):
    """How a rank's event stream stands."""

    state: Literal["current", "uncertain", "replaying", "silent", "none"]
    lag_s: float | None  # by how much later than its fastest its last batch came; null: unknown
    open_gaps: int  # holes that are being mended while newer batches wait
    lost_batches: int  # that will never come


class RankTrustRow(Struct, frozen=True, kw_only=True):
    """How far one rank's index is believed."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    trust: float  # by what its overlap credit is multiplied
    reasons: list[Literal["prediction", "lag", "gaps"]]
    prediction_error: float | None  # predicted - actual tokens, mean of late; null: never told
    missing_share: float  # of what was predicted lately, not found by the engine
    samples: int  # prompts compared of which anything was predicted
    rereads: int  # times its index was read again for that
    index: IndexFreshness


class TrustTable(Struct, frozen=True):
    """GET /trust."""

    ranks: list[RankTrustRow]


class ReplicaStatus(Struct, frozen=True):
    """What is known of one publisher of the replica plane."""

    router_id: int
    peer: str  # the endpoint it was last heard from
    state: Literal["synced", "behind", "leaving", "gone", "foreign"]
    epoch: int
    seq: int  # the newest of its statements heard
    missing: int  # older ones not heard yet
    claims: int  # reservations it says it owns
    unbooked: int  # of them, those whose worker is unknown here, or who yield to another claim
    heard_s_ago: float
    pulls: int
    pulls_failed: int


# -- router settings ---------------------------------------------------------------------------


class RouterConfig(Struct, frozen=True, kw_only=True):
    """The weights and switches in force; defaults are the reference's."""

    policy: Policy = "kv-cost"
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    temperature: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    use_kv_events: bool = True
    track_prefill_tokens: bool = True
    queue_threshold: float = 16.0
    kv_transfer_cost_per_block: float = 0.1  # of prefill: moving a block costs a tenth of it
    # terms of `first-token` (`scoring.py`); None: as the policy has them
    decode_load_scale: float | None = None
    delay_scale: float | None = None
    eviction_scale: float | None = None
    expects_booked: bool | None = None
    context_load_scale: float | None = None
    pace_scale: float | None = None
    overtaking_s: float | None = None  # of the queue, where no policy file orders it
    overtaking_share: float | None = None


class CoreLimits(Struct, kw_only=True):
    """Bounds of the core's own memory and of one turn of housekeeping.

    One object that everybody reads each time: `edge/reloading.py` writes it.
    """

    data_parallel_size_max: int = 1024
    workers_max: int = 10_000
    worker_bytes_max: int = 256 << 10  # of a record; a thousand ranks with an endpoint each: 50 KB
    scopes_max: int = 4_096  # some 20 KB each while empty
    scope_linger_s: float = 600.0  # without workers, before a scope is given up
    reservations_max: int = 1_000_000  # 2 to 3 KB each
    blocks_per_request_max: int = 131_072  # two million tokens in blocks of 16
    id_length_max: int = 256  # characters of reservation_id, selection_id
    name_length_max: int = 256  # characters of a model, tenant, adapter, who shares fairly
    freed_ids_max: int = 200_000  # remembered ids; ten minutes of 300 ends a second
    reservation_ttl_s: float = 300.0  # since the last lifecycle call; 0 = never
    reservation_ttl_max_s: float = 86400.0  # most a request may ask for
    leases_max: int = 10_000  # one a client process; 1 KiB each
    ended_leases_max: int = 10_000  # remembered, for ten minutes
    lease_reopen_s: float = 30.0  # after it was closed; longer than a request is under way
    lease_copies_max: int = 100_000  # known through replicas; beyond, their orphans age singly
    lease_ttl_min_s: float = 1.0  # housekeeping is no finer
    lease_ttl_max_s: float = 3600.0
    lease_name_length_max: int = 256  # characters of lease_id and of owner
    batch_operations_max: int = 1_000  # their member names are read in one go, 5 µs each
    wave_samples_max: int = 1_024  # they are sorted in one go, half a µs each
    session_ttl_s: float = 0.0  # of silence, then a session may go anywhere; 0: sessions are off
    sessions_max: int = 100_000  # 0.5 KB each
    queue_recheck_s: float = 60.0
    recovery_unclaimed_s: float = 600.0  # ranks out of a dump that nobody registers
    sources_weighed_per_turn_max: int = 256  # ranks; a µs each
    expired_per_turn_max: int = 64  # reservations; 5 µs each: a turn takes a third of a ms
    let_in_per_turn_max: int = 16  # who waits, when load goes; some 30 µs each
    judged_per_turn_max: int = 16  # who waits, when the policy changes; some 50 µs each
    dropped_per_turn_max: int = 32  # the same of ranks that went, with blocks of their own
    swept_nodes_per_turn_max: int = 64
    streams_watched_per_turn_max: int = 128  # for lag and gaps; a microsecond each
    replica_heartbeat_s: float = 1.0
    replica_output_interval_s: float = 3.0  # output blocks are told together, this often
    replica_timeout_s: float = 10.0  # silent for longer: gone, its claims age or are adopted
    replica_pull_retry_s: float = 2.0  # between two pulls from one publisher
    replica_pull_timeout_s: float = 30.0  # a pull that nobody ended
    replica_gap_grace_s: float = 0.5  # how long a missing statement may be late
    replica_claims_max: int = 1_000_000  # of one publisher
    replica_ended_max: int = 200_000  # ends of claims remembered
    replica_missing_max: int = 1024  # lost statements known one by one; beyond: all is pulled
    replica_orphan_ttl_s: float = 300.0  # of reservations whose owner is gone, since last touched
    replica_ended_s: float = 600.0  # how long what has ended is remembered
    replica_publishers_max: int = 256
    replica_items_per_message_max: int = 32  # statements under one number
    replica_resolved_per_turn_max: int = 64  # claims looked at again; some µs each
    decision_ring: int = 1024  # records of decisions; 0: none
    decision_ring_bytes: int = 16 << 20  # a thousand of 256 ranks under changing load: 6 MB


class TrustSettings(Struct, frozen=True, kw_only=True):
    """When what a rank's index says counts for less."""

    samples: int = 16  # prompts over which errors are kept; half of them before anything follows
    error_max: float = 0.3  # share of predicted tokens that were not found; 1: never too many
    error_clear: float = 0.15  # below that the rank counts in full again
    reread_s: float = 30.0  # between two readings of a doubtful index, doubled up to the next
    reread_max_s: float = 3600.0
    rereads_max: int = 4  # at one time; each takes a second of the event loop, in slices
    weigh_freshness: bool = True
    lag_grace_s: float = 5.0  # events may be late by so much, and a gap open for so long
    lag_half_s: float = 10.0  # beyond, half of the credit goes in so many seconds

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: naming it.
        """
        if not 0.0 < self.error_clear <= self.error_max:
            raise ValueError("trust: error_clear must be above 0 and at most error_max")
        if self.samples < 1 or not (self.reread_s > 0.0 and self.lag_half_s > 0.0):
            raise ValueError("trust: samples, reread_s and lag_half_s must be above 0")


class ReplicaLimits(Struct, kw_only=True):
    """Bounds of the replica plane's edge: what peers may cost, and how long they may take.

    Written as `CoreLimits` is.
    """

    peers_max: int = 256  # a SUB socket and two file descriptors each
    message_bytes_max: int = 4 << 20  # a million-token prompt makes 0.6 MB
    receive_messages_max: int = 10_000  # held per peer until they are read
    send_messages_max: int = 10_000  # held per slow peer; what it loses it pulls later
    pulls_max: int = 4  # snapshots fetched at one time
    pull_timeout_s: float = 30.0  # one snapshot altogether
    pull_bytes_max: int = 1 << 30  # one snapshot; a million reservations of 100 blocks
    pull_backoff_s: float = 0.2  # after a pull that failed, doubled each time up to the next
    pull_backoff_max_s: float = 10.0
    snapshots_max: int = 8  # given out at one time, 503 beyond


class DumpLimits(Struct, kw_only=True):
    """Bounds of GET /dump. Written as `CoreLimits` is."""

    at_once_max: int = 8  # 503 beyond; each keeps the index from tidying up
    timeout_s: float = 600.0  # one dump altogether: ten million blocks at 1.5 MB a second


class BodyLimits(Struct, frozen=True, kw_only=True):
    """How much a body may hold; each a flag of the same name behind `--body-`, but for the depth.

    All of a body is read in one go, which no client may draw out: a prompt of a million tokens,
    thousands of media items and records of workers with thousands of endpoints find room.
    """

    depth_max: int = 128  # `--json-depth-max`; the reference's parser stops there as well
    parts_max: int = 16_384  # strings, objects, arrays: one or two µs each
    numbers_max: int = 1 << 20  # not packed: 40 ms of JSON where they are no array of a prompt
    short_bytes_max: int = 1 << 21  # of a body without a prompt: a worker has 8,000 endpoints
    unknown_bytes_max: int = 1 << 18  # of a member nobody knows: up to half a second a megabyte
    media_bytes_max: int = 1 << 20  # of an array of objects in MessagePack
