"""Ended claims: which are over, by which owner, and which claim took each one over.

An end is final, so ends are remembered for a while, up to a limit: any later statement on such a
claim is outdated. Only `claims.py` writes here.

An end is that of a claim on one id: a statement with the same claim name but another id was
garbled, and ends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from select_service.core.expiring_map import ExpiringMap
from select_service.core.ledger.freed_ids import key_of
from select_service.core.replication.messages import ANCESTORS_MAX, Ended, Key
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_expiring_map import TenantExpiringMap

if TYPE_CHECKING:
    from collections.abc import Iterator


ENDS_KEPT_MAX: Final = 64
"""Tombstones of claims on one id kept on disk, the latest: an id is rarely booked again."""


class _End(msgspec.Struct, array_like=True, frozen=True):
    """What we know of an end; packed, and remembered since it was last heard."""

    name: str  # the id it was on; the next four are as in `Tombstone`
    by_owner: bool
    since: int
    heir: Key | None
    freed: bool
    kept: bool = False  # on disk, if there is one


class Tombstone(msgspec.Struct, array_like=True):
    """The end of a claim as it is sent, and kept on disk."""

    owner: int
    born: int
    by_owner: bool = False  # its owner said so itself
    since: int = 0  # when we first heard it, see `FinishedClaims.order`; 0: now
    heir: Key | None = None  # the claim that took it over
    freed: bool = False  # whether the reservation was freed


_pack = msgspec.msgpack.Encoder().encode
_read_end = msgspec.msgpack.Decoder(_End).decode
_read_name = msgspec.msgpack.Decoder(tuple[int, int, int]).decode
_read_on = msgspec.msgpack.Decoder(tuple[str, list[Key]]).decode


def _name(reservation_id: str, key: Key) -> bytes:
    """Pack the name of a claim with a 32-bit digest of its id, which saves 36 bytes.

    The digest is of `key_of` the id, as a state directory keeps no more of a long id.
    """
    name = key_of(reservation_id).encode("utf-8", "surrogatepass")
    return _pack((*key, xxhash.xxh32_intdigest(name)))


class Tombstones:
    """Tombstones by claim name and id, in the order last heard. All operations O(1).

    Attributes:
        lost: forgotten early, because of the limit.
    """

    def __init__(self, ends_max: int, shares: Shares | None = None) -> None:
        self.lost = 0
        self._ends_max = ends_max
        shares = shares or Shares()
        bound = shares.bound("replica_ended_max", lambda: ends_max, by_prefix=True)
        self._ends: TenantExpiringMap[bytes] = TenantExpiringMap(shares, bound)
        """By the tenant that the id is of: a `_name` → a packed `_End`."""
        self._on: ExpiringMap[str] = ExpiringMap()  # `key_of` the id → the kept ends on it, packed

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def nbytes(self) -> int:
        """Their size in memory."""
        return self._ends.nbytes + self._on.nbytes

    def has(self, reservation_id: str, key: Key) -> bool:
        """Tell whether this claim on this id is over."""
        packed = _name(reservation_id, key)
        return any(packed in row for _, row in self._ends.where(prefix_in(reservation_id)))

    def _find(self, reservation_id: str, key: Key) -> _End | None:
        found = self._ends.get(prefix_in(reservation_id), _name(reservation_id, key))
        return None if found is None else _read_end(found)

    def is_word_of_owner(self, reservation_id: str, key: Key) -> bool:
        """Tell whether its owner said so itself."""
        entry = self._find(reservation_id, key)
        return entry is not None and entry.by_owner

    def was_freed(self, reservation_id: str, key: Key) -> bool:
        """Tell whether the reservation was freed: then all claims that took it over are over."""
        entry = self._find(reservation_id, key)
        return entry is not None and entry.freed

    def since(self, reservation_id: str, key: Key) -> int | None:
        """Return when the end was first heard; None: it has not ended, as far as we know."""
        entry = self._find(reservation_id, key)
        return None if entry is None else entry.since

    def kept_on(self, freed_key: str) -> tuple[str, list[Tombstone]]:
        """Return what is to be kept on disk of the ends on an id, and the id itself."""
        kept: list[Tombstone] = []
        name, keys = self._keys_on(freed_key)
        for key in keys:
            end = self._find(name, key)
            if end is not None:
                kept.append(Tombstone(*key, end.by_owner, end.since, end.heir, end.freed))
        return name, kept

    def _keys_on(self, freed_key: str) -> tuple[str, list[Key]]:
        found = self._on.get(freed_key)
        return (freed_key, []) if found is None else _read_on(found)

    # -- heirs ---------------------------------------------------------------------------------

    def heir_of(self, reservation_id: str, key: Key) -> Key | None:
        """Return the claim that lives on in place of an ended one; None: none is known."""
        return self.living(reservation_id, key) if self.has(reservation_id, key) else None

    def living(self, reservation_id: str, key: Key) -> Key | None:
        """Return this claim, or the last in the chain of those that took it over.

        None if that is over, too.
        """
        for _ in range(ANCESTORS_MAX):
            entry = self._find(reservation_id, key)
            if entry is None:
                return key
            if entry.heir is None or entry.freed:
                return None
            key = entry.heir
        return None

    # -- statements ----------------------------------------------------------------------------

    def message_of(self, reservation_id: str, key: Key) -> Ended:
        """Return the statement that a claim is over."""
        heir = self.heir_of(reservation_id, key)
        return Ended(reservation_id, *key, heir, self.was_freed(reservation_id, key))

    def retold(self) -> Iterator[Ended]:
        """Yield the statements of all ends known now; the table may change meanwhile."""
        for row in self._ends.rows:
            for packed, _, _ in row.items():
                found = row.get(packed)
                if found is not None:
                    owner, born, _ = _read_name(packed)
                    yield self.message_of(_read_end(found).name, (owner, born))

    # -- changes -------------------------------------------------------------------------------

    def note(
        self, reservation_id: str, tombstone: Tombstone, now: float, *, kept: bool
    ) -> list[str]:
        """Remember the end of a claim on an id, on disk too if it is to be `kept`.

        Returns:
            `key_of` the ids whose kept ends have changed: this one, and one that had to make room.
        """
        key = tombstone.owner, tombstone.born
        known = self._find(reservation_id, key)
        if known is None:
            end = _End(
                reservation_id,
                tombstone.by_owner,
                tombstone.since,
                tombstone.heir,
                tombstone.freed,
                kept,
            )
        else:
            end = _End(
                known.name,
                tombstone.by_owner or known.by_owner,
                known.since,
                known.heir or tombstone.heir,
                tombstone.freed or known.freed,
                kept or known.kept,
            )
        if end.kept and (known is None or not known.kept):
            freed_key = key_of(reservation_id)
            keys = [*self._keys_on(freed_key)[1][1 - ENDS_KEPT_MAX :], key]
            self._on.put(freed_key, now, _pack((end.name, keys)))
        was_kept = known is not None and known.kept
        is_new = known is None or (known.heir, known.freed) != (end.heir, end.freed)
        changed = [key_of(reservation_id)] if end.kept and (is_new or not was_kept) else []
        name = _name(reservation_id, key)
        lost = self._ends.put(prefix_in(reservation_id), name, now, _pack(end))
        if lost is not None:
            self.lost += 1
            changed += self._forgotten(*lost)
        return changed

    def purge(self, horizon: float, limit: int) -> list[str]:
        """Forget up to `limit` ends last heard before `horizon`.

        Returns:
            `key_of` the ids whose kept ends have changed.
        """
        return [
            freed_key
            for forgotten in self._ends.expire(horizon, limit)
            for freed_key in self._forgotten(*forgotten)
        ]

    def _forgotten(self, name: bytes, packed: bytes) -> list[str]:
        """Note that an end is forgotten; return `key_of` its id if that is kept on disk."""
        owner, born, _ = _read_name(name)
        end = _read_end(packed)
        if not end.kept:
            return []
        freed_key = key_of(end.name)
        keys = [one for one in self._keys_on(freed_key)[1] if one != (owner, born)]
        if keys:
            self._on.put(freed_key, 0.0, _pack((end.name, keys)))
        else:
            self._on.discard(freed_key)
        return [freed_key]

    def check(self) -> None:
        """Assert all invariants."""
        self._ends.check()
        assert len(self._ends) <= self._ends_max
        known: dict[str, set[Key]] = {}
        for name, _, packed in [one for row in self._ends.rows for one in row.items()]:
            owner, born, _ = _read_name(name)
            end = _read_end(packed)
            if end.kept:
                known.setdefault(key_of(end.name), set()).add((owner, born))
        for freed_key, _, packed in self._on.items():
            _, keys = _read_on(packed)
            assert keys
            assert set(keys) <= known[freed_key], "of what is forgotten nothing is kept"
