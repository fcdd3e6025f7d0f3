"""Answers: the worker that was chosen, the pair, or why nobody was near enough."""

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from select_service.types.decisions import Decision


class Overlap(Struct, frozen=True):
    """Matched tokens of the selected worker, cumulative per tier, each of its best rank there.

    What the selected rank has on its device is `dp` of that rank, and may be less than `gpu`.
    """

    longest_matched: int
    gpu: int  # the greatest of `dp`
    dp: dict[str, int]  # on the device, by rank
    cpu: int
    disk: int


class CacheHit(Struct, frozen=True, kw_only=True):
    """A selection compared with its cache-hit threshold."""

    best_hit_rate: float | None  # of all candidates; null: the prompt is empty
    threshold: float
    threshold_source: Literal["request", "global", "loop_guard"]


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


class Advice(Struct, frozen=True, kw_only=True):
    """Whether one worker or a pair should serve a request: `core/pricing/pair.py` says why."""

    mode: Literal["aggregated", "disaggregated"]
    reason: str
    prefill: PrefillCandidate | None  # of the pair, when that is advised
    aggregated_cost: float | None  # of the best worker, in blocks; null: there is none
    disaggregated_cost: float | None  # of the best pair, its transfer included; null likewise


class CacheThreshold(Struct, kw_only=True):
    """The answer of /select and /select_and_reserve when no rank holds enough of the prompt."""

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
    endpoint: str
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
    overlap_estimated: bool | UnsetType = UNSET  # true: not known from KV events of the rank


class PairLeg(Struct, frozen=True, kw_only=True):
    """One of the two ranks that serve a request together, or the only one."""

    reservation_id: str
    worker_id: int
    dp_rank: int
    endpoint: str
    overlap: Overlap
    effective_prefill_tokens: int  # 0 of a decode leg whose prompt is computed elsewhere
    potential_decode_blocks: int  # 0 of a prefill leg; with this prompt, before it was booked
    overlap_estimated: bool | UnsetType = UNSET  # true: not known from KV events of the rank


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
