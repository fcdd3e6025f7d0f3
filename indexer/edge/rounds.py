"""Whom to look at, and when: some at every tick, the others not before a time of their own.

A thousand streams that rest cost nothing until one of them is due. Which stream is due when is the
stream's to say; what a look does is the listener's.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

__all__ = ["Rounds"]


class Rounds:
    """Numbers with a time each, or with none: then they are looked at always."""

    __slots__ = ("_always", "_due", "_heap")

    def __init__(self) -> None:
        self._always: dict[int, None] = {}
        self._due: dict[int, float] = {}  # the entry of the heap that counts
        self._heap: list[tuple[float, int]] = []

    def always(self, one: int) -> None:
        """Have `take` return it every time from now on. O(1)."""
        self._always[one] = None

    def at(self, one: int, due: float) -> None:
        """Have it returned once, as soon as it is due, or earlier; `inf`: not at all. O(log n).

        Who is due earlier already stays so: to put off what is put off with every message would
        fill the heap with what no longer counts. Who is looked at says again when it is due.
        """
        if due < self._due.get(one, inf):
            self._due[one] = due
            heappush(self._heap, (due, one))

    def rest(self, one: int) -> None:
        """Return it no more every time; a time it has stands."""
        self._always.pop(one, None)

    def forget(self, one: int) -> None:
        """Return it no more. What is left of it in the heap goes when its time comes."""
        self._always.pop(one, None)
        self._due.pop(one, None)

    def take(self, now: float) -> list[int]:
        """Return who is looked at now; a time that has come is used up. O(those returned)."""
        heap, due = self._heap, self._due
        taken = list(self._always)
        while heap and heap[0][0] <= now:
            entry = heappop(heap)
            if due.get(entry[1]) == entry[0]:
                del due[entry[1]]
                if entry[1] not in self._always:
                    taken.append(entry[1])
        return taken

    def check(self) -> None:
        """Assert that whoever has a time is in the heap with it."""
        assert set(zip(self._due.values(), self._due, strict=True)) <= set(self._heap)
        assert all(self._heap[(i - 1) // 2] <= self._heap[i] for i in range(1, len(self._heap)))
