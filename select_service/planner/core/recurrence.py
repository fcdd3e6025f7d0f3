"""Recurrence traffic: the values one, two and three periods ago, at the current level.

The period is the lag with the highest autocorrelation; the search is repeated from time to time,
and the period must explain most of the variance over at least two whole periods. Until then, and
for series without a period, the last value stands in, and the backtest does not choose this model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from select_service.planner.core.profile import Floats

RECURRING: Final = "recurring"
"""The name of this model."""
SAME_TIME: Final = "same-time"
"""The name of the other one."""

WINDOW: Final = 1_440
"""Values remembered: three days of three-minute intervals. Two periods have to fit."""
HINDCAST: Final = 240
"""Intervals on which a new period is judged."""
_SEARCH_EVERY: Final = 5
_PERIOD_MIN: Final = 4
_ALIKE_MIN: Final = 0.6  # autocorrelation at the period
_NEARLY: Final = 0.05
_HELD_MOST: Final = 0.25  # share of all values that may stand in for an unknown time
_LEVEL_WEIGHT: Final = 0.1  # weight of one interval in the ratio of this period to the last one
_LEVEL_MOST: Final = 2.0
_DAMPED: Final = 0.7
"""Power of the ratio by which past periods went on from this time; the rest is chance."""
_RATIO_MOST: Final = 3.0
_WEIGHTS: Final = (0.5, 0.3, 0.2)
"""Weights of the latest periods: three contain less chance than one; the last is the nearest."""


class Recurrence:
    """Finds the period by itself.

    `add` is O(1), except for a search, O(n log n), every few values.
    """

    def __init__(self) -> None:
        self._values: list[float] = []
        self._searched = 0
        self._level = 1.0
        self.period = 0

    def add(self, value: float) -> None:
        """Add one value."""
        self._keep(value)
        self._searched += 1
        if self._searched >= _SEARCH_EVERY:
            self._searched = 0
            self._search()
        if self.period:
            self._compare(value, self._before(self.period + 1))

    def skip(self, intervals: int) -> list[float]:
        """Let unknown time pass; returns the values that stand in for it.

        Without them everything later would be shifted within its period. They are the forecasts;
        whole periods are left out, as they change nothing. Before a period is found the last value
        stands in, as long as that does not outweigh the known values.
        """
        period, held = self.period, int(_HELD_MOST * len(self._values))
        count = intervals % period if period else intervals if intervals <= held else 0
        stood_in = []
        for _ in range(count):
            stood_in.append(self.predict())
            self._keep(stood_in[-1])
        return stood_in

    def _keep(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) > 2 * WINDOW:
            del self._values[:WINDOW]

    def predict(self, steps: int = 1) -> float:
        """Return the values whole periods before that time, scaled to this period's level."""
        if not self._values:
            return 0.0
        if not self.period:
            return self._values[-1]
        back = self.period - (steps - 1) % self.period
        return self._level * self._before(back)

    def going_on(self, steps: int) -> float:
        """Return the last value, changed as past periods changed from this time on, but less."""
        last = self._values[-1] if self._values else 0.0
        if not self.period:
            return last
        now = self._before(self.period + 1)
        then = self._before(self.period - (steps - 1) % self.period)
        if now <= 0 or then <= 0:
            return last
        ratio = min(max(then / now, 1 / _RATIO_MOST), _RATIO_MOST)
        return last * math.pow(ratio, _DAMPED)

    def hindcast(self) -> list[tuple[float, float]]:
        """Return this period's forecasts of the past, with the actual values. O(n)."""
        if not self.period:
            return []
        count = len(self._values)
        return [
            (self._before(count - index + self.period), self._values[index])
            for index in range(max(self.period, count - HINDCAST), count)
        ]

    def _before(self, back: int) -> float:
        """Return the weighted mean this far back, and whole periods further."""
        values, period = self._values, self.period
        known = [
            (weight, values[-back - times * period])
            for times, weight in enumerate(_WEIGHTS)
            if back + times * period <= len(values)
        ]
        total = sum(weight for weight, _ in known)
        return sum(weight * value for weight, value in known) / total

    def _compare(self, value: float, before: float) -> None:
        if before > 0 and value > 0:
            ratio = min(max(value / before, 1 / _LEVEL_MOST), _LEVEL_MOST)
            self._level += _LEVEL_WEIGHT * (ratio - self._level)

    def _search(self) -> None:
        values = np.asarray(self._values[-WINDOW:], dtype=np.float64)
        self.period = _period(_autocorrelation(values), len(values) // 2)
        if not self.period:
            self._level = 1.0


class SameTime:
    """The last value, changed as it changed at this time of past periods.

    Where every period is at another level, or its course is half chance, this errs less than what
    repeats the periods themselves.

    Args:
        recurrence: of the same series, which learns each value first.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        self._recurrence = recurrence

    @property
    def period(self) -> int:
        """In intervals; 0: none has been found."""
        return self._recurrence.period

    def add(self, value: float) -> None:
        """Do nothing: the other one has learnt the value."""

    def predict(self, steps: int = 1) -> float:
        """Return the last value times the damped ratio."""
        return self._recurrence.going_on(steps)


def _period(alike: Floats, longest: int) -> int:
    """Return the lag of the highest autocorrelation; 0: there is no period."""
    first = 1  # neighbours are alike anyway: start where that has passed
    while first < longest and alike[first + 1] <= alike[first]:
        first += 1
    first = max(first, _PERIOD_MIN)
    if first >= longest:
        return 0
    best = float(alike[first : longest + 1].max())
    # two periods are alike, too: take the first lag that is nearly as good, at its peak
    found = first + int(np.argmax(alike[first : longest + 1] >= best - _NEARLY))
    while found < longest and alike[found + 1] > alike[found]:
        found += 1
    valley = float(alike[:found].min())
    is_peak = alike[found] >= _ALIKE_MIN and alike[found] - valley > _ALIKE_MIN / 2
    return found if is_peak else 0


def _autocorrelation(values: Floats) -> Floats:
    """Return the autocorrelation at every lag, each over the values it has. O(n log n)."""
    count = len(values)
    # squares of huge values would overflow
    centred = values / max(float(np.abs(values).max()), 1e-300)
    centred = centred - centred.mean()
    spectrum = np.fft.rfft(centred, 2 * count)
    products = np.fft.irfft(spectrum * np.conj(spectrum), 2 * count)[:count]
    squares = np.cumsum(centred**2)
    total = squares[-1]
    # of the part without its last lag values, and of the part without its first ones
    heads = squares[::-1]
    tails = total - np.append(0.0, squares[:-1])
    scale: Floats = np.sqrt(np.maximum(heads * tails, 0.0))
    correlations: Floats = np.divide(
        products, scale, out=np.zeros(count), where=scale > 1e-9 * total
    )
    return correlations
