"""Reads items from the bytes of a recording, trusting none of them.

A truncated file ends with its last whole frame, and is reported as torn; any other deviation from
`items.py` is refused, with its position. Items before that position are good.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from indexer.types import HASH_BYTES, Scope
from select_service.core.recording.items import (
    CHUNK_BYTES,
    CHUNKS_MAX,
    FRAME,
    FRAME_RAW_MAX,
    LENGTH,
    MAGIC,
    OPENING,
    VERSION,
    Column,
    Decided,
    End,
    Events,
    Gap,
    Header,
    Item,
    PlannedBatch,
    ReservationStep,
    SlotsChange,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from select_service.core.columns import Slots
    from select_service.core.recording.items import AttachedWorker, Prompted

COLUMN_BYTES_MAX: Final = 64 << 20
"""Four million ranks: no fleet has as many, and a reader should not allocate more."""

_decode = msgspec.msgpack.Decoder(Item).decode
_VALUE: Final = 8
_POSITION: Final = 4


class BadRecording(ValueError):
    """Not a recording, or not a readable one; the text says where it goes wrong."""


class DamagedFile(BadRecording):
    """The bytes of one file are not what a recording wrote.

    Attributes:
        why: what is wrong.
        at: offset of the frame.
    """

    def __init__(self, name: str, at: int, why: str) -> None:
        super().__init__(f"{name}, frame at byte {at}: {why}")
        self.why = why
        self.at = at


class ScopeFleet(NamedTuple):
    """The fleet of a scope. A change makes another one."""

    scope: Scope
    block_size: int
    workers: dict[int, AttachedWorker]


def _changed(before: bytes, column: Column) -> bytes:
    if len(column.at) % _POSITION or len(column.values) != len(column.at) // _POSITION * _VALUE:
        raise BadRecording("a column with as many positions as values is expected")
    at = np.frombuffer(column.at, "<u4")
    values = np.frombuffer(before, "<u8").copy()
    if len(at) and int(at.max()) >= len(values):
        raise BadRecording("a position beyond its column")
    values[at] = np.frombuffer(column.values, "<u8")
    return values.tobytes()


def hashes_of(prompt: Prompted) -> bytes:
    """Return the block hashes of a prompt that came from a `RecordedFile`."""
    (hashes,) = prompt.hashes
    assert isinstance(hashes, bytes)
    return hashes


def slots_of(packed: bytes, ranks: int) -> Slots:
    """Return slots in the form the core uses.

    Raises:
        BadRecording: there are none such.
    """
    if len(packed) % _POSITION:
        raise BadRecording("slots are of 4 bytes each")
    slots = np.frombuffer(packed, "<u4").astype(np.int64)
    if len(slots) and int(slots.max()) >= ranks:
        raise BadRecording(f"slot {int(slots.max())} of {ranks}")
    return slots


class RecordedFile:
    """One file, item by item.

    Attributes:
        header: once something was read.
        fleets: by the file's number of a scope, as of the last item.
        is_torn: whether it ends in the middle of a frame.
        is_ended: whether its writer ended it; not one that was killed, or is still writing.
        frames: whole ones, so far.
        offset: of the frame that was read last.
    """

    def __init__(self, read: Callable[[int], bytes], name: str) -> None:
        """Prepare to read; nothing is read yet.

        `read` returns this many bytes, fewer only at the end; errors carry the `name` of
        the file.
        """
        self._read = read
        self._name = name
        self.offset = 0
        self.header: Header | None = None
        self.fleets: dict[int, ScopeFleet] = {}
        self._columns: dict[tuple[str, int], bytes] = {}
        self.is_torn = self.is_ended = False
        self.frames = 0
        self._chunks: list[bytes] = []

    def __iter__(self) -> Iterator[Item]:
        """Yield the items after the header; `fleets` already includes the last `SlotsChange`.

        Columns are whole, and prompts have all their hashes.

        Raises:
            DamagedFile: with file and offset.
        """
        try:
            for item in self._items():
                if self.header is None:
                    self.header = self._begin(item)
                    continue
                if isinstance(item, Header):
                    raise BadRecording("a second header")  # noqa: TRY301 - its place is added here
                if isinstance(item, Gap) and item.resets:
                    self._forget()
                elif isinstance(item, SlotsChange):
                    self._attach(item)
                elif (
                    isinstance(item, Decided | PlannedBatch | Events | ReservationStep)
                    and item.scope is not None
                ):
                    self.fleet(item.scope)
                elif isinstance(item, End):
                    self.is_ended = True
                if isinstance(item, Decided | PlannedBatch):
                    self._fill(item)
                yield item
        except BadRecording as error:
            raise DamagedFile(self._name, self.offset, str(error)) from None

    def _begin(self, item: Item) -> Header:
        if not isinstance(item, Header):
            raise BadRecording("it does not begin with a header")
        return item

    def _forget(self) -> None:
        self.fleets.clear()
        self._columns.clear()
        self._chunks.clear()

    def _attach(self, item: SlotsChange) -> None:
        before = self.fleets.get(item.scope)
        if before is None and not item.is_whole:
            raise BadRecording(f"what is new in scope {item.scope}, of which nothing is known")
        workers = {} if item.is_whole or before is None else dict(before.workers)
        for worker_id in item.gone:
            workers.pop(worker_id, None)
        workers.update((one.spec.worker_id, one) for one in item.workers)
        scope = Scope(item.model_name, item.tenant_id)
        self.fleets[item.scope] = ScopeFleet(scope, item.block_size, workers)

    def fleet(self, scope: int) -> ScopeFleet:
        """Return the fleet of a scope.

        Raises:
            BadRecording: the file does not have it.
        """
        fleet = self.fleets.get(scope)
        if fleet is None:
            raise BadRecording(f"scope {scope} was never named")
        return fleet

    # -- unchanged data ----------------------------------------------------------------------------

    def _fill(self, item: Decided | PlannedBatch) -> None:
        """Complete columns and hashes that refer to earlier items."""
        if isinstance(item, Decided):
            self._fill_column("load", item.scope, item.load)
            if item.trust is not None:
                self._fill_column("trust", item.scope, item.trust)
            self._fill_prompt(item.prompt)
            return
        for prompt in item.prompts:
            self._fill_prompt(prompt)
        for step in item.steps:
            self._fill_column("load", item.scope, step.load)
            self._fill_column("requests", item.scope, step.requests)
            for _, _, _, trust in step.looked:
                if trust is not None:
                    self._fill_column("trust", item.scope, trust)

    def _fill_column(self, kind: str, scope: int, column: Column) -> None:
        whole = column.whole
        if whole is None:
            before = self._columns.get((kind, scope))
            if before is None:
                raise BadRecording("a column that differs from none")
            whole = column.whole = (
                _changed(before, column) if column.at or column.values else before
            )
        elif len(whole) % _VALUE or len(whole) > COLUMN_BYTES_MAX:
            raise BadRecording(f"a column of {len(whole)} bytes")
        self._columns[kind, scope] = whole

    def _fill_prompt(self, prompt: Prompted) -> None:
        chunks = self._chunks
        whole: list[bytes] = []
        for one in prompt.hashes:
            if isinstance(one, int):
                if not 0 <= one < len(chunks):
                    raise BadRecording(f"chunk {one} of {len(chunks)}")
                whole.append(chunks[one])
                continue
            if len(one) % HASH_BYTES or len(one) > CHUNK_BYTES:
                raise BadRecording(f"hashes of {len(one)} bytes")
            whole.append(one)
            if len(one) == CHUNK_BYTES:
                if len(chunks) >= CHUNKS_MAX:
                    chunks.clear()
                chunks.append(one)
        if prompt.isl_tokens < 0:
            raise BadRecording("a prompt shorter than nothing")
        prompt.hashes = [b"".join(whole)]

    # -- frames ------------------------------------------------------------------------------------

    def _items(self) -> Iterator[Item]:
        opening = self._read(len(OPENING))
        if opening != OPENING:
            self._complain(opening)
            return
        self.offset = len(OPENING)
        while (raw := self._frame()) is not None:
            at = 0
            while at < len(raw):
                if at + LENGTH.size > len(raw):
                    raise BadRecording("an item without its length")
                (size,) = LENGTH.unpack_from(raw, at)
                at += LENGTH.size
                if at + size > len(raw):
                    raise BadRecording("an item that is longer than its frame")
                yield _item(raw[at : at + size])
                at += size

    def _complain(self, opening: bytes) -> None:
        """Refuse wrong first bytes, unless the file is merely too short."""
        if OPENING.startswith(opening):
            self.is_torn = True
        elif opening.startswith(MAGIC):
            other = opening[len(MAGIC) :].decode("ascii", "replace").strip()
            raise BadRecording(
                f"format {other} of a recording; this reads format {VERSION}:"
                " replay it with the version that wrote it"
            )
        else:
            raise BadRecording("this is no recording of select-service")

    def _frame(self) -> bytes | None:
        """Return the content of the next frame; None: there is none, or not all of it."""
        head = self._read(FRAME.size)
        if len(head) < FRAME.size:
            self.is_torn = bool(head)
            return None
        size, checksum = FRAME.unpack(head)
        if size > FRAME_RAW_MAX:
            raise BadRecording(f"a frame of {size} bytes")
        body = self._read(size)
        if len(body) < size:
            self.is_torn = True
            return None
        if zlib.crc32(body) != checksum:
            raise BadRecording("its checksum is wrong")
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(body, FRAME_RAW_MAX)
        except zlib.error as error:
            raise BadRecording(f"it cannot be decompressed: {error}") from None
        if inflate.unconsumed_tail or not inflate.eof:
            raise BadRecording("it is too long, or not all there")
        self.frames += 1
        self.offset += FRAME.size + size
        return raw


def _item(body: bytes) -> Item:
    try:
        item: Item = _decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise BadRecording(f"an item that cannot be read: {error}") from None
    return item
