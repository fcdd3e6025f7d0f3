import contextlib
import errno
import os
import random
import shutil
import sqlite3
import stat
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from select_service.core.changes import StateKey
from select_service.edge.state import wal
from select_service.edge.state.rows import FILE, checksum_of
from select_service.edge.state.store import WAL, Store
from select_service.errors import StateDirUnusable

Rows = dict[StateKey, bytes]
PAGE = 4096
FRAME = wal.FRAME.size + PAGE


def key(number: int) -> StateKey:
    return ("reservation", f"id-{number}")


def contents(store: Store) -> tuple[Rows, list[str]]:
    loaded = store.load()
    rows = {(row.kind, row.name): row.value for row in loaded.rows}
    assert len(rows) == len(loaded.rows)
    return rows, loaded.damage.what


def opened(directory: Path) -> Store:
    store = Store(directory)
    store.lock()
    return store


def started(directory: Path) -> Rows:
    with closing(Store(directory)) as store:
        store.lock()
        return contents(store)[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = opened(tmp_path / "state")
    store.load()
    yield store
    store.close()


def reopened(store: Store) -> tuple[Rows, list[str]]:
    store.close()
    again = opened(store.directory)
    try:
        return contents(again)
    finally:
        again.close()


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
        started(store.directory)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("name", ["lock", FILE, WAL])
def test_a_fifo_in_the_directory_is_not_waited_for(store: Store, name: str) -> None:
    store.commit([(key(1), b"one")])
    store.close()
    path = store.directory / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StateDirUnusable, match=f"{name} is no plain file"):
        started(store.directory)


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
    rows, damage = contents(opened(store.directory))
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
    again = opened(killed)
    assert contents(again) == ({key(number): b"x" * 100 for number in range(10)}, [])
    again.close()


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


# -- damage --------------------------------------------------------------------------------------


class History:
    """What a directory held after each commit, and its files as a killed process leaves them."""

    def __init__(self, directory: Path, log_bytes: int) -> None:
        rng = random.Random(7)
        store = opened(directory)
        store.load()
        store.reserve_log(log_bytes)
        self.states: list[Rows] = [{}]
        self.values: dict[StateKey, set[bytes]] = {}
        for step in range(24):
            batch: dict[StateKey, bytes | None] = {}
            for _ in range(rng.randint(1, 6)):
                name = key(rng.randrange(40))
                batch[name] = rng.choice((None, rng.randbytes(rng.randint(0, 700))))
            self._commit(store, list(batch.items()))
            if step == 13:
                assert store._db is not None
                mode = "RESTART" if log_bytes > wal.HEADER.size else "TRUNCATE"
                store._db.execute(f"PRAGMA wal_checkpoint({mode})")
        self.file = (directory / FILE).read_bytes()
        self.log = (directory / WAL).read_bytes()
        store.close()
        salts = self.log[16:24]
        starts = range(wal.HEADER.size, len(self.log), FRAME)
        self.ends_at = FRAME + max(at for at in starts if self.log[at + 8 : at + 16] == salts)

    def _commit(self, store: Store, batch: list[tuple[StateKey, bytes | None]]) -> None:
        store.commit(batch)
        state = dict(self.states[-1])
        for name, value in batch:
            if value is None:
                state.pop(name, None)
            else:
                state[name] = value
                self.values.setdefault(name, set()).add(value)
        self.states.append(state)

    def judge(self, directory: Path, file: bytes | None, log: bytes | None) -> bool:
        """Start with these files: a state there was, or a report; never an invention. Damaged?"""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        for name, data in ((FILE, file), (WAL, log)):
            if data is not None:
                (directory / name).write_bytes(data)
        store = opened(directory)
        rows, damage = contents(store)
        assert all(value in self.values[name] for name, value in rows.items()), "invented"
        assert damage or rows in self.states, "silently wrong"
        store.commit([(key(99), b"and on it goes")])
        store.close()
        again = opened(directory)
        assert contents(again) == (rows | {key(99): b"and on it goes"}, [])
        again.close()
        return bool(damage)


@pytest.fixture(scope="module", params=[0, 50], ids=["as it grew", "reserved"])
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    """With a log that ends behind its last frame, and with one that was used before and goes on."""
    log_bytes = wal.HEADER.size + request.param * FRAME
    return History(tmp_path_factory.mktemp("history") / "state", log_bytes)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]


@pytest.mark.parametrize("room", [0, 1, PAGE - 1])
def test_a_frame_that_found_no_room_is_no_damage(
    history: History, memory_path: Path, room: int
) -> None:
    """A full disk takes a frame's head and not all of its page, and nobody was told of it."""
    log = history.log[: history.ends_at]
    head = log[-FRAME:][: wal.FRAME.size]
    assert struct.unpack_from(">2I", head)[1], "it would end a transaction"
    assert not history.judge(memory_path / "s", history.file, log + head + bytes(room))


def test_as_many_frames_are_taken_as_sqlite_takes(history: History, memory_path: Path) -> None:
    """Who counts them for it, where it cannot be asked, must not count others."""
    rng = random.Random(3)
    logs = [history.log, b"", history.log[: wal.HEADER.size]]
    for _ in range(40):
        logs.append(history.log[: rng.randrange(len(history.log))])
        logs.append(flipped(history.log, rng.randrange(len(history.log))))
    found = set()
    for log in logs:
        (memory_path / FILE).write_bytes(history.file)
        (memory_path / WAL).write_bytes(log)
        counted = wal.frames_taken(memory_path / WAL)
        db = sqlite3.connect(memory_path / FILE, isolation_level=None)
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL"):
            db.execute(f"PRAGMA {pragma}")
        with contextlib.suppress(sqlite3.DatabaseError):  # a file without its log is none, maybe
            db.execute("SELECT count(*) FROM state").fetchone()
        _, taken, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        db.close()
        assert counted == max(0, taken)
        found.add(counted)
    assert len(found) > 5
    assert wal.frames_taken(memory_path / "nothing") == 0


def test_rows_that_changed_places_or_stayed_behind(history: History, memory_path: Path) -> None:
    """An old page in place of a new one has sound sums of its own; the digest tells."""
    file = bytearray(history.file)
    number, _ = struct.unpack_from(">2I", history.log, wal.HEADER.size + 2 * FRAME)
    page = history.log[wal.HEADER.size + 2 * FRAME + wal.FRAME.size :][:PAGE]
    file[(number - 1) * PAGE : number * PAGE] = page
    history.judge(memory_path / "s", bytes(file), None)


def test_nothing_but_rubbish(history: History, memory_path: Path) -> None:
    assert history.judge(memory_path / "s", b"", None)
    assert history.judge(memory_path / "s", b"rubbish" * 5000, b"rubbish" * 500)
    assert history.judge(memory_path / "s", None, history.log)
    assert history.judge(memory_path / "s", history.file, b"rubbish" * 500)
