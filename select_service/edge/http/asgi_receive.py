"""Reads request bodies from ASGI: complete, uncompressed, and within the length limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.errors import BodyTooLarge, UnsupportedMediaType

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

    from select_service.edge.http.api import Handler
    from select_service.edge.http.calls import Head
    from select_service.edge.routing import Route


class ClientGoneError(Exception):
    """The client disconnected; there is nobody to answer."""


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
    raise _too_large(limit)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than {limit} bytes", limit="max_body_bytes")
