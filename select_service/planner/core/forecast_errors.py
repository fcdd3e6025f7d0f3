"""Past forecast errors, and what they require a forecast to be prepared for.

A share of requests in time is a share of all requests, including those of unforeseen intervals:
promising 99 % requires engines for the interval that was forecast too low, as often as that
happens. Errors are kept as differences of square roots, in which the chance of arrivals is equal at
any load, and weighed by the actual requests. The largest event is excluded: once is chance, twice
is a pattern. Foreseen traffic costs nothing here; unforeseen bursts cost headroom, or attainment.
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

EXACT: Final[Spread] = ((1.0, 1.0),)
POINTS_MIN: Final = 12
"""With fewer intervals nothing is known about errors."""
WINDOW: Final = 240
"""Intervals remembered."""
_ALIKE: Final = 1.03
"""Factors with a smaller ratio are merged into one point, their mean."""
_SMALL: Final = 0.9  # lower factors cost nothing and are one point
_CHANCE: Final = 0.25  # variance of the root of a Poisson count, at any load
_CHANCE_MOST: Final = 1.5  # three standard deviations of such a root
_FACTOR_MOST: Final = 20.0  # for forecasts near 0


class ForecastErrors:
    """Differences between the forecasts and the actual values of one series."""

    def __init__(self) -> None:
        # (difference of roots, weight)
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, forecast: float, actual: float) -> None:
        """Add one interval. O(1)."""
        roots = math.sqrt(max(0.0, actual)) - math.sqrt(max(0.0, forecast))
        self._seen.append((roots, max(0.0, actual)))

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def usual(self) -> float | None:
        """Return the usual error of a root, as two deviations; None: too few are known.

        Estimated from the median: rare events say nothing about ordinary intervals.
        """
        if len(self._seen) < POINTS_MIN:
            return None
        return 2 * 1.4826 * median(abs(difference) for difference, _ in self._seen)

    @property
    def unforeseen(self) -> float:
        """Return the share of requests that exceeded their forecasts by more than chance."""
        total = sum(weight for _, weight in self._seen)
        above = sum(
            weight - max(0.0, math.sqrt(weight) - difference) ** 2
            for difference, weight in self._seen
            if difference > _CHANCE_MOST
        )
        return above / total if total else 0.0

    def spread(self, forecast: float) -> Spread:
        """Return what may come instead of a forecast, as a dozen points or so. O(n log n).

        Capped at the maximum ever seen, plus the usual error: a burst does not come on top of
        itself. The chance of Poisson arrivals at an equal rate is deducted: queues are sized for it
        anyway.
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
        begun = -math.inf  # the smallest factor merged into the last point
        for difference, weight in ordered:
            share = weight / total
            if not share:  # the share of a tiny weight may be 0
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
