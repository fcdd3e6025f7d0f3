"""What can be looked at: loads, overlaps, trust in each rank's index, replicas."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


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
    estimated: bool | UnsetType = UNSET  # true: not known from KV events of the rank


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
    unknown_batches: int  # of these, from before anything was held: they make nothing held wrong
    known_share: float  # of all batches, those that were applied
    last_batch: int | None  # the engine's number of the last one applied; null: none was


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
    estimated: bool | UnsetType = UNSET  # true: matched by what routing put there


class TrustTable(Struct, frozen=True):
    """GET /trust."""

    ranks: list[RankTrustRow]


class LoadDifference(Struct, frozen=True, kw_only=True):
    """A load in the ledger that differs from the sum of its reservations."""

    model_name: str
    tenant_id: str
    worker_id: int | None  # null: of nobody, or of the whole scope
    dp_rank: int | None
    what: Literal["requests", "computing", "prefill", "decode", "context"]
    carried: int
    recomputed: int


class Consistency(Struct, frozen=True, kw_only=True):
    """GET /debug/consistency."""

    consistent: bool
    scopes: int
    ranks: int
    reservations: int  # when their scope's turn came
    seconds: float  # how long it took, others served meanwhile
    differences_total: int
    differences: list[LoadDifference]  # the first hundred


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
