"""The fast loop: reacts to current arrivals, whatever was forecast.

New engines need a minute or so to start, so no number of them helps requests waiting now; the goal
is that the queue stops growing and is gone soon. So the only question is how many requests arrive
per second. Ideally they are counted; if not that often, the arrival rate of work is the growth of
the queue plus what the ready engines compute meanwhile. That rate is sized like a forecast, and the
prefill queue adds engines to work it off. Nothing climbs one replica at a time, and no engines are
ordered to empty a queue at once: requests stay on their decode engine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.catch_up import COUNT_S, deviations, is_surge
from select_service.planner.core.forecast_errors import EXACT
from select_service.planner.types import number_of

if TYPE_CHECKING:
    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.surface import Surface
    from select_service.planner.types import Load

RECOVERY_S: Final = 60.0
"""The time in which a queue is to be worked off."""
_MEMORY: Final = 0.6  # weight of earlier growth, per look
# more work than this multiple of what fits the target is a queue, less is chance
_SPARE_TIMES: Final = 2.0


class Surge(NamedTuple):
    """More arrivals than engines are planned for."""

    rate: float  # requests per second
    engines_least: float = 0.0  # to compute the arrivals and work the queue off meanwhile
    why: str = ""
    spread: Spread = EXACT  # what may come instead


class ArrivalRate:
    """Counts arrivals over the last half minute, or since they last jumped if that is shorter."""

    def __init__(self) -> None:
        self._counts: list[tuple[float, float]] = []  # (requests, seconds), oldest first
        self.latest: float | None = None
        """Requests per second at the last count; None: not counted."""

    @property
    def rate(self) -> float | None:
        """Requests per second over the whole span; None: not counted."""
        seconds = sum(seconds for _, seconds in self._counts)
        return sum(count for count, _ in self._counts) / seconds if seconds else None

    def forget(self) -> None:
        """Restart the counts: arrivals before a new plan do not count against it."""
        self._counts.clear()

    def observe(self, load: Load, planned: float, dispersion: float = 1.0) -> Surge | None:
        """Return the surge in the counts, if any.

        Args:
            load: with the last count.
            planned: requests per second.
            dispersion: of arrivals, see `is_surge`.
        """
        if not load.is_counted:
            self._counts.clear()
            self.latest = None
            return None
        if load.seconds > 0:
            self._counts.append((load.requests, load.seconds))
            self.latest = load.requests / load.seconds
        while sum(seconds for _, seconds in self._counts[1:]) >= COUNT_S:
            del self._counts[0]
        return self._surge(planned, dispersion)

    def _surge(self, planned: float, dispersion: float) -> Surge | None:
        """Return the surge of the span ending now that lies furthest above the plan."""
        count = seconds = 0.0
        found: Surge | None = None
        most = 0.0
        for one, span in reversed(self._counts):
            count, seconds = count + one, seconds + span
            expected = planned * seconds
            above = deviations(count, expected)
            if is_surge(count, expected, dispersion) and above > most:
                most = above
                why = f"{count:.0f} requests came in {seconds:.0f} s, {expected:.0f} were planned"
                found = Surge(count / seconds, 0.0, why)
        return found


class QueueGrowth:
    """How fast one pool's queue grows: prompts to compute, or live requests beyond their ITL."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._at = 0.0
        self.per_s = 0.0
        """Smoothed over looks."""

    def _observe(self, value: float, at: float) -> None:
        """Add what was measured at a time; measurements not later than the last say nothing."""
        if self._last is not None:
            if at <= self._at:
                return
            growth = (value - self._last) / (at - self._at)
            self.per_s += (1 - _MEMORY) * (growth - self.per_s)
        self._last, self._at = value, at

    def _forget(self) -> None:
        """Restart after the quantity was not seen."""
        self._last, self.per_s = None, 0.0

    def prefill(
        self,
        surface: Surface,
        load: Load,
        now: float,
        *,
        target_ms: float,
        isl: float,
        ready: int,
        arriving: float | None,
        units: str = "engine",
    ) -> Surge | None:
        """Return the surge shown by waiting prompts; None: there is no queue, or it is unknown.

        Args:
            surface: of the engines.
            load: current.
            now: monotonic seconds.
            target_ms: TTFT.
            isl: mean tokens to compute per prompt.
            ready: engines that compute.
            arriving: requests per second, as last counted; None: not counted.
            units: what those that compute are called.
        """
        tokens = number_of(load.prefill_backlog_tokens)
        if tokens is None or isl <= 0:
            self._forget()
            return None
        one_s = surface.prefill.ttft_ms(isl) / 1e3
        work_s = tokens / isl * one_s
        self._observe(work_s, now - load.ago_s)
        spare_s = (target_ms - surface.prefill.latency_ms) / 1e3 - one_s
        spare_s = max(spare_s, 0.1 * target_ms / 1e3)
        if work_s <= _SPARE_TIMES * spare_s * max(1, ready):
            return None  # chance
        growth = self.per_s
        # in engines: all that are ready compute
        work = max(0.0, ready + growth) if arriving is None else arriving * one_s
        return Surge(
            work / one_s,
            work + work_s / RECOVERY_S,
            f"{tokens:.0f} tokens wait to be computed, {work_s:.1f} s of work for {ready} {units}s"
            f", growing by {growth:+.1f} s a second",
        )

    def decode(
        self,
        surface: Surface,
        load: Load,
        now: float,
        *,
        itl_ms: float,
        osl: float,
        ready: int,
        units: str = "engine",
    ) -> Surge | None:
        """Return the surge shown by live requests; None: they keep the ITL, or are unknown."""
        live, context = number_of(load.concurrency), number_of(load.context_tokens)
        if live is None or not context or osl <= 0:
            self._forget()
            return None
        self._observe(live, now - load.ago_s)
        if load.is_counted:
            return None  # live requests were counted on arrival
        best = surface.decode.best(itl_ms, context)
        engines = max(1, ready)
        if best is None or live <= best.concurrency * engines:
            return None
        done = rate_ended(surface, live, context, osl=osl, engines=engines)
        rate = max(0.0, done + self.per_s)
        return Surge(
            rate,
            0.0,
            f"{live:.0f} live requests of {context:.0f} tokens on {ready} {units}s, growing by "
            f"{self.per_s:+.1f} a second; {best.concurrency:.1f} per {units} keep the ITL",
        )


def rate_ended(surface: Surface, live: float, context: float, *, osl: float, engines: int) -> float:
    """Return the requests per second that end, and in steady state arrive, with this many live.

    Args:
        surface: of the engines.
        live: requests, over all engines.
        context: mean tokens of one.
        osl: mean tokens of an output.
        engines: that generate.
    """
    full = surface.decode.best(math.inf, context)
    running = live / engines
    if full is not None:
        running = min(running, full.concurrency)  # the others wait for room
    return engines * running / (osl * surface.decode.itl_ms(running, context) / 1e3)
