"""Answers ready to send: bytes in the client's format, or a stream.

Handlers (`http/handlers/`) make them through a `Writer` (`encoder.py`); transports
(`http/connection.py`, `http/exchange.py`) send them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Generator

_JSON: Final = (b"content-type", b"application/json")
VARY: Final = (b"vary", b"accept")
"""An answer's format depends on this header of the request."""
ALWAYS_JSON: Final = (_JSON,)
"""Headers of answers that are JSON whatever the client prefers."""
ONLY_JSON: Final = (_JSON, VARY)


class Status(msgspec.Struct, frozen=True):
    """The answer of /health and of the lifecycle routes."""

    status: str = "ok"
    """Always the same: the call was carried out, e.g. `"ok"`."""


class Response(msgspec.Struct, eq=False):
    """An answer: a body, or a stream of bytes."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ONLY_JSON
    stream: AsyncIterator[bytes] | None = None
    withdraw: Callable[[], None] | None = None
    """Takes back what it says was booked; see `lost`."""

    def lost(self) -> None:
        """Note that it cannot be written: nothing stays booked for it, but what a lease keeps."""
        withdraw, self.withdraw = self.withdraw, None
        if withdraw is not None:
            withdraw()


class Feed(Response, eq=False):
    """A stream that ends only with its reader; it counts neither as in flight nor as slow."""


class DurableResponse:
    """An answer that may be given once its changes are on disk: a matter of milliseconds."""

    __slots__ = ("response", "written")

    def __init__(self, response: Response, written: asyncio.Future[None]) -> None:
        self.response = response
        self.written = written

    def __await__(self) -> Generator[Any, None, Response]:
        yield from self.written.__await__()
        return self.response
