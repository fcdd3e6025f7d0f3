"""The comparison behind a request that may take a pair: each rank's cost as a leg, the best two.

Recomputed from the record by the formulas of `pricing/cost.py` and `pricing/pair.py`; `explain.py`
presents it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from select_service.core.decisions.explained_terms import kv_source_at
from select_service.core.pricing.cost import decode_cost
from select_service.core.pricing.pair import moving_cost, permitted
from select_service.types.decisions import Chosen, DecisionLeg, DecisionLegs, DecisionPair

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from select_service.core.columns import Floats, Slots
    from select_service.core.decisions.explained_terms import RankTerms
    from select_service.core.decisions.record import DecisionRecord
    from select_service.core.pricing.pair import WorkerPair


class PairTerms:
    """The legs of one record, as columns by rank; nan where a rank cannot be that leg."""

    def __init__(self, record: DecisionRecord, terms: RankTerms) -> None:
        odds = record.odds
        assert odds is not None
        assert odds.plan is not None
        assert odds.legs is not None
        self._record, self._plan = record, odds.plan
        self._prefill = self._positions(odds.legs.prefill)
        self._decode = self._positions(odds.legs.decode)
        count = len(record.fleet_slots.rank_states)
        self._computing: Floats = np.full(count, np.nan)
        self._decoding: Floats = np.full(count, np.nan)
        priced = terms.terms
        held: Floats = priced.held.device + priced.held.host + priced.held.disk
        if priced.trust is not None:
            held = np.floor(held * priced.trust)
        blocks = -(-record.isl_tokens // record.fleet_slots.block_size)
        self._to_move: Floats = np.maximum(blocks - held, 0.0)
        factors = np.ones(count) if terms.factors is None else terms.factors
        prefill, decode = self._prefill, self._decode
        if len(prefill):
            mask = np.zeros(count, dtype=np.bool_)
            mask[prefill] = True
            computing = terms.among(mask).prefill_cost
            self._computing[prefill] = (computing * factors)[prefill]
        couple = odds.plan.couple
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
        odds = self._record.odds
        assert odds is not None
        assert odds.roles is not None
        assert odds.legs is not None
        slots = self._record.fleet_slots.slots
        for positions, transfer in odds.roles.transfers(odds.legs.prefill):
            if couple.prefill_slot in odds.legs.prefill[positions]:
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
