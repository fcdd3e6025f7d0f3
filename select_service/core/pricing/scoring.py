"""The cost formula over all candidates at once: the contract's (3.2), and that of our own policy.

Pure arithmetic on columns: what the numbers mean is decided in `projection.py`, which candidate
wins in `picking.py`. Lower is better; the unit is blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.core.columns import Floats
    from select_service.core.pricing.projection import Overlap, Projection
    from select_service.types import RouterConfig, RouterConfigOverride, SelectRequest


_WEIGHT_MAX: Final = 1e100
"""No larger weight means anything more, and products of two with 64-bit counts stay numbers: an
infinite cost would make different ranks equal."""


DECODE_LOAD_SCALE: Final = 0.0
"""`first-token`: what many answers have in common is read for each of them, so distinct blocks say
nothing of how long a step takes; the context does."""

CONTEXT_LOAD_SCALE: Final = 0.0625
"""`first-token`: a block that a request attends to costs a sixteenth of a block to compute."""

SEQUENCE_TOKENS: Final = 4_096
"""`first-token`: what a request has in the context beside what it attends to. A step does the same
for every sequence, however short: it takes about as long as reading a thousand tokens of a cache.
And each has one of the engine's seats (a hundredth of a cache or less): who levelled lengths alone
filled those of the ranks whose prompts are short, and what came there next waited for an answer to
end. With a thousand tokens that is only rarer; 4,096 were chosen by measuring, of 256 to 8,192."""

SEAT_TOKENS: Final = 8_192
"""`first-token`: context that it is worth to wait until one answer more ends, on a rank whose seats
(`max_num_seqs`) are taken. Answers last for seconds, but one that has a seat elsewhere and finds no
prefix there is computed at the cost of all: 512 tokens to compute (sixteen of the context are one
of them) were chosen by measuring. Twice as much helps more where seats are unequal or nothing is
shared, and costs conversations on small engines 5 % of their p90; what answers were measured to
last is four times as much and more."""

FEW_SEATS: Final = 32
"""`first-token`: of fewer one ends the more rarely, and it is worth as much more."""

DELAY_SCALE: Final = 1.0
"""`first-token`: who is behind waits for what is computed now just as its own request does."""

EVICTION_SCALE: Final = 0.125
"""`first-token`: of what a prompt pushes out of a cache, an eighth of the share that prompts find
would have been asked for again. Where nothing is found nothing is lost, and to level what went into
caches would only make loads uneven."""


PACE_SCALE: Final = 1.0
"""`first-token`: of what a rank can have computed since it was last heard of all is gone from its
queue. Without, queues fall by a whole step at once, just when the next has begun, and who comes
then waits for all of it."""


class Weights(NamedTuple):
    """The numbers of the formula in force for one request.

    The last six are those of `kv-cost` unless they are given. As configured, `delay_weight` is per
    prompt that a rank computes on average, and `eviction_weight` per multiple of the average churn
    of a cache, where all of every prompt is found, and `pace` a share of that of a rank;
    `at_present` makes of them what a decision multiplies with: `pace` is in tokens a second then.
    """

    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    host_cache_hit_weight: float
    disk_cache_hit_weight: float
    temperature: float
    track_prefill_tokens: bool
    decode_load_scale: float = 1.0
    delay_weight: float = 0.0
    eviction_weight: float = 0.0
    expects_booked: bool = False
    context_load_scale: float = 0.0
    pace: float = 0.0

    @property
    def is_kv_cost(self) -> bool:
        """Whether the contract's formula is all there is."""
        return self[_OF_CONTRACT:] == _NOTHING_MORE

    @property
    def of_ours(self) -> tuple[float, float, float, bool, float, float]:
        """What `Pricer.cheapest` takes beyond the contract's formula."""
        return self[_OF_CONTRACT:]

    def kv_cost(self) -> Weights:
        """Return them with nothing beyond the contract's formula."""
        return self if self.is_kv_cost else Weights(*self[:_OF_CONTRACT])

    def at_present(self, computing: float, turnover: float, pace: float) -> Weights:
        """Return what one decision multiplies with.

        Args:
            computing: prompts not computed yet, per rank.
            turnover: tokens lately computed, per rank, over the share of prompts that was found;
                0: none, and caches are as good as empty.
            pace: tokens that a rank computes in a second.
        """
        eviction = self.eviction_weight / turnover if turnover > 0.0 else 0.0
        return Weights(
            *self[:_OF_CONTRACT],
            self.decode_load_scale,
            self.delay_weight * computing,
            eviction,
            self.expects_booked,
            self.context_load_scale,
            self.pace * pace,
        )


_NOTHING_MORE: Final = (1.0, 0.0, 0.0, False, 0.0, 0.0)

_OF_CONTRACT: Final = 7
"""How many of the weights the contract's formula has."""


def weights_in_force(config: RouterConfig, override: RouterConfigOverride | None) -> Weights:
    """Merge the process settings with a request's override."""
    credit, scale = config.overlap_score_credit, config.prefill_load_scale
    temperature, track = config.temperature, config.track_prefill_tokens
    if override is not None:
        if override.overlap_score_credit is not None:
            credit = override.overlap_score_credit
        if override.prefill_load_scale is not None:
            scale = override.prefill_load_scale
        if override.overlap_score_weight is not None:  # the old name wins, as in the reference
            scale = override.overlap_score_weight
            credit = 0.0 if scale == 0.0 else credit
        if override.router_temperature is not None:
            temperature = override.router_temperature
        if override.track_prefill_tokens is not None:
            track = override.track_prefill_tokens
    return Weights(
        _bounded(credit),
        _bounded(config.overlap_score_credit_decay),
        _bounded(scale),
        _bounded(config.host_cache_hit_weight),
        _bounded(config.disk_cache_hit_weight),
        temperature,
        track,
        *_terms(config),
    )


def _terms(config: RouterConfig) -> tuple[float, float, float, bool, float, float]:
    """Return the weights that the contract's formula does not have."""
    terms: tuple[float, float, float, bool, float, float] = _NOTHING_MORE
    if config.policy == "first-token":
        scales = DECODE_LOAD_SCALE, DELAY_SCALE, EVICTION_SCALE
        terms = (*scales, True, CONTEXT_LOAD_SCALE, PACE_SCALE)
    decode, delay, eviction, expects, context, pace = terms
    return (
        _bounded(decode if config.decode_load_scale is None else config.decode_load_scale),
        _bounded(delay if config.delay_scale is None else config.delay_scale),
        _bounded(eviction if config.eviction_scale is None else config.eviction_scale),
        expects if config.expects_booked is None else config.expects_booked,
        _bounded(context if config.context_load_scale is None else config.context_load_scale),
        _bounded(pace if config.pace_scale is None else config.pace_scale),
    )


def _bounded(weight: float) -> float:
    return max(-_WEIGHT_MAX, min(_WEIGHT_MAX, weight))


def costs(projection: Projection, weights: Weights) -> Floats:
    """Return the cost of each candidate, in blocks.

    raw      = track ? (P + max(isl - cached, 0) + cached) / block_size : 0
    decay    = 1 / (1 + credit_decay · (P - min P)/block_size / ceil(isl/block_size))
    adjusted = max(0, raw - trust·(credit·decay·device + host_weight·host + disk_weight·disk))
    cost     = prefill_load_scale · adjusted + decode blocks with this prompt

    `first-token` counts blocks that somebody is booked with as cached, and of the queue P what may
    be computed already (`loads.worked_off`) as gone, and adds three terms:

    own      = track ? max(0, max(isl, cached)/block_size - credited) : 0
    cost     = prefill_load_scale · (adjusted + (delay_weight + eviction_weight · churn) · own)
               + decode_load_scale · decode blocks with this prompt
               + context_load_scale · context with this prompt
    """
    if not weights.is_kv_cost:
        return _costs_of_ours(projection, weights)
    prefill, block_size = projection.prefill, projection.block_size
    isl = float(projection.isl_tokens)
    track = weights.track_prefill_tokens
    if projection.overlap is None:
        if not track:
            return projection.decode
        raw: Floats = (prefill + isl) / block_size
        scale = weights.prefill_load_scale
        return raw + projection.decode if scale == 1.0 else scale * raw + projection.decode
    cached = projection.cached_tokens
    if track and projection.cached_within_isl:
        raw = (prefill + isl) / block_size  # what is cached cancels out, exactly
    elif track:
        raw = (prefill + np.maximum(isl - cached, 0.0) + cached) / block_size
    else:
        raw = np.zeros_like(prefill)
    adjusted = np.maximum(raw - _credited(projection, projection.overlap, weights), 0.0)
    if weights.prefill_load_scale != 1.0:
        adjusted *= weights.prefill_load_scale
    adjusted += projection.decode
    return adjusted


def _credited(projection: Projection, overlap: Overlap, weights: Weights) -> Floats:
    """Return the blocks that overlap takes off."""
    device, host, disk = overlap
    credit: Floats | float = weights.overlap_score_credit
    if weights.track_prefill_tokens and weights.overlap_score_credit_decay > 0.0:
        block_size, prefill = projection.block_size, projection.prefill
        excess = (prefill - prefill.min()) / block_size
        blocks = -(-projection.isl_tokens // block_size)
        credit = credit * (1.0 / (1.0 + weights.overlap_score_credit_decay * excess / blocks))
    credited = credit * device
    if projection.has_lower_tiers:
        credited = (
            credited + weights.host_cache_hit_weight * host + weights.disk_cache_hit_weight * disk
        )
    if projection.trust is not None:
        credited = credited * projection.trust
    taken: Floats = credited
    return taken


def _costs_of_ours(projection: Projection, weights: Weights) -> Floats:
    """Do what `costs` says of `first-token`, in the order of the kernel."""
    prefill, block_size = projection.prefill, projection.block_size
    track = weights.track_prefill_tokens
    tokens = np.maximum(projection.cached_tokens, float(projection.isl_tokens))
    raw = (prefill - projection.worked + tokens) / block_size if track else np.zeros_like(prefill)
    own = tokens / block_size if track else raw
    held: Floats | float = 0.0
    if projection.overlap is not None:
        device, host, disk = projection.overlap
        held = device + host + disk if projection.has_lower_tiers else device
        credited = _credited(projection, projection.overlap, weights)
        raw, own = raw - credited, own - credited
    if weights.expects_booked and projection.booked is not None:
        expected = np.maximum(projection.booked - held, 0.0)
        raw, own = raw - expected, own - expected
    raw, own = np.maximum(raw, 0.0), np.maximum(own, 0.0)
    more = (weights.delay_weight + weights.eviction_weight * projection.churn) * own
    priced: Floats = weights.prefill_load_scale * (raw + more)
    priced += weights.decode_load_scale * projection.decode
    priced += weights.context_load_scale * projection.context
    return priced


def wait_blocks(seats: int, block_size: int) -> int:
    """Return the blocks of context that it is worth to wait for one of so many seats, at least 1.

    Whoever comes to a rank where R requests are waits for R + 1 - seats of them to end.
    """
    return round(SEAT_TOKENS * max(1.0, FEW_SEATS / seats) / block_size)


def is_plain(request: SelectRequest, weights: Weights) -> bool:
    """Tell whether nothing but the formula decides, without its rarer terms."""
    constraints = request.routing_constraints
    return (
        weights.temperature == 0.0
        and weights.overlap_score_credit_decay <= 0.0
        and (constraints is UNSET or not constraints.preferred_taints)
    )


def prefer(
    costs: Floats, preferred: Mapping[str, float], taints: Sequence[frozenset[str]]
) -> Floats:
    """Make candidates with preferred taints cheaper."""
    priced: Floats = costs * preferences(preferred, taints)
    return priced


def preferences(preferred: Mapping[str, float], taints: Sequence[frozenset[str]]) -> Floats:
    """Return what the cost of each candidate is multiplied with: exp(-tanh(Σ weights present)).

    Reckoned once for each set of taints: there are few, and ranks many.
    """
    factor_of = {
        have: math.exp(
            -math.tanh(sum(weight for taint, weight in preferred.items() if taint in have))
        )
        for have in set(taints)
    }
    return np.array([factor_of[have] for have in taints])
