"""Scopes that had workers, with the block size they had last: requests for them are no strays.

`membership.py` notes them, `routing/read.py` asks; the next worker may have another size. The data
is packed rather than kept in Python objects: with thousands of scopes that come and go, scattered
objects would keep the memory around them from being freed.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from select_service.core.expiring_map import ExpiringMap
from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_parts import TenantParts

if TYPE_CHECKING:
    from indexer.types import Scope

PINS_MAX: Final = 65_536
"""Scopes without workers that are remembered; the oldest is forgotten first. About 100 bytes
each."""

_PIN: Final = Struct("<Q?")
_LENGTH: Final = Struct("<Q")


class Pins:
    """The pinned block size of each scope. All operations are O(1)."""

    def __init__(self, shares: Shares | None = None) -> None:
        shares = shares or Shares()
        bound = shares.bound("pinned_scopes", lambda: PINS_MAX)
        self._pins: TenantParts[ExpiringMap[bytes]] = TenantParts(shares, bound, ExpiringMap)

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        return sum(row.nbytes for row in self._pins.rows)

    def get(self, scope: Scope) -> tuple[int, bool] | None:
        """Return block size and is_eagle; None if nothing is pinned."""
        key = _key(scope)
        found = (row.get(key) for _, row in self._pins.where(scope.tenant_id))
        pin = next((one for one in found if one is not None), None)
        return None if pin is None else _PIN.unpack(pin)

    def put(self, scope: Scope, block_size: int, *, is_eagle: bool) -> None:
        """Pin a block size; a tenant's oldest pin is dropped if there are too many."""
        self.discard(scope)
        holder, row = self._pins.place(scope.tenant_id)
        row.put(_key(scope), 0.0, _PIN.pack(block_size, is_eagle))
        self._pins.took(holder)
        crowded = self._pins.crowded(holder)
        if crowded is not None:
            holder, row = crowded
            row.pop_oldest(0.0)
            self._pins.left(holder)

    def discard(self, scope: Scope) -> None:
        """Drop a pin: the open scope has its block size itself."""
        key = _key(scope)
        for holder, row in self._pins.where(scope.tenant_id):
            if row.discard(key):
                self._pins.left(holder)

    def check(self) -> None:
        """Assert all invariants."""
        self._pins.check()


def _key(scope: Scope) -> bytes:
    """Return a key of both names, unambiguous by the length prefix."""
    model_name = scope.model_name.encode()
    return _LENGTH.pack(len(model_name)) + model_name + scope.tenant_id.encode()
