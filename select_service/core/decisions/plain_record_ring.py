"""The last records of decisions: a ring bounded by count and by bytes.

The plain twin of `RecordRing` in `_record_ring.pyx`: same names, same records, same sizes. It makes
the records, too, because every selection pays for that; who asks about one goes to `keeping.py`.
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
    from select_service.core.decisions.lookout import Lookout
    from select_service.core.decisions.record import Look, Odds, Record
    from select_service.core.pricing.placement import Placement, Seen
    from select_service.core.pricing.weights import Weights
    from select_service.types import CacheHit

__all__ = ["RecordRing"]

_CHAR_BYTES: Final = 4  # of a text that is not all ASCII, at most
_RECORD_BYTES: Final = 640  # the record with its places in the ring; measured, rounded up
_GROUP_BYTES: Final = 256  # one group of matches, without its slots
_ASKED_BYTES: Final = 320  # what a gate was asked and said; the classes' names are its own
_HIT_BYTES: Final = 64  # how it stood to a cache-hit threshold


class RecordRing:
    """Makes records and keeps the last of them.

    Attributes:
        bytes: what those kept take together: each its own size, and the columns of each run of
            records that have the same.
        next: number of the next one.
    """

    __slots__ = ("_bytes_max", "_columns", "_count_max", "_ring", "bytes", "next")

    def __init__(self, count_max: int, bytes_max: int, first: int) -> None:
        """Start empty.

        Args:
            count_max: records kept; 0: none, they are only made.
            bytes_max: bytes they may take together; 0: none are kept.
            first: number of the first.
        """
        self.bytes = 0
        self.next = first
        self._count_max = count_max if bytes_max else 0
        self._bytes_max = bytes_max
        self._ring: deque[Record] = deque()
        self._columns = b""  # of the newest

    def __len__(self) -> int:
        return len(self._ring)

    def keep(  # noqa: C901, PLR0912, PLR0917 - in one call, by place: all pay for it
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        odds: Odds | None,
        cache_hit: CacheHit | None,
        weights: Weights,
        lookout: Look,
        more: int,
    ) -> Record | None:
        """Keep the record of a decision, let the oldest go; return it if it is to be told."""
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
        if selection_id is not None:  # a caller's words, and of any length
            size += len(selection_id) if selection_id.isascii() else _text_bytes(selection_id)
        if reservation_id is not None:
            size += len(reservation_id) if reservation_id.isascii() else _text_bytes(reservation_id)
        if ask is not None:  # the tenant is as it was sent
            size += _ASKED_BYTES + _text_bytes(ask.tenant_id)
        if cache_hit is not None:
            size += _HIT_BYTES
        # fmt: off
        record: Record = (  # type: ignore[assignment]
            self.next, now, ticket.since, lookout, rows, seen, block_hashes, prompt.blocks,
            prompt.isl_tokens, weights, slot, selection_id, reservation_id, odds, ask, ticket.said,
            cache_hit, size,
        )
        # fmt: on
        if self._count_max:
            self.next += 1
            self._ring.append(record)
            self.bytes += size
            if columns is not self._columns:  # charged once for a run of records with the same
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
        lookout: Lookout,
    ) -> bool:
        """Keep the record of a decision with nothing unusual about it; False: it has something.

        Unusual are a choice among some, wishes, who wants it told, and what was written down of
        the fleet too long ago.
        """
        request, seen = ticket.request, placement.seen
        if (
            now >= lookout.until
            or rows is not lookout.everyone
            or request.explain
            or request.routing_constraints is not UNSET
            or seen is None
        ):
            return False
        slot, weights = placement.slot, placement.weights
        self.keep(ticket, seen, rows, slot, now, None, cache_hit, weights, lookout.told, 0)
        return True

    def _drop_oldest(self) -> None:
        """Let go of as many as are too many."""
        ring = self._ring
        while ring and (len(ring) > self._count_max or self.bytes > self._bytes_max):
            oldest = ring.popleft()
            self.bytes -= oldest[SIZE]
            columns = oldest[SEEN][0]
            if not ring:
                self._columns = b""
            if not ring or ring[0][SEEN][0] is not columns:
                self.bytes -= len(columns)

    def numbered(self, number: int) -> Record | None:
        """Return the record of a number, if it is there."""
        at = number - (self.next - len(self._ring))
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def numbers_of(self, names: frozenset[str]) -> list[int]:
        """Return the numbers of the records under any of these ids, the newest first."""
        return [
            one[0]
            for one in reversed(self._ring)
            if one[SELECTION_ID] in names or one[RESERVATION_ID] in names
        ]


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else _CHAR_BYTES * len(text)
