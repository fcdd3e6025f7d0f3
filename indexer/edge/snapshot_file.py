"""The index snapshot as a file: checksummed frames, written completely or not at all.

A rank is a head, its frozen runs and an end. Each frame's checksum is seeded with the file's random
number and the frame's place, so neither a torn tail, a flipped bit nor a block of an older file
passes for valid. Damage costs only the ranks it lies in. Everything here blocks and is called in a
thread by `snapshots.py`; pieces are small, because decoding holds the GIL.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import Counter
from struct import Struct as Packing
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.core.cursor import StreamMemory
from indexer.plain_file import open_own
from indexer.types import U64_MASK, Scope, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

NAME: Final = "index.snapshot"
NEW: Final = "index.snapshot.new"
MAGIC: Final = b"ssindex1"  # the digit is the format version

PIECE_BYTES: Final = 16 << 10
"""Bytes of frozen runs per frame: some 100 µs to decode."""

FRAME_BYTES_MAX: Final = 64 << 20
"""A longer frame is invalid: its length field is damaged."""

_HEADER: Final = Packing("<8sQ")  # magic, number of the file
_FRAME: Final = Packing("<IBQ")  # length, kind, checksum
_HEAD, _RUNS, _END, _LAST = range(4)


class RankHead(msgspec.Struct, frozen=True, array_like=True):
    """Whose blocks follow, and what must still be true for them to be valid."""

    model_name: str
    tenant_id: str
    block_size: int
    is_eagle: bool
    worker_id: int
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    home: int | None  # see `Holder.home`
    is_uncertain: bool  # batches were lost, but blocks kept
    memory: StreamMemory
    reports_in_full: bool = False  # see `IndexWriter`; copies are counted otherwise

    @property
    def key(self) -> tuple[Scope, WorkerRank]:
        """Scope and rank."""
        return Scope(self.model_name, self.tenant_id), WorkerRank(self.worker_id, self.dp_rank)


class RankEnd(msgspec.Struct, frozen=True, array_like=True):
    """Totals that a complete rank must match."""

    runs: int
    blocks: list[int]  # per tier


class RankSnapshot(NamedTuple):
    """One rank as it goes into the file."""

    head: bytes
    pieces: Sequence[bytes]
    end: RankEnd

    @property
    def size(self) -> int:
        """Size in bytes without the frames."""
        return len(self.head) + sum(map(len, self.pieces))


class SnapshotEntry(NamedTuple):
    """One rank as it was found in a file."""

    head: RankHead
    end: RankEnd
    start: int  # offset of the first frame behind the head
    frames: int


class BadSnapshot(Exception):
    """The data read differs from the data written."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(RankHead).decode
_decode_end: Final = msgspec.msgpack.Decoder(RankEnd).decode


def _checksum(payload: bytes, kind: int, number: int, place: int) -> int:
    return xxh3_64_intdigest(payload, seed=(number + (place << 3) + kind) & U64_MASK)


class SnapshotWriter:
    """Writes a new file beside the old one and replaces the old one at the end."""

    def __init__(self, directory: Path) -> None:
        """Create the new file.

        Raises:
            OSError: the disk refuses.
        """
        self._directory = directory
        self._lock = threading.Lock()  # an abandoned writer may still be at work in its thread
        self._number = random.SystemRandom().getrandbits(64)
        self._place = 0
        descriptor = open_own(directory / NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb")
        self._write(_HEADER.pack(MAGIC, self._number))

    @property
    def written(self) -> int:
        """Bytes so far."""
        return self._place

    def add(self, rank: RankSnapshot) -> None:
        """Write a rank.

        Raises:
            OSError: the disk refuses.
        """
        with self._lock:
            self._frame(_HEAD, rank.head)
            for piece in rank.pieces:
                self._frame(_RUNS, piece)
            self._frame(_END, _encode(rank.end))

    def finish(self) -> None:
        """Flush to disk and rename to the final name.

        Raises:
            OSError: the disk refuses; the old file is still there.
        """
        with self._lock:
            if self._file is None:
                return
            self._frame(_LAST, b"")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            (self._directory / NEW).replace(self._directory / NAME)
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def abandon(self) -> None:
        """Discard the new file, keep the old one. Idempotent; nothing is raised."""
        with self._lock:
            if self._file is None:
                return
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # the disk may have no room for the buffered data
                file.close()
            (self._directory / NEW).unlink(missing_ok=True)

    def _frame(self, kind: int, payload: bytes) -> None:
        checksum = _checksum(payload, kind, self._number, self._place)
        self._write(_FRAME.pack(len(payload), kind, checksum))
        self._write(payload)

    def _write(self, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)
            self._place += len(data)


class SnapshotReader:
    """A file that may be damaged anywhere.

    Attributes:
        entries: complete ranks, by scope and rank.
        damage: faults found, by kind.
    """

    def __init__(self, path: Path) -> None:
        """Read through the whole file once.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: it cannot be read.
        """
        self.entries: dict[tuple[Scope, WorkerRank], SnapshotEntry] = {}
        self.damage: Counter[str] = Counter()
        self._file = os.fdopen(open_own(path, os.O_RDONLY), "rb")
        self._number = 0
        try:
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def read(self, entry: SnapshotEntry) -> list[bytes]:
        """Return the pieces of a rank.

        Raises:
            BadSnapshot: they have changed since the scan.
            OSError: the disk refuses.
        """
        self._file.seek(entry.start)
        pieces: list[bytes] = []
        for kind, payload in self._frames(entry.start):
            if kind != _RUNS or payload is None:
                break
            pieces.append(payload)
            if len(pieces) == entry.frames:
                break
        if len(pieces) != entry.frames:
            raise BadSnapshot("frames have changed since they were read first")
        return pieces

    def _scan(self) -> None:
        header = self._file.read(_HEADER.size)
        if len(header) != _HEADER.size or not header.startswith(MAGIC):
            self.damage["header"] += 1
            return
        self._number = _HEADER.unpack(header)[1]
        head: RankHead | None = None
        start = frames = 0
        for kind, payload in self._frames(_HEADER.size):
            if payload is None:
                self.damage["frame"] += 1
                head = None
            elif kind == _LAST:
                return
            elif kind == _HEAD:
                head = self._decoded(_decode_head, payload)
                start, frames = self._file.tell(), 0
            elif kind == _RUNS:
                frames += 1
            elif head is not None:
                end = self._decoded(_decode_end, payload)
                if end is not None:
                    self.entries[head.key] = SnapshotEntry(head, end, start, frames)
                head = None
        self.damage["torn"] += 1

    def _decoded(self, decode: Callable[[bytes], T], payload: bytes) -> T | None:
        """Decode an intact frame, possibly written by another version of this program."""
        try:
            return decode(payload)
        except ValueError:  # msgspec's errors, and invalid UTF-8
            self.damage["frame"] += 1
            return None

    def _frames(self, place: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield kind and payload; None for a damaged payload.

        The length field is trusted as long as what follows it makes sense.
        """
        misses = 0
        while len(head := self._file.read(_FRAME.size)) == _FRAME.size and misses < 2:  # noqa: PLR2004
            length, kind, checksum = _FRAME.unpack(head)
            if length > FRAME_BYTES_MAX:
                return
            payload = self._file.read(length)
            if len(payload) < length:
                return
            is_good = _checksum(payload, kind, self._number, place) == checksum
            misses = 0 if is_good else misses + 1
            place += _FRAME.size + length
            yield kind, payload if is_good else None
