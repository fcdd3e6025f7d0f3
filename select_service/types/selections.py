"""Answers: the worker that was chosen, the pair, or why none was near enough."""

from typing import Final, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from select_service.types.decisions import Decision
from select_service.types.kv_source import KvSource

RANK_HEADER: Final = "X-data-parallel-rank"
"""By which vLLM's server knows the rank; it counts the ranks behind its address from 0."""


class Overlap(Struct, frozen=True):
    """Matched tokens of the selected worker, cumulative per tier, each of its best rank there.

    What the selected rank has on its device is `dp` of that rank, and may be less than `gpu`.
    """

    longest_matched: int
    """Most tokens of the prompt that any tier holds, e.g. `384`."""
    gpu: int
    """Most tokens that any rank of the worker has on its device; `dp` says which, e.g. `384`."""
    dp: dict[str, int]
    """Tokens on the device, of every rank of the worker."""
    cpu: int
    """Tokens on the device or in host memory, e.g. `384`."""
    disk: int
    """Tokens on any tier up to the disk, e.g. `384`."""


class CacheHit(Struct, frozen=True, kw_only=True):
    """A selection compared with its cache-hit threshold."""

    best_hit_rate: float | None
    """Best share of all candidates; null: the prompt is empty, e.g. `0.75`."""
    threshold: float
    """Share that was asked for, e.g. `0.5`."""
    threshold_source: Literal["request", "global", "loop_guard"]
    """Who asked for it."""


class BestWorker(Struct, frozen=True):
    """The rank that came nearest to a cache-hit threshold."""

    worker_id: int
    dp_rank: int
    endpoint: str


class PrefillCandidate(Struct, frozen=True, kw_only=True):
    """The rank that should compute a prompt whose request decodes elsewhere."""

    worker_id: int
    dp_rank: int
    endpoint: str
    effective_prefill_tokens: int
    kv_source: KvSource | UnsetType = UNSET
    """Where to pull blocks of the prompt from; `effective_prefill_tokens` is without them."""


class Advice(Struct, frozen=True, kw_only=True):
    """Whether one worker or a pair should serve a request: `core/pricing/pair.py` says why."""

    mode: Literal["aggregated", "disaggregated"]
    """Whether one worker (`aggregated`) or a pair (`disaggregated`) should serve it."""
    reason: str
    prefill: PrefillCandidate | None
    """Prefill rank of the pair, where that is advised."""
    aggregated_cost: float | None  # of the best worker, in blocks; null: there is none
    disaggregated_cost: float | None  # of the best pair, its transfer included; null likewise


class CacheThreshold(Struct, kw_only=True):
    """The answer of /select and /select_and_reserve when no rank holds enough of the prompt."""

    selection_id: str | UnsetType = UNSET
    finish_reason: Literal["cache_threshold"] = "cache_threshold"
    """Says that this is no selection."""
    model_name: str
    tenant_id: str
    best_hit_rate: float
    """Best share of the prompt that any candidate has cached, e.g. `0.25`."""
    threshold: float
    """Share that was asked for, e.g. `0.5`."""
    threshold_source: Literal["request", "global", "loop_guard"]
    """Who asked for it."""
    best_worker: BestWorker
    """The rank that came nearest."""
    advice: Advice | UnsetType = UNSET  # where workers have roles
    decision: Decision | UnsetType = UNSET  # when it was to be explained


class Selection(Struct, kw_only=True):
    """The answer of /select and /select_and_reserve."""

    selection_id: str | UnsetType = UNSET
    reservation_id: str | UnsetType = UNSET
    """Id of the reservation; with `/select_and_reserve`, e.g.
    `"5f0c7f0e-6a1c-4b58-a5c1-5d1c2a9b7c11"`."""
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    needs_prefill: bool | UnsetType = UNSET
    """True where no rank reached the cache-hit threshold and it goes there anyway."""
    cache_hit: CacheHit | UnsetType = UNSET
    """The comparison with the cache-hit threshold, where one was in force."""
    # the booking facts (/select_and_reserve only)
    sequence_hashes: list[int] | UnsetType = UNSET  # signed 64 bit
    isl_tokens: int | UnsetType = UNSET
    """Length of the prompt, in tokens; with `/select_and_reserve`, e.g. `512`."""
    track_prefill_tokens: bool | UnsetType = UNSET
    potential_decode_blocks: int | UnsetType = UNSET
    advice: Advice | UnsetType = UNSET  # where workers have roles
    decision: Decision | UnsetType = UNSET  # when it was to be explained
    overlap_estimated: bool | UnsetType = UNSET  # true: not known from KV events of the rank
    kv_source: KvSource | UnsetType = UNSET
    """Where to pull blocks of the prompt from, with `--kv-pull` and if that costs less than
    computing them; `effective_prefill_tokens` is without them."""
    predicted_ttft_ms: float | UnsetType = UNSET  # once the rank was measured
    predicted_itl_ms: float | UnsetType = UNSET  # likewise


class PairLeg(Struct, frozen=True, kw_only=True):
    """One of the two ranks that serve a request together, or the only one."""

    reservation_id: str
    worker_id: int
    dp_rank: int
    endpoint: str
    overlap: Overlap
    effective_prefill_tokens: int
    """Tokens of the prompt to compute there; 0 of a decode leg whose prompt is computed elsewhere,
    e.g. `128`."""
    potential_decode_blocks: int
    """KV blocks of the rank with this prompt's, before it was booked; 0 of a prefill leg, e.g.
    `96`."""
    overlap_estimated: bool | UnsetType = UNSET  # true: not known from KV events of the rank
    kv_source: KvSource | UnsetType = UNSET
    """Where to pull blocks of the prompt from; a decode leg gets its from the prefill leg."""


class PairSelection(Struct, kw_only=True):
    """The answer of /select_pair."""

    selection_id: str | UnsetType = UNSET
    reservation_id: str
    """Id of the pair: calls under it reach the leg that they mean, e.g.
    `"5f0c7f0e-6a1c-4b58-a5c1-5d1c2a9b7c11"`."""
    model_name: str
    tenant_id: str
    block_size: int
    mode: Literal["aggregated", "disaggregated"]
    reason: str
    prefill: PairLeg | None
    """Where to send the request first; null: `decode` does both."""
    decode: PairLeg
    """The worker that answers."""
    transfer_blocks: int
    """KV blocks to be moved from the one to the other, e.g. `32`."""
    isl_tokens: int
    track_prefill_tokens: bool
    aggregated_cost: float | None  # of the best worker alone, in blocks; null: there is none
    disaggregated_cost: float | None  # of the best pair, its transfer included; null likewise
    decision: Decision | UnsetType = UNSET  # when it was to be explained
    predicted_ttft_ms: float | UnsetType = UNSET  # of the prefill leg, once its rank was measured
    predicted_itl_ms: float | UnsetType = UNSET  # of the decode leg, likewise


Answer: TypeAlias = Selection | CacheThreshold | PairSelection
"""Of whatever verb looks for workers, to a request that need not wait."""
