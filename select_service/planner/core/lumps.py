"""Requests that come together: of how many seconds they come at once.

Clients that send in rounds, and traces with rounded times, bring requests in lumps. Within a lump
prompts wait for each other, whatever the mean load is: a queue of single arrivals explains neither
that wait nor how many engines end it. Counts are longer than a lump, but show it: they differ from
their neighbours by more than chance, all the time. How large lumps are follows from the wait.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

LUMPY: Final = 2.0
"""Variance of neighbouring counts as a multiple of chance, by their median: one jump is none."""
_STILL_LUMPY: Final = 1.5
"""The same where there were lumps before: they do not come and go with each interval."""
_LARGER: Final = 2.0
"""How much larger lumps may be than counts show: regular ones differ less than those by chance."""
_REMEMBERED: Final = 720
_COUNTS_MIN: Final = 24
_REQUESTS_MIN: Final = 8.0
"""Of two neighbours together; fewer are too few to decide, and count against lumps."""
_MEDIAN: Final = 0.455  # of the square of a normal variable
_WEIGHT: Final = 0.3  # of a new interval


class Lumps:
    """The lumps of one model's arrivals.

    Attributes:
        dispersion: of counts, as a multiple of chance; 1 where there are no lumps.
        seconds: of how many seconds requests come at once; 0: there are no lumps.
    """

    def __init__(self) -> None:
        self.dispersion = 1.0
        self.seconds = 0.0
        self._last: tuple[float, float] | None = None
        self._squares: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, requests: float, seconds: float) -> None:
        """Add the arrivals of the last seconds."""
        last, self._last = self._last, (requests, seconds)
        if last is None:
            return
        if requests + last[0] < _REQUESTS_MIN:
            self._squares.append(0.0)
            return
        rate = (requests + last[0]) / (seconds + last[1])
        variance = rate * (1 / seconds + 1 / last[1])
        self._squares.append((requests / seconds - last[0] / last[1]) ** 2 / variance)

    def judge(self) -> None:
        """Decide whether there are lumps. O(n log n)."""
        has_enough = len(self._squares) >= _COUNTS_MIN
        found = median(self._squares) / _MEDIAN if has_enough else 1.0
        least = LUMPY if self.dispersion == 1.0 else _STILL_LUMPY
        self.dispersion = found if found >= least else 1.0
        if self.dispersion == 1.0:
            self.seconds = 0.0

    def most_s(self, requests: float, seconds: float) -> float:
        """Return of how many seconds requests may come at once by what counts show; 0: of none.

        Args:
            requests: that came.
            seconds: in which they did.
        """
        if self.dispersion == 1.0 or requests <= 0:
            return 0.0
        return _LARGER * self.dispersion * seconds / requests

    def learn(self, seconds: float, most_s: float) -> None:
        """Take the size of lumps from an interval's wait, where there are any.

        A wait that counts do not explain is none of lumps, which engines could end: of requests on
        their way to slow engines or through a network, more engines would be ordered for ever.

        Args:
            seconds: of how many requests came at once by that wait: `PrefillQueue.lump_s`.
            most_s: what `most_s` returns for its requests.
        """
        found = min(seconds, most_s)
        if found > 0:
            known = math.log(self.seconds or found)
            self.seconds = math.exp(known + _WEIGHT * (math.log(found) - known))
