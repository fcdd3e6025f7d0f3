"""Files that are cut, or have a bit flipped or a byte more or less; those of killed processes."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from select_service.core.changes import StateKey
from select_service.edge.state import store as module
from select_service.edge.state import wal
from select_service.edge.state.rows import FILE
from select_service.edge.state.store import LOCK, PAGE, WAL, Store
from tests.effort import examples
from tests.harms import HARMS, Harm, cut, flipped, with_one_more, without
from tests.select_service.edge.state.directories import FRAME, Rows, key, opened, read

Files = dict[str, bytes]
NAMES = (FILE, WAL, LOCK)
AGAIN = 13  # the step before which the log begins anew


def files(directory: Path) -> Files:
    return {name: (directory / name).read_bytes() for name in NAMES}


def started(directory: Path, found: Files) -> tuple[Rows, list[str]]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    for name, data in found.items():
        (directory / name).write_bytes(data)
    return read(directory)


class Killed(NamedTuple):
    """The files of a killed process, and the rows it had acknowledged."""

    found: Files
    rows: Rows
    written: dict[StateKey, set[bytes]]  # every value that a key ever had
    ends_at: int  # of the last frame in use


def killed(directory: Path, log_bytes: int, *, again: bool) -> Killed:
    rng = random.Random(5)
    store = opened(directory)
    store.load()
    store.reserve_log(log_bytes)
    rows: Rows = {}
    written: dict[StateKey, set[bytes]] = {}
    for step in range(20):
        batch = {key(rng.randrange(30)): rng.randbytes(rng.randint(0, 600)) for _ in range(4)}
        if step == AGAIN and again:
            assert store._db is not None
            store._db.execute("PRAGMA wal_checkpoint(RESTART)")
        store.commit(list(batch.items()))
        rows |= batch
        for name, value in batch.items():
            written.setdefault(name, set()).add(value)
    found = files(directory)
    store.close()
    log = found[WAL]
    starts = range(wal.HEADER.size, len(log) - FRAME + 1, FRAME)
    ends_at = FRAME + max(at for at in starts if log[at + 8 : at + 16] == log[16:24])
    return Killed(found, rows, written, ends_at)


@pytest.fixture(
    scope="module",
    params=[(0, False), (0, True), (70, False), (70, True)],
    ids=["as it grew", "as it grew, used again", "reserved", "reserved, used again"],
)
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    frames, again = request.param
    log_bytes = wal.HEADER.size + frames * FRAME
    return killed(tmp_path_factory.mktemp("killed") / "state", log_bytes, again=again)


def positions(name: str, data: bytes) -> list[int]:
    """Of every class: each field of every head, both sides of every boundary, within pages."""
    if name == LOCK:
        return list(range(len(data)))
    first, step = (wal.HEADER.size, FRAME) if name == WAL else (0, PAGE)
    inside = {0, 1, 4, 7, 8, 9, 12, 15, 16, 20, 23, 24, 25, 2000, step - 1}
    found = set(range(0, 100 if name == FILE else first, 2))
    found |= set(range(16, 24) if name == FILE else ())  # fields of a byte, others of two or four
    starts = list(range(first, len(data), step))
    used = [at for at in starts if data[at + 8 : at + 16] == data[16:24]] if name == WAL else starts
    for start in {*used[:2], *used[-2:], *starts[len(used) : len(used) + 1], starts[-1]}:
        found |= {start + at for at in inside}
    return sorted(at for at in found if at < len(data))


def expect_no_silence(history: Killed, found: tuple[Rows, list[str]], at: int) -> None:
    """All that was acknowledged is there, or damage is reported; nothing is invented either way."""
    rows, damage = found
    assert damage or rows == history.rows, f"lost in silence at {at}"
    invented = [name for name, value in rows.items() if value not in history.written.get(name, ())]
    assert not invented, f"at {at}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", HARMS)
def test_nothing_acknowledged_is_lost_in_silence(
    history: Killed, memory_path: Path, name: str, harm: Harm
) -> None:
    data = history.found[name]
    for at in positions(name, data):
        found = started(memory_path / "s", history.found | {name: harm(data, at)})
        expect_no_silence(history, found, at)


@pytest.mark.parametrize("name", NAMES)
def test_a_bit_flipped_anywhere_is_reported_or_harmless(
    history: Killed, memory_path: Path, name: str
) -> None:
    data, rng = history.found[name], random.Random(11)
    in_use = history.ends_at if name == WAL else len(data)
    count = min(in_use, examples(200))
    reported = 0
    for at in rng.sample(range(in_use), count):
        bent = bytearray(data)
        bent[at] ^= 1 << rng.randrange(8)
        found = started(memory_path / "s", history.found | {name: bytes(bent)})
        expect_no_silence(history, found, at)
        reported += bool(found[1])
    assert reported > 0.9 * count or name == FILE, "most of its pages the log has newer ones of"


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_without_a_log(history: Killed, memory_path: Path, harm: Harm) -> None:
    """After an orderly end there is none, and nothing of the file is anywhere else."""
    directory = memory_path / "s"
    assert started(directory, history.found) == (history.rows, [])
    closed = {name: (directory / name).read_bytes() for name in (FILE, LOCK)}
    assert not (directory / WAL).exists()
    for at in positions(FILE, closed[FILE]):
        found = started(directory, closed | {FILE: harm(closed[FILE], at)})
        expect_no_silence(history, found, at)


@pytest.mark.parametrize("missing", [[FILE], [WAL], [FILE, WAL]])
def test_files_that_are_gone(history: Killed, memory_path: Path, missing: list[str]) -> None:
    left = {name: data for name, data in history.found.items() if name not in missing}
    _, damage = started(memory_path / "s", left)
    assert damage
    assert read(memory_path / "s")[1] == [], "it is reported once"


def test_a_log_and_a_lock_of_an_older_build(history: Killed, memory_path: Path) -> None:
    """It noted nothing: what SQLite finds counts, and what lies out of its place."""
    older = history.found | {LOCK: b""}
    assert started(memory_path / "s", older) == (history.rows, [])
    log = history.found[WAL]
    last = history.ends_at - FRAME
    for at in range(wal.HEADER.size, last, FRAME // 2 + 5):
        for harm in (without, with_one_more):
            rows, damage = started(memory_path / "s", older | {WAL: harm(log, at)})
            assert damage or rows == history.rows


def test_an_older_build_ran_in_between(history: Killed, memory_path: Path) -> None:
    directory = memory_path / "s"
    assert started(directory, history.found) == (history.rows, [])
    lock = (directory / LOCK).read_bytes()
    store = opened(directory)
    store.load()
    assert store.identity is not None
    store.identity = type(store.identity)(
        router_id=1,
        epoch=7,
        **{name: getattr(store.identity, name) for name in ("rows", "digest", "number")},
    )
    store.commit([])
    store.close()
    (directory / LOCK).write_bytes(history.found[LOCK])  # it leaves the note as it is
    assert lock != history.found[LOCK]
    assert read(directory) == (history.rows, [])


def test_a_transaction_that_was_not_finished_is_no_damage(
    history: Killed, memory_path: Path
) -> None:
    """Its frames may lengthen the log; a full disk takes a frame's head and not all of its page."""
    log = history.found[WAL]
    frame = log[history.ends_at - FRAME : history.ends_at]
    head = frame[: wal.FRAME.size]
    assert struct.unpack_from(">2I", head)[1], "it would end a transaction"
    open_frame = frame[:4] + bytes(4) + frame[8:16] + bytes(8) + frame[wal.FRAME.size :]
    torn_ends = [open_frame, open_frame * 3, open_frame + open_frame[:1000], open_frame[:10]]
    for more in torn_ends + [head + bytes(room) for room in (0, 1, PAGE - 1)]:
        if history.ends_at < len(log):
            torn = log[: history.ends_at] + more + log[history.ends_at + len(more) :]
        else:
            torn = log + more
        assert started(memory_path / "s", history.found | {WAL: torn}) == (history.rows, [])


def test_as_many_frames_are_taken_as_sqlite_takes(history: Killed, memory_path: Path) -> None:
    """Who counts them for it, where it cannot be asked, must not count others."""
    rng, whole = random.Random(3), history.found[WAL]
    logs = [whole, b"", whole[: wal.HEADER.size]]
    for _ in range(40):
        logs += [harm(whole, rng.randrange(len(whole))) for harm in (cut, flipped)]
    found = set()
    for log in logs:
        (memory_path / FILE).write_bytes(history.found[FILE])
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


def test_rows_that_changed_places_or_stayed_behind(history: Killed, memory_path: Path) -> None:
    """An old page in place of a new one has sound sums of its own; the digest shows it."""
    directory, log = memory_path / "s", history.found[WAL]
    assert started(directory, history.found) == (history.rows, [])
    closed = {name: (directory / name).read_bytes() for name in (FILE, LOCK)}
    losses = []
    for at in range(wal.HEADER.size, history.ends_at, FRAME):
        number, _ = struct.unpack_from(">2I", log, at)
        file = bytearray(closed[FILE])
        file[(number - 1) * PAGE : number * PAGE] = log[at + wal.FRAME.size : at + FRAME]
        found = started(directory, closed | {FILE: bytes(file)})
        expect_no_silence(history, found, at)
        losses += found[1]
    assert losses


@pytest.mark.parametrize(
    "found",
    [{FILE: b""}, {FILE: b"rubbish" * 5000, WAL: b"rubbish" * 500}, {WAL: b"rubbish" * 500}],
    ids=["empty", "both", "the log"],
)
def test_nothing_but_rubbish(history: Killed, memory_path: Path, found: Files) -> None:
    """It is reported, once, and the directory serves on."""
    sound = {FILE: history.found[FILE]} if FILE not in found else {}
    rows, damage = started(memory_path / "s", sound | found)
    expect_no_silence(history, (rows, damage), 0)
    assert damage
    with closing(opened(memory_path / "s")) as store:
        store.load()
        store.commit([(key(99), b"and on it goes")])
    assert read(memory_path / "s") == (rows | {key(99): b"and on it goes"}, [])


# -- killed at any point ---------------------------------------------------------------------------


class Camera:
    """Takes the files before and after every call that may change them."""

    def __init__(self, directory: Path, shots: Path) -> None:
        self.directory, self.shots = directory, shots
        self.acknowledged: Rows = {}
        self.taken: list[tuple[Path, Rows]] = []

    def take(self) -> None:
        path = self.shots / str(len(self.taken))
        shutil.copytree(self.directory, path)
        self.taken.append((path, dict(self.acknowledged)))

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def photographed(*args: Any, **kwargs: Any) -> Any:
            self.take()
            try:
                return call(*args, **kwargs)
            finally:
                self.take()

        return photographed


@pytest.fixture
def camera(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Camera:
    """Photograph until the test undoes it."""
    camera = Camera(memory_path / "state", memory_path / "shots")
    (memory_path / "state").mkdir(mode=0o700)
    for name in ("pwrite", "fdatasync", "ftruncate", "fsync"):
        monkeypatch.setattr(os, name, camera.around(getattr(os, name)))
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, camera.around(getattr(Path, name)))
    monkeypatch.setattr(Store, "_transact", camera.around(Store._transact))
    monkeypatch.setattr(Store, "close_file", camera.around(Store.close_file))
    monkeypatch.setattr(Store, "_open", camera.around(Store._open))
    monkeypatch.setattr(module, "CHECKPOINT_PAGES", 12)
    monkeypatch.setattr(module, "_ZEROS", 3 * FRAME + 1)
    return camera


def write(store: Store, camera: Camera, numbers: range, size: int) -> None:
    for number in numbers:
        row = {key(number): bytes([number]) * size}
        store.commit(list(row.items()))
        store.reserve_log(wal.HEADER.size + 14 * FRAME)
        camera.acknowledged |= row


def test_a_process_killed_anywhere_leaves_no_damage(
    camera: Camera, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First start, log used again and outgrown, refused commit, an orderly end, another start."""
    for life in range(2):
        store = opened(camera.directory)
        store.load()
        assert store.identity is not None
        store.reserve_log(wal.HEADER.size + 14 * FRAME)
        write(store, camera, range(life * 20, life * 20 + 8), 3000)
        write(store, camera, range(life * 20 + 8, life * 20 + 9), 80_000)
        assert store._db is not None
        store._db.execute("PRAGMA max_page_count=2")
        with pytest.raises(Exception, match="full"):
            store.commit([(key(99), b"x" * 100_000)])
        write(store, camera, range(life * 20 + 9, life * 20 + 12), 3000)
        store.close()
    monkeypatch.undo()
    assert len(camera.taken) > 100
    longest = 0
    for path, acknowledged in camera.taken:
        with contextlib.suppress(FileNotFoundError):
            longest = max(longest, (path / WAL).stat().st_size)
        rows, damage = read(path)
        assert not damage, path
        assert rows.items() >= acknowledged.items(), path
    assert longest > wal.HEADER.size + 14 * FRAME


def test_damage_is_reported_though_a_start_was_killed_while_it_saved(
    camera: Camera, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(camera.directory)
    store.load()
    store.reserve_log()
    write(store, camera, range(5), 3000)
    found = files(camera.directory)
    store.close()
    for name, data in (found | {WAL: found[WAL][: wal.HEADER.size + FRAME]}).items():
        (camera.directory / name).write_bytes(data)
    camera.taken.clear()
    shutil.rmtree(camera.shots)
    _, damage = read(camera.directory)
    assert damage
    monkeypatch.undo()
    reports = [bool(read(path)[1]) for path, _ in camera.taken]
    assert reports == sorted(reports, reverse=True), "from the last rename on the file is sound"
    assert sum(reports) > 10


def commit_for_ever(directory: Path, first: int, log_bytes: int, pipe: int) -> None:
    module.CHECKPOINT_PAGES = 12  # type: ignore[misc] # of this child alone
    store = opened(directory)
    store.load()
    store.reserve_log(log_bytes)
    for number in range(first, first + 100_000):
        value = b"%d" % number
        store.commit([(key(number % 50), value * 200), (key(99), value)])
        store.reserve_log(log_bytes)
        os.write(pipe, b"%d\n" % number)


@pytest.mark.parametrize("frames", [0, 14, 40])
def test_processes_killed_by_signal(memory_path: Path, frames: int) -> None:
    directory, rng, last = memory_path / "state", random.Random(frames), 0
    for _ in range(12):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                commit_for_ever(directory, last + 1, wal.HEADER.size + frames * FRAME, writer)
            os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as numbers:
            for _ in range(rng.randint(1, 60)):
                last = int(numbers.readline())
            os.kill(child, signal.SIGKILL)
            last = max([last, *(int(number) for number in numbers.read().split("\n")[:-1])])
        os.waitpid(child, 0)
        shutil.copytree(directory, memory_path / "copy")
        rows, damage = read(memory_path / "copy")
        shutil.rmtree(memory_path / "copy")
        assert not damage
        assert int(rows[key(99)]) >= last
        last = int(rows[key(99)])
