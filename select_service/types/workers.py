"""A worker as it is registered, changed and shown, and whether the service is ready."""

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from indexer.core.curve_key import is_curve_key
from select_service.types.doctor import Finding
from select_service.types.ranges import U32, U64, check_positive, check_scope_names, check_u64

Role = Literal["prefill", "decode", "aggregated"]
KvEvents = Literal["engine", "predicted", "none"]
KvEventsDefault = Literal["auto", "engine", "predicted", "none"]
"""Where the blocks of a worker's ranks are known from: the KV events of its engine; an estimate of
what routing put there; nowhere."""
KvCacheReportMode = Literal["incremental", "full"]
"""What an engine's KV events carry: changes of its cache; also what each prompt finds there."""
Inflight = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
SequenceLimit = Annotated[int, Meta(ge=1)]  # upper bound: `__post_init__`, as of U64


def _check_curve_key(key: str | None) -> None:
    if key is not None and not is_curve_key(key):
        raise ValueError("curve_public_key must be 40 characters of Z85")


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
    max_num_seqs: SequenceLimit | None = None  # requests that each of its ranks runs at once
    role: Role | None = None
    curve_public_key: str | None = None  # of its event and replay sockets, where they encrypt
    replay_endpoints: dict[
        str, str
    ] = {}  # by dp_rank; the other ranks are asked by `replay_endpoint`
    kv_events: KvEvents | None = None  # null: `--kv-events-default`
    kv_cache_report_mode: KvCacheReportMode | None = None  # null: "incremental"

    def __post_init__(self) -> None:
        check_u64("worker_id", self.worker_id)
        _check_curve_key(self.curve_public_key)
        check_u64("max_num_batched_tokens", self.max_num_batched_tokens)
        check_u64("total_kv_blocks", self.total_kv_blocks)
        check_u64("max_num_seqs", self.max_num_seqs)
        check_positive("max_num_seqs", self.max_num_seqs)
        check_positive("max_inflight", self.max_inflight)
        check_scope_names(self.tenant_id, self.routing_group)


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
    max_num_seqs: SequenceLimit | None = None
    role: Role | None = None
    curve_public_key: str | None = None
    replay_endpoints: dict[str, str] | None = None
    kv_events: KvEvents | None = None
    kv_cache_report_mode: KvCacheReportMode | None = None

    # named in a PATCH, and ignored whatever they are
    worker_id: Any = None
    """Ignored: it cannot be changed."""
    model_name: Any = None
    """Ignored: it cannot be changed."""
    tenant_id: Any = None
    """Ignored: it cannot be changed."""
    routing_group: Any = None
    """Ignored: it cannot be changed."""

    def __post_init__(self) -> None:
        _check_curve_key(self.curve_public_key)
        check_u64("max_num_batched_tokens", self.max_num_batched_tokens)
        check_u64("total_kv_blocks", self.total_kv_blocks)
        check_u64("max_num_seqs", self.max_num_seqs)
        check_positive("max_num_seqs", self.max_num_seqs)
        check_positive("max_inflight", self.max_inflight)


class KvRankState(Struct, frozen=True):
    """What is doubtful about one rank's index."""

    dp_rank: int
    kv_state: Literal["current", "uncertain"]
    """Whether the rank's index is known to be right."""
    lost_batches: int
    """Batches of KV events that were lost, e.g. `2`."""


class Outlier(Struct, frozen=True):
    """A rank that is passed over as long as others may be chosen, or is due for a probe."""

    dp_rank: int
    reason: Literal["failing", "unreachable"]
    """Whether its requests fail, or it cannot be reached."""
    passed_over: bool
    """Whether it gets no requests; false: it is due for a probe, and the next request may go there.
    """
    failures: int
    """Reservations that failed there in a row, e.g. `5`."""
    backoff_s: float
    """Seconds between its probes, e.g. `8.0`."""


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
    """Whether a pair has to share that domain (`required`), or is only cheaper if it does
    (`preferred`), e.g. `"preferred"`."""
    kv_transfer_preferred_weight: float | None
    not_schedulable_reasons: list[str] | UnsetType = UNSET
    """Why it takes no requests, in words, e.g. `["block_size must be greater than 0"]`."""
    # additions of this product
    kv_state: Literal["uncertain"] | UnsetType = UNSET
    """Present where the index of a rank may be wrong."""
    kv_ranks: list[KvRankState] | UnsetType = UNSET
    """The ranks whose index may be wrong."""
    source: str = "api"  # or "file", "kubernetes": what registered it, and may change it
    max_inflight: int | UnsetType = UNSET
    max_queued: int | UnsetType = UNSET
    max_num_seqs: int | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    curve_public_key: str | UnsetType = UNSET
    replay_endpoints: dict[str, str] | UnsetType = UNSET
    outliers: list[Outlier] | UnsetType = UNSET
    """Ranks that are passed over as long as others may be chosen."""
    kv_events: KvEvents | UnsetType = UNSET
    kv_cache_report_mode: KvCacheReportMode | UnsetType = UNSET


class StateStatus(Struct, frozen=True):
    """The state of the state directory."""

    epoch: int  # lives of the process that used it
    durability: Literal["strict", "relaxed"]
    """When a change is acknowledged: once it is on disk (`strict`), or at once."""
    writable: bool
    """Whether changes can be written."""
    pending: int
    """Changes that are not on disk yet, e.g. `0`."""
    restored: dict[str, int]
    """Rows that were brought back at the start, by kind."""
    dropped: dict[str, int]
    """Rows whose worker or lease was gone at the start, by kind."""
    damage: list[str] = []
    """Damage found at the start; the damaged files lie beside, as `.corrupt`, e.g. `[]`."""
    rows_saved: int = 0
    """Rows of damaged files that could be read, e.g. `0`."""
    rows_lost: int = 0
    """Rows of damaged files that could not be read, e.g. `0`."""


class Ready(Struct, frozen=True):
    """GET /ready."""

    ready: bool
    schedulable_workers: int
    """Number of workers that take requests, e.g. `2`."""
    workers: list[WorkerRecord]
    """All workers, by ascending id."""
    waiting_for: list[str] = []  # what is missing until it is ready; an addition of this product
    state: StateStatus | UnsetType = UNSET
    """The state directory; with `--state-dir`."""
    findings: list[Finding] | UnsetType = UNSET
    """What is wired wrong, the gravest first; with `verbose=true`."""
    findings_left_out: int | UnsetType = UNSET
    """Findings beyond `--doctor-findings-max`, e.g. `3`."""
    suspected: list[Finding] | UnsetType = UNSET
    """What looks wrong, but not for long enough to be a finding; with `examine=true`."""


class BriefReady(Struct, frozen=True):
    """GET /ready?for=traffic; and GET /ready to those without a token, where one is required."""

    ready: bool
    waiting_for: list[str] | UnsetType = UNSET  # with ?for=traffic, to those who may read


HIT_RATE_LOSS_MAX: Final = 0.02
"""Of the hit rate, that may go with those who are advised to, unless another share is asked for."""


class DrainRequest(Struct, kw_only=True):
    """POST /workers/{id}/drain; the body may be empty."""

    reason: Annotated[str, Meta(max_length=256)] | None = None
    """Why, for the people who look at it; `GET /workers` shows it, e.g. `"upgrade"`."""


class DrainStatus(Struct, frozen=True, kw_only=True):
    """How far a worker is from being idle: what this process knows to be in flight on its ranks."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: Literal["incomplete", "schedulable", "draining"]
    drains: bool
    """Whether an operator wants it to take no requests; also while its record is incomplete."""
    reason: str | UnsetType = UNSET
    """Why, as it was said, e.g. `"upgrade"`."""
    reservations: int
    """Live reservations on it, ours and those of replicas, e.g. `3`."""
    prefill_tokens: int  # of them, yet to be computed
    decode_blocks: int  # held by them
    safe_to_terminate: bool
    """Whether it drains and nothing is in flight."""
    waiting_for: list[str] = []
    """What is in the way of that, in words, e.g. `["3 reservations"]`."""


class ScaleDownCandidate(Struct, frozen=True, kw_only=True):
    """One worker of the set, and what losing it costs once those before it are gone."""

    worker_id: int
    model_name: str
    tenant_id: str
    drains: bool
    """Whether it is leaving already."""
    cost_tokens: float
    """Tokens that losing it costs: work in flight, and hot blocks that no other has; lower is
    cheaper, e.g. `2048.0`."""
    cost_tokens_so_far: float  # of it and of all before it: the last one's is that of the set
    """The same of it and all before it, e.g. `2048.0`."""
    sole_blocks: int
    """Blocks that no other holds on any tier, those before it counting as gone, e.g. `120`."""
    blocks: int
    """Blocks that it holds, e.g. `400`."""
    room_so_far: float | UnsetType = UNSET
    """Share of the KV blocks of its scope, or of the role asked for there, that goes with it and
    those before; if all have named theirs. Where caches are full this is what is missed, whoever
    goes, e.g. `0.125`."""
    reused_tokens: float
    """Tokens found in its cache lately; half of it is forgotten every ten minutes, e.g. `51200.0`.
    """
    hit_rate_loss_so_far: float
    """What the hit rate of its scope will lose by it and those before it; 0.02 is two points. An
    estimate from what was asked for lately, 0 where nothing was, e.g. `0.004`."""
    advised: bool
    """Whether that is within the `hit_rate_loss_max` asked for (0.02): as far as caches go, it and
    those before it may leave. Whether the rest can carry the load is the planner's to say."""
    reservations: int
    prefill_tokens: int
    decode_blocks: int
    pod_deletion_cost: int
    """Value for the annotation controller.kubernetes.io/pod-deletion-cost; below 0 where it drains,
    e.g. `-10`."""


class ScaleDownCandidates(Struct, frozen=True, kw_only=True):
    """GET /scale_down_candidates: the set that is cheapest to lose, in the order to lose it."""

    candidates: list[ScaleDownCandidate]
    """The set that is cheapest to lose, in the order to lose it."""
