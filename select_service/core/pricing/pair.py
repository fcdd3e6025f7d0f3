"""One worker for the whole request, or a prefill and a decode worker: which costs less.

Both are priced by the policy in force, in blocks: the whole request on its best rank, against the
policy's part for computing on the best prefill rank (queue, own prefill and what that does to
others), plus its part for decoding on the best decode rank (blocks, context, requests), plus the
cost of moving the blocks that the decode rank does not hold. On equal cost the single worker wins.
Nothing is booked here; `reservations/pairs.py` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec import UNSET

from select_service.core.pricing.cost import decode_cost, preferences
from select_service.core.pricing.kv_sources import kv_source
from select_service.core.pricing.pick import pick
from select_service.types import Advice, PrefillCandidate

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from select_service.core.columns import Floats, Slots
    from select_service.core.fleet.roles import Legs, Transfer
    from select_service.core.fleet.slots import FleetSlots
    from select_service.core.pricing.cost import Terms, TierMatches
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.types import KvSource, SelectRequest

Mode = Literal["aggregated", "disaggregated"]
Reason = Literal[
    "cached",
    "cheaper",
    "no_aggregated_worker",
    "no_decode_worker",
    "no_kv_transfer",
    "no_prefill_worker",
    "not_cached",
]
"""The reason for the mode. Aggregated: no pair possible, `cached` (the rank holds enough of the
prompt), or `cheaper`. Disaggregated: no rank for whole requests, `not_cached` (no rank holds
enough), or `cheaper`. Part of the API."""


Holders: TypeAlias = "Callable[[Slots, Terms], Slots | None]"


class WorkerPair(NamedTuple):
    """The best pair of ranks."""

    prefill_slot: int
    decode_slot: int
    cost: float
    effective_prefill_tokens: int
    potential_decode_blocks: int
    transfer_blocks: int
    pulled_blocks: int  # of the prompt, that the prefill rank pulls from a third one
    pull_tokens: int  # that could be computed while those are moved


class PairPlan(NamedTuple):
    """How a request should be served."""

    mode: Mode
    reason: Reason
    whole: Slots  # ranks that may take all of it
    whole_cost: float | None  # of the best of them
    couple: WorkerPair | None  # the best one, whichever the mode
    found: TierMatches | None  # of the prompt in the index, and what ranks may pull
    weights: Weights  # as they applied

    def advice(self, fleet_slots: FleetSlots) -> Advice:
        """Say it to a caller, by rank."""
        couple = self.couple
        candidate = None
        if couple is not None and self.mode == "disaggregated":
            worker, dp_rank = fleet_slots.rank_at(couple.prefill_slot)
            candidate = PrefillCandidate(
                worker_id=worker.worker_id,
                dp_rank=dp_rank,
                endpoint=worker.spec.endpoint or "",
                effective_prefill_tokens=couple.effective_prefill_tokens,
                kv_source=self.kv_source(fleet_slots) or UNSET,
            )
        return Advice(
            mode=self.mode,
            reason=self.reason,
            prefill=candidate,
            aggregated_cost=self.whole_cost,
            disaggregated_cost=None if couple is None else couple.cost,
        )

    def kv_source(self, fleet_slots: FleetSlots) -> KvSource | None:
        """Return where the prefill rank pulls blocks from; None: nowhere."""
        couple, found = self.couple, self.found
        if couple is None or not couple.pulled_blocks or found is None or found.pulls is None:
            return None
        return kv_source(fleet_slots, found.pulls, couple.prefill_slot)


class PairQuery(NamedTuple):
    """A request for which a plan is needed."""

    fleet_slots: FleetSlots
    request: SelectRequest
    prompt: Prompt
    weights: Weights  # as they apply now
    block_size: int


def plan(
    question: PairQuery,
    legs: Legs,
    priced: Callable[[Slots], Terms],
    found: TierMatches | None,
    rng: random.Random,
    holders: Holders,
) -> PairPlan:
    """Choose between the whole and a pair.

    Args:
        question: what is asked.
        legs: the ranks that may be chosen.
        priced: gives the terms of the prompt's cost on some slots.
        found: what of the prompt is in the index, and what ranks may pull.
        rng: draws ties.
        holders: given slots and their terms, returns those that hold enough of the prompt for the
            threshold in force; None: no threshold, and a decode rank must hold all of it.
    """
    decode = priced(legs.decode)
    cached = holders(legs.rows, priced(legs.rows))
    couple = _couple(question, legs, priced(legs.prefill), decode, rng)
    alone, is_cached = _alone(question, legs, decode, cached)
    cost = None
    if len(alone):
        cost = float(_preferred(question, priced(alone).cost, alone).min())
    if is_cached:
        mode: tuple[Mode, Reason] = "aggregated", "cached"
    elif cached is not None and couple is not None:
        mode = "disaggregated", "not_cached"
    else:
        mode = _compare(cost, couple, legs)
    return PairPlan(*mode, alone, cost, couple, found, question.weights)


def _alone(
    question: PairQuery, legs: Legs, decode: Terms, cached: Slots | None
) -> tuple[Slots, bool]:
    """Return the ranks for the whole request, and whether they qualify by what they hold."""
    if cached is None:
        ready = legs.decode[decode.cached_tokens >= question.prompt.isl_tokens]
        return np.sort(np.concatenate([legs.whole, ready])), False
    everyone = np.sort(np.concatenate([legs.whole, legs.decode]))
    holders = everyone[np.isin(everyone, cached)]
    return (holders, True) if len(holders) else (legs.whole, False)


def _compare(cost: float | None, couple: WorkerPair | None, legs: Legs) -> tuple[Mode, Reason]:
    if couple is None:
        if not len(legs.prefill):
            return "aggregated", "no_prefill_worker"
        return "aggregated", "no_kv_transfer" if len(legs.decode) else "no_decode_worker"
    if cost is None:
        return "disaggregated", "no_aggregated_worker"
    return "disaggregated" if couple.cost < cost else "aggregated", "cheaper"


def _couple(
    question: PairQuery, legs: Legs, prefill: Terms, decode: Terms, rng: random.Random
) -> WorkerPair | None:
    """Return the cheapest prefill and decode rank between which blocks may move."""
    if not legs.can_pair:
        return None
    weights = question.weights
    computing_costs = _preferred(question, prefill.prefill_cost, legs.prefill)
    to_move = blocks_to_move(decode, question.prompt.isl_tokens, question.block_size)
    decoding = decode_cost(decode, weights)
    found: list[tuple[int, int]] = []
    totals: list[float] = []
    for positions, transfer in question.fleet_slots.roles.transfers(legs.prefill):
        prices = decoding + moving_cost(to_move, legs.decode, transfer)
        prices = permitted(_preferred(question, prices, legs.decode), legs.decode, transfer)
        open_to = np.isfinite(prices).nonzero()[0]
        if not len(open_to):
            continue
        first = int(positions[pick(computing_costs[positions], weights.temperature, rng)])
        second = int(open_to[pick(prices[open_to], weights.temperature, rng)])
        found.append((first, second))
        totals.append(float(computing_costs[first] + prices[second]))
    if not found:
        return None
    best = pick(np.array(totals), 0.0, rng)
    first, second = found[best]
    here = prefill.cached_tokens[first] + prefill.pulled[first] * question.block_size
    return WorkerPair(
        prefill_slot=int(legs.prefill[first]),
        decode_slot=int(legs.decode[second]),
        cost=totals[best],
        effective_prefill_tokens=max(0, question.prompt.isl_tokens - int(here)),
        potential_decode_blocks=int(decode.decode[second]),
        transfer_blocks=int(to_move[second]),
        pulled_blocks=int(prefill.pulled[first]),
        pull_tokens=round(float(prefill.pull_cost[first]) * question.block_size),
    )


def blocks_to_move(decode: Terms, isl_tokens: int, block_size: int) -> Floats:
    """Return the blocks of the prompt that each decode rank lacks on every tier."""
    blocks = float(-(-isl_tokens // block_size))
    held: Floats = decode.held.device + decode.held.host + decode.held.disk
    if decode.trust is not None:
        held = np.floor(held * decode.trust)
    return np.maximum(blocks - held, 0.0)


def moving_cost(blocks: Floats, slots: Slots, transfer: Transfer) -> Floats:
    """Return the cost of moving blocks to each slot from one kind of prefill rank."""
    cost = transfer.costs
    return blocks * (cost if isinstance(cost, float) else cost[slots])


def permitted(prices: Floats, slots: Slots, transfer: Transfer) -> Floats:
    """Return decode costs as seen from one kind of prefill rank; infinite if blocks cannot move."""
    if transfer.factors is not None:
        prices = prices * transfer.factors[slots]
    if transfer.allowed is not None:
        prices = np.where(transfer.allowed[slots], prices, np.inf)
    return prices


def _preferred(question: PairQuery, prices: Floats, slots: Slots) -> Floats:
    constraints = question.request.routing_constraints
    if constraints is UNSET or not constraints.preferred_taints or question.request.pinned_worker:
        return prices
    taints = [question.fleet_slots.rank_at(slot)[0].taints for slot in slots.tolist()]
    return prices * preferences(constraints.preferred_taints, taints)
