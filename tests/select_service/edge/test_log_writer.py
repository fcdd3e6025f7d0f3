"""A log that nobody takes: the service goes on, and says how much of it is missing."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import pty
import select
import signal
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from select_service.edge import logs
from select_service.edge.logs import LOST, PIECE_BYTES, LogWriter
from tests.live.replicas import Replica
from tests.live.server import OURS
from tests.wait import PATIENCE_S, block_until

LINES = 2000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reads without waiting."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    yield reads, writes
    os.close(reads)
    os.close(writes)


def outlet(number: int) -> LogWriter:
    return LogWriter(os.fdopen(number, "w", closefd=False))


def say(taker: LogWriter, text: str) -> None:
    taker.emit(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def read(number: int) -> list[str]:
    found = b""
    while True:
        try:
            found += os.read(number, 1 << 20)
        except BlockingIOError:
            return found.decode().splitlines()


def test_lines_that_nobody_reads(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    taker, before = outlet(writes), LOST["blocked"]
    for number in range(LINES):
        say(taker, f"{number} " + "x" * 100)
    kept = read(reads)
    lost = LINES - len(kept)
    assert lost == LOST["blocked"] - before > 0
    assert [line.split()[0] for line in kept] == [str(number) for number in range(len(kept))]
    say(taker, "again")
    assert read(reads) == [f"{lost} lines of the log are lost: they were not read", "again"]
    say(taker, "and again")
    assert read(reads) == ["and again"]


def test_a_line_longer_than_a_pipe(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    taker = outlet(writes)
    say(taker, "x" * 3 * PIECE_BYTES)
    assert [len(line) for line in read(reads)] == [3 * PIECE_BYTES]
    say(taker, "y" * 10 * (1 << 16))
    (torn,) = read(reads)
    say(taker, "whole")
    first, note, last = read(reads)
    assert set(torn) == {"y"}
    assert (first, last) == ("", "whole")
    assert note.startswith("1 lines")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select_service.edge.logs.RETRY_S", 0.0)
    number = os.open("/dev/full", os.O_WRONLY)
    taker, before = outlet(number), LOST["failed"]
    for _ in range(3):
        say(taker, "nobody reads this")
    assert LOST["failed"] - before == 3
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(room, number)
    say(taker, "room again")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["3 lines of the log are lost: they were not read", "room again"]
    os.close(number)
    os.close(room)


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_terminal_that_nobody_reads(is_raw: bool) -> None:
    """It says that there is room when there is some, less than a piece: a write waited for ever."""
    master, slave = pty.openpty()
    if is_raw:
        tty.setraw(slave)
    taker, before = outlet(slave), LOST["blocked"]

    def wake(*_: object) -> None:
        pytest.fail("it waits for a reader")

    woken = signal.signal(signal.SIGALRM, wake)
    signal.alarm(round(PATIENCE_S))  # what fails waits for ever
    try:
        for number in range(LINES):
            say(taker, f"{number} " + "x" * 100)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, woken)
    assert os.get_blocking(slave), "others write to it as ever"
    assert LOST["blocked"] > before
    os.set_blocking(master, False)
    read(master)
    before = LOST["blocked"]
    say(taker, "again")
    taker.close()
    say(taker, "and again")
    assert read(master)[-2:] == ["again", "and again"]
    assert LOST["blocked"] == before
    os.close(slave)
    os.close(master)


def test_an_outlet_that_is_closed_holds_nothing(pipe: tuple[int, int]) -> None:
    before = os.listdir("/proc/self/fd")
    taker = outlet(pipe[1])
    taker.close()
    taker.close()
    assert os.listdir("/proc/self/fd") == before


def test_patience_is_in_vain_once_a_second(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader slower than the lines cost a wait with each page that it took."""
    waits: list[int] = []
    now = 0.0

    class Room:
        """Makes some when it is asked at once."""

        def register(self, *_: int) -> None: ...

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            if timeout_ms:
                waits.append(timeout_ms)
            return [(0, 0)] if is_roomy else []

    monkeypatch.setattr(select, "poll", Room)
    monkeypatch.setattr("select_service.edge.logs.time.monotonic", lambda: now)
    taker = outlet(pipe[1])
    for _ in range(5):
        is_roomy = False
        say(taker, "lost")
        say(taker, "lost")
        is_roomy = True
        say(taker, "taken")
    assert waits == [logs.PATIENCE_MS]
    now += 2 * logs.HASTE_S
    is_roomy = False
    say(taker, "lost")
    assert waits == [logs.PATIENCE_MS] * 2


def test_one_patience_for_a_line_of_many_pieces(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    class Room:
        """Makes some for those who wait for it."""

        def register(self, *_: int) -> None: ...

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            if timeout_ms:
                waits.append(timeout_ms)
            return [(0, 0)] if timeout_ms else []

    now = iter(range(100))
    monkeypatch.setattr(select, "poll", Room)
    monkeypatch.setattr("select_service.edge.logs.time.monotonic", lambda: next(now) * 0.001 * 0.75)
    say(outlet(pipe[1]), "x" * 9 * PIECE_BYTES)
    assert 0 < sum(waits) <= 2 * logs.PATIENCE_MS


def test_a_stream_without_a_descriptor() -> None:
    closed = io.StringIO()
    closed.close()
    before = LOST["failed"]
    say(LogWriter(closed), "nobody reads this")
    assert LOST["failed"] - before == 1

    class Deaf(io.StringIO):
        def fileno(self) -> int:
            raise OSError(9, "Bad file descriptor")

    class Missing:
        def __init__(self) -> None:
            self.text = io.StringIO()
            self.write, self.flush = self.text.write, self.text.flush

    for stream in (Deaf(), missing := Missing()):
        say(LogWriter(stream), "read")  # type: ignore[arg-type]
        text = missing.text if stream is missing else stream
        assert text.getvalue() == "read\n"  # type: ignore[union-attr]


def test_a_system_that_cannot_be_asked_for_room(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has neither of the two; the module did not even load."""
    monkeypatch.delattr(select, "poll")
    monkeypatch.delattr(select, "PIPE_BUF")
    path = logs.__file__
    spec = importlib.util.spec_from_file_location("elsewhere", path)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    say(elsewhere.LogWriter(os.fdopen(pipe[1], "w", closefd=False)), "said")
    assert read(pipe[0]) == ["said"]


@pytest.mark.e2e
def test_a_service_without_stderr(tmp_path: Path) -> None:
    """It ended with 1 and without a word."""
    without = ("sh", "-c", 'exec "$@" 2>&-', "without")
    with Replica(tmp_path / "log", command=(*without, *OURS), args=("--access-log",)) as server:
        assert server.request("GET", "/health").status == 200
        assert server.stop() == 0


@pytest.mark.e2e
def test_a_service_whose_log_nobody_reads(tmp_path: Path) -> None:
    """It answers as ever, and ends when it is signalled."""
    unread = tmp_path / "unread"
    os.mkfifo(unread)
    reads = os.open(unread, os.O_RDONLY | os.O_NONBLOCK)
    into = ("sh", "-c", f'exec "$@" > {unread} 2>&1', "into")
    try:
        with Replica(tmp_path / "log", command=(*into, *OURS), args=("--access-log",)) as server:

            def loses_lines() -> bool:  # some 400 fill a pipe, and a thread writes them
                assert server.request("GET", "/health").status == 200
                return server.metric("log_lines_lost_total", reason="blocked") > 0

            block_until(loses_lines)
            assert server.request("GET", "/health").status == 200
            assert server.stop() == 0
    finally:
        os.close(reads)
