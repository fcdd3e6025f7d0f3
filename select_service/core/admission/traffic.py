"""Admitted work and requests per second by priority line: what is left over for those below.

`gate.py` and `slo_shed.py` add what they admit, and read it for predictions and return times.
"""

from __future__ import annotations

import math
from typing import Final

_STEP_S: Final = 0.25
MEMORY_S: Final = 10.0
"""How long admitted work counts as traffic of its line."""
LEFT_SHARE_MIN: Final = 0.05
"""Share of the drain rate that counts as left over by the lines above, at least."""


class AdmittedTraffic:
    """Exponentially weighted sums; they decay in steps, so adding is O(1).

    Args:
        lines: their number, most important first.
    """

    __slots__ = ("_at", "fades_at", "requests", "sums")

    def __init__(self, lines: int) -> None:
        self.sums = [0.0] * lines
        """By line. Callers may add work admitted before `fades_at` directly, until they call
        `faded`."""
        self.requests = [0.0] * lines
        """Their number, likewise."""
        self.fades_at = _STEP_S
        self._at = 0.0

    def add(self, line: int, work: float, now: float) -> None:
        """Add admitted work of a line."""
        if now > self.fades_at:
            self.fade(now)
        self.sums[line] += work
        self.requests[line] += 1.0

    def faded(self, now: float) -> float:
        """Decay the sums if it is time; return when the next decay is due."""
        if now > self.fades_at:
            self.fade(now)
        return self.fades_at

    def fade(self, now: float) -> None:
        """Decay the sums."""
        fade = math.exp((self._at - now) / MEMORY_S)
        self.sums = [one * fade for one in self.sums]
        self.requests = [one * fade for one in self.requests]
        self._at, self.fades_at = now, now + _STEP_S

    def above(self, line: int, now: float) -> float:
        """Return the work per second admitted in the lines above this one."""
        if now > self.fades_at:
            self.fade(now)
        return sum(self.sums[:line]) / MEMORY_S

    def requests_above(self, line: int, now: float) -> float:
        """Return the requests per second admitted in the lines above this one."""
        if now > self.fades_at:
            self.fade(now)
        return sum(self.requests[:line]) / MEMORY_S
