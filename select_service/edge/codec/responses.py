"""Answers ready to send: bytes in the client's format, or a stream.

Handlers (`http/handlers/`) make them through a `Writer`, one per format; transports
(`http/connection.py`, `http/exchange.py`) send them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from select_service.edge.codec.encoder import encode, encode_capped, encode_msgpack
from select_service.edge.codec.formats import Format
from select_service.errors import ServiceError, problem, retry_after, retry_after_header

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Generator

    from indexer.errors import IndexerError

__all__ = [
    "ALWAYS_JSON",
    "JSON_WRITER",
    "ONLY_JSON",
    "DurableResponse",
    "Feed",
    "Response",
    "Status",
    "Writer",
    "msgpack_writer",
]

_JSON: Final = (b"content-type", b"application/json")
_VARY: Final = (b"vary", b"accept")
ALWAYS_JSON: Final = (_JSON,)
"""Headers of answers that are JSON whatever the client prefers."""
ONLY_JSON: Final = (_JSON, _VARY)


class Status(msgspec.Struct, frozen=True):
    """The answer of /health and of the lifecycle routes."""

    status: str = "ok"


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


class Writer:
    """Encodes answers in one format."""

    __slots__ = ("_done", "_form", "_headers", "encode")

    def __init__(
        self,
        encode: Callable[[object], bytes],
        headers: tuple[tuple[bytes, bytes], ...],
        form: Format = Format.JSON,
    ) -> None:
        self.encode = encode
        self._headers = headers
        self._form = form
        self._done = encode(Status())

    def reply(self, answer: object, status: int = 200, warning: str | None = None) -> Response:
        """Encode an answer."""
        try:
            body = self.encode(answer)
        except OverflowError:  # in MessagePack, of sums beyond 64 bits
            body = encode_capped(answer)
        if warning is None:
            return Response(status, body, self._headers)
        return Response(status, body, (*self._headers, (b"warning", warning.encode())))

    def written(self, part: object) -> msgspec.Raw:
        """Encode part of a long answer; the encoder of the whole copies it verbatim."""
        try:
            return msgspec.Raw(self.encode(part))
        except OverflowError:
            return msgspec.Raw(encode_capped(part))

    def reply_listing(self, name: str, items: AsyncIterator[object], count: int) -> Response:
        """Encode an object whose only member is a long list, item by item.

        Args:
            name: of the member.
            items: of the list.
            count: how many there are.
        """
        return Response(200, b"", self._headers, stream=self._list(name, items, count))

    async def _list(
        self, name: str, items: AsyncIterator[object], count: int
    ) -> AsyncIterator[bytes]:
        is_json = self._form is Format.JSON
        if is_json:
            yield b'{"%b":[' % name.encode()
        else:
            yield b"\x81" + self.encode(name) + b"\xdd" + count.to_bytes(4, "big")
        comma = b""
        async for item in items:
            yield comma + bytes(self.written(item))
            comma = b"," if is_json else b""
        if is_json:
            yield b"]}"

    def done(self) -> Response:
        """Return the answer that only confirms."""
        return Response(200, self._done, self._headers)

    def refusal(self, error: ServiceError | IndexerError, warning: str | None = None) -> Response:
        """Encode an error."""
        if not isinstance(error, ServiceError):
            return self.reply({"error": str(error), "code": error.code}, error.status, warning)
        status, body = problem(error)
        response = self.reply(body, status, warning)
        seconds = retry_after(error)
        if seconds is not None:
            response.headers += (retry_after_line(seconds),)
        return response


def retry_after_line(seconds: float) -> tuple[bytes, bytes]:
    """Return the header that says when to retry."""
    return b"retry-after", b"%d" % retry_after_header(seconds)


JSON_WRITER: Final = Writer(encode, ONLY_JSON)


def msgpack_writer(name: bytes) -> Writer:
    """Return a writer that uses this media type, by which the client knows msgpack."""
    return Writer(encode_msgpack, ((b"content-type", name), _VARY), Format.MSGPACK)
