"""An `ExpiringMap` in which every tenant has a part of the bound, and the oldest make room."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeVar

from select_service.core.expiring_map import ExpiringMap
from select_service.core.tenancy.tenant_parts import TenantParts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.tenancy.shares import Bound, Party, Shares

K = TypeVar("K", str, bytes)

if TYPE_CHECKING:
    _Rows = TenantParts[ExpiringMap[K]]
else:
    _Rows = TenantParts  # the compiled map takes no parameters


class TenantExpiringMap(_Rows[K]):
    """Keys of holders with the time they were put, and packed values. All operations are O(1)."""

    def __init__(self, shares: Shares, bound: Bound) -> None:
        super().__init__(shares, bound, ExpiringMap)

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes. O(rows)."""
        return sum(row.nbytes for row in self.rows)

    def get(self, holder: Party, key: K) -> bytes | None:
        """Return the value of a holder's key; None if it is not remembered."""
        found = (row.get(key) for _, row in self.where(holder))
        return next((value for value in found if value is not None), None)

    def put(self, holder: Party, key: K, at: float, value: bytes = b"") -> tuple[K, bytes] | None:
        """Remember a holder's key, as the youngest; return what had to make room, if anything."""
        self.discard(holder, key)
        party, row = self.place(holder)
        row.put(key, at, value)
        self.took(party)
        crowded = self.crowded(party)
        if crowded is None:
            return None
        party, row = crowded
        lost = row.pop_oldest(inf)
        assert lost is not None, "what has to make room has something"
        self.left(party)
        return lost

    def discard(self, holder: Party, key: K) -> bool:
        """Forget a holder's key; return whether it was remembered."""
        for party, row in self.where(holder):
            if row.discard(key):
                self.left(party)
                return True
        return False

    def expire(self, until: float, limit: int) -> Iterator[tuple[K, bytes]]:
        """Forget and yield up to `limit` entries put by `until`; the next call begins elsewhere."""
        left = limit
        for party, row in self.turns(limit):
            while left and (oldest := row.pop_oldest(until)) is not None:
                left -= 1
                self.left(party)
                yield oldest
