"""The nouns of admission: its settings, and the requests and answers of its routes.

As everywhere in `types`, one definition decodes the wire, types the core and generates
/openapi.json.
Policies read their own configuration (`core/admission/policies.py`); here it is a plain object.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from select_service.types.ranges import U32, U64, Seconds, check_u64
from select_service.types.requests import CacheBasis, CacheScope

Mode = Literal["token-capacity", "none"]
StaleReports = Literal["full", "unknown"]
Count = Annotated[float, Meta(ge=0.0)]


class AdmissionSettings(Struct, kw_only=True):
    """What the process is given at its start, and by PUT /config; everything off."""

    mode: Mode = "none"  # whether busy thresholds are in force at all
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    overload_status: int = 503
    max_inflight: int | None = None  # N of workers that do not say; None: no cap
    max_queued: int = 16  # Q
    queue_deadline_s: float | None = None  # None: as measured for a full worker, else no end
    queue_deadline_min_s: float = 5.0
    queue_deadline_max_s: float = 120.0
    cache_hit_threshold: float = 0.0
    cache_hit_scope: CacheScope = "any"
    cache_hit_basis: CacheBasis = "prompt"
    cache_hit_attempts_max: int = 3
    policy: str = "always-admit"
    policy_config: dict[str, Any] = {}
    slo_class_max: str | None = None  # the most important class a client may claim
    slo_target_ttft_s: float | None = None  # None: the policy's own, `Built.target_ttft_s`
    prefill_tokens_per_s: float = 8_000.0  # of a rank, until it is measured
    return_horizon_s: float = 3600.0
    return_slots_max: int = 65_536
    tenant_labels_max: int = 32
    load_report_stale_s: float = 10.0
    load_report_stale_as: StaleReports = "full"  # what such a rank is for slo-shed
    load_report_bytes_max: int = 128 << 10  # of a worker with a thousand ranks, in one message


# -- busy thresholds ---------------------------------------------------------------------------


class ChargedRequest(Struct, frozen=True, array_like=True):
    """What replicas receive of an admission, which they charge to its tenant as well."""

    slo_class: Annotated[str, Meta(max_length=65_536)]
    prefill_tokens: Annotated[int, Meta(ge=0)]
    """Prompt tokens to compute."""
    target_s: Seconds | None = None
    """The time to first token that the request asks for; None: its class's."""


class BusyThresholdChange(Struct, kw_only=True):
    """POST /busy_threshold: set what is given, clear what is named, or only read."""

    model: str
    tenant_id: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    clear: list[str] = []
    """Names of thresholds to clear, e.g. `["active_decode_blocks_threshold"]`."""


class BusyThreshold(Struct, frozen=True, kw_only=True):
    """What is in force for a model, or for one tenant of it; null: not checked."""

    model: str
    tenant_id: str | UnsetType = UNSET
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None


class BusyThresholds(Struct, frozen=True):
    """GET /busy_threshold."""

    thresholds: list[BusyThreshold]
    """Thresholds by model and tenant."""


# -- policies ----------------------------------------------------------------------------------


class AdmissionChange(Struct, kw_only=True):
    """PUT /admission: another policy, at once."""

    policy: str
    config: dict[str, Any] = {}
    """Configuration of the policy."""


class ClassCounts(Struct, frozen=True, kw_only=True):
    """What became of a class: offered = admitted + refused + withdrawn + waiting."""

    offered: int
    """Requests that came, e.g. `100`."""
    admitted: int
    """Requests that were let in, e.g. `90`."""
    refused: int
    """Requests that were refused, e.g. `5`."""
    withdrawn: int
    """Requests that were given up while they waited, e.g. `1`."""
    waiting: int
    """Requests that wait now, e.g. `4`."""


class ScopeAdmission(Struct, frozen=True, kw_only=True):
    """One scope as its gate sees it."""

    model_name: str
    tenant_id: str
    saturation: float
    """How full the ranks are, as the policy sees it; 1 is full, e.g. `0.6`."""
    prefill_tokens_per_s: float
    """Prompt tokens that one rank computes per second, as measured, e.g. `8000.0`."""
    waiting: int
    """Requests that wait, e.g. `4`."""
    busy_ranks: int
    """Ranks above a busy threshold, e.g. `1`."""
    full_ranks: int
    """Ranks that have as many requests as they may, e.g. `0`."""
    promises: int
    """Places that are held for refused requests that were given a time to return, e.g. `2`."""
    flaps: int
    """How often a band of priorities was closed, e.g. `0`."""


class AdmissionStatus(Struct, frozen=True, kw_only=True):
    """GET and PUT /admission."""

    policy: str
    config: dict[str, Any]
    """Configuration of the policy."""
    mode: Mode
    """Whether busy thresholds are in force (`--admission-control`)."""
    thresholds: list[BusyThreshold]
    """Busy thresholds by model and tenant."""
    classes: dict[str, int]
    """Priority of each service class, by name."""
    counters: dict[str, ClassCounts]
    """What became of the requests of each class."""
    scopes: list[ScopeAdmission]
    """What the gate sees of each model and tenant."""


# -- what workers report ------------------------------------------------------------------------


class RankMetrics(Struct, frozen=True, kw_only=True):
    """What one rank reports of itself; a field that is left out is unknown."""

    dp_rank: U32 = 0
    kv_used_blocks: Count | None = None
    """KV blocks in use, e.g. `12000`."""
    kv_total_blocks: U64 | None = None
    """KV blocks that there are, e.g. `25000`."""
    num_requests_waiting: U32 | None = None
    """Requests that wait in the engine, e.g. `3`."""
    num_requests_running: U32 | None = None
    """Requests that the engine runs, e.g. `24`."""

    def __post_init__(self) -> None:
        for name in ("dp_rank", "kv_total_blocks", "num_requests_waiting", "num_requests_running"):
            check_u64(name, getattr(self, name))
        if self.kv_used_blocks is not None and not self.kv_used_blocks >= 0.0:
            raise ValueError("kv_used_blocks must be at least 0")


class WorkerMetrics(Struct, kw_only=True):
    """POST /workers/{id}/metrics."""

    ranks: Annotated[list[RankMetrics], Meta(min_length=1, max_length=1024)]
    """Reports of ranks."""


class WorkerMetricsAnswer(Struct, frozen=True):
    """Which ranks were taken, and which the worker has not declared."""

    accepted: list[int]
    """Ranks whose report was taken, e.g. `[0]`."""
    dropped: list[int]
    """Ranks that the worker has not declared, e.g. `[]`."""
