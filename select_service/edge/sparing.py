"""Tells the log of failures that others cause, so often and no oftener.

Who may have us fail, with a wrong address in every heartbeat or registration, would otherwise
write our log. What is not told is counted and said with the next line that is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Sparing"]

PERIOD_S: Final = 10.0
LINES_MAX: Final = 4
"""In so long so many lines are written of what one party has caused: it may be another thing each
time."""

PARTIES_REMEMBERED: Final = 1024
"""The last ones of whom something was said."""


class Sparing:
    """Writes lines of one kind."""

    def __init__(self, log: Callable[[str], object], clock: Callable[[], float]) -> None:
        """Have nothing said.

        Args:
            log: writes a line.
            clock: monotonic seconds.
        """
        self._log, self._clock = log, clock
        # who → (since when, told since then, not told)
        self._told: OrderedDict[str, tuple[float, int, int]] = OrderedDict()

    def tell(self, who: str, what: str) -> None:
        """Write a line about what somebody has caused, or count it for the next one."""
        now = self._clock()
        since, told, untold = self._told.pop(who, (now, 0, 0))
        if now - since >= PERIOD_S:
            since, told = now, 0
        if told < LINES_MAX:
            self._log(f"{what} ({untold} more since last told)" if untold else what)
            told, untold = told + 1, 0
        else:
            untold += 1
        self._told[who] = since, told, untold
        while len(self._told) > PARTIES_REMEMBERED:
            self._told.popitem(last=False)
