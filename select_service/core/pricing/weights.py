"""The numbers of the cost formula: as configured, as a policy has them, as one decision uses them.

`scoring.py` and the pricer multiply with them. How a number was chosen stands beside it; nothing is
priced here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from select_service.types import RouterConfig, RouterConfigOverride

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


def wait_blocks(seats: int, block_size: int) -> int:
    """Return the blocks of context that it is worth to wait for one of so many seats, at least 1.

    Whoever comes to a rank where R requests are waits for R + 1 - seats of them to end.
    """
    return round(SEAT_TOKENS * max(1.0, FEW_SEATS / seats) / block_size)
