"""The measuring client against a server that behaves oddly on purpose."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from bench.load.http import Answer, BadAnswer, ask, drive, request_bytes
from tests.bench.load.answering import answering

if TYPE_CHECKING:
    from collections.abc import Sequence


def server(*pieces: bytes) -> AbstractContextManager[tuple[str, int]]:
    """Answers every request (one per recv) with the pieces, each in a send of its own."""

    def serve(connection: socket.socket) -> None:
        while connection.recv(1 << 16) and pieces:
            for piece in pieces:
                connection.sendall(piece)

    return answering(serve)


def drive_all(address: tuple[str, int], operations: range, steps: int) -> list[Answer]:
    answers: list[Answer] = []
    request = request_bytes("GET", "/")
    drive(
        address,
        lambda _: (request,) * steps,
        answers.append,
        operations=operations,
        connections=3,
    )
    return answers


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    "pieces",
    [(OK,), (OK[:20], OK[20:]), (OK[:-1], OK[-1:]), (OK.lower().replace(b"http", b"HTTP"),)],
)
def test_every_step_of_every_operation_is_answered_once(pieces: Sequence[bytes]) -> None:
    with server(*pieces) as address:
        answers = drive_all(address, range(5, 12), steps=2)
    assert sorted((one.operation, one.step) for one in answers) == [
        (operation, step) for operation in range(5, 12) for step in range(2)
    ]
    assert {(one.status, one.body) for one in answers} == {(200, b"ok")}


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ((), "closed"),
        ((b"HTTP/1.1 200 OK\r\n\r\n",), "no content-length"),
        ((OK + b"more",), "more bytes"),
    ],
)
def test_odd_answers_are_bad_answers(pieces: Sequence[bytes], text: str) -> None:
    with server(*pieces) as address, pytest.raises(BadAnswer, match=text):
        drive_all(address, range(1), steps=1)


def test_ask_wants_success() -> None:
    missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with server(missing) as address, pytest.raises(BadAnswer, match="404"):
        ask(address, [request_bytes("GET", "/")])


def test_request_bytes() -> None:
    assert request_bytes("DELETE", "/a") == b"DELETE /a HTTP/1.1\r\nHost: bench\r\n\r\n"
    assert b"Content-Length: 0" in request_bytes("POST", "/a")
    assert request_bytes("POST", "/a", b"{}").endswith(b"Content-Length: 2\r\n\r\n{}")
