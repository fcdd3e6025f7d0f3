"""The numbers of the cost formula: as configured, as a policy has them, as one decision uses them.

`cost.py` and the pricer multiply with them. How a number was chosen stands beside it; nothing is
priced here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from select_service.types import RouterConfig, RouterConfigOverride

_WEIGHT_MAX: Final = 1e100
"""Larger weights mean nothing more, and products of two with 64-bit counts stay finite: an infinite
cost would make different ranks equal."""


DECODE_LOAD_SCALE: Final = 0.0
"""`first-token`: an engine reads shared blocks once per answer, so the number of distinct blocks
does not predict the length of a step; the context does."""

CONTEXT_LOAD_SCALE: Final = 0.0625
"""`first-token`: attending to a block costs a sixteenth of computing it."""

SEQUENCE_TOKENS: Final = 4_096
"""`first-token`: a request's fixed weight in the context, besides what it attends to. A step does
the same work for every sequence, however short, which takes about as long as reading a thousand
tokens of cache. And an engine runs `max_num_seqs` requests at once: levelling lengths alone filled
the batches of ranks with short prompts, and what came there next waited for an answer to end. A
thousand tokens only made that rarer; 4,096 was chosen by measuring, from 256 to 8,192."""

FULL_BATCH_TOKENS: Final = 8_192
"""`first-token`: context tokens that waiting for one more answer to end is worth, on a rank that
runs `max_num_seqs` requests. Answers last for seconds, but a request that goes elsewhere without
its prefix there is computed at the cost of all. 512 tokens to compute (sixteen tokens of context
equal one of them) were chosen by measuring. Twice as much helps more if limits are unequal or
nothing is shared, and costs conversations on small engines 5 % of their p90; the measured duration
of answers would be four times as much and more."""

SMALL_BATCH: Final = 32
"""`first-token`: with a smaller limit an answer ends more rarely, and waiting is worth
proportionally more."""

DELAY_SCALE: Final = 1.0
"""`first-token`: requests behind wait for the current prefill just as its own request does."""

EVICTION_SCALE: Final = 0.125
"""`first-token`: of what a prompt evicts from a cache, an eighth of the share that prompts find
would have been asked for again. If nothing is found nothing is lost, and levelling what went into
caches would only make loads uneven."""


PACE_SCALE: Final = 1.0
"""`first-token`: everything a rank can have computed since its last report is taken off its queue.
Otherwise queues fall by a whole step at once, just when the next step has begun, and a request that
arrives then waits for all of it."""


INTERFERENCE_SCALE: Final = 0.05
"""`first-token`: each token that a rank computes makes every request that decodes there wait; that
wait counts a twentieth of what the prompt's own caller waits."""


SLOWNESS_SCALE: Final = 0.33
"""`first-token`: a third of what a worn rank takes longer than others is added to its cost. If all
of it were, conversations would leave a rank of a quarter of the speed, whose cache holds them."""


class Weights(NamedTuple):
    """The weights of the formula in force for one request.

    The last nine default to those of `kv-cost`. As configured, `delay_weight` is per prompt that a
    rank computes on average, `eviction_weight` per multiple of the average churn of a cache, given
    that all of every prompt is found, and `pace` a share of a rank's pace. `at_present` turns them
    into the factors of one decision, where `pace` is in tokens per second.
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
    interference: float = 0.0
    decode_active_request_weight: float = 0.0
    slowness: float = 0.0

    @property
    def is_kv_cost(self) -> bool:
        """Whether the weights are nothing but the contract's formula."""
        return self[_OF_CONTRACT:] == _NOTHING_MORE

    @property
    def reads_queues(self) -> bool:
        """Whether prices need more of a rank's queue than its length."""
        return (
            self.pace > 0.0
            or self.interference > 0.0
            or self.decode_active_request_weight != 0.0
            or self.slowness > 0.0
        )

    def kv_cost(self) -> Weights:
        """Return the weights without anything beyond the contract's formula."""
        return self if self.is_kv_cost else Weights(*self[:_OF_CONTRACT])

    def at_present(self, computing: float, turnover: float, pace: float) -> Weights:
        """Return the factors of one decision.

        Args:
            computing: prompts not computed yet, per rank.
            turnover: recently computed tokens, per rank, divided by the share of prompts that was
                found; 0: none, and caches are as good as empty.
            pace: tokens that a rank computes per second.
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
            self.interference / (1.0 + computing),
            self.decode_active_request_weight,
            self.slowness,
        )


_NOTHING_MORE: Final = (1.0, 0.0, 0.0, False, 0.0, 0.0, 0.0, 0.0, 0.0)

_OF_CONTRACT: Final = 7
"""Number of weights in the contract's formula."""


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
        _bounded(config.decode_active_request_weight),
        _slowness(config),
    )


def _slowness(config: RouterConfig) -> float:
    """Return the weight of how much slower a worn rank is."""
    if config.slowness_scale is not None:
        return _bounded(config.slowness_scale)
    return SLOWNESS_SCALE if config.policy == "first-token" else 0.0


def _terms(config: RouterConfig) -> tuple[float, float, float, bool, float, float, float]:
    """Return the weights that the contract's formula does not have."""
    terms: tuple[float, float, float, bool, float, float, float] = _NOTHING_MORE[:-2]
    if config.policy == "first-token":
        scales = DECODE_LOAD_SCALE, DELAY_SCALE, EVICTION_SCALE
        terms = (*scales, True, CONTEXT_LOAD_SCALE, PACE_SCALE, INTERFERENCE_SCALE)
    decode, delay, eviction, expects, context, pace, interference = terms
    return (
        _bounded(decode if config.decode_load_scale is None else config.decode_load_scale),
        _bounded(delay if config.delay_scale is None else config.delay_scale),
        _bounded(eviction if config.eviction_scale is None else config.eviction_scale),
        expects if config.expects_booked is None else config.expects_booked,
        _bounded(context if config.context_load_scale is None else config.context_load_scale),
        _bounded(pace if config.pace_scale is None else config.pace_scale),
        _bounded(interference if config.interference_scale is None else config.interference_scale),
    )


def _bounded(weight: float) -> float:
    return max(-_WEIGHT_MAX, min(_WEIGHT_MAX, weight))


def sequence_blocks(block_size: int) -> int:
    """Return a request's fixed weight in the context, in blocks."""
    return round(SEQUENCE_TOKENS / block_size)


def wait_blocks(max_num_seqs: int, block_size: int) -> int:
    """Return the context blocks that waiting for an answer to end is worth; a limit is at least 1.

    A request at a rank with R requests waits for R + 1 - max_num_seqs of them to end.
    """
    return round(FULL_BATCH_TOKENS * max(1.0, SMALL_BATCH / max_num_seqs) / block_size)
