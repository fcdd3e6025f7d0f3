"""Reads request bodies from ASGI: complete, uncompressed, and within the length limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from select_service.edge.codec.encoder import JSON_WRITER
from select_service.edge.codec.responses import Feed
from select_service.edge.dump_stream import StreamCut
from select_service.errors import BodyTooLarge, HttpVersionTooOld, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from select_service.edge.codec.responses import Response
    from select_service.edge.http.api import Handler
    from select_service.edge.http.calls import Head
    from select_service.edge.http.traffic import Traffic
    from select_service.edge.routing import Route


class ClientGoneError(Exception):
    """The client disconnected; no answer is possible."""


def has_no_body(head: Head, scope: Scope) -> bool:
    """Whether nothing announces a body."""
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    return not head.has_type and not _length(scope) and not chunked


def _length(scope: Scope) -> int:
    """Return the announced length of the body, 0 if none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
    return 0


def refuse_encoding(scope: Scope) -> None:
    """Refuse a compressed body, which would be misread.

    Raises:
        UnsupportedMediaType: it has a Content-Encoding.
    """
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in {b"identity", b""}:
            raise UnsupportedMediaType("a body with Content-Encoding is not understood")


async def read_body(
    route: Route[Handler], head: Head, scope: Scope, receive: Receive, limit: int
) -> bytes:
    """Read a whole body.

    Args:
        route: says what it takes.
        head: says which format the body has.
        scope: of ASGI; may say how long it is.
        receive: of ASGI.
        limit: bytes; bodies announced as longer are refused unread.

    Raises:
        UnsupportedMediaType: we cannot read its format.
        BodyTooLarge: it is longer than the limit.
        ClientGoneError: it will not be completed.
    """
    if not (head.is_readable or route.body_lenient):
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    if _length(scope) > limit:
        return _refuse_length(route, limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        pieces = bytearray(body)
        while message.get("more_body"):
            if len(pieces) > limit:
                return _refuse_length(route, limit)
            message = await receive()
            pieces += message.get("body", b"")
        body = bytes(pieces)
    if message["type"] != "http.request":
        raise ClientGoneError
    if len(body) > limit:
        return _refuse_length(route, limit)
    return body


async def until_gone(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse_length(route: Route[Handler], limit: int) -> bytes:
    """Refuse a body that is too long; lenient routes treat it as empty.

    Raises:
        BodyTooLarge: the route requires a body.
    """
    if route.body_lenient:
        return b""  # a computed prompt must not stay booked because of an irrelevant body
    raise BodyTooLarge(f"the body is longer than {limit} bytes", limit="max_body_bytes")


_log = logging.getLogger("select_service.http")


class Sending:
    """Sends the answers of one application."""

    def __init__(self, traffic: Traffic, leaving: asyncio.Event) -> None:
        """Set up.

        Args:
            traffic: counts failed streams.
            leaving: set when the process is about to end, which cuts streams.
        """
        self._traffic, self._leaving = traffic, leaving

    async def respond(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an answer.

        Raises:
            ClientGoneError: not all of it could be written, or not all of a stream's head or end.
        """
        is_head = scope["method"] == "HEAD"
        if response.stream is not None and not is_head:
            await self._stream(response, scope, receive, send)
            return
        headers = [*response.headers]
        if response.stream is None:
            headers.append((b"content-length", b"%d" % len(response.body)))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if is_head else response.body
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a stream piece by piece; for HTTP/1.0 the connection's end marks its end."""
        assert response.stream is not None
        if scope.get("http_version") == "1.0" and isinstance(response, Feed):
            why = HttpVersionTooOld("this needs HTTP/1.1: it has no end")
            await self.respond(JSON_WRITER.refusal(why), scope, receive, send)
            return
        headers = [*response.headers]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(until_gone(receive))
            complete = await self._pass_on(response.stream, gone, send)
            gone.cancel()
        if isinstance(response.stream, AsyncGenerator):
            await response.stream.aclose()  # releases its place at once
        if complete:  # otherwise the missing last piece shows the client that it is incomplete
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(
        self, stream: AsyncIterator[bytes], gone: asyncio.Task[None], send: Send
    ) -> bool:
        try:
            async for piece in stream:
                if self._leaving.is_set() or gone.done():
                    return False
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (StreamCut, ClientGoneError):
            return False
        except Exception:  # noqa: BLE001 - logged and counted; the client sees a cut stream
            self._traffic.crashes += 1
            _log.exception("stream failed")
            return False
        return True
