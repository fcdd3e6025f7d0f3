"""What one read brought, given to the parser piece by piece where it is of many lines.

A read may be a quarter of a megabyte, and that five thousand requests, forty thousand chunks or as
many header lines: parsed at once they would hold the loop for a quarter of a second. A body of
numbers has no lines to speak of and passes whole. `protocol.py` asks, and gives the pieces out.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Final

from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LINES_PER_TURN", "Flow", "pieces_of"]

LINES_PER_TURN: Final = 64
"""Lines parsed in one turn of the loop: some 15 requests, a millisecond."""

_SHORT_BYTES: Final = 2048  # of what is parsed at once, whatever it is


def pieces_of(data: bytes) -> Iterator[bytes] | None:
    """Return the pieces of data of many lines, None where it may be parsed as it is.

    Lines are looked for one by one: a body of 256 KiB without any is gone through in 3 µs.
    """
    if len(data) <= _SHORT_BYTES:
        return None
    end = _behind_lines(data, 0)
    return _pieces(data, end) if data.find(b"\n", end) >= 0 else None


def _pieces(data: bytes, end: int) -> Iterator[bytes]:
    """Yield the pieces of data of which the first ends here; each is cut when its turn comes."""
    start = 0
    while start < len(data):
        yield data[start:end]
        start, end = end, _behind_lines(data, end)


def _behind_lines(data: bytes, start: int) -> int:
    """Return where the piece ends that begins here: behind so many lines, or where all does."""
    for _ in range(LINES_PER_TURN):
        start = data.find(b"\n", start) + 1
        if not start:
            return len(data)
    return start


class Flow(FlowControl):
    """Reading rests for two reasons: uvicorn's own, and pieces that are still to be parsed."""

    is_held = False
    read_paused = False
    write_paused = False

    @override
    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    @cached_property
    def _is_writable_event(self) -> asyncio.Event:  # type: ignore[override]
        """For who waits until there is room to write: most connections have nobody who does."""
        event = asyncio.Event()
        if not self.write_paused:
            event.set()
        return event

    def hold(self) -> None:
        """Read no more until `release`, whatever uvicorn says. Idempotent."""
        if not self.is_held:
            self.is_held = True
            if not self.read_paused:
                self._transport.pause_reading()

    def release(self) -> None:
        """Read on, unless uvicorn has a reason not to. Idempotent."""
        if self.is_held:
            self.is_held = False
            if not self.read_paused:
                self._transport.resume_reading()

    @override
    def pause_reading(self) -> None:
        if self.is_held:
            self.read_paused = True
        else:
            super().pause_reading()

    @override
    def resume_reading(self) -> None:
        if self.is_held:
            self.read_paused = False
        else:
            super().resume_reading()
