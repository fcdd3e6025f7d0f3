"""Work let in per second, by line of priority: what is left over for those below."""

from __future__ import annotations

import math
from typing import Final

_STEP_S: Final = 0.25
MEMORY_S: Final = 10.0
"""How long admitted work counts as traffic of its line."""
LEFT_SHARE_MIN: Final = 0.05
"""Of what drains, at least so much counts as left over by the lines above."""


class Traffic:
    """Exponentially weighted sums; they fade in steps, so that adding is O(1).

    Args:
        lines: how many there are, most important first.
    """

    __slots__ = ("_at", "fades_at", "sums")

    def __init__(self, lines: int) -> None:
        self.sums = [0.0] * lines
        """By line. What was let in before `fades_at` may be added here, until `faded` is asked."""
        self.fades_at = _STEP_S
        self._at = 0.0

    def add(self, line: int, work: float, now: float) -> None:
        """So much work of a line was let in."""
        if now > self.fades_at:
            self.fade(now)
        self.sums[line] += work

    def faded(self, now: float) -> float:
        """Let what was let in before count for less if it is time; return when it will be next."""
        if now > self.fades_at:
            self.fade(now)
        return self.fades_at

    def fade(self, now: float) -> None:
        """Let what was let in before count for less."""
        fade = math.exp((self._at - now) / MEMORY_S)
        self.sums = [one * fade for one in self.sums]
        self._at, self.fades_at = now, now + _STEP_S

    def above(self, line: int, now: float) -> float:
        """Return the work per second let in of the lines above one."""
        if now > self.fades_at:
            self.fade(now)
        return sum(self.sums[:line]) / MEMORY_S
