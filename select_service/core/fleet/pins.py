"""Block sizes of scopes that were given up: a scope keeps its own for good.

`membership.py` pins and asks. Not among Python's objects: a thousand scopes that come and go would
leave one here and there, and each keep memory around it from being given back.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from select_service.core.memory import Memory

if TYPE_CHECKING:
    from indexer.types import Scope

__all__ = ["PINS_MAX", "Pins"]

PINS_MAX: Final = 65_536
"""Of scopes without workers; the one that was given up first is forgotten first. A tenth of a
kilobyte each."""

_PIN: Final = Struct("<Q?")
_LENGTH: Final = Struct("<Q")


class Pins:
    """What is pinned of which scope. All moves O(1)."""

    def __init__(self) -> None:
        self._pins: Memory[bytes] = Memory()

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def nbytes(self) -> int:
        """Bytes of it all, about."""
        return self._pins.nbytes

    def get(self, scope: Scope) -> tuple[int, bool] | None:
        """Return block size and is_eagle; None: nothing is pinned."""
        pin = self._pins.get(_key(scope))
        return None if pin is None else _PIN.unpack(pin)

    def put(self, scope: Scope, block_size: int, *, is_eagle: bool) -> None:
        """Pin; the oldest gives way if there are too many."""
        self._pins.put(_key(scope), 0.0, _PIN.pack(block_size, is_eagle))
        while len(self._pins) > PINS_MAX:
            self._pins.pop_oldest(0.0)

    def discard(self, scope: Scope) -> None:
        """Forget: the scope is open again, and has its block size itself."""
        self._pins.discard(_key(scope))


def _key(scope: Scope) -> bytes:
    """Return both names; what the first one ends with may be what the other begins with."""
    model_name = scope.model_name.encode()
    return _LENGTH.pack(len(model_name)) + model_name + scope.tenant_id.encode()
