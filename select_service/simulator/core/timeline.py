"""What is to happen, in order: a heap of calls, and the time up to which all have been made."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timeline"]


class Timeline:
    """Calls at the same time are made in the order they were asked for.

    Attributes:
        now: Up to when everything has happened; of the call that is being made.
    """

    __slots__ = ("_calls", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()

    def at(self, when: float, do: Callable[..., None], *arguments: object) -> None:
        """Make a call at a time; what is past by then happens now."""
        heappush(self._calls, (when, next(self._order), do, arguments))

    @property
    def next(self) -> float:
        """When the next call is due; infinity: there is none."""
        return self._calls[0][0] if self._calls else math.inf

    def advance(self, until: float) -> None:
        """Let everything happen that happens up to and at this time, and be there."""
        self._make_calls(math.nextafter(until, math.inf))
        if self.now < until < math.inf:
            self.now = until

    def come_to(self, now: float) -> None:
        """Let everything happen that happens before this time, and be there."""
        self._make_calls(now)
        self.now = max(self.now, now)

    def _make_calls(self, before: float) -> None:
        calls = self._calls
        while calls and calls[0][0] < before:
            at, _, do, arguments = heappop(calls)
            self.now = max(self.now, at)
            do(*arguments)
