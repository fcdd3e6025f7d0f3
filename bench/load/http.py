"""A small HTTP/1.1 client that costs little: prebuilt bytes over a few kept-alive connections.

Closed loop, no pipelining: each connection sends its next request when the answer to the last one
is complete. Every answer goes to a check, so a server that answers quickly and wrongly cannot win.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "SILENCE_MAX_S",
    "Address",
    "Answer",
    "BadAnswer",
    "Line",
    "Operation",
    "ask",
    "connect",
    "drive",
    "receive",
    "request_bytes",
]

_RECEIVE_BYTES = 1 << 18
SILENCE_MAX_S = 30.0
_HEAD_END = b"\r\n\r\n"

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

Operation = tuple[bytes, ...]
"""The requests of one operation, to be sent one after the other on one connection."""


class BadAnswer(RuntimeError):
    """The server answered something else than the workload expects, or not at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, and which request of which operation it answers."""

    operation: int
    step: int
    status: int
    body: bytes


@dataclass(slots=True, eq=False)
class Line:
    """One connection and the operation at work on it."""

    socket: socket.socket
    operation: int = -1
    steps: Operation = ()
    step: int = 0
    received: bytearray = field(default_factory=bytearray)


def request_bytes(
    method: str, path: str, body: bytes | None = None, media_type: str = "application/json"
) -> bytes:
    """One request, ready to send."""
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\n"
    if body is None:
        if method == "POST":
            head += "Content-Length: 0\r\n"
        return head.encode() + b"\r\n"
    head += f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def drive(
    address: Address,
    operation: Callable[[int], Operation],
    check: Callable[[Answer], None],
    *,
    operations: range,
    connections: int,
) -> None:
    """Carry out `operation(i)` for every i of `operations` and check every answer.

    Raises:
        BadAnswer: from `check`, or when the server is silent for too long or hangs up.
    """
    with _behind_the_server():
        _drive(address, operation, check, operations, connections)


def _drive(
    address: Address,
    operation: Callable[[int], Operation],
    check: Callable[[Answer], None],
    operations: range,
    connections: int,
) -> None:
    pending = iter(operations)
    poller = select.epoll()
    lines: dict[int, Line] = {}
    try:
        for _ in range(min(connections, len(operations))):
            line = Line(connect(address))
            lines[line.socket.fileno()] = line
            poller.register(line.socket.fileno(), select.EPOLLIN)
        active = sum(_next_operation(line, operation, pending) for line in lines.values())
        while active:
            ready = poller.poll(SILENCE_MAX_S)
            if not ready:
                raise BadAnswer(f"no answer for {SILENCE_MAX_S:.0f} s")
            for descriptor, _ in ready:
                line = lines[descriptor]
                answer = receive(line)
                if answer is None:
                    continue
                check(answer)
                line.step += 1
                if line.step < len(line.steps):
                    line.socket.sendall(line.steps[line.step])
                elif not _next_operation(line, operation, pending):
                    active -= 1
    finally:
        poller.close()
        for line in lines.values():
            line.socket.close()


@contextmanager
def _behind_the_server() -> Iterator[None]:
    """Do not take the processor from a server that has just answered.

    Where both share a core, every answer would else wake this client in the server's place, and
    the server would pay for caches that are cold again: 20 µs for each request, of 60.
    """
    try:
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # not on every system
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def ask(address: Address, requests: Sequence[bytes]) -> list[bytes]:
    """Send requests one after the other and return the bodies; for what is not measured.

    Raises:
        BadAnswer: on any status of 400 or above.
    """
    bodies: list[bytes] = []

    def check(answer: Answer) -> None:
        if answer.status >= 400:
            raise BadAnswer(f"{answer.status} {answer.body[:300]!r}")
        bodies.append(answer.body)

    drive(address, lambda i: (requests[i],), check, operations=range(len(requests)), connections=1)
    return bodies


def connect(address: Address) -> socket.socket:
    """A connection that sends at once."""
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SILENCE_MAX_S)
        connection.connect(address)
        return connection
    connection = socket.create_connection(address, timeout=SILENCE_MAX_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _next_operation(
    line: Line, operation: Callable[[int], Operation], pending: Iterator[int]
) -> bool:
    number = next(pending, None)
    if number is None:
        return False
    line.operation, line.steps, line.step = number, operation(number), 0
    line.socket.sendall(line.steps[0])
    return True


def receive(line: Line) -> Answer | None:
    """Take what has come; return the answer once it is complete.

    Raises:
        BadAnswer: the server hung up, or sent what is no answer.
    """
    data = line.socket.recv(_RECEIVE_BYTES)
    if not data:
        raise BadAnswer("the server closed the connection")
    line.received += data
    received = line.received
    end = received.find(_HEAD_END)
    if end < 0:
        return None
    head = bytes(received[:end])
    start = end + len(_HEAD_END)
    length = _content_length(head)
    if len(received) < start + length:
        return None
    if len(received) > start + length:
        raise BadAnswer(f"more bytes than announced: {bytes(received)!r:.300}")
    answer = Answer(line.operation, line.step, int(head[9:12]), bytes(received[start:]))
    received.clear()
    return answer


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(b"\r\ncontent-length:")
    if at < 0:
        raise BadAnswer(f"no content-length: {head!r:.300}")
    value_at = at + len(b"\r\ncontent-length:")
    stop = lowered.find(b"\r\n", value_at)
    return int(lowered[value_at:] if stop < 0 else lowered[value_at:stop])
