"""The state directory: one SQLite file with a row per key, its lock, and recovery from damage.

SQLite (WAL, synchronous=FULL) makes commits atomic and durable, but it has no checksums over older
data, and silently truncates a log at a wrong byte in the middle. So every row carries a checksum,
every transaction includes its number and a digest over all rows, and the log is compared with what
SQLite made of it. The number of the last transaction is noted in the lock file, too: a log that was
cut cannot know what followed. Damage is reported, readable rows are saved to a new file, and the
old one is kept as `.corrupt`. Never fatal, never silent.

Everything here blocks; `journal.py` calls it from its writer thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from indexer.plain_file import open_own
from indexer.types import U64_MASK
from select_service.edge.state import wal
from select_service.edge.state.rows import (
    FILE,
    META_ID,
    Damage,
    Identity,
    LaterFormatError,
    Loaded,
    Row,
    RowReader,
    checksum_of,
    encode,
    inner_damage,
    is_corruption,
)
from select_service.errors import StateDirUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.changes import StateKey

PAGE: Final = 4096  # SQLite's default

CHECKPOINT_PAGES: Final = 1000
"""Log pages before a checkpoint: 4 MB, some 10 ms every hundred commits or two."""

LOG_BYTES: Final = wal.HEADER.size + CHECKPOINT_PAGES * (wal.FRAME.size + PAGE)
"""Initial size of the log. Syncing a file that has grown also writes metadata, and commits the file
system's journal if it has one: 0.12 instead of 0.08 ms here, without a journal. SQLite reads a log
up to the first frame with foreign salts, and zeros match none."""

_ZEROS: Final = 1 << 18

ROWS_PER_STATEMENT: Final = 64
"""Three parameters per row; this releases the interpreter lock once per statement, not once per
row."""

WAL, LOCK = "state.db-wal", "lock"
NEW, SAVED, CORRUPT = "state.db.new", "state.db.saved", ".corrupt"
_NOTE: Final = struct.Struct(">3Q")  # in the lock file: epoch, number of a transaction, checksum

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS state(id INTEGER PRIMARY KEY, record BLOB, sum INTEGER)"
)


class Store:
    """One state directory, locked by this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.identity: Identity | None = None
        self._lock: int | None = None
        self._db: sqlite3.Connection | None = None
        self._is_log_reserved = False
        self._noted = (0, 0)  # epoch and number of a transaction that the last run completed
        self._is_saving = False
        self._places: dict[StateKey, int] = {}  # key → row id << 64 | checksum (unsigned)
        self._next_id = META_ID + 1

    # -- lifecycle -----------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the directory.

        Raises:
            StateDirUnusable: it cannot be created or written, or another process holds it.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_own(self.directory / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StateDirUnusable(f"state directory {self.directory}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise StateDirUnusable(
                f"state directory {self.directory} is in use by another process"
            ) from None
        self._lock = lock

    def load(self) -> Loaded:
        """Read everything; replace a damaged file by one with the rows that could be saved.

        Raises:
            StateDirUnusable: the directory cannot be read at all, or has a later format.
        """
        try:
            damage = self._read_note()
            earlier = self._finish_earlier_saving()
            damage += self._create_if_missing()
            loaded = self._read()
            loaded.damage.what += damage
            if loaded.damage:
                self._save(loaded.identity, loaded.rows)
            loaded.damage.what += earlier
        except (sqlite3.Error, OSError) as error:
            self.close_file()
            raise StateDirUnusable(f"state directory {self.directory}: {error}") from error
        except LaterFormatError as error:
            self.close_file()
            raise StateDirUnusable(f"state directory {self.directory} {error}") from None
        return loaded

    def close(self) -> None:
        """Release the directory, after a checkpoint of the log if possible. Idempotent."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.close_file()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close_file(self) -> None:
        """Close only the file; the next commit reopens it."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()  # deletes the log if all of it is in the file
            self._db = None
            self._is_log_reserved = False

    # -- writing -------------------------------------------------------------------------------

    def commit(self, batch: Sequence[tuple[StateKey, bytes | None]]) -> None:
        """Write a batch atomically, on disk when this returns; None deletes the key.

        Raises:
            sqlite3.Error: it may or may not be on disk; writing the same keys again settles it.
        """
        assert self.identity is not None, "who we are is known"
        places: dict[StateKey, int | None] = {}
        puts: list[tuple[int, bytes, int]] = []
        digest, next_id = self.identity.digest, self._next_id
        for key, value in batch:
            old = places[key] if key in places else self._places.get(key)
            digest -= 0 if old is None else old & U64_MASK
            if value is None:
                places[key] = None
                continue
            row_id = old >> 64 if old is not None else next_id
            next_id += old is None
            record = encode(Row(*key, value))
            checksum = checksum_of(row_id, record)
            puts.append((row_id, record, checksum))
            digest += checksum & U64_MASK
            places[key] = row_id << 64 | checksum & U64_MASK
        gone = [at >> 64 for key, new in places.items() if new is None and (at := self._at(key))]
        identity = msgspec.structs.replace(
            self.identity,
            rows=self._count_with(places),
            digest=digest & U64_MASK,
            number=self.identity.number + 1,
        )
        record = encode(identity)
        puts.append((META_ID, record, checksum_of(META_ID, record)))
        self._transact(puts, gone)
        self.identity, self._next_id = identity, next_id
        if not self._is_saving:  # that file is not in its place yet
            self._note(identity)
        for key, new in places.items():
            if new is None:
                self._places.pop(key, None)
            else:
                self._places[key] = new

    def reserve_log(self, size: int = LOG_BYTES) -> None:
        """Extend the log to its full size, once after each opening; some 20 ms.

        Zeros are written, as room that is merely allocated costs the same as growth once it is
        used. If the disk refuses, the log just grows as it is written.
        """
        if self._db is None or self._is_log_reserved:
            return
        self._is_log_reserved = True  # whether or not it succeeds
        with contextlib.suppress(OSError):
            log = open_own(self.directory / WAL, os.O_WRONLY)
            try:
                _lengthen(log, size)
            finally:
                os.close(log)

    def _note(self, identity: Identity) -> None:
        """Note that a transaction is complete, before anybody is answered.

        2 µs, as it is not synced: a killed process leaves it behind, and an older one, after a
        power failure, claims less.
        """
        if self._lock is not None:
            numbers = struct.pack(">2Q", identity.epoch, identity.number)
            with contextlib.suppress(OSError):  # a full disk, before the file has its room
                os.pwrite(self._lock, numbers + _note_sum(numbers), 0)

    def _read_note(self) -> list[str]:
        """Read what the last run noted; older builds note nothing."""
        assert self._lock is not None, "locked"
        note = os.pread(self._lock, _NOTE.size + 1, 0)
        if not any(note):
            return []
        if len(note) != _NOTE.size or _note_sum(note[:16]) != note[16:]:
            os.ftruncate(self._lock, 0)
            return [f"{LOCK} is damaged: it does not show which transaction was the last"]
        epoch, number, _ = _NOTE.unpack(note)
        self._noted = epoch, number
        return []

    def _at(self, key: StateKey) -> int:
        return self._places.get(key, 0)

    def _count_with(self, places: dict[StateKey, int | None]) -> int:
        count = len(self._places)
        for key, new in places.items():
            count += (new is not None) - (key in self._places)
        return count

    def _transact(self, puts: Sequence[tuple[int, bytes, int]], gone: Sequence[int]) -> None:
        db = self._db = self._db or self._open(self.directory / FILE)
        try:
            db.execute("BEGIN IMMEDIATE")
            for start in range(0, len(puts), ROWS_PER_STATEMENT):
                part = puts[start : start + ROWS_PER_STATEMENT]
                rows = ",".join(["(?,?,?)"] * len(part))
                db.execute(
                    f"INSERT OR REPLACE INTO state VALUES {rows}",  # noqa: S608  # nosec B608 - marks
                    [value for row in part for value in row],
                )
            for start in range(0, len(gone), ROWS_PER_STATEMENT):
                ids = gone[start : start + ROWS_PER_STATEMENT]
                marks = ",".join("?" * len(ids))
                db.execute(f"DELETE FROM state WHERE id IN ({marks})", ids)  # noqa: S608  # nosec B608
            db.execute("COMMIT")
        except sqlite3.Error:
            self.close_file()  # rolls back; the next commit reopens the file, whatever failed
            raise

    # -- reading -------------------------------------------------------------------------------

    def _open(self, path: Path, *, journal_mode: str = "WAL") -> sqlite3.Connection:
        # The log inherits these permissions; through a symlink, SQLite would keep its log
        # elsewhere, unseen.
        os.close(open_own(path, os.O_RDWR | os.O_CREAT))
        db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            db.text_factory = bytes
            for pragma in (
                "locking_mode=EXCLUSIVE",  # before the first read: then there is no -shm file
                f"journal_mode={journal_mode}",
                "synchronous=FULL",
                f"wal_autocheckpoint={CHECKPOINT_PAGES}",
                "cell_size_check=ON",
                "trusted_schema=OFF",
                "mmap_size=0",
            ):
                db.execute(f"PRAGMA {pragma}")
            db.execute(_SCHEMA)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _read(self) -> Loaded:
        path = self.directory / FILE
        log = wal.inspect(self.directory / WAL)
        loaded = Loaded(None, [], Damage())
        reader = RowReader(loaded)
        try:
            self._db = self._open(path)
            reader.read(self._db)
            loaded.damage.what += inner_damage(self._db)
            loaded.damage.what += self._log_damage(self._db, log, loaded.identity)
        except sqlite3.DatabaseError as error:
            if not is_corruption(error):
                raise
            loaded.damage.what.append(f"{FILE}: {error}")
        reader.judge()
        if loaded.identity is not None:
            loaded.damage.what += self._missing(loaded.identity)
        self._places, self._next_id = reader.places, reader.last_id + 1
        self.identity = loaded.identity
        if not loaded.damage:
            loaded.damage.what += self._write_damage()
        return loaded

    def _missing(self, identity: Identity) -> list[str]:
        """Return what is known to be lost because the transaction that was noted is not there."""
        epoch, number = self._noted
        if identity.epoch > epoch or identity.number >= number:  # or an older build has run since
            return []
        return [
            f"the state is that of transaction {identity.number} of {number}: "
            "later transactions are lost"
        ]

    def _log_damage(
        self, db: sqlite3.Connection, log: wal.Log, identity: Identity | None
    ) -> list[str]:
        """Compare the log as found with what SQLite took from it."""
        try:
            _, frames, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            frames = wal.frames_taken(self.directory / WAL)  # SQLite has no room for a checkpoint
        is_complete = identity is not None and (identity.epoch, identity.number) == self._noted
        return log.damage(max(0, frames), is_complete=is_complete)

    def _write_damage(self) -> list[str]:
        """Return why the file is readable but not writable, unless the disk is to blame."""
        try:
            self.commit([])
        except sqlite3.DatabaseError as error:
            if is_corruption(error):
                return [f"{FILE}: {error}"]
        return []

    # -- saving --------------------------------------------------------------------------------

    def _create_if_missing(self) -> list[str]:
        """Create a missing file; it contains the identity row from the start."""
        if (self.directory / FILE).exists():
            return []
        damage = [f"{FILE} was gone"] if self._noted[1] or (self.directory / WAL).exists() else []
        self._save(None, [])
        return damage

    def _save(self, identity: Identity | None, rows: Sequence[Row]) -> None:
        """Save rows to a new file and rename the old one away; safe to be killed at any point."""
        self._is_saving = True
        self.close_file()
        for name in (NEW, f"{NEW}-journal"):
            (self.directory / name).unlink(missing_ok=True)
        self._db = self._open(self.directory / NEW, journal_mode="DELETE")
        was = identity or Identity(0, 0)
        number = max(was.number, self._noted[1])
        self.identity = Identity(was.router_id, was.epoch, number=number)
        self._places, self._next_id = {}, META_ID + 1
        self.commit([((row.kind, row.name), row.value) for row in rows])
        self.close_file()
        (self.directory / NEW).rename(self.directory / SAVED)  # the commit point
        self._sync_directory()
        self._finish_saving()
        self._is_saving = False

    def _finish_earlier_saving(self) -> list[str]:
        """Finish what the last start began and had no time to report."""
        if not (self.directory / SAVED).exists():
            return []
        old = (FILE, WAL, FILE + CORRUPT)
        was_damage = any((self.directory / name).exists() for name in old)  # else: a first start
        self._finish_saving()
        if not was_damage:
            return []
        return ["the last start found damage, and was killed while it saved the rows"]

    def _finish_saving(self) -> None:
        for name in (WAL, FILE):
            path = self.directory / name
            if path.exists():
                path.replace(self.directory / (name + CORRUPT))
        (self.directory / SAVED).rename(self.directory / FILE)
        self._sync_directory()

    def _sync_directory(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _note_sum(numbers: bytes) -> bytes:
    return xxhash.xxh3_64_digest(numbers, seed=1)


def _lengthen(log: int, size: int) -> None:
    before = os.fstat(log).st_size
    if before < wal.HEADER.size:
        return  # a log must not begin with zeros
    try:
        at = before
        while at < size:
            at += os.pwrite(log, bytes(min(size - at, _ZEROS)), at)
        os.fdatasync(log)
    except OSError:
        os.ftruncate(log, before)  # leaves the room for data
        raise
