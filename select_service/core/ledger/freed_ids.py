"""Ids whose reservations ended lately: freeing one of these again is no error.

`reservation_ids.py` puts them in, and takes out those that are booked again. Where tenants have
parts of the bound, the prefix of an id says whose it is.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_128_hexdigest

from select_service.core.changes import RESERVATION
from select_service.core.tenancy.shares import prefix_in
from select_service.core.tenancy.tenant_expiring_map import TenantExpiringMap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.core.changes import Changes
    from select_service.core.tenancy.shares import Shares

FREED_MEMORY_S = 600.0  # the contract: at least ten minutes, as far as the bound allows

LONG_ID_CHARS: Final = 64
"""Longer freed ids are remembered by a digest only, since an id may be as long as a body."""

_BY_DIGEST: Final = "freed id by its digest, xxh3_128 = "  # with it, longer than a short id
_KEY_CHARS: Final = len(_BY_DIGEST) + 32


class FreedIds:
    """Freed ids by `key_of` them, oldest first. A name may be given by its key, too."""

    __slots__ = ("_by_holder", "_most", "changes", "common", "has_parts", "lost")

    def __init__(self, most: int, shares: Shares) -> None:
        bound = shares.bound("freed_ids_max", lambda: most, by_prefix=True)
        self._by_holder: TenantExpiringMap[str] = TenantExpiringMap(shares, bound)
        self._most = most
        self.common = self._by_holder.common
        """All of them, unless tenants have parts."""
        self.has_parts = False
        self.lost = 0  # forgotten before their ten minutes were over
        self.changes: Changes | None = None  # set if the state is kept on disk

    def __len__(self) -> int:
        return len(self._by_holder)

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return self._by_holder.nbytes

    def follow_tenants(self) -> None:
        """Remember what each tenant freed apart from now on."""
        self.has_parts = True
        self._by_holder.bound.recount({None: len(self.common)})

    def __contains__(self, name: str) -> bool:
        if not self.has_parts:
            return key_of(name) in self.common
        return self._by_holder.get(prefix_in(name), key_of(name)) is not None

    def has_key(self, key: str) -> bool:
        """Tell whether an id is remembered whose key this is."""
        # that of a long one does not say whose it is
        return any(key in row for row in self._by_holder.rows) if is_digest(key) else key in self

    def put(self, name: str, now: float) -> None:
        """Count an id as freed now; at the bound the oldest is forgotten."""
        key = name if len(name) <= LONG_ID_CHARS else key_of(name)
        lost = None
        if self.has_parts:
            lost = self._by_holder.put(prefix_in(name), key, now)
        else:
            self.common.put(key, now)
            if len(self.common) > self._most:
                lost = self.common.pop_oldest(inf)
        if self.changes is not None:
            self.changes.mark(RESERVATION, key)
        if lost is not None:
            self._changed(lost[0])
            self.lost += 1

    def discard(self, name: str) -> None:
        """Forget an id, if it is there: it is in use again."""
        key = key_of(name)
        if self.has_parts:
            is_gone = self._by_holder.discard(prefix_in(name), key)
        else:
            is_gone = self.common.discard(key)
        if is_gone:
            self._changed(key)

    def _changed(self, key: str) -> None:
        if self.changes is not None:
            self.changes.mark(RESERVATION, key)

    def purge(self, now: float, limit: int) -> int:
        """Forget up to `limit` ids freed more than ten minutes ago; return how many."""
        gone = 0
        for holder, row in self._by_holder.turns(limit):
            while gone < limit:
                entry = row.pop_oldest(now - FREED_MEMORY_S)
                if entry is None:
                    break
                if self.has_parts:
                    self._by_holder.left(holder)
                self._changed(entry[0])
                gone += 1
        return gone

    def check(self, taken: Iterable[str]) -> None:
        """Assert all invariants, given the names in use."""
        keys = {key_of(name) for name in taken}
        rows = self._by_holder
        assert not any(key in row for key in keys for row in rows.rows), "live and freed at once"
        if self.has_parts:
            rows.check()
        else:
            assert len(self.common) <= self._most


def is_digest(key: str) -> bool:
    """Return whether a key is of an id too long to be remembered in full."""
    return len(key) == _KEY_CHARS and key.startswith(_BY_DIGEST)


def key_of(name: str) -> str:
    """Return the key of a freed id; a digest collision would only answer 200 instead of 404."""
    if len(name) <= LONG_ID_CHARS or is_digest(name):
        return name
    return _BY_DIGEST + xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))
