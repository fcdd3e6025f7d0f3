"""The client most Python programs have: `http.client`, one connection, one request at a time.

It writes a head and its body one after the other, so that a server is often woken up twice for a
request with a body. `http.py` writes both at once over many connections, as a proxy does.
"""

from __future__ import annotations

from http.client import HTTPConnection
from typing import TYPE_CHECKING

from bench.load.http import SILENCE_MAX_S, Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.load.http import Operation

__all__ = ["drive_plainly"]


def drive_plainly(
    address: tuple[str, int],
    operation: Callable[[int], Operation],
    check: Callable[[Answer], None],
    *,
    operations: range,
) -> None:
    """Carry out `operation(i)` for every i of `operations` and check every answer.

    Raises:
        BadAnswer: from `check`.
        OSError, HTTPException: the server is silent for too long or hangs up.
    """
    connection = HTTPConnection(*address, timeout=SILENCE_MAX_S)
    try:
        for number in operations:
            for step, request in enumerate(operation(number)):
                head, _, body = request.partition(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                headers = {"Content-Type": "application/json"} if body else {}
                connection.request(method.decode(), path.decode(), body or None, headers)
                answer = connection.getresponse()
                check(Answer(number, step, answer.status, answer.read()))
    finally:
        connection.close()
