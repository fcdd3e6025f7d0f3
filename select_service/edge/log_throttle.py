"""Rate-limited logging of failures that others cause.

Otherwise anyone able to make us fail, with a wrong address in every heartbeat or registration,
could flood our log. Suppressed lines are counted, and the next line written says how many.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_S: Final = 10.0
LINES_MAX: Final = 4
"""Lines written per period about one party; more than one, since causes may differ."""

PARTIES_REMEMBERED: Final = 1024
"""The most recently mentioned ones."""


class LogThrottle:
    """Writes lines of one kind."""

    def __init__(self, log: Callable[[str], object], clock: Callable[[], float]) -> None:
        """Start with nothing logged.

        Args:
            log: writes a line.
            clock: monotonic seconds.
        """
        self._log, self._clock = log, clock
        # party → (start of its period, lines written since, lines suppressed)
        self._told: OrderedDict[str, tuple[float, int, int]] = OrderedDict()

    def tell(self, who: str, what: str) -> None:
        """Log a failure that `who` caused, or count it for the next line."""
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
