"""Every term of every rank's cost at the time of a decision, from its record.

The terms are those of `pricing/cost.py` over the recorded loads, so the numbers are the decision's
own to the last bit. `explain.py` and `explained_pair.py` present them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from select_service.core.ledger.loads import unpacked
from select_service.core.ledger.rank_speeds import SpeedRow, seconds_at
from select_service.core.pricing.cost import Size, preferences, terms_of
from select_service.core.pricing.kv_sources import told_source
from select_service.core.pricing.weights import sequence_blocks

if TYPE_CHECKING:
    from msgspec import UnsetType
    from numpy.typing import NDArray

    from select_service.core.columns import Floats
    from select_service.core.decisions.record import DecisionRecord
    from select_service.core.pricing.cost import Terms
    from select_service.types import KvSource


class RankTerms:
    """Terms by rank.

    Attributes:
        considered: Which ranks were candidates.
        is_priced: Whether the decision came to prices.
        factors: Of preferred taints, on each cost; None: none were preferred.
        ttft_ms: Predicted time to the first token; nan: not measured.
        itl_ms: Predicted time between tokens, likewise.
        unheard: Seconds since each queue was known; None: queues were not recorded.
        ahead: Tokens of each queue that may have been computed since.
        terms: Everything else.
        cost: With preferences.
    """

    def __init__(self, record: DecisionRecord) -> None:
        """Compute the terms; some 50 µs, plus a µs for every ten differing sets of taints."""
        slots = record.fleet_slots.slots
        self._record, self._loads = record, unpacked(record.seen[0])
        self.is_priced = record.odds is None or record.odds.refusal is None
        self.considered = _considered(record, len(self._loads.prefill))[slots]
        self.terms = self.among(self.considered)
        self.factors = _factors(record)
        self.cost: Floats = self.terms.cost
        if self.factors is not None:
            self.cost = self.cost * self.factors
        self.ttft_ms, self.itl_ms = self._predicted()
        self.unheard: Floats | None = None
        self.ahead: Floats = np.zeros(len(slots))
        if self._loads.heard is not None and self._loads.ahead is not None:
            heard, self.ahead = self._loads.heard[slots], self._loads.ahead[slots]
            self.unheard = np.where(self.ahead > 0.0, record.at - heard, 0.0)

    def _predicted(self) -> tuple[Floats, Floats]:
        """Predict as `reservations/predictions.py`, with the speeds of the fleet's snapshot."""
        record, terms = self._record, self.terms
        speeds = np.frombuffer(record.fleet_snapshot[3]).reshape(-1, len(SpeedRow._fields))
        if not len(speeds) or not self.is_priced:
            unknown = np.full(len(terms.prefill), np.nan)
            return unknown, unknown
        rows = SpeedRow(*np.where(speeds < 0.0, np.nan, speeds).T)
        block_size = record.fleet_slots.block_size
        found = terms.cached_tokens + terms.pulled * block_size
        moving = np.round(terms.pull_cost * block_size)
        tokens = terms.prefill + moving + np.maximum(0.0, record.isl_tokens - found)
        context = terms.context + sequence_blocks(block_size) + (not record.blocks)
        ttft_s = seconds_at(rows.ttft_base_s, rows.ttft_s_per_token, tokens)
        block_s = seconds_at(rows.block_base_s, rows.block_s_per_context, context)
        return np.round(ttft_s * 1e3, 3), np.round(block_s * 1e3 / block_size, 3)

    def among(self, candidates: NDArray[np.bool_]) -> Terms:
        """Return the terms of all ranks where only some were candidates."""
        record, fleet_slots = self._record, self._record.fleet_slots
        _, found, shared, trust = record.seen
        size = Size(record.isl_tokens, record.blocks, fleet_slots.block_size)
        believed = None if trust is None else np.frombuffer(trust)
        asked = (
            self._loads,
            fleet_slots.slots,
            size,
            record.weights,
            found,
            shared,
            believed,
            record.at,
        )
        positions = np.flatnonzero(candidates)
        return terms_of(*asked, positions if len(positions) else None)


def kv_source_at(record: DecisionRecord, slot: int, blocks: float) -> KvSource | UnsetType:
    """Return where the rank on a slot pulls so many blocks from; UNSET: nowhere."""
    found, fleet_slots = record.seen[1], record.fleet_slots
    if not blocks or found is None or found.pulls is None:
        return UNSET
    source = fleet_slots.rank_states[fleet_slots.at[int(found.pulls.source[slot])]]
    return told_source(found.pulls, slot, source.worker_id, source.dp_rank, source.endpoint)


def _considered(record: DecisionRecord, rows: int) -> NDArray[np.bool_]:
    """Return the candidates, by slot."""
    mask = np.zeros(rows, dtype=np.bool_)
    if record.rows is not None and not (record.odds is not None and record.odds.is_threshold):
        mask[record.rows] = True
    return mask


def _factors(record: DecisionRecord) -> Floats | None:
    """Return the factor of preferred taints on each cost; None: none are preferred."""
    odds = record.odds
    if odds is None or odds.pinned is not None or odds.constraints is None:
        return None
    preferred = odds.constraints.preferred_taints
    if not preferred:
        return None
    return preferences(preferred, [rank.taints for rank in record.fleet_slots.rank_states])
