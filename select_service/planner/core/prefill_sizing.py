"""The prefill engines needed for the TTFT target: queues of prompts of many lengths.

An engine computes one prompt after another; arrivals are Poisson, service times those of the actual
prompt lengths. `independent`: every engine has its own queue (M/G/1, Pollaczek-Khinchine): with w =
target - E[S], rho = 2w / (E[S^2]/E[S] + 2w). `pooled`: the selector knows the work queued at every
engine, and no request waits while another engine is free (M/G/n: Erlang C, scaled by the variance
of service times). If a share of requests must be in time, the tail counts, P(W > t) = C exp(-2 n
(1-rho) t E[S]/E[S^2]), instead of the mean, over the rates that may come instead of the expected
one. The reference's formula has no wait at all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.core.forecast_errors import EXACT
from select_service.planner.core.sizing import KEEP_UP, Need

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.demand import Forecast
    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.lengths import Lengths
    from select_service.planner.core.sizing import Goals
    from select_service.planner.core.surface import PrefillCurve, Surface

_HALVINGS: Final = 40
_MANY: Final = 10_000.0
"""Engines' worth of work above which no queue is computed: chance is negligible among that many."""
_MANY_BUSY: Final = 0.95
# of waits in lumps: their exponential tail's mean, relative to the mean wait; most requests are in
# lumps larger than the mean, and the last one waits twice as long as the middle one
_LUMP_TAIL: Final = 1.4
# if length alone makes requests late: this part of the late share is added
_LATE_EXTRA: Final = 0.5


def size_prefill(surface: Surface, forecast: Forecast, goals: Goals, slowness: float) -> Need:
    """Return the engines that compute the forecast's prompts in time."""
    return _queue(surface, forecast, slowness).need(
        forecast.rate,
        goals.ttft_ms / 1e3,
        goals.attainment,
        pooled=goals.pooled,
        spread=forecast.spread,
    )


def late_prefill(
    surface: Surface, forecast: Forecast, goals: Goals, slowness: float
) -> Callable[[float, int], float]:
    """Return a function from rate and engines to the share of late prompts."""
    queue = _queue(surface, forecast, slowness)

    def late(rate: float, engines: int) -> float:
        if not engines:
            return 1.0
        return queue.late_on(rate, goals.ttft_ms / 1e3, engines, pooled=goals.pooled)

    return late


def _queue(surface: Surface, forecast: Forecast, slowness: float) -> PrefillQueue:
    lengths = forecast.lengths.scaled(forecast.computed)
    return PrefillQueue(surface.prefill, lengths, slowness, forecast.lumps_s)


class PrefillQueue:
    """The service times of prompts, and the resulting queue.

    Args:
        curve: time per prompt.
        lengths: of prompts, the part to be computed.
        slowness: measured TTFT over profiled, 1 = as profiled.
        lumps_s: of how many seconds requests come at once; 0: they come one by one.
    """

    def __init__(
        self, curve: PrefillCurve, lengths: Lengths, slowness: float = 1.0, lumps_s: float = 0.0
    ) -> None:
        self._lumps_s = lumps_s
        self._times = [
            (slowness * curve.ttft_ms(tokens) / 1e3, share) for tokens, share in lengths.points
        ]
        self.latency_s = slowness * curve.latency_ms / 1e3
        """What a first token takes beside the queue, in which no engine is busy."""
        self.mean_s = sum(seconds * share for seconds, share in self._times)
        self.square = sum(seconds * seconds * share for seconds, share in self._times)

    def need(
        self,
        rate: float,
        target_s: float,
        attainment: float | None,
        *,
        pooled: bool,
        spread: Spread = EXACT,
    ) -> Need:
        """Return the engines for `rate` requests per second.

        Args:
            rate: requests per second.
            target_s: TTFT.
            attainment: share of requests that must be in time; None: on average.
            pooled: no request waits while an engine is free.
            spread: factors of the rate that may come, if a share must be in time.
        """
        target_ms, target_s = 1e3 * target_s, target_s - self.latency_s
        spare = target_s - self.mean_s
        if spare <= 0:
            alone_ms = 1e3 * (self.mean_s + self.latency_s)
            terms = {"service_s": self.mean_s, "rho": 0.0, "rate": rate}
            return Need(rate * self.mean_s / KEEP_UP, terms, _out_of_reach(target_ms, alone_ms))
        why = ""
        chance_of = _erlang_c if pooled else _always_own
        if attainment is None:

            def keeps(work: float, engines: int) -> bool:
                rho = work / engines
                wait_s = self.wait_s(rho, engines, chance_of(work, engines))
                return max(wait_s, self.lump_wait_s(rho)) <= spare
        else:
            late_most, why = self._late_allowed(target_s, 1.0 - attainment, target_ms)

            def keeps(work: float, engines: int) -> bool:
                late = 0.0
                for factor, share in spread:
                    rho, chance = factor * work / engines, chance_of(factor * work, engines)
                    alone = self.late(rho, target_s, engines, chance)
                    late += share * max(alone, self._lump_late(factor * work, target_s, engines))
                return late <= late_most

        work = rate * self.mean_s
        engines = _pooled(work, keeps) if pooled else _independent(work, keeps)
        rho = work / engines if engines else 0.0
        engines = work / KEEP_UP if math.isinf(engines) else engines  # no queue is short enough
        return Need(engines, {"service_s": self.mean_s, "rho": rho, "rate": rate}, why)

    def wait_s(self, rho: float, engines: int = 1, chance: float | None = None) -> float:
        """Return the mean wait; `chance`: of waiting at all, which is rho for one engine."""
        if rho >= 1:
            return math.inf
        chance = rho if chance is None else chance
        return chance * self.square / (2 * self.mean_s * engines * (1 - rho))

    def late(
        self, rho: float, target_s: float, engines: int = 1, chance: float | None = None
    ) -> float:
        """Return the share of requests whose first token comes after the target."""
        if rho >= 1:
            return 1.0
        chance = rho if chance is None else chance
        fall = 2 * engines * (1 - rho) * self.mean_s / self.square
        return sum(
            share * (chance * math.exp(-fall * (target_s - seconds)) if seconds < target_s else 1)
            for seconds, share in self._times
        )

    def late_on(self, rate: float, target_s: float, engines: int, *, pooled: bool) -> float:
        """Return the share of late requests, at a rate on this many engines."""
        work, target_s = rate * self.mean_s, target_s - self.latency_s
        chance = (_erlang_c if pooled else _always_own)(work, engines)
        alone = self.late(work / engines, target_s, engines, chance)
        return max(alone, self._lump_late(work, target_s, engines))

    def lump_s(self, ttft_s: float, rho: float) -> float:
        """Return of how many seconds requests come at once, where the mean TTFT is this.

        The middle one of a lump waits until half of the others are computed; without its own half.
        """
        return (ttft_s - self.latency_s - self.mean_s / 2) / rho if rho else 0.0

    def lump_wait_s(self, rho: float) -> float:
        """Return the mean wait in lumps."""
        return max(0.0, self._lumps_s * rho - self.mean_s / 2)

    def _lump_late(self, work: float, target_s: float, engines: int) -> float:
        """Return the share of late requests in lumps."""
        wait_s = _LUMP_TAIL * self.lump_wait_s(work / engines)
        if not wait_s:
            return 0.0
        return sum(
            share * (math.exp(-(target_s - seconds) / wait_s) if seconds < target_s else 1)
            for seconds, share in self._times
        )

    def _late_allowed(
        self, target_s: float, late_most: float, target_ms: float
    ) -> tuple[float, str]:
        too_long = self.late(0.0, target_s, 1, 0.0)
        if too_long <= _LATE_EXTRA * late_most:
            return late_most, ""
        why = ""
        if too_long > late_most:
            why = (
                f"{100 * too_long:.1f} % of prompts take longer than the TTFT target of "
                f"{target_ms:.0f} ms on an idle engine: raise the target (--ttft), lower the share "
                f"(--attainment), or use faster engines"
            )
        return too_long + _LATE_EXTRA * late_most, why


def _out_of_reach(target_ms: float, alone_ms: float) -> str:
    return (
        f"the TTFT target is {target_ms:.0f} ms, and one prompt alone takes {alone_ms:.0f} ms on "
        f"an idle engine: raise the target (--ttft) beyond that, or use faster engines; until "
        f"then there are as many as keep up with what comes"
    )


def _independent(work: float, keeps: Callable[[float, int], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        rho = (low + high) / 2
        low, high = (rho, high) if keeps(rho, 1) else (low, rho)
    return work / low if low else math.inf


def _pooled(work: float, keeps: Callable[[float, int], bool]) -> float:
    """Return the smallest number of engines. O(engines log engines)."""
    if not work:
        return 0.0
    if work > _MANY:
        return math.ceil(work / _MANY_BUSY)
    high = 1
    # terminates: with enough engines none waits, and requests late by length are allowed for
    while not keeps(work, high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(work, middle) else (middle, high)
    return float(high)


def _always_own(work: float, engines: int) -> float:
    """One queue per engine: a request waits whenever its engine is busy."""
    return work / engines


def _erlang_c(work: float, engines: int) -> float:
    """Return the chance that all engines are busy. O(engines)."""
    if work >= engines:
        return 1.0
    blocked = 1.0
    for count in range(1, engines + 1):
        blocked = work * blocked / (count + work * blocked)  # Erlang B, one more
    return blocked / (1 - work / engines * (1 - blocked))
