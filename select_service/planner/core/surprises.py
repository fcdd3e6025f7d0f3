"""How far off forecasts have been, and so what a forecast has to be prepared for.

A share of requests that must be in time is a share of all requests, those of intervals nobody
foresaw included: whoever promises 99 % has to have engines for the interval that was forecast too
low, as often as that happens. Differences are kept between square roots, where the chance of
arrivals is alike at any load, and weighed by the requests that came. The greatest event is left
out: once is chance, twice is a pattern. Traffic that is foreseen costs nothing here; bursts that
are not cost headroom, or attainment.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TypeAlias

    Spread: TypeAlias = tuple[tuple[float, float], ...]
    """(factor of the expected rate, share of requests), shares adding up to 1."""

__all__ = ["EXACT", "Surprises"]

EXACT: Final[Spread] = ((1.0, 1.0),)
POINTS_MIN: Final = 12
"""With fewer intervals nothing is known about errors."""
WINDOW: Final = 240
"""Intervals that are remembered."""
_ALIKE: Final = 1.03
"""Factors so close count as one point, their mean."""
_SMALL: Final = 0.9  # what is below costs nothing and is one point
_CHANCE: Final = 0.25  # the variance of the root of a Poisson count, at any load
_CHANCE_MOST: Final = 1.5  # three deviations of such a root
_FACTOR_MOST: Final = 20.0  # of a forecast of nearly nothing


class Surprises:
    """Differences between forecasts of one series and what came."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # difference of roots, weight

    def add(self, forecast: float, actual: float) -> None:
        """Take in one interval. O(1)."""
        roots = math.sqrt(max(0.0, actual)) - math.sqrt(max(0.0, forecast))
        self._seen.append((roots, max(0.0, actual)))

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def usual(self) -> float | None:
        """Return how far a root is off in most intervals: two deviations; None: too few are known.

        The median's: an event now and then says nothing about ordinary intervals.
        """
        if len(self._seen) < POINTS_MIN:
            return None
        return 2 * 1.4826 * median(abs(difference) for difference, _ in self._seen)

    @property
    def unforeseen(self) -> float:
        """Return the share of requests that came above their forecasts, and not by chance."""
        total = sum(weight for _, weight in self._seen)
        above = sum(
            weight - max(0.0, math.sqrt(weight) - difference) ** 2
            for difference, weight in self._seen
            if difference > _CHANCE_MOST
        )
        return above / total if total else 0.0

    def spread(self, forecast: float) -> Spread:
        """Return what may come instead of a forecast, as some dozen points. O(n log n).

        Nothing is greater than what ever came, but for the usual error: a burst does not
        come on top of itself. What Poisson arrivals differ by at the same rate is taken off:
        queues are sized for it anyway.
        """
        if len(self._seen) < POINTS_MIN or forecast <= 0:
            return EXACT
        ordered = sorted(self._without_greatest())
        total = sum(weight for _, weight in ordered)
        if not total:
            return EXACT
        root = math.sqrt(forecast)
        seen_most = max(weight for _, weight in self._seen)
        most = max(seen_most, (root + (self.usual or 0.0)) ** 2) / forecast
        points: list[tuple[float, float]] = []
        begun = -math.inf  # the smallest factor of the last point
        for difference, weight in ordered:
            share = weight / total
            if not share:  # even of something, if it is nearly nothing
                continue
            rate = max(0.0, root + _beyond_chance(difference)) ** 2 / forecast
            factor = min(rate, most, _FACTOR_MOST)
            if points and factor < max(begun, _SMALL) * _ALIKE:
                mean, before = points.pop()
                both = before + share
                points.append(((mean * before + factor * share) / both, both))
            else:
                begun = factor
                points.append((factor, share))
        return tuple(points)

    def _without_greatest(self) -> list[tuple[float, float]]:
        seen = list(self._seen)
        first = last = max(range(len(seen)), key=lambda index: seen[index][0])
        limit = seen[first][0] / 2
        while first > 0 and seen[first - 1][0] > limit:
            first -= 1
        while last < len(seen) - 1 and seen[last + 1][0] > limit:
            last += 1
        return seen[:first] + seen[last + 1 :]


def _beyond_chance(difference: float) -> float:
    return math.copysign(math.sqrt(max(0.0, difference**2 - _CHANCE)), difference)
