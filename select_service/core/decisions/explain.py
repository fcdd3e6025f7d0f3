"""Turns a record into the explanation of its decision: every rank's cost terms, and the winner.

Nothing was computed for this when the decision was made; all of it is derived here on demand. A
large fleet may be sent in slices (`ExplainedRecord.candidates`).
"""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import UNSET

from indexer.core.packing import unpack_u64
from indexer.core.progress import PLAUSIBLE_LAG_S
from indexer.types import HASH_BYTES
from select_service.core.decisions.decision_log import decision_id, outcome_of
from select_service.core.decisions.explained_terms import PairTerms, RankTerms, kv_source_at
from select_service.core.decisions.record import (
    ESTIMATED,
    HASHES_KEPT,
    REPLAYING,
    STREAM_STATES,
)
from select_service.types.decisions import (
    Candidate,
    Chosen,
    Decision,
    DecisionAdmission,
    DecisionIndex,
    DecisionPrompt,
    DecisionShadow,
    DecisionShadowChoice,
    DecisionWeights,
    RunnerUp,
)
from select_service.types.shadow import ShadowWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from select_service.core.decisions.record import Absent, DecisionRecord, RankState, UnusualFacts
    from select_service.core.decisions.shadow_regret import Side, Sighting
    from select_service.core.fleet.outliers import EjectionReason
    from select_service.types.decisions import Excluded


class ExplainedRecord:
    """One record, explained piece by piece."""

    def __init__(
        self,
        record: DecisionRecord,
        wall_offset: float,
        transfer_cost: float,
        *,
        is_withdrawn: bool = False,
    ) -> None:
        """Prepare the explanation of a record.

        `wall_offset` are unix seconds when the monotonic clock shows 0; `transfer_cost` is
        that of moving a block, in blocks of prefill.
        """
        self._is_withdrawn = is_withdrawn
        self._record = record
        self._wall_at = record.at + wall_offset
        self._transfer_cost = transfer_cost
        self._terms = terms = RankTerms(record)
        self._stamps = np.frombuffer(record.fleet_snapshot[2]).tolist()
        self._pair = None
        in_play = terms.considered
        unusual = record.unusual
        if unusual is not None and unusual.plan is not None:
            self._pair = PairTerms(record, terms)
            in_play = terms.considered | self._pair.is_leg
        self._in_play = in_play
        self._allowed = None
        if unusual is not None and unusual.allowed is not None:
            self._allowed = frozenset(unusual.allowed)
        self._ejected: Mapping[int, EjectionReason] = {}
        if unusual is not None and unusual.ejected is not None:
            playing = {record.fleet_slots.rank_states[at].slot for at in np.flatnonzero(in_play)}
            if not playing & unusual.ejected.keys():  # else all candidates were suspected: none was
                self._ejected = unusual.ejected

    def __len__(self) -> int:
        """The number of candidates."""
        return len(self._record.fleet_slots.rank_states) + len(self._record.fleet_slots.absent)

    def decision(self) -> Decision:
        """Return everything but the candidates; some 20 µs, and 0.1 µs per rank."""
        record, scope = self._record, self._record.fleet_slots.scope
        unusual = record.unusual
        decision = Decision(
            decision_id=decision_id(record),
            selection_id=record.selection_id,
            reservation_id=record.reservation_id,
            route=_route(record),
            at_ms=round(self._wall_at * 1e3, 3),
            waited_s=0.0 if record.since < 0.0 else record.at - record.since,
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            outcome=outcome_of(record),
            refusal=None if unusual is None else unusual.refusal,
            prompt=_prompt(record),
            weights=DecisionWeights(
                **record.weights._asdict(), kv_transfer_cost_per_block=self._transfer_cost
            ),
            admission=_admission(record),
            chosen=None if record.slot < 0 else self._chosen(),
        )
        if self._pair is not None:
            decision.pair = self._pair.pair()
        if unusual is not None and unusual.shadow is not None:
            decision.shadow = _shadow(unusual.shadow, record)
        if record.slot >= 0:
            self._predict(decision)
        if self._is_withdrawn:
            decision.withdrawn = True
        return decision

    def _predict(self, decision: Decision) -> None:
        """Say what was to be expected of the chosen rank; of a pair, of each leg its part."""
        at, unusual = self._record.fleet_slots.at, self._record.unusual
        computes = self._record.slot
        if self._pair is not None and self._pair.is_pair:
            assert unusual is not None
            assert unusual.plan is not None
            assert unusual.plan.couple is not None
            computes = unusual.plan.couple.prefill_slot
        ttft_ms = _known(self._terms.ttft_ms.item(at[computes]))
        itl_ms = _known(self._terms.itl_ms.item(at[self._record.slot]))
        decision.predicted_ttft_ms = UNSET if ttft_ms is None else ttft_ms
        decision.predicted_itl_ms = UNSET if itl_ms is None else itl_ms

    def whole(self) -> Decision:
        """Return the decision with all candidates at once; a µs per candidate."""
        decision = self.decision()
        decision.candidates = self.candidates(0, len(self))
        return decision

    def _chosen(self) -> Chosen:
        record, terms = self._record, self._terms
        if self._pair is not None and self._pair.is_pair:
            return self._pair.chosen()
        rank_states, at = record.fleet_slots.rank_states, record.fleet_slots.at[record.slot]
        costs = terms.cost[terms.considered]
        others = terms.considered.copy()
        others[at] = False
        behind = np.flatnonzero(others)
        cost, ties = float(terms.cost[at]), int((costs == costs.min()).sum())
        runner_up, margin = None, None
        if len(behind):
            second = int(behind[terms.cost[behind].argmin()])
            margin = float(terms.cost[second]) - cost
            rank = rank_states[second]
            runner_up = RunnerUp(rank.worker_id, rank.dp_rank, float(terms.cost[second]))
        how: Literal["lowest", "tie", "softmax", "only"] = "tie" if ties > 1 else "lowest"
        if not len(behind):
            how = "only"
        elif record.weights.temperature > 0.0:
            how = "softmax"
        rank = rank_states[at]
        return Chosen(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            endpoint=rank.endpoint,
            cost=cost,
            margin=margin,
            runner_up=runner_up,
            ties=ties,
            picked_by=how,
            kv_source=kv_source_at(record, record.slot, terms.terms.pulled[at]),
        )

    # -- the ranks ------------------------------------------------------------------------------

    def candidates(self, start: int, stop: int) -> list[Candidate]:
        """Return some of the ranks: the attached ones by worker and rank, then the absent ones."""
        fleet_slots = self._record.fleet_slots
        attached = len(fleet_slots.rank_states)
        candidates = self._attached(slice(min(start, attached), min(stop, attached)))
        absent = fleet_slots.absent[max(0, start - attached) : max(0, stop - attached)]
        return candidates + [_absent(one) for one in absent]

    def _attached(self, some: slice[int, int, None]) -> list[Candidate]:
        terms, rank_states = self._terms, self._record.fleet_slots.rank_states[some]
        count = len(rank_states)
        in_play = self._in_play[some].tolist()
        columns: list[Sequence[object]] = [
            [rank.worker_id for rank in rank_states],
            [rank.dp_rank for rank in rank_states],
            [rank.endpoint for rank in rank_states],
            [
                None if plays else self._excluded(rank)
                for plays, rank in zip(in_play, rank_states, strict=True)
            ],
        ]
        priced, weights = terms.terms, self._record.weights
        decode = priced.decode - self._record.blocks + priced.booked  # without the prompt
        whole = (priced.prefill, decode, priced.booked, *priced.held, priced.cached_tokens)
        columns += [list(map(int, column[some].tolist())) for column in whole]
        credit = priced.credit + priced.expected + priced.pull_credit
        credit = np.minimum(credit, priced.raw)
        columns += [column[some].tolist() for column in (priced.raw, credit, priced.decode)]
        columns.append([None] * count if terms.factors is None else terms.factors[some].tolist())
        columns.append(terms.cost[some].tolist())
        if not terms.is_priced:
            columns[6:] = [[None] * count] * (len(columns) - 6)
        columns.append([self._index(at) for at in range(some.start, some.stop)])
        columns.append([1.0] * count if priced.trust is None else priced.trust[some].tolist())
        if terms.is_priced:
            columns.append(list(map(int, priced.expected[some].tolist())))
            delay = weights.delay_weight * priced.own
            eviction = weights.eviction_weight * priced.churn * priced.own
            interference = weights.interference * priced.requests * priced.own
            ours = (priced.churn, delay, eviction, priced.context, interference)
            columns += [column[some].tolist() for column in ours]
        else:
            columns += [[None] * count] * 6
        if terms.is_priced and terms.queue_age_s is not None:
            columns.append(terms.queue_age_s[some].tolist())
            columns.append(list(map(int, terms.ahead[some].tolist())))
            columns.append(priced.worked[some].tolist())
            columns.append(list(map(int, priced.requests[some].tolist())))
            columns.append(priced.slowness[some].tolist())
        else:
            columns += [[None] * count] * 5
        columns += self._pulls(some)
        columns += [
            list(map(_known, column[some].tolist())) for column in (terms.ttft_ms, terms.itl_ms)
        ]
        if self._pair is not None:
            columns.append(self._pair.legs(some))
        return list(map(Candidate, *columns))

    def _pulls(self, some: slice[int, int, None]) -> list[Sequence[object]]:
        """Return what some ranks would pull, and what that costs."""
        found, priced = self._record.seen[1], self._terms.terms
        if not self._terms.is_priced or found is None or found.pulls is None:
            return [[UNSET] * len(priced.pulled[some])] * 2
        return [list(map(int, priced.pulled[some].tolist())), priced.pull_cost[some].tolist()]

    def _excluded(self, rank: RankState) -> Excluded:
        """Return why a rank was no candidate: the first reason, in the order of evaluation."""
        unusual = self._record.unusual
        assert unusual is not None, "all are considered otherwise"
        pinned = unusual.pinned
        if self._allowed is not None and rank.worker_id not in self._allowed:
            return "not_allowed"
        if pinned is not None and (pinned.worker_id, pinned.dp_rank) != rank[1:3]:
            return "pinned_elsewhere"
        if unusual.constraints and not rank.taints.issuperset(unusual.constraints.required_taints):
            return "taint"
        holds_to_cache = self._record.cache_hit is not None
        return _unfit(unusual, rank, self._ejected, holds_to_cache=holds_to_cache)

    def _index(self, position: int) -> DecisionIndex:
        states = self._record.fleet_snapshot[1]
        age = self._wall_at - self._stamps[position]
        lag = max(age, 0.0) if abs(age) < PLAUSIBLE_LAG_S else None  # false for nan, too
        state = states[position]
        estimated = state >= ESTIMATED or UNSET
        state %= ESTIMATED
        return DecisionIndex(STREAM_STATES[state], lag, int(state == REPLAYING), estimated)


def _known(value: float) -> float | None:
    return None if isnan(value) else value


def _shadow(sighting: Sighting, record: DecisionRecord) -> DecisionShadow:
    return DecisionShadow(
        weights=ShadowWeights(**sighting.weights._asdict()),
        agrees=sighting.agrees,
        regret_by_live_weights=sighting.regret_live,
        regret_by_shadow_weights=sighting.regret_shadow,
        live=_shadow_choice(sighting.live, record),
        shadow=_shadow_choice(sighting.shadow, record),
    )


def _shadow_choice(side: Side, record: DecisionRecord) -> DecisionShadowChoice:
    fleet_slots = record.fleet_slots
    rank = fleet_slots.rank_states[fleet_slots.at[side.slot]]
    return DecisionShadowChoice(
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
        cost_by_live_weights=side.cost_live,
        cost_by_shadow_weights=side.cost_shadow,
        prefill_tokens=side.prefill_tokens,
        cached_tokens=side.cached_tokens,
        queued_prefill_tokens=int(side.queued_prefill_tokens),
        decode_blocks=int(side.decode_blocks),
    )


def _unfit(
    unusual: UnusualFacts,
    rank: RankState,
    ejected: Mapping[int, EjectionReason],
    *,
    holds_to_cache: bool,
) -> Excluded:
    """Return why a rank that meets all constraints was no candidate."""
    if not unusual.is_pair and not (
        rank.role == "aggregated" or (rank.role == "decode" and holds_to_cache)
    ):
        return "role"
    if rank.slot in ejected:
        return ejected[rank.slot]
    if rank.slot in unusual.full or rank.slot in unusual.busy:
        return "full" if rank.slot in unusual.full else "busy"
    if unusual.refusal is not None:
        return "refused"
    if (unusual.in_batch or unusual.in_session) and not holds_to_cache:
        return "batch" if unusual.in_batch else "session"
    return "role" if unusual.is_pair else "cache_hit"


_NOT_PRICED: Final = (None,) * 13


def _absent(one: Absent) -> Candidate:
    return Candidate(
        one.worker_id,
        one.dp_rank,
        one.endpoint,
        "draining" if one.drains else "not_schedulable",
        *_NOT_PRICED,
        1.0,
    )


def _route(record: DecisionRecord) -> Literal["select", "select_and_reserve", "select_pair"]:
    if record.unusual is not None and record.unusual.is_pair:
        return "select_pair"
    return "select" if record.reservation_id is None else "select_and_reserve"


def _prompt(record: DecisionRecord) -> DecisionPrompt:
    hashes = record.block_hashes
    return DecisionPrompt(
        isl_tokens=record.isl_tokens,
        blocks=record.blocks,
        block_size=record.fleet_slots.block_size,
        block_hashes=[str(one) for one in unpack_u64(hashes)],
        is_cut=record.blocks > HASHES_KEPT <= len(hashes) // HASH_BYTES,
    )


def _admission(record: DecisionRecord) -> DecisionAdmission | None:
    ask, gate_decision = record.ask, record.gate_decision
    if ask is None or gate_decision is None:
        return None
    return DecisionAdmission(
        policy=gate_decision.policy,
        slo_class=ask.slo_class or None,
        tenant=ask.tenant_id,
        outcome=gate_decision.outcome,
        reason=gate_decision.reason,
        gate=gate_decision.gate or None,
    )
