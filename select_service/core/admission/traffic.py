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

    __slots__ = ("_at", "_sums")

    def __init__(self, lines: int) -> None:
        self._sums = [0.0] * lines
        self._at = 0.0

    def add(self, line: int, work: float, now: float) -> None:
        """So much work of a line was let in."""
        if now - self._at > _STEP_S:
            self._fade(now)
        self._sums[line] += work

    def _fade(self, now: float) -> None:
        fade = math.exp((self._at - now) / MEMORY_S)
        self._sums = [one * fade for one in self._sums]
        self._at = now

    def above(self, line: int, now: float) -> float:
        """Return the work per second let in of the lines above one."""
        if now - self._at > _STEP_S:
            self._fade(now)
        return sum(self._sums[:line]) / MEMORY_S
