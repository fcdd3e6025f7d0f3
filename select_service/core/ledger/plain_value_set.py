"""A set of 64-bit values, entered and discarded in packed runs.

The plain twin of the one in `_value_set.pyx`: same names, same answers, based on Python's set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core.packing import unpack_native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.types import PackedHashes

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

    def enter(self, packed: PackedHashes) -> int:
        """Add a packed run of values; return how many were new."""
        return self.enter_run(unpack_native(packed))

    def enter_run(self, run: tuple[int, ...]) -> int:
        """Add the values of a run; return how many were new."""
        values = self._values
        before = len(values)
        values.update(run)
        return len(values) - before

    def leave(self, packed: PackedHashes) -> None:
        """Discard a run of values."""
        self.leave_run(unpack_native(packed))

    def leave_run(self, run: tuple[int, ...]) -> None:
        """Discard the values of a run; twice as fast with the very objects that were entered."""
        # It sometimes rebuilds the table in one go, as `update` does after as many changes: no new
        # kind of pause, and 40 % less than discarding one by one.
        self._values.difference_update(run)
        if not self._values:
            self._values = set()  # the table of a formerly large set stays large

    def discard(self, value: int) -> None:
        """Discard one value."""
        self._values.discard(value)
