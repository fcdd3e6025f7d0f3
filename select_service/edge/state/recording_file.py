"""`--record FILE`: writes the core's notes to disk, in a thread of their own, within bounds.

The event loop only appends notes to a queue; the thread encodes them, compresses some hundred KiB
at a time into a frame, and starts another file when one is long enough. Notes that find no room in
the queue or on the disk are counted, and the file says how many are missing.
`core/instrumentation/recorder.py` stands before it; `core/recording/items.py` defines the format.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import stat
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from typing_extensions import override

from select_service.core.recording.encoder import Packer, message
from select_service.core.recording.items import (
    FRAME,
    MAGIC,
    OPENING,
    End,
    Gap,
    Header,
    number_of,
    numbered,
)
from select_service.core.recording.notes import EventNote
from select_service.errors import RecordingUnusable
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from indexer.core.stream import EventStream
    from select_service.core.recording.items import Item
    from select_service.core.recording.notes import Note
    from select_service.types import RouterConfig

_log = logging.getLogger("select_service.recording")

FRAME_BYTES: Final = 256 << 10
"""Before compression: long enough to compress well, short enough to lose in a crash."""

LEVEL: Final = 1
"""The fastest of zlib, which releases the interpreter lock meanwhile."""

LOOK_S: Final = 0.1
"""How often the thread checks the queue: waking it for every note would cost the loop more."""

SLICE_S: Final = 0.0002
YIELD_S: Final = 0.0001
"""How long the thread works before it yields the interpreter to the loop, and for how long it
sleeps."""

RETRY_S: Final = 1.0
"""How long a disk that refused is left alone."""

SWITCH_S: Final = 0.0005
"""How long Python lets the thread keep the loop waiting; a tenth of the default."""

CLOSE_S: Final = 5.0
"""How long shutdown waits for the disk; what a stalled disk has not taken by then is lost."""

_DRAWN_BITS_MAX: Final = 64
"""Longer draws are ids, not choices."""


class RecordSettings(Struct, frozen=True, kw_only=True):
    """Where to record, and how much."""

    path: Path
    bytes_max: int = 64 << 20  # per file
    files_max: int = 8
    queue_bytes_max: int = 16 << 20
    flush_s: float = 1.0


class RecordedRng(random.Random):
    """The random generator of a recorded service: everything drawn is recorded.

    Args:
        draws: where draws are appended.
        seed: None: from the system.
    """

    def __init__(self, draws: list[float | int], seed: int | None = None) -> None:
        self._draws = draws
        super().__init__(seed)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Copy to a plain generator: copies serve a shadow policy, whose draws decide nothing."""
        return random.Random, (), self.getstate()

    @override
    def random(self) -> float:
        drawn = super().random()
        self._draws.append(drawn)
        return drawn

    @override
    def getrandbits(self, k: int, /) -> int:
        drawn = super().getrandbits(k)
        if k < _DRAWN_BITS_MAX:
            self._draws.append(drawn)
        return drawn


class Recording:
    """One recording under way.

    Attributes:
        draws: random draws since they were last taken; belongs to the core.
        notes: counts by outcome: written, or why not.
        bytes_written: compressed bytes in files.
        raw_bytes: the same before compression.
        files: begun.
        failures: writes that failed.
    """

    def __init__(self, settings: RecordSettings, config: RouterConfig) -> None:
        """Name the file; `open` creates it."""
        self.draws: list[float | int] = []
        self.settings = settings
        self._config = config
        self._clock: Callable[[], float] = time.monotonic
        self._queue: deque[tuple[Note, int]] = deque()
        self._put = self._taken = 0  # bytes; one is written by the loop only, one by the thread
        self._queue_bytes_max = settings.queue_bytes_max
        self._missing = 0  # notes that found no room since the last one that did
        self.notes: dict[str, int] = {"written": 0, "queue": 0, "disk": 0, "fault": 0}
        self.bytes_written = self.raw_bytes = self.files = self.failures = 0
        self._packer = Packer()  # `_rotate` and `_lose` reset it: no items refer back past them
        self._name = os.urandom(8).hex()
        self._file: int | None = None  # descriptor
        self._size = 0
        self._number = 0  # of the last file renamed away
        self._raw = bytearray()
        self._raw_notes = 0
        self._file_notes = 0
        self._raw_since = 0.0
        self._lost: Gap | None = None  # to be written first
        self._retry_at = 0.0
        self._is_refused = False
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    # -- called on the loop --------------------------------------------------------------------

    @property
    def queue_bytes(self) -> int:
        """Approximate bytes waiting to be written."""
        return self._put - self._taken

    @property
    def is_refused(self) -> bool:
        """Whether the last write failed."""
        return self._is_refused

    def put(self, note: Note, size: int) -> bool:
        """Queue a note of about `size` bytes; False if there is no room, which is counted."""
        put = self._put + size
        if put - self._taken > self._queue_bytes_max:
            self.leave_out()
            return False
        if self._missing:
            self._queue.append((Gap(self._missing, "queue"), 0))
            self._missing = 0
        self._put = put
        self._queue.append((note, size))
        return True

    def leave_out(self) -> None:
        """Count a note that is useless without one that found no room."""
        self._missing += 1
        self.notes["queue"] += 1

    def event(
        self, stream: EventStream, frames: Sequence[bytes], *, is_replay: bool, is_eagle: bool
    ) -> None:
        """Queue an engine's message."""
        facts = stream.scope, stream.rank, is_eagle, is_replay
        self.put(EventNote(self._clock(), *facts, frames), 128 + sum(map(len, frames)))

    def random(self, seed: int | None) -> RecordedRng:
        """Return the random generator for the recorded core."""
        return RecordedRng(self.draws, seed)

    # -- lifecycle -----------------------------------------------------------------------------

    def open(self) -> None:
        """Create the file; rename away one of an earlier run.

        Raises:
            RecordingUnusable: that is impossible.
        """
        path = self.settings.path
        try:
            self._number = max((number for number, _ in _aside(path)), default=0)
            self._put_earlier_aside(path)
            self._begin_file()
        except OSError as error:
            raise RecordingUnusable(f"{path}: {error.strerror}") from None

    def start(self, clock: Callable[[], float]) -> None:
        """Start to write."""
        self._clock = clock
        self._thread = threading.Thread(target=self._write, name="recording", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Write what is left and end the file, if the disk permits. Idempotent."""
        self._queue_bytes_max = -1  # refuses all further notes, which are only counted
        self._over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():  # it still uses the file
                _log.error("the disk of the recording stands still, it is not waited for")
                return
            self._thread = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _put_earlier_aside(self, path: Path) -> None:
        """Rename away an earlier run's recording; touch nothing that is not a recording."""
        try:
            there = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        try:
            opening = b""
            if stat.S_ISREG(os.fstat(there).st_mode):
                opening = os.read(there, len(MAGIC)) or MAGIC
            if not MAGIC.startswith(opening) or not opening:
                raise RecordingUnusable(f"{path} is there, and is no recording")
            try:
                fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecordingUnusable(f"{path}: another process records there") from None
            self._put_aside()
        finally:
            os.close(there)

    # -- the thread ----------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            is_over = self._over.is_set()  # read first: whatever is queued after it is refused
            self._work_off()
            if is_over:
                break
            if self._raw and perf_counter() >= self._raw_since + self.settings.flush_s:
                self._end_frame()
            self._over.wait(LOOK_S)
        if self._missing:
            self._append(Gap(self._missing, "queue"), 0)
        self._end_frame()
        if self._file is not None:
            self._end_file(is_last=True)

    def _work_off(self) -> None:
        """Encode the queued notes, yielding to the loop in between."""
        queue, until = self._queue, perf_counter() + SLICE_S
        while queue:
            note, size = queue.popleft()
            try:
                for item in self._packer.pack(note):
                    if item is not None:
                        self._raw += message(item)
                    if item is None or perf_counter() >= until:
                        time.sleep(YIELD_S)
                        until = perf_counter() + SLICE_S
            except Exception:  # noqa: BLE001 - a bug must not end the recording
                self.failures += 1
                _log.exception("something cannot be recorded")
                self._lose("fault", 1)
            else:
                self._raw_notes += not isinstance(note, Gap)
                if not self._raw_since:
                    self._raw_since = perf_counter()
            self._taken += size
            if len(self._raw) >= FRAME_BYTES:
                self._end_frame()

    def _append(self, item: Item, notes: int) -> None:
        self._raw += message(item)
        self._raw_notes += notes

    def _lose(self, why: str, notes: int) -> None:
        """Note a gap; whatever follows must not refer to anything before it."""
        self.notes[why] += notes
        before = 0 if self._lost is None else self._lost.notes
        self._lost = Gap(before + notes, why, resets=True)
        if why == "fault":  # the complete items of this frame stay
            self._raw += message(self._lost)
            self._lost = None
        self._packer.begin()

    def _end_frame(self) -> None:
        """Compress the encoded notes and write the frame, if the disk permits."""
        notes, self._raw_notes, self._raw_since = self._raw_notes, 0, 0.0
        if not self._raw:
            return
        raw, self._raw = self._raw, bytearray()
        if perf_counter() < self._retry_at:
            self._lose("disk", notes)
            return
        try:
            if self._file is None:
                self._put_earlier_aside(self.settings.path)  # a rotation has failed halfway
                self._begin_file()
            if self._lost is not None:
                self._write_frame(message(self._lost))
                self._lost = None
            self._write_frame(bytes(raw))
        except (OSError, RecordingUnusable) as error:
            self._fail(error)
            self._lose("disk", notes)
            return
        self._file_notes += notes
        self.notes["written"] += notes
        if self._is_refused:
            self._is_refused = False
            _log.info("the recording goes on", extra={"lost": self.notes["disk"]})
        if self._size >= self.settings.bytes_max:
            self._rotate()

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self._retry_at = perf_counter() + RETRY_S
        if not self._is_refused:
            self._is_refused = True
            _log.error("the recording cannot be written: %s", error)

    def _write_frame(self, raw: bytes) -> None:
        """Write a whole frame or nothing."""
        assert self._file is not None
        body = zlib.compress(raw, LEVEL)
        frame = memoryview(FRAME.pack(len(body), zlib.crc32(body)) + body)
        try:
            self._write_all(frame)
        except OSError:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(frame)
        self.bytes_written += len(frame)
        self.raw_bytes += len(raw)

    def _write_all(self, rest: memoryview) -> None:
        assert self._file is not None
        while rest:
            rest = rest[os.write(self._file, rest) :]

    # -- files ---------------------------------------------------------------------------------

    def _begin_file(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.settings.path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file, self._size, self._file_notes = file, 0, 0
            self._write_all(memoryview(OPENING))
            self._size = len(OPENING)
            wall_s = time.time()  # noqa: TID251 - informational only
            began = Header(
                __version__, self._name, self.files + 1, wall_s, self._clock(), self._config
            )
            self._write_frame(message(began))
            self.files += 1  # lets a reader see that no file is missing
        except OSError:
            self._file = None
            os.close(file)
            self.settings.path.unlink(missing_ok=True)
            raise

    def _end_file(self, *, is_last: bool) -> None:
        try:
            self._write_frame(message(End(self._clock(), self._file_notes, is_last)))
        except OSError as error:
            self._fail(error)

    def _rotate(self) -> None:
        """Start another file; if that fails, the next frame tries again."""
        self._end_file(is_last=False)
        before, self._file = self._file, None
        try:
            self._put_aside()
            self._begin_file()
        except OSError as error:
            self._fail(error)
        finally:
            if before is not None:
                os.close(before)
        self._packer.begin()

    def _put_aside(self) -> None:
        """Rename the file to its number, and delete the oldest."""
        path, keep = self.settings.path, self.settings.files_max - 1
        path.rename(path.with_name(numbered(path.name, self._number + 1)))
        self._number += 1
        older = sorted(_aside(path))
        for _, one in older[: max(0, len(older) - keep)]:
            one.unlink(missing_ok=True)


def _aside(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the numbers and paths of files renamed away."""
    for one in path.parent.iterdir():
        number = number_of(path.name, one.name)
        if number is not None:
            yield number, one
