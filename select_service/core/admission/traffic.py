"""Admitted work and requests per second by priority line: what is left over for those below.

`gate.py` and `slo_shed.py` add what they admit, and read it for predictions and return times. What
came all at once is booked, so it is counted there as work ahead, and is no rate that will go on:
the average over ten seconds counts up to a quarter more than that over a minute. Of the minute only
time with requests counts: an idle hour says nothing of what comes after it.
"""

from __future__ import annotations

import math
from typing import Final

_STEP_S: Final = 0.25
MEMORY_S: Final = 10.0
"""How long admitted work counts as traffic of its line."""
LASTING_S: Final = 60.0
"""Over how long it must have come like that: a burst alone leaves as much to others as before."""
RISE_MAX: Final = 1.25
"""How many times that average counts at most. At 1 the lower of two averages would be too low on
average, and leave others twice what there is where little is left."""
LEFT_SHARE_MIN: Final = 0.05
"""Share of the drain rate that counts as left over by the lines above, at least."""


class AdmittedTraffic:
    """Exponentially weighted sums; they decay in steps, so adding is O(1)."""

    __slots__ = ("_at", "_left", "_longer", "_quiet_s", "_span_s", "fades_at", "requests", "sums")

    def __init__(self, lines: int) -> None:
        self.sums = [0.0] * lines
        """By line. Callers may add work admitted before `fades_at` directly, until they call
        `faded`."""
        self.requests = [0.0] * lines
        """Their number, likewise."""
        self.fades_at = _STEP_S
        self._longer = [0.0] * lines, [0.0] * lines
        """By how much the sums over `LASTING_S` are larger than these two."""
        self._span_s = 0.0  # seconds that those are of, weighted alike
        self._at = -math.inf
        self._left = 0.0  # requests after the last decay: more have come if there are more
        self._quiet_s = 0.0  # since some came

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
        passed = now - self._at if self._at > -math.inf else 0.0
        busy_s = self._busy_s(passed)
        fade, lasts = math.exp(-passed / MEMORY_S), math.exp(-busy_s / LASTING_S)
        self._span_s = self._span_s * lasts + LASTING_S * (1.0 - lasts)
        work, requests = (
            [one * (lasts - fade) + more * lasts for one, more in zip(some, longer, strict=True)]
            for some, longer in zip((self.sums, self.requests), self._longer, strict=True)
        )
        self._longer = work, requests
        self.sums = [one * fade for one in self.sums]
        self.requests = [one * fade for one in self.requests]
        self._left = sum(self.requests)
        self._at, self.fades_at = now, now + _STEP_S

    def _busy_s(self, passed: float) -> float:
        """Return how much of the time since the last decay counts: at most so long after any."""
        if sum(self.requests) > self._left:
            self._quiet_s = 0.0
        counts = min(passed, max(0.0, MEMORY_S - self._quiet_s))
        self._quiet_s += passed
        return counts

    def above(self, line: int, now: float) -> float:
        """Return the work per second admitted in the lines above this one."""
        self.faded(now)
        return self._lasting(self.sums, self._longer[0], line)

    def requests_above(self, line: int, now: float) -> float:
        """Return the requests per second admitted in the lines above this one."""
        self.faded(now)
        return self._lasting(self.requests, self._longer[1], line)

    def _lasting(self, sums: list[float], longer: list[float], line: int) -> float:
        lately = sum(sums[:line])
        span_s = max(self._span_s, MEMORY_S)
        return min(lately / MEMORY_S, RISE_MAX * (lately + sum(longer[:line])) / span_s)

    def taken(self, now: float) -> float:
        """Return the work per second admitted in all lines lately."""
        self.faded(now)
        return sum(self.sums) / MEMORY_S
