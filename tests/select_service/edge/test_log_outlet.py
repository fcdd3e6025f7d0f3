"""A log that nobody takes: the service goes on, and says how much of it is missing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from select_service.edge.log_outlet import LOST, PIECE_BYTES, LogOutlet
from tests.live.replicas import Replica
from tests.live.server import OURS

LINES = 2000
REQUESTS = 700  # some 400 lines of them fill a pipe


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reads without waiting."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    yield reads, writes
    os.close(reads)
    os.close(writes)


def outlet(number: int) -> LogOutlet:
    return LogOutlet(os.fdopen(number, "w", closefd=False))


def say(taker: LogOutlet, text: str) -> None:
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
    assert read(reads) == [f"{lost} lines of the log are lost: nobody took them", "again"]
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
    first, told, last = read(reads)
    assert set(torn) == {"y"}
    assert (first, last) == ("", "whole")
    assert told.startswith("1 lines")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select_service.edge.log_outlet.RETRY_S", 0.0)
    number = os.open("/dev/full", os.O_WRONLY)
    taker, before = outlet(number), LOST["failed"]
    for _ in range(3):
        say(taker, "nobody reads this")
    assert LOST["failed"] - before == 3
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(room, number)
    say(taker, "room again")
    told = (tmp_path / "log").read_text().splitlines()
    assert told == ["3 lines of the log are lost: nobody took them", "room again"]
    os.close(number)
    os.close(room)


@pytest.mark.e2e
def test_a_service_whose_log_nobody_reads(tmp_path: Path) -> None:
    """It answers as ever, and ends when it is told to."""
    unread = tmp_path / "unread"
    os.mkfifo(unread)
    reads = os.open(unread, os.O_RDONLY | os.O_NONBLOCK)
    into = ("sh", "-c", f'exec "$@" > {unread} 2>&1', "into")
    try:
        with Replica(tmp_path / "log", command=(*into, *OURS), args=("--access-log",)) as server:
            for _ in range(REQUESTS):
                assert server.request("GET", "/health").status == 200
            assert server.metric("log_lines_lost_total", reason="blocked") > 0
            assert server.stop() == 0
    finally:
        os.close(reads)
