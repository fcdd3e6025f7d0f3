"""Ended things, remembered for a while: keys with the time they were put, and a value.

The plain twin of the one in `_expiring_map.pyx`: same names, same answers, with a dict and some
objects per entry.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

K = TypeVar("K", str, bytes)

_ENTRY_BYTES: Final = 260
"""An entry's share of the dict, its tuple, its float, and the object headers of key and value."""


class ExpiringMap(Generic[K]):
    """Oldest first; all keys are str, or all are bytes. All operations are O(1)."""

    __slots__ = ("_bytes", "_entries")

    def __init__(self) -> None:
        self._entries: OrderedDict[K, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        return self._bytes + len(self._entries) * _ENTRY_BYTES

    def at(self, key: K) -> float | None:
        """Return when a key was put; None if it is not remembered."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: K) -> bytes | None:
        """Return the value put with a key; None if it is not remembered."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def put(self, key: K, at: float, value: bytes = b"") -> None:
        """Remember a key, as the youngest."""
        entries = self._entries
        before = entries.pop(key, None)
        entries[key] = (at, value)
        if before is None:
            self._bytes += len(key) + len(value)
        else:
            self._bytes += len(value) - len(before[1])

    def discard(self, key: K) -> bool:
        """Forget a key; return whether it was remembered."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= len(key) + len(entry[1])
        if not self._entries:
            self._entries.clear()  # the table of a formerly large dict stays large
        return True

    def pop_oldest(self, until: float) -> tuple[K, bytes] | None:
        """Remove the oldest entry if it was put by `until`; return (key, value), else None."""
        for key, (at, value) in self._entries.items():
            if at > until:
                break
            self.discard(key)
            return key, value
        return None

    def items(self) -> list[tuple[K, float, bytes]]:
        """Return all entries, oldest first: (key, at, value). O(n)."""
        return [(key, at, value) for key, (at, value) in self._entries.items()]
