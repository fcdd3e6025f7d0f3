"""The deviation of reality from the profile: a factor that moves slowly and never far.

The reference divides one interval's mean by the profile and multiplies by the result at once; a
missing metric is a zero there, and scales the pool away. Here the logarithm of the ratio is
smoothed and clamped, and counts only if many requests contributed while replicas stood still.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.types import Value

if TYPE_CHECKING:
    from select_service.planner.types import Reading

__all__ = ["Correction"]

FACTOR_LEAST: Final = 0.5
FACTOR_MOST: Final = 2.0
SAMPLES_MIN: Final = 20
_WEIGHT: Final = 0.3  # of a new interval


class Correction:
    """The ratio of measured to profiled, for one metric of one model."""

    def __init__(self, factor: float = 1.0) -> None:
        self._log = math.log(factor)

    @property
    def factor(self) -> float:
        """1 is as profiled, 2 twice as slow."""
        return math.exp(self._log)

    def hear(self, measured: Reading, profiled: float, samples: float, *, steady: bool) -> bool:
        """Add one interval if it is meaningful; returns whether it was."""
        if not isinstance(measured, Value) or measured.value <= 0 or profiled <= 0:
            return False
        if samples < SAMPLES_MIN or not steady:
            return False
        ratio = min(max(measured.value / profiled, FACTOR_LEAST), FACTOR_MOST)
        self._log += _WEIGHT * (math.log(ratio) - self._log)
        return True
