"""The latest records of decisions: a ring bounded by count and by bytes.

The pure-Python twin of `RecordRing` in `_record_ring.pyx`: same names, same records, same sizes. It
also makes the records, because every selection pays for that; `decision_log.py` finds and returns
them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from select_service.core.decisions.record import (
    HASH_BYTES_KEPT,
    RESERVATION_ID,
    SEEN,
    SELECTION_ID,
    SIZE,
)

if TYPE_CHECKING:
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Rows
    from select_service.core.decisions.fleet_snapshot import FleetSnapshot
    from select_service.core.decisions.record import DecisionRecord, Look, UnusualFacts
    from select_service.core.pricing.placement import Placement, Seen
    from select_service.core.pricing.weights import Weights
    from select_service.types import CacheHit

_CHAR_BYTES: Final = 4  # maximum, in a text that is not all ASCII
_RECORD_BYTES: Final = 640  # the record with its places in the ring; measured, rounded up
_GROUP_BYTES: Final = 256  # one group of matches, without its slots
_ASKED_BYTES: Final = 320  # the gate's request and decision; class names are shared
_HIT_BYTES: Final = 64  # hit rate and threshold


class RecordRing:
    """Makes records and keeps the latest.

    Attributes:
        bytes: of all kept records: each one's size, plus the columns of each run of records that
            share them.
        next: number of the next record.
    """

    __slots__ = ("_bytes_max", "_columns", "_count_max", "_ring", "bytes", "next")

    def __init__(self, count_max: int, bytes_max: int, first: int) -> None:
        """Start empty.

        0 records or bytes: none are kept, only made. `first` is the number of the first
        record.
        """
        self.bytes = 0
        self.next = first
        self._count_max = count_max if bytes_max else 0
        self._bytes_max = bytes_max
        self._ring: deque[DecisionRecord] = deque()
        self._columns = b""  # of the newest record

    def __len__(self) -> int:
        return len(self._ring)

    def keep(  # noqa: C901, PLR0912, PLR0917 - in one call, by place: all pay for it
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        unusual: UnusualFacts | None,
        cache_hit: CacheHit | None,
        weights: Weights,
        fleet_snapshot: Look,
        more: int,
    ) -> DecisionRecord | None:
        """Keep a decision's record, evicting the oldest; return it if it is to be explained."""
        prompt, request, ask = ticket.prompt, ticket.request, ticket.asked
        block_hashes, selection_id = prompt.block_hashes, request.selection_id
        reservation_id = ticket.reservation_id
        if len(block_hashes) > HASH_BYTES_KEPT:
            block_hashes = block_hashes[:HASH_BYTES_KEPT]
        columns, matched, shared, trust = seen
        size = _RECORD_BYTES + len(block_hashes) + more
        if matched is not None:
            size += 2 * len(columns) + _GROUP_BYTES * len(matched)
        if shared is not None:
            size += len(columns) + _GROUP_BYTES * len(shared)
        if trust is not None:
            size += len(trust)
        if selection_id is not None:  # chosen by the client, of any length
            size += len(selection_id) if selection_id.isascii() else _text_bytes(selection_id)
        if reservation_id is not None:
            size += len(reservation_id) if reservation_id.isascii() else _text_bytes(reservation_id)
        if ask is not None:  # the tenant is as sent
            size += _ASKED_BYTES + _text_bytes(ask.tenant_id)
        if cache_hit is not None:
            size += _HIT_BYTES
        # fmt: off
        record: DecisionRecord = (  # type: ignore[assignment]
            self.next, now, ticket.since, fleet_snapshot, rows, seen, block_hashes, prompt.blocks,
            prompt.isl_tokens, weights, slot, selection_id, reservation_id, unusual, ask,
            ticket.gate_decision, cache_hit, size,
        )
        # fmt: on
        if self._count_max:
            self.next += 1
            self._ring.append(record)
            self.bytes += size
            if columns is not self._columns:  # charged once for a run of records that share them
                self._columns = columns
                self.bytes += len(columns)
            if self.bytes > self._bytes_max or len(self._ring) > self._count_max:
                self._drop_oldest()
        return record if request.explain else None

    def keep_usual(
        self,
        ticket: Ticket,
        placement: Placement,
        rows: Rows,
        now: float,
        cache_hit: CacheHit | None,
        fleet_snapshot: FleetSnapshot,
    ) -> bool:
        """Keep a decision's record if nothing about it is unusual; False: something is.

        Unusual are a choice among a subset, routing constraints, a request to explain, and a
        fleet snapshot that is out of date.
        """
        request, seen = ticket.request, placement.seen
        if (
            now >= fleet_snapshot.until
            or rows is not fleet_snapshot.everyone
            or request.explain
            or request.routing_constraints is not UNSET
            or seen is None
        ):
            return False
        slot, weights = placement.slot, placement.weights
        self.keep(ticket, seen, rows, slot, now, None, cache_hit, weights, fleet_snapshot.latest, 0)
        return True

    def _drop_oldest(self) -> None:
        """Evict records until both limits are met."""
        ring = self._ring
        while ring and (len(ring) > self._count_max or self.bytes > self._bytes_max):
            oldest = ring.popleft()
            self.bytes -= oldest[SIZE]
            columns = oldest[SEEN][0]
            if not ring:
                self._columns = b""
            if not ring or ring[0][SEEN][0] is not columns:
                self.bytes -= len(columns)

    def numbered(self, number: int) -> DecisionRecord | None:
        """Return the record of a number, if it is still kept."""
        at = number - (self.next - len(self._ring))
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def numbers_of(self, names: frozenset[str]) -> list[int]:
        """Return the numbers of the records with any of these ids, newest first."""
        return [
            one[0]
            for one in reversed(self._ring)
            if one[SELECTION_ID] in names or one[RESERVATION_ID] in names
        ]


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else _CHAR_BYTES * len(text)
