"""A set of 64-bit values, entered and discarded by the packed run.

The plain twin of the one in `_speed.pyx`: same names, same answers, on Python's own set.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ValueSet"]


class ValueSet:
    """Values as unsigned numbers in the machine's byte order: they only need to be told apart."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: set[int] = set()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, value: int) -> bool:
        return value in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def enter(self, packed: bytes) -> int:
        """Add a run of values; return how many were not in."""
        before = len(self._values)
        self._values.update(memoryview(packed).cast("Q"))
        return len(self._values) - before

    def leave(self, packed: bytes) -> None:
        """Discard a run of values."""
        # Not difference_update: it rebuilds a set of millions in one go when a quarter is gone.
        deque(map(self._values.discard, memoryview(packed).cast("Q")), 0)  # a loop in C
        if not self._values:
            self._values = set()  # the table of a set that was large stays large

    def discard(self, value: int) -> None:
        """Discard one value."""
        self._values.discard(value)
