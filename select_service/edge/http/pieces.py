"""Splits data with many lines into pieces, so that parsing one read does not hold the loop.

A read may be a quarter of a megabyte, and contain five thousand requests, forty thousand chunks or
as many header lines: parsed at once they would hold the loop for a quarter of a second. A body of
numbers has hardly any lines and passes whole. `connection.py` parses the pieces.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES_PER_TURN: Final = 64
"""Lines parsed in one turn of the loop: some 15 requests, a millisecond."""

_SHORT_BYTES: Final = 2048  # parsed at once, whatever it contains


def pieces_of(data: bytes) -> Iterator[bytes] | None:
    """Return the pieces of data with many lines; None if it may be parsed as it is.

    Lines are searched one by one: 256 KiB without any take 3 µs.
    """
    if len(data) <= _SHORT_BYTES:
        return None
    end = _behind_lines(data, 0)
    return _pieces(data, end) if data.find(b"\n", end) >= 0 else None


def _pieces(data: bytes, end: int) -> Iterator[bytes]:
    """Yield the pieces, the first of which ends at `end`; each is cut when its turn comes."""
    start = 0
    while start < len(data):
        yield data[start:end]
        start, end = end, _behind_lines(data, end)


def _behind_lines(data: bytes, start: int) -> int:
    """Return the end of the piece that begins at `start`, or of the data."""
    for _ in range(LINES_PER_TURN):
        start = data.find(b"\n", start) + 1
        if not start:
            return len(data)
    return start


class Flow:
    """Pauses reading for two reasons: a body or a queue that is full, and pieces to be parsed.

    Attributes:
        is_held: there are pieces to be parsed.
        read_paused: there is no room for more.
        write_paused: the client does not read.
    """

    is_held = False
    read_paused = False

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.write_paused = False  # every request reads it

    @cached_property
    def _writable(self) -> asyncio.Event:
        """Created on demand: on most connections nothing waits for room to write."""
        event = asyncio.Event()
        if not self.write_paused:
            event.set()
        return event

    async def drain(self) -> None:
        """Wait until the client reads again."""
        await self._writable.wait()

    def pause_writing(self) -> None:
        """Make `drain` wait. Idempotent."""
        self.write_paused = True
        if "_writable" in self.__dict__:
            self._writable.clear()

    def resume_writing(self) -> None:
        """End all waits in `drain`. Idempotent."""
        self.write_paused = False
        if "_writable" in self.__dict__:
            self._writable.set()

    def hold(self) -> None:
        """Pause reading until `release`. Idempotent."""
        if not self.is_held:
            self.is_held = True
            if not self.read_paused:
                self._transport.pause_reading()

    def release(self) -> None:
        """Resume reading, unless there is no room. Idempotent."""
        if self.is_held:
            self.is_held = False
            if not self.read_paused:
                self._transport.resume_reading()

    def pause_reading(self) -> None:
        """Pause reading until `resume_reading`. Idempotent."""
        if not self.read_paused:
            self.read_paused = True
            if not self.is_held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless there are pieces to be parsed. Idempotent."""
        if self.read_paused:
            self.read_paused = False
            if not self.is_held:
                self._transport.resume_reading()
