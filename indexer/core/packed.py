"""Per-block and per-pair values of long events, packed; objects are created on access.

Freeing a list of a million small objects takes time and cannot be split up; freeing an array takes
none. `long_events` fills them, `writer` and `index` read them in slices.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from collections.abc import Iterator

    Cut = slice[int | None, int | None, int | None]


class PackedPairs(Sequence[tuple[int, int]]):
    """Pairs of numbers; signed ones become unsigned."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: array[int]) -> None:
        self._numbers = memoryview(numbers)  # 64 bits each, two per pair

    def __len__(self) -> int:
        return len(self._numbers) // 2

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, at: Cut) -> list[tuple[int, int]]: ...
    def __getitem__(self, at: int | Cut) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            some = self._numbers[2 * start : 2 * stop].tolist()
            return list(zip(some[::2], some[1::2], strict=True))
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._numbers[2 * at], self._numbers[2 * at + 1]


class PackedLists(Sequence[list[int]]):
    """Lists of numbers below 2^64, one per block, most of them empty."""

    __slots__ = ("_ends", "_values")

    def __init__(self) -> None:
        self._values = array("Q")
        self._ends = array("Q", [0])

    def extend(self, lists: Sequence[list[int]]) -> None:
        """Add the lists of the next blocks."""
        for values in lists:
            self._values.extend(values)
            self._ends.append(len(self._values))

    def extend_empty(self, blocks: int) -> None:
        """Add `blocks` blocks with empty lists."""
        self._ends.extend(array("Q", [len(self._values)]) * blocks)

    @property
    def has_values(self) -> bool:
        """Whether any list is non-empty."""
        return bool(self._values)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> list[int]: ...
    @overload
    def __getitem__(self, at: Cut) -> list[list[int]]: ...
    def __getitem__(self, at: int | Cut) -> list[int] | list[list[int]]:
        if isinstance(at, slice):
            return [self[block] for block in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._values[self._ends[at] : self._ends[at + 1]].tolist()


class PackedBytes(Mapping[int, bytes]):
    """Block → bytes, for some of the blocks, added in block order."""

    __slots__ = ("_blocks", "_data", "_ends")

    def __init__(self) -> None:
        self._data = bytearray()
        self._blocks = array("Q")
        self._ends = array("Q", [0])

    def add(self, block: int, data: bytes) -> None:
        """Add a block that comes after all others."""
        self._data += data
        self._blocks.append(block)
        self._ends.append(len(self._data))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __getitem__(self, block: int) -> bytes:
        at = bisect_left(self._blocks, block)
        if at == len(self._blocks) or self._blocks[at] != block:
            raise KeyError(block)
        return bytes(self._data[self._ends[at] : self._ends[at + 1]])
