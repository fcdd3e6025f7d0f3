"""HTTP/1.1 calls for asyncio: a connection for each call in progress, kept for the next one.

For many calls that wait at once and few per second; `http.py` is the one for saturating a server.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from bench.load.http import BadAnswer

__all__ = ["Calls", "Reply"]

_HEAD_END = b"\r\n\r\n"


class Reply(NamedTuple):
    """One response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Calls:
    """Calls to one server; `close` it in the end."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.calls = 0

    async def call(self, request: bytes) -> Reply:
        """Send a request and wait for its answer, however long.

        Raises:
            BadAnswer: the server hung up, or sent what is no answer.
            OSError: no connection.
        """
        self.calls += 1
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(*self._address)
        kept = False
        try:
            writer.write(request)
            head = await reader.readuntil(_HEAD_END)
            lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.strip().lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            kept = headers.get("connection", "").lower() != "close"
            return Reply(int(lines[0].split(" ", 2)[1]), headers, body)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise BadAnswer(f"no answer to {request[:60]!r}: {error}") from error
        finally:
            if kept:
                self._idle.append((reader, writer))
            else:
                writer.close()

    def close(self) -> None:
        """Close what is idle; calls in progress close theirs when they end or are cancelled."""
        while self._idle:
            self._idle.pop()[1].close()
