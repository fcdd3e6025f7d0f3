"""Engine hashes to nodes, as a dict: the plain twin of `indexer/_names.pyx`."""

from __future__ import annotations

from array import array
from sys import getsizeof
from typing import TYPE_CHECKING, Final, TypeVar

from indexer.core.packing import numbers_in
from indexer.types import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

_AT_ONCE: Final = 64
"""Names compared with a run at once. Few may match, yet all are packed for the comparison."""

_NAME_BYTES: Final = 48  # an engine hash as a Python int


class NameMap(dict[int, T]):
    """Names to nodes, or to whatever; a name is an unsigned 64-bit number."""

    __slots__ = ()

    def knows_none(self, names: Iterable[int]) -> bool:
        """Say whether none of these names is filed."""
        return self.keys().isdisjoint(names)

    def is_filed(self, names: Iterable[int], node: T) -> bool:
        """Say whether all of these names are filed for a node."""
        return all(self.get(name) is node for name in names)

    def file(self, names: Iterable[int], node: T) -> None:
        """File names for a node, replacing what they were filed for."""
        self.update(dict.fromkeys(names, node))

    def file_new(self, names: Sequence[int], node: T) -> bool:
        """File names for a node if none of them is filed, and none occurs twice.

        Returns whether they were filed.
        """
        new = dict.fromkeys(names, node)
        fits = len(new) == len(names) and self.keys().isdisjoint(new)
        if fits:
            self.update(new)
        return fits

    def drop_all(self, names: Iterable[int]) -> None:
        """Remove names, all of which are filed."""
        for name in names:
            del self[name]

    def drop_tail(self, names: Sequence[int], start: int, run: bytes) -> int:
        """Remove the names from `start` on that match the end of a run backwards.

        All of the run's names are filed, and its first one stays. Returns how many were removed.
        """
        most = min(len(names) - start, len(run) // HASH_BYTES - 1, _AT_ONCE)
        tail = numbers_in(run[len(run) - most * HASH_BYTES :] if most > 0 else b"")[::-1]
        if array("Q", names[start : start + len(tail)]) != tail:
            pairs = enumerate(zip(names[start : start + len(tail)], tail, strict=True))
            tail = tail[: next(at for at, (one, other) in pairs if one != other)]
        self.drop_all(tail)
        return len(tail)

    def pop_some(self, count: int) -> None:
        """Remove `count` arbitrary names; the rest must not be looked up any more."""
        for _ in range(min(count, len(self))):
            self.popitem()

    @property
    def nbytes(self) -> int:
        """Size of the table and its names in bytes."""
        return getsizeof(self) + len(self) * _NAME_BYTES
