"""The decode engines needed for the ITL target, by the mix of context lengths.

Every class of requests takes the share of an engine given by its output tokens relative to the
throughput at its own context length; shares add up. Using the mean length would promise too much:
throughput falls faster than context grows. If a share of requests must be in time, live requests
vary by their Poisson deviation around each of the possible rates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.forecast_errors import EXACT

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.lengths import Lengths
    from select_service.planner.core.surface import DecodeSurface

KEEP_UP: Final = 0.85
"""The utilization of engines if their target cannot be met anyway."""

NEAR: Final = 1.05
"""A target below so many times what a single request takes is out of reach: engines are divided by
the difference, and what the single request takes is never known as exactly."""
BACK: Final = 1.15
"""The same for a target that was out of reach before: counts are not to swing with measurements."""
_ALONE: Final = 0.1
"""Share of its room that an engine fills at such a target; above, few requests hardly slow it."""

_ALL: Final = 1.0 - 1e-9  # 1, up to rounding
_MOST: Final = 0.5  # share that may be slow if a target holds on average
_SWING: Final = 0.69
"""Factor on the deviation of live requests: a request's ITL is its mean over many of them."""
_LUMPS_SWING: Final = 1.15
"""The same where requests come together, relative to that."""
_DEVIATIONS_MOST: Final = 8.0
_HALVINGS: Final = 40


class DecodeNeed(NamedTuple):
    """The needed engines, as a fraction."""

    engines: float
    concurrency: float  # live requests at the target, over all engines
    why: str = ""  # why the target cannot be met, in words


def decode_need(
    surface: DecodeSurface,
    *,
    rate: float,
    lengths: Lengths,
    osl: float,
    itl_ms: float,
    gpus: int,
    attainment: float | None = None,
    spread: Spread = EXACT,
    in_lumps: bool = False,
    slowness: float = 1.0,
    reach: float = NEAR,
) -> DecodeNeed:
    """Return the engines for `rate` requests per second.

    Args:
        surface: of one engine.
        rate: requests per second.
        lengths: of prompts, all tokens: cached ones take room, too.
        osl: mean output tokens.
        itl_ms: the target.
        gpus: of one engine.
        attainment: share of requests that must be in time; None: on average.
        spread: factors of the rate that may come, if a share must be in time.
        in_lumps: requests come together.
        slowness: measured times over those of the surface.
        reach: `NEAR` or `BACK`.
    """
    within = itl_ms / slowness
    work = _work(surface, rate, lengths, osl, within, gpus, in_lumps=in_lumps, reach=reach)
    engines = work.engines
    # if every request is too slow anyway, more engines do not help
    if attainment is not None and engines and work.slow < _ALL:
        engines = _for_share(engines, work.deviation, 1.0 - attainment, spread)
    slow_most = _MOST if attainment is None else 1.0 - attainment
    why = ""
    if work.slow > slow_most:
        alone_ms = slowness * surface.itl_ms(1.0, work.slow_from)
        longer = "" if work.slow >= _ALL else f", as long as {100 * work.slow:.1f} % are,"
        why = (
            f"the ITL target is {itl_ms:.1f} ms, and a single request of {work.slow_from:.0f} "
            f"tokens{longer} takes {alone_ms:.1f} ms on an engine of its own: raise the target "
            f"(--itl) to {math.ceil(10 * BACK * alone_ms) / 10:.1f} ms, or use faster engines; "
            f"until then there are as many as keep up with what comes"
        )
    return DecodeNeed(engines, work.concurrency, why)


def decode_late(
    surface: DecodeSurface,
    *,
    lengths: Lengths,
    osl: float,
    itl_ms: float,
    gpus: int,
    in_lumps: bool = False,
    reach: float = NEAR,
) -> Callable[[float, int], float]:
    """Return a function from rate and engines to the share of requests slower than the target."""
    work = _work(surface, 1.0, lengths, osl, itl_ms, gpus, in_lumps=in_lumps, reach=reach)

    def late(rate: float, engines: int) -> float:
        if work.slow >= _ALL:
            return 1.0
        deviation = work.deviation * math.sqrt(rate)
        return _above((engines - work.engines * rate) / deviation) if deviation else 0.0

    return late


class _Work(NamedTuple):
    """The load of requests at the target; those too long for any engine are sized to keep up."""

    engines: float
    concurrency: float
    deviation: float  # of `engines`
    slow: float  # the share of requests too long for any engine
    slow_from: float  # the smallest such length, prompt and half the output


def _work(
    surface: DecodeSurface,
    rate: float,
    lengths: Lengths,
    osl: float,
    itl_ms: float,
    gpus: int,
    *,
    in_lumps: bool,
    reach: float,
) -> _Work:
    engines = concurrency = variance = slow = 0.0
    least = math.inf
    for isl, share in lengths.points:
        context = isl + osl / 2
        best = surface.best(itl_ms, context)
        busy = 1.0
        if best is None or (
            best.kv_usage < _ALONE and itl_ms < reach * surface.itl_ms(1.0, context)
        ):
            slow, least, busy = slow + share, min(least, context), KEEP_UP
            best = surface.best(math.inf, context)
            assert best is not None, "a full engine keeps any ITL"
        live = rate * share * osl * best.itl_ms / 1e3
        concurrency += live
        engines += rate * share * osl / (best.thpt_per_gpu * gpus * busy)
        variance += live * (1 / max(best.concurrency, 1.0)) ** 2
    swing = _SWING * (_LUMPS_SWING if in_lumps else 1.0)
    return _Work(engines, concurrency, swing * math.sqrt(variance), slow, least)


def _for_share(mean: float, deviation: float, late_most: float, spread: Spread) -> float:
    """Return the engines that keep the late share within the limit, by bisection."""

    def late(engines: float) -> float:
        return sum(
            share * _above((engines - factor * mean) / (deviation * math.sqrt(factor)))
            for factor, share in spread
            if factor > 0
        )

    most = max(factor for factor, _ in spread)
    low, high = 0.0, most * mean + _DEVIATIONS_MOST * deviation * math.sqrt(max(most, 1.0))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) <= late_most else (middle, high)
    return high


def _above(deviations: float) -> float:
    """Return the probability that a normal variable exceeds its mean by this many deviations."""
    return math.erfc(deviations / math.sqrt(2.0)) / 2.0
