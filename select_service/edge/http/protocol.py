"""HTTP/1.1 on a socket, with a deadline for everything a client may leave unfinished.

Uvicorn's httptools protocol serves requests but waits forever for their bytes. This adds limits on
the number of connections, on the length of a head, and on the time that a head, a body or the
reading of an answer may take. There are no timers per request: a connection notes when its phase
began, and the server's tick (`server.py`) sweeps all connections a few times per second.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import httptools
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from indexer.edge.descriptors import descriptors_end
from select_service.edge.codec.encoder import encode
from select_service.edge.http.framing import (
    CHUNKED,
    UNTIL_CLOSED,
    as_plain,
    body_length,
    judge_framing,
)
from select_service.edge.http.head_reader import HeadReader
from select_service.edge.http.pieces import Flow, pieces_of
from select_service.errors import (
    HeadTooLarge,
    MalformedHttp,
    RequestTimeout,
    ServiceError,
    TooManyConnections,
    problem,
    retry_after,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from uvicorn._types import ASGI3Application
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from select_service.core.tenancy.shares import Party
    from select_service.edge.http.connection_limits import ConnectionLimits
    from select_service.edge.http.traffic import Connections

__all__ = ["GuardedProtocol", "Phase", "TurnedAway"]

LINGER_BYTES_MAX: Final = 64 * 1024 * 1024
LINGER_S: Final = 5.0
LINGER_MAX_S: Final = 60.0
"""How much is read and discarded from a client that was answered while still sending, how long it
may pause, and for how long altogether: closing a socket with unread bytes resets it, and the client
loses the answer."""

RESERVED_MAX: Final = 16
"""Extra connections beyond `--connections-max` and similar limits, one request each, for what must
work when these are reached or set too low: only `RESERVED_PATHS`. When all are taken, a newcomer
replaces the first that has been refused, or whose request has not arrived yet. Connections beyond
their tenant's room are refused here: those that their clients do not close take no other place."""

RESERVED_PATHS: Final = (b"/config", b"/health", b"/metrics")

PIPELINED_MAX: Final = 16
"""Requests read ahead of the one being answered; beyond this, or 64 KiB of a body, the client
waits."""

_REFUSAL_HEAD: Final = (
    b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
)

_CLOSE: Final = (b"connection", b"close")

_NEWCOMERS: Final = 8
"""A share of --connections-max (one in so many) is there for clients that nobody knows yet, even
where all of it is promised to tenants: theirs among them."""

_TOO_MANY: Final = "too many open connections"

_LATE: Final = ("parser", "pipeline", "server", "client", "scheme")
"""Attributes that uvicorn creates for every connection, and most plain ones never need."""


class TurnedAway(Exception):
    """The connection has been refused: the parser must stop."""


class Phase(Enum):
    """What a connection is in the middle of."""

    HEAD = 0  # also before the first byte
    BODY = 1
    REST = 2  # a whole request has arrived: an answer is owed, or the client is idle


class GuardedProtocol(HttpToolsProtocol):
    """One connection. A subclass sets `limits` and `counts`, as uvicorn creates the instances."""

    limits: ConnectionLimits
    counts: Connections
    flow: Flow  # type: ignore[mutable-override] # replaces uvicorn's

    _owes_answer = False  # to a request without an ASGI cycle

    _phase = Phase.HEAD
    _stamped: Phase | None = None  # the phase that `_since` refers to
    _since = 0.0  # loop time
    _body_left = 0  # bytes, while a body arrives; or CHUNKED
    _line_bytes = 0  # of an incomplete line between chunks or after them
    _stalled_since: float | None = None  # since when the client does not read
    _closing_since: float | None = None  # loop time at which a sweep first saw it closing
    _refused = False
    _is_parting = False  # what follows the last request is not read as another
    _address = ""  # of the client; "" on a Unix socket
    _discarded: int | None = None  # bytes; None: not lingering
    _linger_until = 0.0  # loop time
    _upgrading = False
    _is_reserved = False  # accepted beyond the limit, for one request of RESERVED_PATHS
    _beyond = "refused"  # the counter for its refusal
    _is_counted = False  # among those that `counts.tenants` counts
    holder: Party = None  # the tenant that it counts for: whose token a request has shown
    _at_work: RequestResponseCycle | None = None  # the request to be answered next
    _pieces: Iterator[bytes] | None = None  # of the last read, not parsed yet

    shared_by: ServerState | None = None  # whose connections share attributes in their class

    # -- construction --------------------------------------------------------------------------

    @override
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Begin as uvicorn does, but share what is the same for all connections of a server.

        Uvicorn sets two dozen such attributes per connection; the first connection moves them to
        the class, which makes reconnecting for each request cheaper.
        """
        kind = type(self)
        if kind.shared_by is server_state and self.config is config:
            return
        super().__init__(config, server_state, app_state, _loop)
        own = self.__dict__
        for name in _LATE:
            own.pop(name, None)
        if kind.shared_by is None:
            kind.shared_by = server_state
            for name in list(own):
                setattr(kind, name, own.pop(name))

    @cached_property
    def parser(self) -> Any:  # type: ignore[override]
        """The parser, created when a head is not in memory."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        return parser

    @cached_property
    def head_reader(self) -> HeadReader:
        """Measures what the parser parses; created with it."""
        return HeadReader()

    @cached_property
    def pipeline(self) -> deque[tuple[RequestResponseCycle, ASGI3Application]]:  # type: ignore[override]
        """Requests queued behind the one being answered."""
        return deque()

    @cached_property
    def server(self) -> tuple[str, int | None] | None:  # type: ignore[override]
        """Our own address, from the transport's cache."""
        address = self.transport.get_extra_info("sockname")
        if isinstance(address, str):
            return address, None
        return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None

    @cached_property
    def client(self) -> tuple[str, int] | None:  # type: ignore[override]
        """The client's address; None on a Unix socket."""
        address = self.transport.get_extra_info("peername")
        return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None

    @cached_property
    def scheme(self) -> str:  # type: ignore[override]
        """`http` or `https`."""
        return "https" if self.transport.get_extra_info("sslcontext") else "http"

    # -- asyncio.Protocol ----------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.add(self)
        self.transport = transport
        self.flow = Flow(transport)
        self.counts.accepted += 1
        self._stamp()
        self._find_place(transport)
        tenants = self.counts.tenants
        if tenants is not None and not (self._refused or self._is_reserved):
            tenants.take(None)
            self._is_counted = True

    def _find_place(self, transport: asyncio.Transport) -> None:
        """Take a reserved place, or refuse the connection, if it exceeds a limit."""
        if not self._has_place():
            self._reserve_or("refused", TooManyConnections(_TOO_MANY))
        elif _number(transport) >= descriptors_end(self.limits.descriptors_kept):
            self._reserve_or("refused_for_descriptors", TooManyConnections("too many open files"))
        if self._refused:
            return
        peer = transport.get_extra_info("peername")
        if not isinstance(peer, tuple):  # a Unix socket
            return
        self._address = address = str(peer[0])
        by_address = self.counts.by_address
        by_address[address] = among = by_address.get(address, 0) + 1
        if among > self.limits.connections_per_address_max and not self._is_reserved:
            why = TooManyConnections("too many open connections from this address")
            self._reserve_or("refused_by_address", why)

    def _reserve_or(self, count: str, refusal: TooManyConnections) -> None:
        """Take a reserved place; if none is left, that of a connection still without a request.

        Args:
            count: the counter of the limit this connection exceeds.
            refusal: sent if there is no such place either.
        """
        self._beyond = count
        if not self._reserve():
            self._count_refusal()
            self._turn_away(refusal, linger=False)

    def _reserve(self) -> bool:
        """Take a reserved place, if there is one or somebody can leave it."""
        reserve = cast("dict[GuardedProtocol, None]", self.counts.reserve)
        if len(reserve) >= RESERVED_MAX:
            leaving = next((one for one in reserve if not one.hears), None)
            leaving = leaving or next((one for one in reserve if one.is_asking), None)
            if leaving is None:
                return False
            leaving.give_up_reserve()
        reserve[self] = None
        self._is_reserved = True
        return True

    def _has_place(self) -> bool:
        """Whether a newcomer, of whom nothing is known yet, is within `--connections-max`."""
        tenants = self.counts.tenants
        if tenants is not None:
            if tenants.has_room(None):
                return True
            most = tenants.most
            return tenants.total < most and tenants.held(None) < most // _NEWCOMERS
        return len(self.connections) - self.counts.reserved <= self.limits.connections_max

    def count_for(self, tenant: str) -> bool:
        """Count the connection for a tenant whose token it shows; False: it has no room for it.

        One in a reserved place, because there was none for a stranger, gets an ordinary one.
        """
        tenants = self.counts.tenants
        if tenants is None or self.holder == tenant:
            return True
        if not self._is_counted and self._beyond != "refused":
            return False
        if self._is_counted:  # while we look
            tenants.give(self.holder)
        has_room = tenants.has_room(tenant)
        if has_room:
            self.holder = tenant
        if self._is_counted or has_room:
            tenants.take(self.holder)
            self._is_counted = True
        if has_room and self._is_reserved:
            del self.counts.reserve[self]
            self._is_reserved = False
        return has_room

    def refuse_for(self, tenant: Party) -> NoReturn:
        """Refuse the request, and close: whoever sends it has as many connections as it may."""
        self._count_refusal()
        tenants, crowded = self.counts.tenants, None
        if tenants is not None and self._beyond == "refused":
            crowded = tenants.refuse(tenant)
        if self._is_counted and tenants is not None:  # it may linger where it takes no place
            self._is_counted = False
            tenants.give(self.holder)
        linger = self._is_reserved or self._reserve()
        self._turn_away(TooManyConnections(_TOO_MANY, crowded), linger=linger)
        raise TurnedAway

    @property
    def is_reserve_for_this(self) -> bool:
        """Whether reserved places are there for the request whose head has arrived."""
        return self.url.partition(b"?")[0] in RESERVED_PATHS

    @property
    def is_asking(self) -> bool:
        """Whether its request has not arrived yet, and it has not been refused."""
        return self._phase is not Phase.REST and not self._refused

    def give_up_reserve(self) -> None:
        """Close in favour of a newcomer; silent connections must not lock others out."""
        del self.counts.reserve[self]
        if not self.hears:  # it has been refused before
            self.transport.close()
            return
        self._count_refusal()
        self._turn_away(TooManyConnections(_TOO_MANY), linger=False)

    def _count_refusal(self) -> None:
        setattr(self.counts, self._beyond, getattr(self.counts, self._beyond) + 1)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        cycle = self.cycle
        if cycle is not None:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()
            self._unset_keepalive_if_required()
        self.parser = None
        self.counts.reserve.pop(self, None)
        if self._is_counted and self.counts.tenants is not None:
            self._is_counted = False
            self.counts.tenants.give(self.holder)
        if self._address:
            left = self.counts.by_address[self._address] - 1
            if left:
                self.counts.by_address[self._address] = left
            else:
                del self.counts.by_address[self._address]
            self._address = ""
        at_work = self._at_work  # uvicorn notifies only the last request read
        if at_work is not None and not at_work.response_complete:
            at_work.disconnected = True
            at_work.message_event.set()
            at_work.transport = self.transport  # breaks a reference cycle
        self._at_work = None
        self._pieces = None
        if isinstance(cycle, RequestResponseCycle):
            cycle.transport = self.transport  # breaks a reference cycle
        if "pipeline" in self.__dict__:
            self.pipeline.clear()

    @override
    def data_received(self, data: bytes) -> None:
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
        self._unset_keepalive_if_required()
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
        if self._phase is not self._stamped:
            self._stamp()
        if self._phase is Phase.BODY and self._line_bytes > self.limits.head_bytes_max:
            self.counts.malformed += 1
            self._turn_away(HeadTooLarge("a line between chunks, or behind them, is too long"))

    def _feed(self, data: bytes) -> None:
        """Parse head by head, so that each is measured, and its request line judged, by itself."""
        at, end = 0, len(data)
        while at < end:
            if self._is_parting:
                stop = end
            elif self._phase is not Phase.BODY:
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
            if self._phase is Phase.REST:
                self._is_parting = not self.parser.should_keep_alive()

    def _feed_head(self, data: bytes, at: int) -> int:
        """Parse what belongs to one head; return where that ends."""
        if self._refused:  # the last answer is given
            raise TurnedAway
        reader = self.head_reader
        stop, is_end = reader.read(data, at)
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
            self._body_left = body_length(self.headers)
            if self._phase is Phase.REST:
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

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since = self.loop.time()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = None

    # -- httptools -----------------------------------------------------------------------------

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.BODY:
            self._line_bytes = 0
            return  # a trailer: it was not there when the request was judged
        most = self.limits.header_lines_max
        if len(self.headers) >= most:
            self.counts.malformed += 1
            self.counts.head_lines += 1
            self._turn_away(HeadTooLarge(f"more than {most} header lines (--header-lines-max)"))
            raise TurnedAway
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        judge_framing(self.parser.get_http_version(), self.headers)
        self._upgrading = self.parser.should_upgrade()
        if self._upgrading:
            return
        if self._is_reserved and not self.is_reserve_for_this:
            self.refuse_for(None)
        if self._is_reserved:
            self.headers.append(_CLOSE)  # old versions of uvicorn take this from the request
        super().on_headers_complete()  # may raise, and then the phase is still HEAD
        if self._is_reserved:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":  # no chunks: the connection ends it
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = UNTIL_CLOSED
        if not self.pipeline:
            self._at_work = self.cycle
        elif len(self.pipeline) < PIPELINED_MAX:
            self.flow.resume_reading()  # else a disconnection would go unnoticed while one waits
        self.cycle.transport = _Answering(self)
        self._enter_body()

    @override
    def on_body(self, body: bytes) -> None:
        self._line_bytes = 0
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._enter_rest()
        if not self.parser.should_keep_alive():  # a trailer may say so; the parser then stops
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        self._at_work = self.pipeline[-1][0] if self.pipeline else None
        is_full = len(self.pipeline) >= PIPELINED_MAX
        super().on_response_complete()
        if is_full and self._pieces is not None:
            self.loop.call_soon(self._take_next)

    def _enter_head(self) -> None:
        self._phase = Phase.HEAD
        self._stamped = None

    def _enter_body(self) -> None:
        self._phase = Phase.BODY
        self._line_bytes = 0

    def _enter_rest(self) -> None:
        self._phase = Phase.REST

    # -- deadlines -----------------------------------------------------------------------------

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count time in which the process stood still: nobody read what the client sent.

        Args:
            seconds: how late the next `sweep` is.
            now: loop time.
        """
        self._since = min(self._since + seconds, now)
        if self._stalled_since is not None:
            self._stalled_since = min(self._stalled_since + seconds, now)
        if self._closing_since is not None:
            self._closing_since = min(self._closing_since + seconds, now)

    def sweep(self, now: float) -> None:
        """Close the connection if its phase has lasted too long. Called a few times a second.

        Args:
            now: loop time.
        """
        if self.transport.is_closing():  # waits until its last answer is read, with a deadline
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > self.limits.body_timeout_s:
                self.counts.write_timeouts += 1
                self.transport.abort()
            return
        if self._discarded is not None:
            return
        if self._stalled_since is not None:
            if now - self._stalled_since > self.limits.body_timeout_s:
                self.counts.write_timeouts += 1
                self.transport.abort()
        elif self.flow.read_paused or self.flow.is_held:
            self._since = now  # it is we who do not read
        elif self._phase is Phase.HEAD:
            self._sweep_head(now)
        elif self._phase is Phase.BODY and now - self._since > self.limits.body_timeout_s:
            self.counts.body_timeouts += 1
            self._turn_away(RequestTimeout("the request body did not arrive in time"))

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()

    @property
    def stalled_since(self) -> float:
        """Loop time since which the client should read and does not; infinity if it does."""
        since = self._closing_since if self._stalled_since is None else self._stalled_since
        return math.inf if since is None else since

    def cut_off(self) -> None:
        """Abort the connection: too many bytes lie unread."""
        self.counts.unread += 1
        self.transport.abort()

    def _sweep_head(self, now: float) -> None:
        if self._unanswered() is not None:
            self._since = now  # the head of a later request, while an answer is owed
        elif now - self._since > self.limits.header_timeout_s:
            self.counts.header_timeouts += 1
            if self.head_reader.size:
                self._turn_away(RequestTimeout("the request head did not arrive in time"))
            else:
                self.transport.close()

    def _stamp(self) -> None:
        self._stamped = self._phase
        self._since = self.loop.time()

    def _unanswered(self) -> RequestResponseCycle | None:
        """Return the request still unanswered; uvicorn's type hides that there may be none."""
        cycle: object = self.cycle
        if isinstance(cycle, RequestResponseCycle) and not cycle.response_complete:
            return cycle
        return None

    def _turn_away(self, error: ServiceError, *, linger: bool = True) -> None:
        """Answer with a refusal if an answer is due, and close."""
        self._refused = True
        due = self._is_refusal_due()
        for cycle in (self._at_work, self._unanswered()):
            if cycle is not None:  # nobody will receive its answer
                cycle.disconnected = True
                cycle.message_event.set()
        if due:
            status, body = problem(error)
            content = encode(body)
            seconds = retry_after(error)
            again = b"" if seconds is None else b"retry-after: %d\r\n" % seconds
            head = STATUS_LINE[status] + again + _REFUSAL_HEAD % len(content)
            self.transport.write(head + content)
        if linger:
            self._linger()
        else:
            self.transport.close()

    def _is_refusal_due(self) -> bool:
        """Return whether a refusal would be taken for the answer to the request it refuses."""
        cycle = self._unanswered()
        if cycle is None:
            # In phase BODY without a debt: answered before its body had arrived.
            return self._phase is not Phase.BODY or self._owes_answer
        is_next = cycle is self._at_work
        return is_next and self._phase is Phase.BODY and not cycle.response_started

    # -- closing -------------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        """Whether the sending side of the connection is still open."""
        return self._discarded is None

    def close_after_answer(self) -> None:
        """Close once an answer is out; linger if the client is still sending its request."""
        if self._phase is Phase.BODY:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the sending side, and discard what arrives for a while."""
        if self._discarded is not None or self.transport.is_closing():
            return
        self._refused = True
        self._discarded = 0
        if self.transport.get_extra_info("ssl_object") is None:  # TLS has no half-close
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_until = self.loop.time() + LINGER_MAX_S
        self.loop.call_later(LINGER_S, self._end_linger, 0)

    def _end_linger(self, discarded: int) -> None:
        """Close a client that has sent nothing since the last look, or for too long in all."""
        assert self._discarded is not None
        if self._discarded == discarded or self.loop.time() >= self._linger_until:
            self.transport.close()
        else:
            self.loop.call_later(LINGER_S, self._end_linger, self._discarded)

    def _discard(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES_MAX:
                self.transport.abort()

    @override
    def shutdown(self) -> None:
        if self._discarded is None:
            super().shutdown()
        else:
            self.transport.close()


def _number(transport: asyncio.BaseTransport) -> int:
    """Return the descriptor of a connection; -1: it has none."""
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())


class _Answering(asyncio.Transport):
    """The transport through which uvicorn answers one request."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__()
        self._protocol = protocol

    @override
    def write(self, data: Any) -> None:
        if self._protocol.hears:
            self._protocol.transport.write(data)

    @override
    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    @override
    def close(self) -> None:
        self._protocol.close_after_answer()
