"""Every term of every rank's cost at the time of a decision, from its record.

The terms are those of `pricing/cost.py` over the recorded loads, so the numbers are the decision's
own to the last bit. `explain.py` presents them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from select_service.core.ledger.loads import unpacked
from select_service.core.ledger.rank_speeds import SpeedRow, seconds_at
from select_service.core.pricing.cost import Size, decode_cost, preferences, terms_of
from select_service.core.pricing.kv_sources import told_source
from select_service.core.pricing.pair import blocks_to_move, moving_cost, permitted
from select_service.core.pricing.weights import sequence_blocks
from select_service.types.decisions import Chosen, DecisionLeg, DecisionLegs, DecisionPair

if TYPE_CHECKING:
    from msgspec import UnsetType
    from numpy.typing import NDArray

    from select_service.core.columns import Floats, Slots
    from select_service.core.decisions.record import DecisionRecord
    from select_service.core.pricing.cost import Terms
    from select_service.core.pricing.pair import WorkerPair
    from select_service.types import KvSource


class RankTerms:
    """Terms by rank.

    Attributes:
        considered: Which ranks were candidates.
        is_priced: Whether the decision came to prices.
        factors: Of preferred taints, on each cost; None: none were preferred.
        ttft_ms: Predicted time to the first token; nan: not measured.
        itl_ms: Predicted time between tokens, likewise.
        queue_age_s: Seconds since each queue was known; None: queues were not recorded.
        ahead: Tokens of each queue that may have been computed since.
        terms: Everything else.
        cost: With preferences.
    """

    def __init__(self, record: DecisionRecord) -> None:
        """Compute the terms; some 50 µs, plus a µs for every ten differing sets of taints."""
        slots = record.fleet_slots.slots
        self._record, self._loads = record, unpacked(record.seen[0])
        self.is_priced = record.unusual is None or record.unusual.refusal is None
        self.considered = _considered(record, len(self._loads.prefill))[slots]
        self.terms = self.among(self.considered)
        self.factors = _factors(record)
        self.cost: Floats = self.terms.cost
        if self.factors is not None:
            self.cost = self.cost * self.factors
        self.ttft_ms, self.itl_ms = self._predicted()
        self.queue_age_s: Floats | None = None
        self.ahead: Floats = np.zeros(len(slots))
        if self._loads.queue_updated_at is not None and self._loads.ahead is not None:
            updated_at, self.ahead = self._loads.queue_updated_at[slots], self._loads.ahead[slots]
            self.queue_age_s = np.where(self.ahead > 0.0, record.at - updated_at, 0.0)

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
        tokens = terms.prefill + np.maximum(0.0, record.isl_tokens - found)
        context = terms.context + sequence_blocks(block_size) + (not record.blocks)
        ttft_s = seconds_at(rows.ttft_base_s, rows.ttft_s_per_token, tokens)
        ttft_s += moving * rows.pull_s_per_token
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
    if record.rows is not None and not (record.unusual is not None and record.unusual.is_threshold):
        mask[record.rows] = True
    return mask


def _factors(record: DecisionRecord) -> Floats | None:
    """Return the factor of preferred taints on each cost; None: none are preferred."""
    unusual = record.unusual
    if unusual is None or unusual.pinned is not None or unusual.constraints is None:
        return None
    preferred = unusual.constraints.preferred_taints
    if not preferred:
        return None
    return preferences(preferred, [rank.taints for rank in record.fleet_slots.rank_states])


class PairTerms:
    """The legs of one record, as columns by rank; nan where a rank cannot be that leg."""

    def __init__(self, record: DecisionRecord, terms: RankTerms) -> None:
        unusual = record.unusual
        assert unusual is not None
        assert unusual.plan is not None
        assert unusual.legs is not None
        self._record, self._plan = record, unusual.plan
        self._prefill = self._positions(unusual.legs.prefill)
        self._decode = self._positions(unusual.legs.decode)
        count = len(record.fleet_slots.rank_states)
        self._computing: Floats = np.full(count, np.nan)
        self._decoding: Floats = np.full(count, np.nan)
        priced = terms.terms
        self._to_move = blocks_to_move(priced, record.isl_tokens, record.fleet_slots.block_size)
        factors = np.ones(count) if terms.factors is None else terms.factors
        prefill, decode = self._prefill, self._decode
        if len(prefill):
            mask = np.zeros(count, dtype=np.bool_)
            mask[prefill] = True
            computing = terms.among(mask).prefill_cost
            self._computing[prefill] = (computing * factors)[prefill]
        couple = unusual.plan.couple
        if couple is not None:
            decoding = decode_cost(priced, record.weights)
            self._decoding[decode] = self._moved(decoding, factors, couple)[decode]

    @property
    def is_leg(self) -> NDArray[np.bool_]:
        """The ranks that could have been a leg, by rank."""
        mask = np.zeros(len(self._to_move), dtype=np.bool_)
        mask[self._prefill] = mask[self._decode] = True
        return mask

    @property
    def is_pair(self) -> bool:
        """Whether two ranks were booked."""
        return self._plan.mode == "disaggregated"

    def _positions(self, slots: Slots) -> Slots:
        at = self._record.fleet_slots.at
        return np.array([at[slot] for slot in slots.tolist()], dtype=np.int64)

    def _moved(self, decoding: Floats, factors: Floats, couple: WorkerPair) -> Floats:
        """Return decode costs as seen from the prefill rank; infinite: no transfer is possible."""
        unusual = self._record.unusual
        assert unusual is not None
        assert unusual.roles is not None
        assert unusual.legs is not None
        slots = self._record.fleet_slots.slots
        for positions, transfer in unusual.roles.transfers(unusual.legs.prefill):
            if couple.prefill_slot in unusual.legs.prefill[positions]:
                costs = (decoding + moving_cost(self._to_move, slots, transfer)) * factors
                return permitted(costs, slots, transfer)
        raise AssertionError("its prefill rank is none of the candidates")

    def pair(self) -> DecisionPair:
        """Return the comparison."""
        plan, couple = self._plan, self._plan.couple
        prefill = decode = None
        if couple is not None:
            slot = couple.prefill_slot
            prefill = self._leg(slot, self._computing)
            source = kv_source_at(self._record, slot, couple.pulled_blocks)
            prefill = replace(prefill, kv_source=source)
            decode = self._leg(couple.decode_slot, self._decoding)
        return DecisionPair(
            mode=plan.mode,
            reason=plan.reason,
            aggregated_cost=plan.whole_cost,
            disaggregated_cost=None if couple is None else couple.cost,
            prefill=prefill,
            decode=decode,
        )

    def _leg(self, slot: int, costs: Floats) -> DecisionLeg:
        at = self._record.fleet_slots.at[slot]
        rank = self._record.fleet_slots.rank_states[at]
        return DecisionLeg(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            endpoint=rank.endpoint,
            cost=float(costs[at]),
        )

    def chosen(self) -> Chosen:
        """Return the decode leg at the price of both legs.

        The runner-up is one rank for the whole.
        """
        plan, couple = self._plan, self._plan.couple
        assert couple is not None
        leg = self._leg(couple.decode_slot, self._decoding)
        whole = plan.whole_cost
        drawn = self._record.weights.temperature > 0.0
        return Chosen(
            worker_id=leg.worker_id,
            dp_rank=leg.dp_rank,
            endpoint=leg.endpoint,
            cost=couple.cost,
            margin=None if whole is None else whole - couple.cost,
            runner_up=None,
            ties=1,
            picked_by="softmax" if drawn else "lowest",
        )

    def legs(self, some: slice[int, int, None]) -> list[DecisionLegs]:
        """Return the costs of some ranks as legs."""
        decode = set(self._decode.tolist())
        computing, decoding = self._computing[some].tolist(), self._decoding[some].tolist()
        to_move = self._to_move[some].tolist()
        return [
            DecisionLegs(
                None if math.isnan(computing[at]) else computing[at],
                decoding[at] if math.isfinite(decoding[at]) else None,
                int(to_move[at]) if some.start + at in decode else None,
            )
            for at in range(len(to_move))
        ]
