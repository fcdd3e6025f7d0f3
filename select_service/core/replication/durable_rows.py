"""What replicas are still to learn from us, as it is kept on disk: see `core/state.py`.

A caller was answered, so it must hold whatever restarts: what is over (`TombstoneRows`,
`ClosedLeaseRows`), times to live that leases of other replicas were given (`LeaseTermsRows`), and
how far their reservations have come (`ClaimRows`). Once
restored it is retold as before, in snapshots and to any replica that states otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from select_service.core.effects import NOTHING
from select_service.core.ledger.freed_ids import key_of
from select_service.core.replication.messages import ClaimRecord
from select_service.core.replication.tombstones import Tombstone

if TYPE_CHECKING:
    from select_service.core.effects import Effects
    from select_service.core.replication.claims import Claims
    from select_service.core.replication.shared_leases import SharedLeases
    from select_service.core.replication.snapshots import ReplicaSnapshots


class TombstoneRecord(msgspec.Struct, array_like=True, frozen=True):
    """The ends of claims on one id, and the order in which a caller last freed it (0: never)."""

    name: str
    tombstones: list[Tombstone]
    freed: int = 0


class ClaimKept(msgspec.Struct, array_like=True, frozen=True):
    """A claim that has no booking of ours.

    `aged`: its owner was lost and its time was up. `wanted`: a caller of ours was told of it.
    """

    owner: int
    claim: ClaimRecord
    aged: bool = False
    wanted: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_ends = msgspec.msgpack.Decoder(TombstoneRecord).decode
_decode_claims = msgspec.msgpack.Decoder(list[ClaimKept]).decode
_decode_terms = msgspec.msgpack.Decoder(tuple[float, int]).decode
_decode_closing = msgspec.msgpack.Decoder(dict[int, int]).decode


class TombstoneRows:
    """Ends by `key_of` the id; restored before the reservations, which may be over."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def record(self, name: str) -> bytes | None:
        """Return everything that is over on an id."""
        full_name, tombstones = self._claims.tombstones.kept_on(name)
        freed = self._claims.endings.kept_order(name)
        return (
            _encode(TombstoneRecord(full_name, tombstones, freed)) if tombstones or freed else None
        )

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Remember it for as long again."""
        known = _decode_ends(record)
        if key_of(known.name) != name:
            return None
        for end in known.tombstones:
            self._claims.endings.note(known.name, end, now, kept=True)
        if known.freed:
            self._claims.endings.recall_freed(known.name, known.freed, now)
        return NOTHING


class ClosedLeaseRows:
    """Closed leases by id; restored after the reservations that may be under them."""

    def __init__(self, claims: Claims, leases: SharedLeases) -> None:
        self._claims = claims
        self._leases = leases

    def record(self, name: str) -> bytes | None:
        """Return by owner the last claim that is over with the lease."""
        up_to = self._claims.closings.find(name)
        return None if up_to is None else _encode(up_to)

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Remember it for as long again."""
        self._leases.recall_closed(name, _decode_closing(record), now)
        return NOTHING


class LeaseTermsRows:
    """Times to live of other replicas' leases by id; restored before the claims that name them."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def record(self, name: str) -> bytes | None:
        """Return the time to live that our callers gave a lease, and its revision."""
        terms = self._claims.copies.terms(name)
        return None if terms is None else _encode(terms)

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Tell the others of it until they know."""
        terms = _decode_terms(record)
        if not self._claims.router_id or not self._claims.copies.recall(name, terms, now):
            return None
        return NOTHING


class ClaimRows:
    """Claims without a booking of ours by id; restored last, if they are not over.

    Those of other replicas become relayed ones, as if another replica had told us of them.
    """

    def __init__(self, claims: Claims, snapshots: ReplicaSnapshots) -> None:
        self._claims = claims
        self._snapshots = snapshots

    def record(self, name: str) -> bytes | None:
        """Return the claims on an id that are to be kept, as they are now."""
        record = self._snapshots.record
        kept = [
            ClaimKept(one.owner, record(one), one.aged, one.wanted)
            for one in self._claims.noted(name)
        ]
        return _encode(kept) if kept else None

    def restore(self, _: str, record: bytes, now: float) -> Effects | None:
        """Know the claims again."""
        kept = _decode_claims(record)
        if not self._claims.router_id:
            return None
        for one in kept:
            self._snapshots.recall(one.owner, one.claim, now, aged=one.aged, wanted=one.wanted)
        return NOTHING
