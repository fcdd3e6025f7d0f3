"""Applies the cache-hit threshold to a selection: which ranks hold enough, and what if none.

`hit_threshold.py` has the rule; this module connects it to projections, requests and answers.
`place.py` applies it last, when a request is placed: the index may have changed while it waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec import UNSET

from select_service.core.admission.hit_threshold import (
    cached_blocks,
    filter_groups,
    filter_rows,
    threshold_in_force,
)
from select_service.types import BestWorker, CacheHit, CacheThreshold

if TYPE_CHECKING:
    from indexer.core.tiers import Matches
    from select_service.core.admission.hit_threshold import Hits, Source, Threshold
    from select_service.core.columns import Floats, Rows, Slots
    from select_service.core.partition import Partition
    from select_service.core.pricing.cost import Terms
    from select_service.core.pricing.prompt import Prompt
    from select_service.types import SelectRequest
    from select_service.types.admission import AdmissionSettings

_NOTHING: Final = CacheHit(best_hit_rate=0.0, threshold=0.0, threshold_source="request")


class ThresholdCandidates(NamedTuple):
    """The candidates that pass a threshold."""

    rows: Rows
    facts: CacheHit  # the selection's hit rate and threshold
    needs_prefill: bool = False
    refused: CacheThreshold | None = None


class CacheHits:
    """Applies a request's own threshold, or the process-wide one."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings  # read on every call: they may change
        self._latest = CacheHit(best_hit_rate=None, threshold=0.0, threshold_source="global")

    def filter(
        self,
        partition: Partition,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        matches: Matches,
    ) -> ThresholdCandidates:
        """Keep the candidates that hold enough, and count the outcome."""
        tally = partition.hit_tally
        if (
            request.cache_hit_threshold == 0.0
            and matches.empty
            # else there may be no whole block to hold
            and prompt.isl_tokens > partition.index.block_size
        ):
            tally.rates[0] += 1
            return ThresholdCandidates(rows, _NOTHING)
        threshold = threshold_in_force(
            request.cache_hit_threshold,
            self.settings.cache_hit_threshold,
            attempt=request.attempt,
            attempts_max=self.settings.cache_hit_attempts_max,
        )
        hits = self._hits(partition, request, prompt, rows, matches, threshold.value)
        if hits.best_rate is not None:
            tally.measure(hits.best_rate)
        tally.guarded += threshold.source == "loop_guard"
        facts = self._facts(hits.best_rate, *threshold)
        if hits.passing is None:
            return ThresholdCandidates(rows, facts)
        if not hits.refused:
            return ThresholdCandidates(
                hits.passing if isinstance(rows, slice) else rows[hits.passing], facts
            )
        if request.on_cache_threshold == "fallback":
            tally.fallbacks += 1
            if partition.fleet_slots.roles.given:  # it will be prefilled where it goes
                rows = partition.fleet_slots.roles.rather_whole(rows)
            return ThresholdCandidates(rows, facts, needs_prefill=True)
        tally.rejections[threshold.source] = tally.rejections.get(threshold.source, 0) + 1
        return ThresholdCandidates(
            rows, facts, refused=_refusal(partition, request, rows, threshold, hits)
        )

    def _facts(self, rate: float | None, threshold: float, source: Source) -> CacheHit:
        """Return the facts as an answer states them; the last object again while it is equal."""
        latest = self._latest
        if (
            rate != latest.best_hit_rate
            or threshold != latest.threshold
            or source != latest.threshold_source
        ):
            latest = self._latest = CacheHit(
                best_hit_rate=rate, threshold=threshold, threshold_source=source
            )
        return latest

    def _hits(
        self,
        partition: Partition,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        matches: Matches,
        threshold: float,
    ) -> Hits:
        index, isl_tokens = partition.index, prompt.isl_tokens
        basis = request.cache_hit_basis or self.settings.cache_hit_basis
        trust = partition.trust.column
        is_plain = trust is None and not (matches.host or matches.disk)
        if is_plain and isinstance(rows, slice):
            groups = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
            return filter_groups(groups, rows.stop, index.block_size, isl_tokens, threshold, basis)
        found = partition.found(prompt, matches)
        if found is None:
            count = rows.stop if isinstance(rows, slice) else len(rows)
            blocks = np.zeros(count)
        else:
            scope = request.cache_hit_scope or self.settings.cache_hit_scope
            blocks = cached_blocks(*found.by_slot(index.capacity), scope)[rows]
            if trust is not None:
                blocks = blocks * trust[rows]
        return filter_rows(blocks, index.block_size, isl_tokens, threshold, basis)

    def holders(
        self,
        request: SelectRequest,
        prompt: Prompt,
        partition: Partition,
        slots: Slots,
        terms: Terms,
    ) -> Slots | None:
        """Return the slots that hold enough; None: no threshold above 0 is in force."""
        threshold = threshold_in_force(
            request.cache_hit_threshold,
            self.settings.cache_hit_threshold,
            attempt=request.attempt,
            attempts_max=self.settings.cache_hit_attempts_max,
        )
        if threshold.value <= 0.0:
            return None
        hits = filter_rows(
            self._blocks(request, terms),
            partition.index.block_size,
            prompt.isl_tokens,
            threshold.value,
            request.cache_hit_basis or self.settings.cache_hit_basis,
        )
        return slots if hits.passing is None else slots[hits.passing]

    def _blocks(self, request: SelectRequest, terms: Terms) -> Floats:
        scope = request.cache_hit_scope or self.settings.cache_hit_scope
        blocks = cached_blocks(*terms.held, scope)
        return blocks if terms.trust is None else blocks * terms.trust


def _refusal(
    partition: Partition, request: SelectRequest, rows: Rows, threshold: Threshold, hits: Hits
) -> CacheThreshold:
    slot = hits.best_row if isinstance(rows, slice) else int(rows[hits.best_row])
    worker, dp_rank = partition.fleet_slots.rank_at(slot)
    return CacheThreshold(
        selection_id=UNSET if request.selection_id is None else request.selection_id,
        model_name=partition.scope.model_name,
        tenant_id=partition.scope.tenant_id,
        best_hit_rate=hits.best_rate or 0.0,
        threshold=threshold.value,
        threshold_source=threshold.source,
        best_worker=BestWorker(worker.worker_id, dp_rank, worker.spec.endpoint or ""),
    )
