"""Payload bytes to `EventBatch`: every dialect, decoded event by event where it matters.

A batch in the stream's usual dialect is decoded in one typed call; whatever that call refuses is
decoded again event by event, so that one bad event costs only itself. `writer` decides what events
*mean* for the index; sequence numbers and frames belong to `stream`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec import Raw
from xxhash import xxh3_64, xxh3_64_intdigest

from indexer.compiled import usable
from indexer.core.dialects import LOOSE_MAP, MAP, MIXED, NIL, RAW_LIST, TYPED
from indexer.core.events import READ_AT_ONCE_BYTES, EventBatch, Oversized
from indexer.core.normalize import (
    UNREADABLE,
    form_of,
    form_of_events,
    normal_events,
    number_of,
    rank_of,
    value_of,
    wire_event,
)
from indexer.core.piecewise import PiecewiseDecoder
from indexer.types import U64_MASK

if usable("indexer._wire", 2):
    from indexer._wire import LongBatch, decode_plain
else:
    LongBatch = None  # type: ignore[assignment,misc]

    def decode_plain(payload: bytes, form: str) -> EventBatch | None:
        """Leave everything to the decoders below: the twin of the compiled fast path."""
        del payload, form
        return None


if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

__all__ = ["BatchDecoder", "LongBatch", "Reading", "decode_plain"]

READ_VALUES: Final = 1 << 15
"""Values of a long plain message that the kernel reads in one step, some 0.15 ms."""

PIECE_VALUES: Final = 1 << 11
"""Values of any other long message read in one step; some 0.2 ms without the kernel."""

DIGESTED_BYTES: Final = 1 << 18
"""Bytes of it digested in one step, 0.03 ms."""


class Reading:
    """A long payload that is read in pieces.

    Attributes:
        batch: The result, once `is_over`; None if the payload is not a batch.
        is_over: Whether everything has been read.
    """

    __slots__ = ("_at", "_hasher", "_is_read", "_steps", "batch", "is_over", "payload")

    def __init__(self, payload: bytes, form: str, *, bigram: bool) -> None:
        self.payload = payload
        self.batch: EventBatch | None = None
        self.is_over = False
        self._is_read = False
        self._hasher = xxh3_64()
        self._at = 0
        self._steps = self._read(form, bigram=bigram)

    def go_on(self) -> bool:
        """Read a piece; return `is_over`."""
        if self._at < len(self.payload):
            piece = memoryview(self.payload)[self._at : self._at + DIGESTED_BYTES]
            self._hasher.update(piece)
            self._at += DIGESTED_BYTES
        if not self._is_read:
            self._is_read = next(self._steps, True) is True
        self.is_over = self._is_read and self._at >= len(self.payload)
        return self.is_over

    def _read(self, form: str, *, bigram: bool) -> Iterator[None]:
        if LongBatch is not None and not bigram:
            with suppress(MemoryError):  # then fall back to the way that takes less memory
                self.batch = yield from self._read_plainly()
                yield  # freeing a failed attempt takes time of its own
        if self.batch is None:
            pieces = PiecewiseDecoder(self.payload, form, bigram=bigram, values=PIECE_VALUES)
            while not pieces.go_on():
                yield
            self.batch = pieces.batch

    def _read_plainly(self) -> Generator[None, None, EventBatch | None]:
        plain = LongBatch(self.payload)
        while not plain.go_on(READ_VALUES):
            yield
        return plain.result()

    @property
    def digest(self) -> int:
        """XXH3-64 of the payload."""
        return self._hasher.intdigest()


class BatchDecoder:
    """Decodes the payloads of one stream and remembers its dialect."""

    __slots__ = ("_bigram", "_form", "_reading")

    def __init__(self, *, is_eagle: bool = False) -> None:
        self._bigram = is_eagle
        self._form = MAP  # the dialect of current engines; a wrong guess costs one failed attempt
        self._reading: Reading | None = None

    def read_ahead(self, payload: bytes) -> bool:
        """Read a piece of a long payload; True if nothing more needs reading before `decode`.

        The result is kept for this very object, until `let_go` or until another one is read.
        """
        if len(payload) <= READ_AT_ONCE_BYTES:
            return True
        if self._reading is None or self._reading.payload is not payload:
            self._reading = Reading(payload, self._form, bigram=self._bigram)
        return self._reading.is_over or self._reading.go_on()

    def let_go(self) -> None:
        """Forget what was read ahead."""
        self._reading = None

    def digest(self, payload: bytes) -> int:
        """XXH3-64 of a payload; of one that was too long, of its head and size."""
        if isinstance(payload, Oversized):
            return xxh3_64_intdigest(payload, payload.size & U64_MASK)
        reading = self._reading
        if reading is not None and reading.payload is payload and reading.is_over:
            return reading.digest
        return xxh3_64_intdigest(payload)

    def decode(self, payload: bytes) -> EventBatch | None:
        """Decode a batch; None if the payload is not one. Never raises, whatever the bytes."""
        if not payload or isinstance(payload, Oversized):
            return None
        form = self._form
        reading = self._reading
        if reading is not None and reading.payload is payload and reading.is_over:
            batch = reading.batch
            if batch is not None and batch.form != MIXED:
                self._form = batch.form
            return batch
        if not self._bigram:
            plain = decode_plain(payload, form)
            if plain is not None:
                return plain
        try:
            typed = TYPED[form, self._bigram].decode(payload)
            events = normal_events(typed.events)
        except UNREADABLE:
            return self._decode_loosely(payload)
        return EventBatch(events, typed.ts, rank_of(typed.dp_rank), form)

    def _decode_loosely(self, payload: bytes) -> EventBatch | None:
        try:
            ts, raw_events, rank = _loose_batch(payload)
            raws = RAW_LIST.decode(raw_events)
        except UNREADABLE:
            return None
        events = normal_events(wire_event(raw, bigram=self._bigram) for raw in raws)
        form = form_of_events({form_of(raw) for raw in raws}, self._form)
        if form != MIXED:
            self._form = form
        return EventBatch(events, number_of(ts), rank_of(value_of(rank)), form)


def _loose_batch(payload: bytes) -> tuple[Raw, Raw, Raw]:
    """Return time, events and rank of a batch in any shape that an engine ever gave it."""
    if form_of(payload) == MAP:
        batch = LOOSE_MAP.decode(payload)
        ranks = (batch.data_parallel_rank, batch.dp_rank, batch.attn_dp_rank)
        return batch.ts, batch.events, next((r for r in ranks if r != NIL), NIL)
    ts, events, *rest = RAW_LIST.decode(payload)
    return ts, events, rest[0] if rest else NIL
