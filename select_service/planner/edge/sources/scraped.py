"""Arrivals from counters that are scraped now and then, each target at its own time.

Between two scrapes a counter stands still, and then it jumps: the difference of two looks is
nothing, nothing, and a lump. So arrivals are counted in the time of the samples: up to the moment
to which every target has been scraped, and of a target that was scraped later too, the part that
came before, as if they had come evenly. A target that stays away for longer than its scrapes are
apart usually is not waited for: it is gone, or does not answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from select_service.planner.types import IDLE, Missing, Value

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from select_service.planner.types import Reading

__all__ = ["Arrived", "Sample", "ScrapedArrivals"]

AWAITED: Final = 2.0
"""How many usual distances of its scrapes a target may be late before others go on without it."""
_SPACING_S: Final = 30.0  # assumed of a target that was scraped once
_SKEW_S: Final = 60.0  # clocks of two who scrape the same may differ by this much


class Sample(NamedTuple):
    """One counter of one target."""

    target: Hashable
    series: Hashable
    at: float  # seconds, by the clock of whoever scrapes
    value: float


class Arrived(NamedTuple):
    """Requests of a span of time that follows on the one before."""

    requests: Reading
    seconds: float = 0.0
    ago_s: float = 0.0  # since the end of the span


class ScrapedArrivals:
    """Counts the arrivals of one model over all targets."""

    def __init__(self) -> None:
        self._targets: dict[Hashable, _Target] = {}
        self._until: float | None = None  # everything up to then has been returned

    def take(self, samples: Iterable[Sample]) -> None:
        """Add the latest sample of each counter; those that were seen before change nothing."""
        seen: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
        times: dict[Hashable, float] = defaultdict(lambda: -math.inf)
        for one in samples:
            seen[one.target][one.series] = one.value
            times[one.target] = max(times[one.target], one.at)
        for name, counts in seen.items():
            if name in self._targets:
                self._targets[name].take(times[name], counts)
            else:
                self._targets[name] = _Target(times[name], counts)

    def next(self, now: float) -> Arrived:
        """Return the arrivals that have become known since the last call.

        Args:
            now: by the clock of the samples.
        """
        if self._until is not None and now < self._until - _SKEW_S:
            self._targets.clear()
            self._until = None
            return Arrived(Missing("the clock went back"))
        awaited = [one.last_at for one in self._targets.values() if one.due_at >= now]
        if not awaited:
            last = max((one.last_at for one in self._targets.values()), default=None)
            self._targets.clear()
            self._until = None
            if last is None:
                return Arrived(Missing("no series"))
            return Arrived(Missing(f"nothing has been scraped for {now - last:.0f} s"))
        if self._until is None:
            self._until = max(awaited)
            return Arrived(Missing("counting begins"))
        begin, end = self._until, min(awaited)
        if end <= begin:
            return Arrived(IDLE, 0.0, max(0.0, now - begin))
        requests = sum(one.between(begin, end) for one in self._targets.values())
        self._until = end
        # of a target that is gone, everything has been returned by now
        self._targets = {
            name: one
            for name, one in self._targets.items()
            if one.due_at >= now or one.last_at > end
        }
        reading = Value(requests) if requests > 0 else IDLE
        return Arrived(reading, end - begin, max(0.0, now - end))


class _Target:
    """One target's counters as one course of arrivals, which begins when it is first seen."""

    def __init__(self, at: float, counts: dict[Hashable, float]) -> None:
        self._counts = counts
        self._at = [at]
        self._arrived = [0.0]
        self._spacing_s = _SPACING_S

    @property
    def last_at(self) -> float:
        return self._at[-1]

    @property
    def due_at(self) -> float:
        """Until when its next sample is waited for."""
        return self.last_at + AWAITED * self._spacing_s

    def take(self, at: float, counts: dict[Hashable, float]) -> None:
        if at <= self.last_at:
            return
        arrived = 0.0
        for series, count in counts.items():
            # a new series of a known target, such as that of another status, begins at zero
            before = self._counts.get(series, 0.0)
            arrived += count - before if count >= before else count
        self._counts |= counts
        self._spacing_s = at - self.last_at
        self._at.append(at)
        self._arrived.append(self._arrived[-1] + arrived)

    def between(self, begin: float, end: float) -> float:
        """Return the arrivals of a span; earlier ones are forgotten."""
        first, last = np.interp((begin, end), self._at, self._arrived)
        passed = int(np.searchsorted(self._at, end, side="right")) - 1
        if passed > 0:
            del self._at[:passed], self._arrived[:passed]
        return float(last - first)
