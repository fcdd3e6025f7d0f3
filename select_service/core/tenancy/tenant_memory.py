"""A bounded dict that forgets its oldest entries, of each tenant of the token file apart.

For memories of a few thousand entries that are plain objects; large ones are packed, in rows of
`tenant_parts.py` as here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from select_service.core.tenancy.shares import prefix_in
from select_service.core.tenancy.tenant_parts import TenantParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.tenancy.shares import Party, Shares

K = TypeVar("K")
V = TypeVar("V")


def _one(_: object) -> int:
    return 1


def _ignore(_: object) -> None:
    """Do nothing with a key that was forgotten."""


def with_places(own: str, *others: str | None) -> list[tuple[str, int]]:
    """Return the names of an entry that has several, each with what it counts for: one in all.

    Its own comes last: the others must be put first, and then also go first. One with another
    tenant's prefix is in that tenant's part, and counts there.
    """
    if not any(others):
        return [(own, 1)]  # nearly always
    owner = prefix_in(own)
    names = [name for name in dict.fromkeys(others) if name is not None and name != own]
    return [*((name, int(prefix_in(name) != owner)) for name in names), (own, 1)]


class TenantMemory(Generic[K, V]):
    """Entries by holder and key, oldest first. All operations are O(1), `items` excepted."""

    def __init__(
        self,
        shares: Shares,
        name: str,
        most: Callable[[], int],
        *,
        by_prefix: bool = False,
        size_of: Callable[[V], int] = _one,
        on_forgotten: Callable[[K], None] = _ignore,
    ) -> None:
        """Start empty.

        `most`, `name` and `by_prefix` are as in `Shares.bound`, for what `size_of` the
        entries sums up to. `on_forgotten` is called with every key that makes room, or is
        too old.
        """
        self._on_forgotten = on_forgotten
        self._shares, self._size_of, self._most = shares, size_of, most
        self._bound = shares.bound(name, most, by_prefix=by_prefix)
        # of a plain dict the oldest key is found behind those that have gone
        self._rows: TenantParts[OrderedDict[K, V]] = TenantParts(shares, self._bound, OrderedDict)
        self.lost = 0  # what had to go for newer ones counted for, since start
        self._size: int | None = 0  # of all entries, as long as no tenant has had a part
        self._bound.on_named = self._count_apart

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        return bool(self._bound.total if self._size is None else self._size)

    def has(self, holder: Party, key: K) -> bool:
        """Tell whether there is an entry."""
        return any(key in row for _, row in self._rows.where(holder))

    def get(self, holder: Party, key: K) -> V | None:
        """Return an entry, None if there is none."""
        for _, row in self._rows.where(holder):
            if key in row:
                return row[key]
        return None

    def put(self, holder: Party, key: K, value: V) -> V | None:
        """Add the newest entry, in the place of another one with its key, which is returned."""
        if self._size is not None and not self._shares.parties:  # the usual case, at less cost
            row, size = self._rows.common, self._size + self._size_of(value)
            before = None
            if key in row:
                before = row.pop(key)
                size -= self._size_of(before)
            row[key] = value
            most = self._most()
            while size > most:
                oldest = next(iter(row))
                lost = self._size_of(row.pop(oldest))
                self.lost += lost
                size -= lost
                self._on_forgotten(oldest)
            self._size = size
            return before
        self._count_apart()
        before = self.pop(holder, key)
        holder, row = self._rows.place(holder)
        row[key] = value
        self._rows.took(holder, self._size_of(value))
        while (crowded := self._rows.crowded(holder)) is not None:
            self.lost += self._size_of(self._forget_oldest(*crowded))
        return before

    def has_room(self, holder: Party) -> bool:
        """Tell whether an entry that counts for one would make nothing be forgotten."""
        if self._size is not None and not self._shares.parties:
            return self._size < self._most()
        self._count_apart()
        return self._bound.has_room(holder)

    def _count_apart(self) -> None:
        """Count what each tenant holds from now on."""
        if self._size is not None:
            self._bound.recount({None: self._size})
            self._size = None

    def pop(self, holder: Party, key: K) -> V | None:
        """Remove an entry and return it, None if there is none."""
        for found, row in self._rows.where(holder):
            if key in row:
                return self._drop(found, row, key)
        return None

    def _forget_oldest(self, holder: Party, row: OrderedDict[K, V]) -> V:
        oldest = next(iter(row))
        value = self._drop(holder, row, oldest)
        self._on_forgotten(oldest)
        return value

    def _drop(self, holder: Party, row: OrderedDict[K, V], key: K) -> V:
        value = row.pop(key)
        if self._size is None:
            self._rows.left(holder, self._size_of(value))
        else:
            self._size -= self._size_of(value)
        return value

    def items(self) -> list[tuple[K, V]]:
        """Return all entries, the oldest of each tenant first."""
        return [item for row in self._rows.rows for item in row.items()]

    def values(self) -> list[V]:
        """Return what the entries hold, the oldest of each tenant first."""
        return [value for row in self._rows.rows for value in row.values()]

    def purge(self, is_over: Callable[[V], bool], limit: int) -> int:
        """Forget up to so many entries that are over: those of a tenant end in their order.

        Returns:
            How many were forgotten.
        """
        left = limit
        for holder, row in self._rows.turns(limit):
            while left and row and is_over(row[next(iter(row))]):
                self._forget_oldest(holder, row)
                left -= 1
        return limit - left

    def check(self) -> None:
        """Assert all invariants."""
        if self._size is None:
            self._rows.check(self._size_of_row)
        else:
            assert self._size == self._size_of_row(self._rows.common)
        assert (self._bound.total if self._size is None else self._size) <= self._bound.most

    def _size_of_row(self, row: OrderedDict[K, V]) -> int:
        return sum(map(self._size_of, row.values()))
