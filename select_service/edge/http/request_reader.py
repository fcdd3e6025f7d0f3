"""Feeds the bytes of a connection to the HTTP parser: measured, judged, and never many at once.

The parser (httptools) reports no positions and is lenient: `request_reader.py` measures each head
and checks its request line, `pieces.py` cuts what has many lines, `framing.py` judges what it
accepts. What is to become of a request is up to the subclass (`connection.py`).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import httptools
from typing_extensions import override

from select_service.edge.http.connection_guard import GuardedConnection, Phase, TurnedAway
from select_service.edge.http.framing import CHUNKED, as_plain, body_length
from select_service.edge.http.pieces import pieces_of
from select_service.errors import HeadTooLarge, MalformedHttp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.http.exchange import Exchange

PIPELINED_MAX: Final = 16
"""Requests read ahead of the one being answered; beyond this, or 64 KiB of a body, the client
waits."""


class RequestParser(GuardedConnection):
    """One connection, as far as the parser."""

    headers: list[tuple[bytes, bytes]]  # of the request being parsed, names in lower case
    _pieces: Iterator[bytes] | None = None  # of the last read, not parsed yet
    _line_bytes = 0  # of an incomplete line between chunks or after them
    _body_left = 0  # bytes, while a body arrives; or CHUNKED
    _is_parting = False  # what follows the last request is not read as another
    _upgrading = False
    _expects_continue = False

    @cached_property
    def parser(self) -> Any:
        """The parser, created when a head is not in memory."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # we end with an answer
        return parser

    @cached_property
    def head_reader(self) -> HeadReader:
        """Measures what the parser parses; created with it."""
        return HeadReader()

    @cached_property
    def pipeline(self) -> deque[Exchange]:
        """Requests queued behind the one being answered."""
        return deque()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.parser = None  # breaks a reference cycle
        self._pieces = None
        if "pipeline" in self.__dict__:
            self.pipeline.clear()

    def read(self, data: bytes) -> None:
        """Parse what has arrived, in several turns of the loop if it has many lines."""
        pieces = pieces_of(data)
        if pieces is None:
            self.take(data)
        else:
            self._pieces = pieces
            self.flow.hold()
            self._take_piece()

    def _take_piece(self) -> None:
        """Parse a piece; the next follows soon, or when there is room for more requests."""
        assert self._pieces is not None
        piece = next(self._pieces, None)
        if piece is None or self.transport.is_closing():
            self._pieces = None
            self.flow.release()
            return
        self.take(piece)
        if len(self.pipeline) < PIPELINED_MAX:
            self.loop.call_soon(self._take_next)

    def _take_next(self) -> None:
        if self._pieces is not None:
            self._take_piece()

    def take(self, data: bytes) -> None:
        """Parse one piece."""
        if self._refused:
            self._discard(data)
            return
        self._line_bytes += len(data)  # reset by callbacks that make progress
        try:
            self._feed(data)
        except TurnedAway:
            return
        except httptools.HttpParserError as error:
            ours = error.__context__  # raised by a callback
            if isinstance(ours, TurnedAway):
                return
            self.counts.malformed += 1
            why = ours if isinstance(ours, httptools.HttpParserError) else error
            self._turn_away(MalformedHttp(f"invalid HTTP request: {why}"))
            return
        if self.phase is not self._stamped:
            self._stamp()
        if self.phase is Phase.BODY and self._line_bytes > self.limits.head_bytes_max:
            self.counts.malformed += 1
            self._turn_away(HeadTooLarge("a line between chunks, or behind them, is too long"))

    def _feed(self, data: bytes) -> None:
        """Parse head by head, so that each is measured, and its request line judged, by itself."""
        at, end = 0, len(data)
        while at < end:
            if self._is_parting:
                stop = end
            elif self.phase is not Phase.BODY:
                stop = self._feed_head(data, at)
                at = stop
                continue
            elif self._body_left == CHUNKED:  # such a body ends with a line
                stop = data.find(b"\n", at) + 1 or end
            else:
                stop = min(end, at + max(1, self._body_left))
                self._body_left -= stop - at
            self._parse(data if stop - at == end else data[at:stop])
            at = stop
            if self.phase is Phase.REST:
                self._is_parting = not self.parser.should_keep_alive()

    def _feed_head(self, data: bytes, at: int) -> int:
        """Parse what belongs to one head; return where that ends."""
        if self._refused:  # the last answer is given
            raise TurnedAway
        reader = self.head_reader
        stop, is_end = reader.read(data, at)
        self._head_bytes = reader.size
        if reader.size > self.limits.head_bytes_max:
            self.counts.malformed += 1
            self._turn_away(
                HeadTooLarge(
                    f"the request head is longer than {self.limits.head_bytes_max} bytes "
                    "(--head-bytes-max)"
                )
            )
            raise TurnedAway
        self._parse(data if stop - at == len(data) else data[at:stop])
        if reader.is_wrong:  # unless the parser has said what is wrong
            raise httptools.HttpParserError("Invalid request line")
        if is_end:
            reader.next()
            self._head_bytes = 0
            self._body_left = body_length(self.headers)
            if self.phase is Phase.REST:
                self._is_parting = not self.parser.should_keep_alive()
        return stop

    def _parse(self, data: bytes) -> None:
        """Parse; requests that offer a protocol upgrade are read as if they did not."""
        for _ in range(PIPELINED_MAX):
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                line = self.parser.get_method(), self.url, self.parser.get_http_version()
                data = as_plain(*line, self.headers, data[upgrade.args[0] :])
                self.parser = httptools.HttpRequestParser(self)
            else:
                return
        raise httptools.HttpParserError("one offer of another protocol behind the other")

    # -- callbacks of the parser ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._refused:  # the last answer is given
            raise TurnedAway
        self.phase = Phase.HEAD
        self._stamped = None
        self.url = b""
        self.headers = []
        self._expects_continue = self._upgrading = False

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header line; those behind a body are ignored."""
        if self.phase is Phase.BODY:
            self._line_bytes = 0
            return  # a trailer: it was not there when the request was judged
        most = self.limits.header_lines_max
        if len(self.headers) >= most:
            self.counts.malformed += 1
            self.counts.head_lines += 1
            self._turn_away(HeadTooLarge(f"more than {most} header lines (--header-lines-max)"))
            raise TurnedAway
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self.headers.append((name, value))

    def _enter_body(self) -> None:
        self.phase = Phase.BODY
        self._line_bytes = 0

    @abstractmethod
    def on_headers_complete(self) -> None:
        """Choose how the request will be answered."""

    @abstractmethod
    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""

    @abstractmethod
    def on_message_complete(self) -> None:
        """Take note that a request is complete."""


# Follows the bytes of request heads: where each ends, its length, and its request line. The parser
# reports no positions, and accepts request lines that others read differently: a lone line feed or
# carriage return before one, several spaces in one, other protocols' names.

_REQUEST_LINE: Final = re.compile(
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [!-~]+ HTTP/[0-9]\.[0-9]\r\n"  # RFC 9112, 3; and a fragment
)
_BLANK_LINES: Final = re.compile(rb"(?:\r\n)*")  # before a request line: RFC 9112, 2.2
_END: Final = b"\r\n\r\n"


class HeadReader:
    """One connection's heads, one after the other.

    Attributes:
        size: bytes of the current head that have been read; blank lines before it do not count.
        is_wrong: its request line is not one.
    """

    __slots__ = ("_line", "_tail", "is_wrong", "size")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        self.is_wrong = False
        self._line = b""  # as far as it has been read
        self._tail = b""  # of what has been read behind it, up to three bytes

    def read(self, data: bytes, at: int) -> tuple[int, bool]:
        """Read on.

        Args:
            data: as received.
            at: position from which it belongs to a head.

        Returns:
            Position up to which it does, and whether the head ends there. The head after that
            begins with the next call.
        """
        if not self._tail:
            held = self._line
            line, first, shift = (held + data[at:], 0, at - len(held)) if held else (data, at, 0)
            if data.find(b"\n", at) < 0:  # nothing to judge yet
                self._line = line[first:]
                self.size = len(self._line)
                return len(data), False
            begin = _match_end(_BLANK_LINES, line, first)
            end = _match_end(_REQUEST_LINE, line, begin)
            if not end:
                end = line.find(b"\n", begin) + 1
                self.is_wrong = bool(end)
                end = end or len(line)
                self._line = line[begin:end]
                self.size = end - begin
                return end + shift, False
            self.size, self._line, self._tail = end - begin, b"", b"\r\n"
            at = end + shift
        return self._lines(data, at)

    def _lines(self, data: bytes, at: int) -> tuple[int, bool]:
        tail = self._tail
        end = (tail + data[at : at + 3]).find(_END)
        if end >= 0:
            stop = at + end + len(_END) - len(tail)
        else:
            end = data.find(_END, at)
            stop = end + len(_END) if end >= 0 else len(data)
        self.size += stop - at
        self._tail = (tail + data[max(at, stop - 3) : stop])[-3:]
        return stop, end >= 0

    def next(self) -> None:
        """Begin with another head."""
        self._begin()


def _match_end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Return the end of a match that begins here; 0: there is none."""
    found = pattern.match(text, at)
    return 0 if found is None else found.end()
