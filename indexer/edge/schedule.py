"""Which streams to visit, and when: some at every tick, the others not before their due time.

A thousand idle streams cost nothing until one is due. The stream decides when it is due; the
listener decides what a visit does.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf


class Schedule:
    """Numbers that are due at a time of their own, or at every tick."""

    __slots__ = ("_always", "_due", "_heap")

    def __init__(self) -> None:
        self._always: dict[int, None] = {}
        self._due: dict[int, float] = {}  # the heap entry that counts
        self._heap: list[tuple[float, int]] = []

    def always(self, one: int) -> None:
        """Have `take` return it every time from now on. O(1)."""
        self._always[one] = None

    def at(self, one: int, due: float) -> None:
        """Have it returned once, when it is due or earlier; `inf`: not at all. O(log n).

        An earlier due time stands: postponing it with every message would fill the heap with
        obsolete entries. A visit sets the next due time.
        """
        if due < self._due.get(one, inf):
            self._due[one] = due
            heappush(self._heap, (due, one))

    def rest(self, one: int) -> None:
        """No longer return it every time; its due time, if any, stands."""
        self._always.pop(one, None)

    def forget(self, one: int) -> None:
        """Never return it again. Its heap entries are discarded when their time comes."""
        self._always.pop(one, None)
        self._due.pop(one, None)

    def take(self, now: float) -> list[int]:
        """Return what is due now and use up its due time. O(number returned)."""
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
        """Assert that every due time has its heap entry."""
        assert set(zip(self._due.values(), self._due, strict=True)) <= set(self._heap)
        assert all(self._heap[(i - 1) // 2] <= self._heap[i] for i in range(1, len(self._heap)))
