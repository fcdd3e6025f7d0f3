"""Scopes that had workers, with the block size they had last: requests for them are no strays.

`membership.py` notes them, `routing/read.py` asks; the next worker may have another size. The data
is packed rather than kept in Python objects: with thousands of scopes that come and go, scattered
objects would keep the memory around them from being freed.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_expiring_map import TenantExpiringMap

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
        self._pins: TenantExpiringMap[bytes] = TenantExpiringMap(shares, bound)

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        return self._pins.nbytes

    def get(self, scope: Scope) -> tuple[int, bool] | None:
        """Return block size and is_eagle; None if nothing is pinned."""
        pin = self._pins.get(scope.tenant_id, _key(scope))
        return None if pin is None else _PIN.unpack(pin)

    def put(self, scope: Scope, block_size: int, *, is_eagle: bool) -> None:
        """Pin a block size; a tenant's oldest pin is dropped if there are too many."""
        self._pins.put(scope.tenant_id, _key(scope), 0.0, _PIN.pack(block_size, is_eagle))

    def discard(self, scope: Scope) -> None:
        """Drop a pin: the open scope has its block size itself."""
        self._pins.discard(scope.tenant_id, _key(scope))

    def check(self) -> None:
        """Assert all invariants."""
        self._pins.check()


def _key(scope: Scope) -> bytes:
    """Return a key of both names, unambiguous by the length prefix."""
    model_name = scope.model_name.encode()
    return _LENGTH.pack(len(model_name)) + model_name + scope.tenant_id.encode()
