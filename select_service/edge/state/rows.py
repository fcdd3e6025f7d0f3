"""The rows of the state's file, and how they are read from one that may be damaged anywhere.

Every row carries a checksum over itself and its id; the row with id 0 summarizes the others. What
cannot be read is counted. `store.py` opens the file and decides what becomes of it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from indexer.types import U64_MASK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.changes import StateKey

FILE: Final = "state.db"
META_ID: Final = 0
_FORMAT: Final = 1

_BAD_READS: Final[frozenset[int]] = frozenset(
    (sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)
)
_NOT_THE_FILE: Final[frozenset[int]] = frozenset(
    (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_CANTOPEN,
    )
)
_FIRST: Final = "SELECT id, record, sum FROM state ORDER BY id"
_LAST: Final = "SELECT id, record, sum FROM state ORDER BY id DESC"


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """The owner of the directory, and a summary of its rows: the row with id 0."""

    router_id: int
    epoch: int  # of the last run, ascending
    rows: int = 0
    digest: int = 0  # sum of the checksums of all other rows, modulo 2^64
    format: int = _FORMAT
    number: int = 0  # of the last transaction, ascending; older builds do not count them


class _Beginning(msgspec.Struct, array_like=True):
    """Of an identity of any format."""

    router_id: object
    epoch: object
    rows: object = 0
    digest: object = 0
    format: int = _FORMAT


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One key and its record, as stored."""

    kind: str
    name: str
    value: bytes


class Damage(msgspec.Struct):
    """Damage found at the start."""

    what: list[str] = []
    rows_saved: int = 0
    rows_lost: int = 0  # at least: the former count may be unknown

    def __bool__(self) -> bool:
        return bool(self.what)


class Loaded(msgspec.Struct):
    """Everything a directory held."""

    identity: Identity | None
    rows: list[Row]
    damage: Damage


encode = msgspec.msgpack.Encoder().encode
_decode_row = msgspec.msgpack.Decoder(Row).decode
_decode_beginning = msgspec.msgpack.Decoder(_Beginning).decode
_decode_identity = msgspec.msgpack.Decoder(Identity).decode


def checksum_of(row_id: int, record: bytes) -> int:
    """Return a signed 64-bit checksum; it covers the id, so rows cannot be swapped."""
    unsigned = xxhash.xxh3_64_intdigest(record, seed=row_id & U64_MASK)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


class LaterFormatError(Exception):
    """A later build has written here; this one does not understand its rows."""


class RowReader:
    """Reads all rows of a file that may be damaged anywhere."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.places: dict[StateKey, int] = {}
        self.last_id = META_ID
        self._bad = 0
        self._digest = 0

    def read(self, db: sqlite3.Connection) -> None:
        """Take every row with a right checksum; if reading breaks off, also from the far end."""
        try:
            self._take(db.execute(_FIRST))
        except sqlite3.DatabaseError as error:
            if not is_corruption(error):
                raise
            self._loaded.damage.what.append(f"{FILE}: {error}")
            near_end = self.last_id
            with contextlib.suppress(sqlite3.DatabaseError):
                self._take(db.execute(_LAST), down_to=near_end)

    def _take(self, rows: Iterator[tuple[int, object, object]], down_to: int | None = None) -> None:
        for row_id, record, checksum in rows:
            if down_to is not None and row_id <= down_to:
                return
            try:
                self._take_row(row_id, record, checksum)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._bad += 1
            self.last_id = max(self.last_id, row_id)

    def _take_row(self, row_id: int, record: object, written: object) -> None:
        if not isinstance(record, bytes) or (checksum := checksum_of(row_id, record)) != written:
            self._bad += 1
        elif row_id == META_ID:
            written = _decode_beginning(record).format
            if written > _FORMAT:  # checked before any other row is read or written
                raise LaterFormatError(f"is of format {written}, this build knows {_FORMAT}")
            self._loaded.identity = _decode_identity(record)
        else:
            self._keep(row_id, _decode_row(record), checksum & U64_MASK)

    def _keep(self, row_id: int, row: Row, checksum: int) -> None:
        key = (row.kind, row.name)
        if key in self.places:
            self._bad += 1
            return
        self.places[key] = row_id << 64 | checksum
        self._digest += checksum
        self._loaded.rows.append(row)

    def judge(self) -> None:
        """Compare what was read with the summary of the last transaction."""
        loaded, damage = self._loaded, self._loaded.damage
        identity = loaded.identity
        if self._bad:
            damage.what.append(f"{self._bad} rows with a wrong checksum")
        if identity is None:
            damage.what.append("the row that says who we are is gone")
        elif (identity.rows, identity.digest) != (len(loaded.rows), self._digest & U64_MASK):
            damage.what.append(f"{len(loaded.rows)} rows where there were {identity.rows}")
        if damage:
            expected = len(loaded.rows) + self._bad if identity is None else identity.rows
            damage.rows_saved = len(loaded.rows)
            damage.rows_lost = max(0, expected - len(loaded.rows))


def inner_damage(db: sqlite3.Connection) -> list[str]:
    """Return the first problem outside of rows: free pages, free space within pages."""
    found = [row[0].decode() for row in db.execute("PRAGMA quick_check(1)")]
    return [f"{FILE}: {one}" for one in found if one != "ok"]


def is_corruption(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is to blame: not the disk, permissions, or another process."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code in _BAD_READS or code & 0xFF not in _NOT_THE_FILE
