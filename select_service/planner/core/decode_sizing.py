"""The decode engines needed for the ITL target, by the mix of context lengths.

Every class of requests takes the share of an engine given by its output tokens relative to the
throughput at its own context length; shares add up. Using the mean length would promise too much:
throughput falls faster than context grows. If a share of requests must be in time, live requests
vary by their Poisson deviation around each of the possible rates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.sizing import KEEP_UP, Need

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.demand import Forecast
    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.sizing import Goals
    from select_service.planner.core.surface import DecodeSurface, Surface

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


def size_decode(
    surface: Surface,
    forecast: Forecast,
    goals: Goals,
    slowness: float,
    *,
    gpus: int,
    reach: float = NEAR,
) -> Need:
    """Return the engines that generate the forecast's outputs fast enough.

    Args:
        surface: of one engine.
        forecast: of all lengths, as cached tokens take room, too.
        goals: the targets.
        slowness: measured times over those of the surface.
        gpus: of one engine.
        reach: `NEAR` or `BACK`.
    """
    within, attainment = goals.itl_ms / slowness, goals.attainment
    work = _work(surface.decode, forecast, within, gpus, reach)
    engines = work.engines
    # if every request is too slow anyway, more engines do not help
    if attainment is not None and engines and work.slow < _ALL:
        engines = _for_share(engines, work.deviation, 1.0 - attainment, forecast.spread)
    slow_most = _MOST if attainment is None else 1.0 - attainment
    why = ""
    if work.slow > slow_most:
        alone_ms = slowness * surface.decode.itl_ms(1.0, work.slow_from)
        longer = "" if work.slow >= _ALL else f", as long as {100 * work.slow:.1f} % are,"
        why = (
            f"the ITL target is {goals.itl_ms:.1f} ms, and a single request of "
            f"{work.slow_from:.0f} tokens{longer} takes {alone_ms:.1f} ms on an engine of its own: "
            f"raise the target (--itl) to {math.ceil(10 * BACK * alone_ms) / 10:.1f} ms, or use "
            "faster engines; until then there are as many as keep up with what comes"
        )
    terms = {"corrected_itl": within, "rate": forecast.rate, "concurrency": work.concurrency}
    return Need(engines, terms, why)


def late_decode(
    surface: Surface,
    forecast: Forecast,
    goals: Goals,
    slowness: float,
    *,
    gpus: int,
    reach: float = NEAR,
) -> Callable[[float, int], float]:
    """Return a function from rate and engines to the share of requests slower than the target."""
    one = forecast._replace(rate=1.0)
    work = _work(surface.decode, one, goals.itl_ms / slowness, gpus, reach)

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
    surface: DecodeSurface, forecast: Forecast, itl_ms: float, gpus: int, reach: float
) -> _Work:
    rate, osl = forecast.rate, forecast.osl
    engines = concurrency = variance = slow = 0.0
    least = math.inf
    for isl, share in forecast.lengths.points:
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
    swing = _SWING * (_LUMPS_SWING if forecast.lumps_s > 0 else 1.0)
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
