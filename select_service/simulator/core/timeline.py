"""Scheduled events in order: a heap of calls, and the time until which all were made."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Timeline:
    """Makes calls at the same time in the order they were scheduled.

    Attributes:
        now: The time until which everything has happened; during a call, the call's time.
    """

    __slots__ = ("_calls", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()

    def at(self, when: float, do: Callable[..., None], *arguments: object) -> None:
        """Schedule a call; if its time is past, it is made at `now`."""
        heappush(self._calls, (when, next(self._order), do, arguments))

    @property
    def next(self) -> float:
        """The time of the next call; infinity if there is none."""
        return self._calls[0][0] if self._calls else math.inf

    def advance(self, until: float) -> None:
        """Make all calls up to and including this time, and advance to it."""
        self._make_calls(math.nextafter(until, math.inf))
        if self.now < until < math.inf:
            self.now = until

    def come_to(self, now: float) -> None:
        """Make all calls before this time, and advance to it."""
        self._make_calls(now)
        self.now = max(self.now, now)

    def _make_calls(self, before: float) -> None:
        calls = self._calls
        while calls and calls[0][0] < before:
            at, _, do, arguments = heappop(calls)
            self.now = max(self.now, at)
            do(*arguments)
