"""One request and its answer as an ASGI exchange: for all that is not answered at once.

`connection.py` creates one per such request, passes it what the client sends, and queues it behind
its predecessors. The application runs in a task of its own, through `receive` and `send`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

import httptools

from select_service.edge.http.asgi_receive import ClientGoneError
from select_service.edge.http.response_head import CLOSE_LINE, header_lines, status_line
from select_service.tcp_listener import plain_address

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from select_service.edge.http.application import Application
    from select_service.edge.http.pieces import Flow

_log = logging.getLogger("select_service.http")

BODY_AHEAD_BYTES_MAX: Final = 1 << 16
"""Of a body, read before the application asks for it; then the client waits."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CHUNKED_LINE: Final = b"transfer-encoding: chunked\r\n"
_BROKEN: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Cannot be in the value of a header: a line break would begin another."""
_WITHOUT_BODY: Final = frozenset((204, 304))
_PLAIN: Final = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21"))


class Connection(Protocol):
    """What an exchange uses of its connection; see `connection.py`."""

    transport: asyncio.Transport
    flow: Flow
    is_last: bool

    @property
    def is_receiving(self) -> bool:
        """Whether the sending side is still open."""

    @property
    def default_lines(self) -> bytes:
        """The header lines of every answer, as text."""

    def close_after_answer(self) -> None:
        """Close: the answer is out, or will not be."""

    def exchange_done(self) -> None:
        """Start the next request: an answer is out."""


class Exchange:
    """A request, as far as it has arrived, and its answer, as far as it has been sent.

    Attributes:
        disconnected: the answer will not be received.
        keep_alive: whether the connection stays open after it.
        more_body: whether more of the request's body is to come.
        response_started: the head of the answer is out.
        response_complete: all of it is.
    """

    __slots__ = (
        "_body",
        "_connection",
        "_event",
        "_expects_continue",
        "_is_chunked",
        "_left",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
    )

    def __init__(
        self,
        connection: Connection,
        scope: dict[str, Any],
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        """Begin with a request whose head has arrived.

        Args:
            connection: on which it came.
            scope: of ASGI.
            keep_alive: whether its client keeps the connection open.
            expects_continue: whether its client waits for a word before it sends the body.
        """
        self._connection = connection
        self.scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._event = asyncio.Event()
        self._body = bytearray()
        self._is_chunked = False
        self._left: int | None = None  # bytes of the announced length; None: there is none
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False

    # -- from the client -----------------------------------------------------------------------

    def feed(self, body: bytes) -> None:
        """Take a piece of the body; it is not read once the answer is out."""
        if self.response_complete:
            return
        self._body += body
        if len(self._body) > BODY_AHEAD_BYTES_MAX:
            self._connection.flow.pause_reading()
        self._event.set()

    def end_body(self) -> None:
        """Note that the whole request has arrived."""
        if not self.response_complete:
            self.more_body = False
            self._event.set()

    def disconnect(self) -> None:
        """Note that the answer will not be received, unless it is out."""
        if not self.response_complete:
            self.disconnected = True
        self._event.set()

    # -- the application -----------------------------------------------------------------------

    async def run(self, application: Application) -> None:
        """Have the request answered, with a status 500 if the application fails."""
        try:
            await application(self.scope, self.receive, self.send)
        except BaseException as error:  # noqa: BLE001 - cancelled at exit, too: the client is answered
            _log.error("exception in the application", exc_info=error)
            if self.response_started:
                self._connection.close_after_answer()
            else:
                await self._send_failure()
            return
        if self.response_complete or self.disconnected:
            return
        if self.response_started:  # a stream has been cut, and the application has said why
            self._connection.close_after_answer()
        else:
            _log.error("the application has not answered")
            await self._send_failure()

    async def receive(self) -> dict[str, Any]:
        """Return what has arrived since the last call, as ASGI wants it; waits for something."""
        if self._expects_continue and not self._connection.transport.is_closing():
            self._expects_continue = False
            with contextlib.suppress(ClientGoneError):
                self._write(_CONTINUE)
        if not (self.disconnected or self.response_complete):
            self._connection.flow.resume_reading()
            await self._event.wait()
            self._event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send the head, or a piece of the body, once there is room.

        Raises:
            ClientGoneError: it cannot be written, because the connection is closed or broken.
            RuntimeError: the application breaks the rules of ASGI.
        """
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            raise ClientGoneError
        kind = message["type"]
        if self.response_complete or kind != (
            "http.response.body" if self.response_started else "http.response.start"
        ):
            raise RuntimeError(f"the application must not send {kind} now")
        if not self.response_started:
            self._send_head(message["status"], message.get("headers", ()))
        else:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        connection = self._connection
        own = list[tuple[bytes, bytes]]()
        for name, value in headers:
            if _BROKEN.search(value):
                raise RuntimeError(f"the value of the header {name!r} is not one")
            if name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            if name == b"content-length":
                self._left = int(value)
            own.append((name, value))
        self.response_started, self._expects_continue = True, False
        lines = connection.default_lines + header_lines(own)
        if connection.is_last:
            self.keep_alive = False
        if not self.keep_alive and CLOSE_LINE not in lines:
            lines += CLOSE_LINE
        if self.scope["method"] == "HEAD":
            self._left = None
        elif self._left is None and status not in _WITHOUT_BODY:
            self._is_chunked = self.scope["http_version"] != "1.0"  # else the end is the end
            if self._is_chunked:
                lines += _CHUNKED_LINE
        self._write(status_line(status) + lines + b"\r\n")

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        elif self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if is_last:
                body += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the body of the answer has another length than announced")
        if body:
            self._write(body)
        if is_last:
            self.response_complete = True
            self._event.set()
            if not self.keep_alive:
                self._connection.close_after_answer()
            self._connection.exchange_done()

    async def _send_failure(self) -> None:
        if self._connection.transport.is_closing() or self.disconnected:
            return
        headers = [*_PLAIN, (b"connection", b"close")]
        with contextlib.suppress(ClientGoneError):
            await self.send({"type": "http.response.start", "status": 500, "headers": headers})
            await self.send({"type": "http.response.body", "body": b"Internal Server Error"})

    def _write(self, data: bytes) -> None:
        """Write, or find out that one cannot.

        Raises:
            ClientGoneError: the connection is closed, or broke with this.
        """
        connection, transport = self._connection, self._connection.transport
        if connection.is_receiving and not transport.is_closing():
            transport.write(data)
        if not connection.is_receiving or transport.is_closing():
            self.disconnect()
            raise ClientGoneError


def scope_of(
    parser: httptools.HttpRequestParser,
    url: bytes,
    headers: list[tuple[bytes, bytes]],
    transport: asyncio.Transport,
) -> dict[str, Any]:
    """Return the ASGI scope of a request whose head has been parsed."""
    target = httptools.parse_url(url)
    path = target.path.decode("ascii")
    client = transport.get_extra_info("peername")
    server = transport.get_extra_info("sockname")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": parser.get_http_version(),
        "method": parser.get_method().decode("ascii"),
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "path": unquote(path) if "%" in path else path,
        "raw_path": target.path,
        "query_string": target.query or b"",
        "root_path": "",
        "headers": headers,
        "client": _address(client) if isinstance(client, tuple) else None,
        "server": _address(server) if isinstance(server, tuple) else (server, None),
    }


def _address(name: tuple[Any, ...]) -> tuple[str, int]:
    return plain_address(str(name[0])), int(name[1])
