"""What comes again: the value one period ago, at the level of now.

The period is the lag at which the series resembles itself most; it is looked for again now and
then, and has to explain most of the variance over two whole periods at least. Until then, and on
series that repeat nothing, the last value stands in, and the backtest does not choose this model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from select_service.planner.core.profile import Floats

__all__ = ["Recurring"]

WINDOW: Final = 1_440
"""Values that are remembered: three days of three-minute intervals."""
_SEARCH_EVERY: Final = 5
_PERIOD_MIN: Final = 4
_ALIKE_MIN: Final = 0.6  # correlation of the series with itself, one period later
_LEVEL_WEIGHT: Final = 0.1  # of one interval, in how this period compares with the last one
_LEVEL_MOST: Final = 2.0


class Recurring:
    """Finds the period by itself. `add` is O(1) but for a search, O(n log n), every few values."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._searched = 0
        self._level = 1.0
        self.period = 0

    def add(self, value: float) -> None:
        """Take in one value."""
        self._values.append(value)
        if len(self._values) > 2 * WINDOW:
            del self._values[:WINDOW]
        self._searched += 1
        if self._searched >= _SEARCH_EVERY:
            self._searched = 0
            self._search()
        if self.period:
            self._compare(value, self._values[-1 - self.period])

    def predict(self, steps: int = 1) -> float:
        """Return what was there one period before that time, scaled to this period's level."""
        if not self._values:
            return 0.0
        if not self.period:
            return self._values[-1]
        back = self.period - (steps - 1) % self.period
        return self._level * self._values[-back]

    def _compare(self, value: float, before: float) -> None:
        if before > 0 and value > 0:
            ratio = min(max(value / before, 1 / _LEVEL_MOST), _LEVEL_MOST)
            self._level += _LEVEL_WEIGHT * (ratio - self._level)

    def _search(self) -> None:
        values = np.asarray(self._values[-WINDOW:], dtype=np.float64)
        alike = _autocorrelation(values)
        longest = len(values) // 2
        if longest <= _PERIOD_MIN:
            return
        candidates = alike[_PERIOD_MIN : longest + 1]
        found = int(np.argmax(candidates)) + _PERIOD_MIN
        period = found if alike[found] >= _ALIKE_MIN and _is_peak(alike, found) else 0
        if period != self.period:
            self.period, self._level = period, 1.0


def _autocorrelation(values: Floats) -> Floats:
    """Return the correlation with itself at every lag, each over the values it has. O(n log n)."""
    count = len(values)
    centred = values - values.mean()
    spectrum = np.fft.rfft(centred, 2 * count)
    products = np.fft.irfft(spectrum * np.conj(spectrum), 2 * count)[:count]
    squares = np.cumsum(centred**2)
    total = squares[-1]
    # of the part without its last lag values, and of the part without its first
    heads = squares[::-1]
    tails = total - np.append(0.0, squares[:-1])
    scale: Floats = np.sqrt(np.maximum(heads * tails, 0.0))
    told: Floats = np.divide(products, scale, out=np.zeros(count), where=scale > 1e-9 * total)
    return told


def _is_peak(alike: Floats, lag: int) -> bool:
    """A trend resembles itself most at the shortest lag; a period does so at its own."""
    valley = float(alike[:lag].min())
    return bool(alike[lag] - valley > _ALIKE_MIN / 2)
