"""What can be looked at: loads, overlaps, trust in each rank's index, replicas."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from select_service.types.kv_source import KvTier


class LoadRow(Struct, frozen=True):
    """Load of one rank, now (/loads) or with a prompt added (/potential_loads)."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    """Live reservations on the rank, e.g. `4`."""


class ScopeLoads(Struct, frozen=True):
    """One element of GET /loads."""

    model_name: str
    tenant_id: str
    loads: list[LoadRow]
    """Load of each rank."""
    pending_count: int
    """Requests that wait for a rank, e.g. `0`."""
    pending_isl_tokens: int
    """Tokens of their prompts, e.g. `0`."""


class OverlapRow(Struct, frozen=True):
    """Matched blocks of one rank."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    """Blocks of the prompt that the rank has on its device or in host memory, e.g. `8`."""
    disk_blocks: int
    """Blocks of the prompt that the rank has on any tier, e.g. `8`."""
    host_pinned_extension_blocks: int
    """Blocks that host memory adds to those on the device, e.g. `0`."""
    disk_extension_blocks: int
    """Blocks that the disk adds to those, e.g. `0`."""
    shared_beyond_device_blocks: int | None
    """Always null: there is no shared cache, e.g. `null`."""
    router_credit_blocks: float
    """Blocks that the overlap takes off the cost, e.g. `8.0`."""
    estimated: bool | UnsetType = UNSET  # true: not known from KV events of the rank


class SharedCache(Struct, frozen=True):
    """Kept for compatibility; this service has no shared cache."""

    enabled: bool = False
    """Always false: this service has no shared cache."""
    total_hit_blocks: int = 0
    """Always 0, e.g. `0`."""
    ranges: list[list[int]] = []
    """Always empty, e.g. `[]`."""
    error: str | None = None
    """Always null, e.g. `null`."""


class OverlapScores(Struct, frozen=True):
    """The answer of POST /overlap_scores."""

    block_size: int
    num_blocks: int
    """Whole blocks of the prompt, e.g. `32`."""
    workers: list[OverlapRow]
    """Matched blocks of each rank."""
    shared_cache: SharedCache
    """Kept for compatibility."""


class IndexFreshness(Struct, frozen=True, kw_only=True):
    """How a rank's event stream stands."""

    state: Literal["current", "uncertain", "replaying", "silent", "none"]
    """How the rank's stream of KV events stands."""
    lag_s: float | None
    """Seconds by which its last batch came later than its fastest; null: unknown, e.g. `0.02`."""
    open_gaps: int
    """Gaps that are being mended while newer batches wait, e.g. `0`."""
    lost_batches: int
    """Batches that will never come, e.g. `0`."""
    unknown_batches: int
    """Of these, batches from before anything was held, which make nothing wrong, e.g. `0`."""
    known_share: float
    """Share of all batches that was applied, e.g. `1.0`."""
    last_batch: int | None  # the engine's number of the last one applied; null: none was
    """The engine's number of the last batch that was applied; null: none was, e.g. `4711`."""


class PullSpeedRow(Struct, frozen=True, kw_only=True):
    """How long pulling KV blocks takes by one path, and how well that is predicted."""

    domain: str
    """Topology domain by which the two ranks are connected; empty: none, e.g. `"rack"`."""
    tier: KvTier
    """Tier of the last block of a pull, e.g. `"device"`."""
    samples: int
    """Pulls measured, e.g. `64`."""
    base_ms: float
    """Milliseconds that a pull takes beside those of its blocks, e.g. `3.0`."""
    ms_per_block: float
    """Milliseconds for each block, e.g. `0.2`."""
    cost_per_block: float | None
    """The same in blocks of prefill of a rank of mean speed; null: not known yet, e.g. `0.1`."""
    error_ms: float | None
    """Predicted less actual time of pulls, mean; null: none came yet, e.g. `-1.0`."""
    abs_error_ms: float | None
    """The mean size of that, e.g. `4.0`."""


class RankSpeedRow(Struct, frozen=True, kw_only=True):
    """How fast one rank is, and how well that is predicted; errors of the last 64 predictions."""

    prefill_tokens_per_s: float | None
    """Tokens per second of queues until their first tokens; null: not measured, e.g. `9000.0`."""
    itl_ms: float | None
    """Milliseconds between tokens at its present load; null: not measured, e.g. `21.0`."""
    ttft_error_ms: float | None
    """Predicted less actual time to first tokens, mean; null: none came yet, e.g. `-4.0`."""
    ttft_abs_error_ms: float | None
    """The mean size of that, e.g. `30.0`."""
    itl_error_ms: float | None
    """Predicted less actual time between tokens, mean; null: none came yet, e.g. `0.4`."""
    itl_abs_error_ms: float | None
    """The mean size of that, e.g. `1.5`."""
    pulls: list[PullSpeedRow] | UnsetType = UNSET
    """What pulling KV blocks takes, of all ranks of its model and tenant; absent: not measured."""


class RankTrustRow(Struct, frozen=True, kw_only=True):
    """How far one rank's index is believed."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    trust: float  # by what its overlap credit is multiplied
    reasons: list[Literal["prediction", "lag", "gaps"]]
    """Why the factor is below 1, e.g. `["lag"]`."""
    prediction_error: float | None
    """Predicted less actual cached tokens, mean of the last prompts; null: unknown, e.g. `12.0`."""
    missing_share: float
    """Share of what was predicted lately that the engine has not found, e.g. `0.01`."""
    samples: int
    """Prompts compared of which anything was predicted, e.g. `64`."""
    rereads: int
    """How often its index was read again for that, e.g. `0`."""
    index: IndexFreshness
    """How its KV events stand."""
    estimated: bool | UnsetType = UNSET  # true: matched by what routing put there
    speed: RankSpeedRow | None = None
    """How fast it is; null: it was not measured yet."""


class TrustTable(Struct, frozen=True):
    """GET /trust."""

    ranks: list[RankTrustRow]
    """Trust in each rank."""


class LoadDifference(Struct, frozen=True, kw_only=True):
    """A load in the ledger that differs from the sum of its reservations."""

    model_name: str
    tenant_id: str
    worker_id: int | None
    """Id of the worker; null: the load is no worker's, or of the whole scope, e.g. `7`."""
    dp_rank: int | None
    """Data-parallel rank; null as above, e.g. `0`."""
    what: Literal["requests", "computing", "prefill", "decode", "context"]
    """Kind of load."""
    carried: int
    """The load that the ledger carries, e.g. `5`."""
    recomputed: int
    """The sum over its reservations, e.g. `4`."""


class Consistency(Struct, frozen=True, kw_only=True):
    """GET /debug/consistency."""

    consistent: bool
    """Whether nothing differs."""
    scopes: int
    """Scopes that were compared, e.g. `1`."""
    ranks: int
    """Ranks that were compared, e.g. `8`."""
    reservations: int  # when their scope's turn came
    """Reservations that were added up, e.g. `40`."""
    seconds: float
    """Seconds that it took, others being served meanwhile, e.g. `0.004`."""
    differences_total: int
    """Number of differences, e.g. `0`."""
    differences: list[LoadDifference]
    """The first hundred of them."""


class ReplicaStatus(Struct, frozen=True):
    """What is known of one publisher of the replica plane."""

    router_id: int
    """Id of the replica, e.g. `81093`."""
    peer: str  # the endpoint of its last message
    state: Literal["synced", "behind", "leaving", "gone", "foreign"]
    epoch: int
    seq: int  # the newest of its statements received
    missing: int  # older ones not received yet
    claims: int  # reservations it says it owns
    unbooked: int  # of them, those whose worker is unknown here, or that yield to another claim
    heard_s_ago: float
    pulls: int
    pulls_failed: int
