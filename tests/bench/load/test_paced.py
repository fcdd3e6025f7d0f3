"""The open-loop client and its arithmetic."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from bench.load.http import Answer, BadAnswer, request_bytes
from bench.load.paced import Schedule, Stream, drive_paced, percentile
from tests.bench.load.answering import answering

if TYPE_CHECKING:
    pass

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
REQUEST = request_bytes("GET", "/")


def test_percentiles() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, share) for share in (0.0, 0.25, 0.5, 1.0)] == [1.0, 2.0, 3.0, 5.0]
    assert percentile(values, 0.9) == pytest.approx(4.6)
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_schedule_is_even() -> None:
    schedule = Schedule(start=10.0, rate=4.0, count=8)
    assert [schedule.due_at(number) for number in (0, 1, 4)] == [10.0, 10.25, 11.0]
    assert schedule.end == 12.0


def test_a_stream_sends_what_is_due_a_few_at_a_time() -> None:
    sent: list[int] = []
    stream = Stream(Schedule(0.0, 10.0, 30), sent.append)
    assert stream.go_on(-1.0) == 0.0
    assert stream.go_on(0.25) == pytest.approx(0.3)
    assert sent == [0, 1, 2]
    assert stream.go_on(2.0) == pytest.approx(1.1)  # eight more, the rest in the next turns
    assert sent == list(range(11))
    assert stream.late_s == pytest.approx(1.7)
    turns = 0
    while stream.go_on(100.0) < float("inf"):
        turns += 1
    assert (sent, turns) == (list(range(30)), 2)


def server(answers: int | None = None) -> AbstractContextManager[tuple[str, int]]:
    """Answers each recv; hangs up after so many on a connection."""

    def serve(connection: socket.socket) -> None:
        left = answers
        while connection.recv(1 << 16) and left != 0:
            connection.sendall(OK)
            left = None if left is None else left - 1

    return answering(serve)


def test_every_operation_is_answered_step_by_step() -> None:
    answers: list[Answer] = []
    schedule = Schedule(0.0, 1000.0, 20)  # long past: all are due at once
    with server() as address:
        done = drive_paced(address, lambda _: (REQUEST,) * 3, answers.append, schedule, first=5)
    assert done.operations == 20
    assert sorted((one.operation, one.step) for one in answers) == [
        (operation, step) for operation in range(5, 25) for step in range(3)
    ]
    assert {step: len(values) for step, values in done.answered_s.items()} == {0: 20, 1: 20, 2: 20}
    assert len(done.late_s) == 20


def test_it_goes_on_until_the_stream_has_ended() -> None:
    sent: list[int] = []
    stream = Stream(Schedule(0.0, 1000.0, 100), sent.append)
    with server() as address:
        done = drive_paced(
            *(address, lambda _: (REQUEST,), lambda _: None, Schedule(0.0, 1000.0, 2)),
            meanwhile=stream,
        )
    assert (done.operations, sent) == (2, list(range(100)))


def test_enough_ends_a_schedule_early() -> None:
    answers: list[Answer] = []
    with server() as address:
        done = drive_paced(
            *(address, lambda _: (REQUEST,), answers.append, Schedule(0.0, 1e-6, 10**9)),
            enough=lambda: bool(answers),
        )
    assert done.operations == len(answers) == 1


def test_a_server_that_hangs_up_is_a_bad_answer() -> None:
    with server(answers=1) as address, pytest.raises(BadAnswer, match="closed"):
        drive_paced(address, lambda _: (REQUEST,) * 2, lambda _: None, Schedule(0.0, 1000.0, 1))
