"""What a prompt costs on each rank: the one formula, with all its terms.

All prices are made here: placements, pairs, batches, shadow weights, explanations and
replays, over live columns of load or recorded ones. `_pricer.pyx` computes the same costs, and
nothing else, for the placement of single requests. Lower is better; the unit is blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from select_service.core.ledger.loads import worked_off

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from indexer.core.tiers import Matches
    from select_service.core.columns import Floats, Groups, Rows, Slots
    from select_service.core.ledger.loads import PackedLoads
    from select_service.core.ledger.slot_loads import SlotLoads
    from select_service.core.pricing.weights import Weights


class MatchedRows(NamedTuple):
    """Matched blocks by row: on the device, then the extensions on host and disk."""

    device: Floats
    host: Floats
    disk: Floats


class Pulls(NamedTuple):
    """What each rank could pull, by slot; it is worth at most what it saves."""

    blocks: Floats  # beyond what it holds, or is to compute for others; 0: nothing
    cost: Floats  # of all of them, in blocks of prefill
    source: Slots  # slot that holds them; -1: none
    tier: Slots  # position in `kv_sources.TIERS` of the farthest of them


class TierMatches(NamedTuple):
    """What the index has of a prompt: slots by how many blocks they hold, tier by tier.

    The groups of `device` are disjoint; those of the others extend the tiers before, and a slot's
    blocks in several groups of `disk` add up. The blocks of slots in `estimated` are no facts.
    """

    device: Groups
    host: Groups
    disk: Groups
    estimated: Slots | None = None
    external: int = 0
    """How many of the last groups of `disk` are in the shared store."""
    pulls: Pulls | None = None
    """What ranks could pull from others; None: nothing, or they may not."""

    def external_by_slot(self, slots: int) -> Floats:
        """Return the part of `disk` in the shared store."""
        column = np.zeros(slots)
        for blocks, of in self.disk[len(self.disk) - self.external :]:
            column[of] += blocks
        return column

    def by_slot(self, slots: int) -> MatchedRows:
        """Return the blocks of each of so many slots."""
        held = MatchedRows(*np.zeros((3, slots)))
        for column, groups in zip(held, (self.device, self.host, self.disk), strict=True):
            for blocks, of in groups:
                column[of] += blocks
        return held


def tier_matches(matches: Matches) -> TierMatches:
    """Return what the index found, by slot."""
    return TierMatches(*matches.by_slot(), matches.estimated, matches.external)


class Size(NamedTuple):
    """How large a prompt is, on ranks with blocks of one size."""

    isl_tokens: int
    blocks: int  # whole ones, to be decoded with
    block_size: int  # tokens


class Terms(NamedTuple):
    """The terms of each candidate's cost, in blocks unless stated otherwise.

    left     = max(0, track ? (P - worked + max(isl, cached)) / block_size : 0 - credit - expected)
    credit   = trust · (decay · credit_weight · device + host_weight · host + disk_weight · disk)
    decay    = 1 / (1 + credit_decay · (P - min P)/block_size / ceil(isl/block_size))
    cost     = prefill_load_scale · left + decode blocks with this prompt

    That is `kv-cost` (`deploy/docs/contract.md` 3.2), where `worked` and `expected` are 0.
    `first-token` counts blocks booked by live requests as cached, takes what may already be
    computed (`worked_off`) off the queue P, and adds four terms:

    own      = max(0, track ? max(isl, cached)/block_size : 0 - credit - expected)
    cost     = prefill_load_scale · (left + (delay_weight + eviction_weight · churn
                                             + interference · requests) · own)
               + decode_load_scale · decode blocks with this prompt
               + context_load_scale · context with this prompt
               + decode_active_request_weight · requests

    The last term is Dynamo 1.6's, and 0 unless it is set. All of it is multiplied with

    slowness = 1 + slowness_weight · (how many times as long as others a worn rank takes - 1),

    which is 1 unless `RankSpeeds.worn` names the rank.

    Where a rank may pull blocks (`found.pulls`), they are taken off `left` and `own` as blocks on
    the device are (with `decay · credit_weight`, at most 1: else the rank that holds them would
    lose against another one that pulls them), and what moving them costs is added to `left`, if
    that makes computing cheaper there.
    """

    prefill: Floats  # tokens
    worked: Floats  # tokens of `prefill` that count as computed
    held: MatchedRows
    trust: Floats | None  # factor on what is held; None: full trust
    cached_tokens: Floats  # tier-weighted tokens that need no prefill, scaled by trust
    booked: Floats  # of the prompt, in active chains there
    raw: Floats  # tokens to compute before the first one, as blocks, without credit
    credit: Floats  # what overlap takes off
    expected: Floats  # what is booked there and will be cached by the time it is computed
    own: Floats  # what remains to be computed of this prompt
    left: Floats  # what remains to be computed before its first token
    decode: Floats  # including the prompt's new blocks
    churn: Floats  # tokens
    requests: Floats | Slots  # live on the rank
    context: Floats  # including the prompt
    slowness: Floats  # factor of the cost
    prefill_cost: Floats  # the part of the cost for computing
    cost: Floats
    pulled: Floats  # of the prompt, from another rank, where that costs less than computing them
    pull_credit: Floats  # what they take off
    pull_cost: Floats  # of moving those


def terms_of(  # noqa: PLR0917 - what is known, and for which ranks
    loads: SlotLoads | PackedLoads,
    rows: Rows,
    size: Size,
    weights: Weights,
    found: TierMatches | None,
    shared: Groups | None,
    trust: Floats | None,
    now: float,
    among: Slots | None = None,
) -> Terms:
    """Return the terms of the rows, without preferences.

    Args:
        loads: of every slot, live or recorded.
        rows: the candidates.
        size: of the prompt.
        weights: as they apply now; see `Weights.at_present`.
        found: in the index; None: nothing.
        shared: blocks in active chains and the slots with that many, disjoint; None: none.
        trust: factor on each slot's credit; None: full trust.
        now: monotonic seconds.
        among: positions from whose least load the credit's decay is measured; None: all.
    """
    isl, blocks, block_size = float(size.isl_tokens), size.blocks, size.block_size
    prefill = loads.prefill[rows]
    nothing = np.zeros(len(prefill))
    held, cached, credit = MatchedRows(nothing, nothing, nothing), nothing, nothing
    worked = expected = raw = own = pulled = pull_credit = pull_cost = nothing
    on_device: Floats | float = 0.0
    believed = None if trust is None else trust[rows]
    if found is not None:
        held = MatchedRows(*(column[rows] for column in found.by_slot(len(loads.prefill))))
        cached = _cached_tokens(held, weights, block_size)
        on_device = _device_weight(prefill, size, weights, among)
        credit = _credit(held, on_device, weights)
        if believed is not None:
            cached, credit = np.floor(cached * believed), credit * believed
    booked = nothing if shared is None else _by_slot(shared, len(loads.prefill))[rows]
    if weights.pace and loads.queue_updated_at is not None and loads.ahead is not None:
        worked = worked_off(loads.queue_updated_at[rows], loads.ahead[rows], weights.pace, now)
    if weights.expects_booked:
        expected = np.maximum(booked - (held.device + held.host + held.disk), 0.0)
    if weights.track_prefill_tokens:
        tokens = np.maximum(cached, isl)
        raw, own = (prefill - worked + tokens) / block_size, tokens / block_size
    left, own = raw - credit - expected, own - credit - expected
    decode = loads.decode[rows] + blocks - booked
    churn, context = loads.churn[rows], loads.context[rows] + blocks
    others = nothing if loads.requests is None else loads.requests[rows]
    each = delays(churn, others, weights)
    if found is not None and found.pulls is not None and weights.track_prefill_tokens:
        worth = np.minimum(on_device, 1.0)
        pulled, pull_cost = _what_pays(found.pulls, rows, worth, left, own, each)
        pull_credit = worth * pulled
        left, own = left - pull_credit, own - pull_credit
    left, own = np.maximum(left, 0.0) + pull_cost, np.maximum(own, 0.0)
    computing = weights.prefill_load_scale * (left + each * own)
    slowness = _slowness(loads, rows, weights)
    return Terms(
        prefill=prefill,
        worked=worked,
        held=held,
        trust=believed,
        cached_tokens=cached,
        booked=booked,
        raw=raw,
        credit=credit,
        expected=expected,
        own=own,
        left=left,
        decode=decode,
        churn=churn,
        requests=others,
        context=context,
        slowness=slowness,
        prefill_cost=computing * slowness,
        cost=_decoding(computing, weights, decode, context, others) * slowness,
        pulled=pulled,
        pull_credit=pull_credit,
        pull_cost=pull_cost,
    )


def _slowness(loads: SlotLoads | PackedLoads, rows: Rows, weights: Weights) -> Floats:
    """Return the factor on the cost of each row; above 1 for worn ranks alone."""
    if not weights.slowness or loads.slowness is None:
        return np.ones(len(loads.prefill[rows]))
    factor: Floats = 1.0 + weights.slowness * loads.slowness[rows]
    return factor


def _by_slot(groups: Groups, slots: int) -> Floats:
    """Return the number of blocks of each slot; the groups are disjoint."""
    column = np.zeros(slots)
    for count, those in groups:
        column[those] = count
    return column


def _what_pays(
    pulls: Pulls, rows: Rows, worth: Floats | float, left: Floats, own: Floats, each: Floats
) -> tuple[Floats, Floats]:
    """Return the blocks that are pulled, and what that costs: 0 where computing them costs less."""
    blocks, cost = pulls.blocks[rows], pulls.cost[rows]
    less = worth * blocks
    pays = _computing(left - less, own - less, each) + cost < _computing(left, own, each)
    return np.where(pays, blocks, 0.0), np.where(pays, cost, 0.0)


def delays(churn: Floats, requests: Floats | Slots, weights: Weights) -> Floats:
    """Return what each block of an own prefill costs others, beside what it costs its caller."""
    cost: Floats = weights.delay_weight + weights.eviction_weight * churn
    return cost + weights.interference * requests


def _computing(left: Floats, own: Floats, each: Floats) -> Floats:
    """Return what computing costs, before its scale."""
    cost: Floats = np.maximum(left, 0.0) + each * np.maximum(own, 0.0)
    return cost


def decode_cost(terms: Terms, weights: Weights) -> Floats:
    """Return the part of the cost for decoding: all that a pair's decode rank does, but moving."""
    nothing = np.zeros(len(terms.decode))
    cost = _decoding(nothing, weights, terms.decode, terms.context, terms.requests)
    return cost * terms.slowness


def _decoding(
    computing: Floats, weights: Weights, decode: Floats, context: Floats, requests: Floats | Slots
) -> Floats:
    """Return the cost for computing with what decoding adds to it."""
    cost = computing + weights.decode_load_scale * decode
    cost += weights.context_load_scale * context
    cost += weights.decode_active_request_weight * requests
    return cost


def _cached_tokens(held: MatchedRows, weights: Weights, block_size: int) -> Floats:
    """Return (device + host_weight·host + disk_weight·disk) · block_size, rounded half up."""
    blocks = (
        held.device
        + weights.host_cache_hit_weight * held.host
        + weights.disk_cache_hit_weight * held.disk
    )
    tokens: Floats = np.floor(blocks * block_size + 0.5)
    return tokens


def _device_weight(
    prefill: Floats, size: Size, weights: Weights, among: Slots | None
) -> Floats | float:
    """Return what a block on the device takes off."""
    weight: Floats | float = weights.overlap_score_credit
    if weights.track_prefill_tokens and weights.overlap_score_credit_decay > 0.0:
        least = (prefill if among is None else prefill[among]).min(initial=np.inf)
        excess = np.maximum(prefill - least, 0.0) / size.block_size
        blocks = -(-size.isl_tokens // size.block_size)
        weight = weight * (1.0 / (1.0 + weights.overlap_score_credit_decay * excess / blocks))
    return weight


def _credit(held: MatchedRows, on_device: Floats | float, weights: Weights) -> Floats:
    """Return the blocks that overlap takes off, before trust."""
    credit: Floats = (
        on_device * held.device
        + weights.host_cache_hit_weight * held.host
        + weights.disk_cache_hit_weight * held.disk
    )
    return credit


def preferences(preferred: Mapping[str, float], taints: Sequence[frozenset[str]]) -> Floats:
    """Return the factor on each candidate's cost: exp(-tanh(Σ weights present)).

    Computed once per set of taints: there are few sets, and many ranks.
    """
    factor_of = {
        have: math.exp(
            -math.tanh(sum(weight for taint, weight in preferred.items() if taint in have))
        )
        for have in set(taints)
    }
    return np.array([factor_of[have] for have in taints])
