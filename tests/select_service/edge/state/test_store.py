import errno
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from select_service.edge.state.rows import FILE, checksum_of
from select_service.edge.state.store import WAL, Store
from select_service.errors import StateDirUnusable
from tests.select_service.edge.state.directories import FRAME, Rows, contents, key, opened, read


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = opened(tmp_path / "state")
    store.load()
    yield store
    store.close()


def reopened(store: Store) -> tuple[Rows, list[str]]:
    store.close()
    return read(store.directory)


def test_what_was_committed_comes_back(store: Store) -> None:
    store.commit([(key(1), b"one"), (key(2), b""), (("worker", "1"), b"w")])
    store.commit([(key(1), b"uno"), (("worker", "1"), None), (key(9), None)])
    assert reopened(store) == ({key(1): b"uno", key(2): b""}, [])


def test_many_rows_at_once_and_away_again(store: Store) -> None:
    rows = {key(number): bytes([number % 256]) * number for number in range(300)}
    store.commit(list(rows.items()))
    assert reopened(store) == (rows, [])
    again = opened(store.directory)
    assert contents(again)[0] == rows
    again.commit([(name, None) for name in rows])
    assert reopened(again) == ({}, [])


def test_order_of_first_writing_is_kept(store: Store) -> None:
    for number in (5, 3, 8, 1):
        store.commit([(key(number), b"x")])
    store.commit([(key(5), b"later")])
    store.close()
    again = opened(store.directory)
    assert [row.name for row in again.load().rows] == ["id-5", "id-3", "id-8", "id-1"]
    again.close()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirUnusable):
        opened(tmp_path / "file" / "below")


def test_nobody_else_may_read(store: Store) -> None:
    store.commit([(key(1), b"secret")])
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    for path in store.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert not list(store.directory.glob("*-shm")), "the log's index is ours alone, in memory"


@pytest.mark.parametrize("name", ["lock", FILE, WAL])
def test_a_link_in_the_directory_is_not_followed(store: Store, name: str) -> None:
    """SQLite keeps its log beside where the link leads, and nobody would look at that one."""
    store.commit([(key(1), b"one")])
    store.close()
    elsewhere = store.directory.with_name("elsewhere")
    elsewhere.write_bytes(before := b"somebody else's")
    path = store.directory / name
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises(StateDirUnusable, match=f"{name} is a link"):
        read(store.directory)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("name", ["lock", FILE, WAL])
def test_a_fifo_in_the_directory_is_not_waited_for(store: Store, name: str) -> None:
    store.commit([(key(1), b"one")])
    store.close()
    path = store.directory / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StateDirUnusable, match=f"{name} is no plain file"):
        read(store.directory)


def test_rows_of_a_later_format_may_look_like_anything(store: Store) -> None:
    with closing(alter(store)) as db:
        put(db, 1, msgspec.msgpack.encode({"later": "rows"}))
        put(db, 0, msgspec.msgpack.encode([1, 1, 1, 0, 99, "more"]))
    before = (store.directory / "state.db").read_bytes()
    again = opened(store.directory)
    with pytest.raises(StateDirUnusable, match="format 99"):
        again.load()
    again.close()
    assert (store.directory / "state.db").read_bytes() == before


def test_a_row_that_means_nothing_is_damage(store: Store) -> None:
    """Its checksum is right, so it was no disk that did it."""
    store.commit([(key(1), b"one")])
    with closing(alter(store)) as db:
        put(db, 77, msgspec.msgpack.encode({"no": "row"}))
    rows, damage = read(store.directory)
    assert rows == {key(1): b"one"}
    assert damage


def alter(store: Store) -> sqlite3.Connection:
    store.close()
    return sqlite3.connect(store.directory / "state.db", isolation_level=None)


def put(db: sqlite3.Connection, row_id: int, record: bytes) -> None:
    row = (row_id, record, checksum_of(row_id, record))
    db.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", row)


def test_killed_while_a_file_was_being_saved(store: Store) -> None:
    """The new file counts from the moment it has its second name, whatever lies beside it."""
    store.commit([(key(1), b"one")])
    store.close()
    directory = store.directory
    (directory / "state.db.new").write_bytes(b"half")
    assert reopened(store) == ({key(1): b"one"}, [])
    shutil.copy(directory / FILE, directory / "state.db.saved")
    (directory / FILE).write_bytes(b"nonsense")
    rows, damage = reopened(store)
    assert rows == {key(1): b"one"}
    assert damage, "the killed start had no time to report it"
    assert reopened(store) == ({key(1): b"one"}, [])
    assert (directory / "state.db.corrupt").read_bytes() == b"nonsense"


def test_a_commit_that_fails_leaves_nothing(store: Store) -> None:
    store.commit([(key(1), b"one")])
    assert store._db is not None
    store._db.execute("PRAGMA max_page_count=2")  # genuine SQLITE_FULL
    with pytest.raises(Exception, match="full") as raised:
        store.commit([(key(2), b"x" * 100_000)])
    assert raised.value.sqlite_errorname == "SQLITE_FULL"  # type: ignore[attr-defined]
    store.commit([(key(3), b"three")])
    assert reopened(store) == ({key(1): b"one", key(3): b"three"}, [])


def test_the_log_has_its_size_before_it_is_needed(store: Store) -> None:
    store.reserve_log(50 * FRAME)
    log = store.directory / WAL
    assert log.stat().st_size == 50 * FRAME
    for number in range(10):
        store.commit([(key(number), b"x" * 100)])
    assert log.stat().st_size == 50 * FRAME, "a sync has nothing to say about its length"
    killed = store.directory.with_name("killed")
    shutil.copytree(store.directory, killed)
    assert read(killed) == ({key(number): b"x" * 100 for number in range(10)}, [])


def test_a_disk_without_room_for_the_whole_log(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (store.directory / WAL).stat().st_size
    genuine = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        if at > before:
            raise OSError(errno.ENOSPC, "full")
        return genuine(file, data[:1000], at)

    monkeypatch.setattr(os, "pwrite", full)
    store.reserve_log(50 * FRAME)
    assert (store.directory / WAL).stat().st_size == before, "the room is given back"
    store.commit([(key(1), b"one")])
    assert reopened(store) == ({key(1): b"one"}, [])
