"""What keeps one HTTP connection from harming others: its place, deadlines, refusal and end.

There are limits on the number of connections, and on the time that a head, a body or the reading of
an answer may take. There are no timers per request: a connection notes when its phase began, and
the server's tick (`server.py`) sweeps all connections a few times per second. `connection.py` reads
requests and answers them.
"""

from __future__ import annotations

import asyncio
import math
import socket
from abc import abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Final, NoReturn, cast

from typing_extensions import override

from indexer.edge.descriptors import descriptors_end
from select_service.edge.codec.encoder import encode
from select_service.edge.http.pieces import Flow
from select_service.edge.http.response_head import status_line
from select_service.edge.http.unsent_answers import UnsentAnswers
from select_service.errors import (
    RequestTimeout,
    ServiceError,
    TooManyConnections,
    problem,
    retry_after,
)
from select_service.tcp_listener import plain_address

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from select_service.core.tenancy.shares import Party
    from select_service.edge.codec.responses import DurableResponse, Response
    from select_service.edge.http.connection_limits import ConnectionLimits
    from select_service.edge.http.exchange import Exchange
    from select_service.edge.http.traffic import Connections

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

_REFUSAL_HEAD: Final = (
    b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
)

_NEWCOMERS: Final = 8
"""A share of --connections-max (one in so many) is there for clients that are not known yet, even
where all of it is promised to tenants: theirs among them."""

_TOO_MANY: Final = "too many open connections"


class TurnedAway(Exception):
    """The connection has been refused: the parser must stop."""


class Phase(Enum):
    """What a connection is in the middle of."""

    HEAD = 0  # also before the first byte
    BODY = 1
    REST = 2  # a whole request has arrived: an answer is owed, or the client is idle


class GuardedConnection(asyncio.Protocol):
    """One connection. A subclass sets `limits` and `counts`, the same for all."""

    limits: ConnectionLimits
    counts: Connections
    transport: asyncio.Transport
    flow: Flow
    unsent: UnsentAnswers
    url = b""  # of the request being read

    phase = Phase.HEAD
    _stamped: Phase | None = None  # the phase that `_since` refers to
    _since = 0.0  # loop time
    _head_bytes = 0  # of an incomplete head
    _stalled_since: float | None = None  # since when the client does not read
    _closing_since: float | None = None  # loop time at which a sweep first saw it closing
    _idle_since: float | None = None  # 0.0: answered since the last sweep; else loop time of
    # the first sweep after that; None: a request is under way
    _refused = False
    _address = ""  # of the client; "" on a Unix socket
    _discarded: int | None = None  # bytes; None: not lingering
    _linger_until = 0.0  # loop time
    _is_reserved = False  # accepted beyond the limit, for one request of RESERVED_PATHS
    _beyond = "refused"  # the counter for its refusal
    _is_counted = False  # among those that `counts.tenants` counts
    holder: Party = None  # the tenant that it counts for: whose token a request has shown
    _owes_answer = False  # to a plain request whose body is arriving
    _awaits_disk: DurableResponse | None = None  # an answer that waits for the disk
    tls_socket: socket.socket | None = None  # under TLS only
    _is_cut = False  # we have ended it, whatever is still to be sent
    _at_work: Exchange | None = None  # the request to be answered next
    exchange: Exchange | None = None  # the newest; it may be queued

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Begin without a transport; `uvicorn.Server` creates connections like this."""
        self.server_state = server_state
        self.loop = _loop or asyncio.get_running_loop()
        self._keep_alive_s = config.timeout_keep_alive

    # -- its place -----------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        cast("set[object]", self.server_state.connections).add(self)
        self.transport = transport
        self.flow = Flow(transport)
        if transport.get_extra_info("ssl_object") is not None:
            self.tls_socket = transport.get_extra_info("socket")
        self.unsent = UnsentAnswers(transport, self.flow, self.tls_socket)
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
        self._address = address = plain_address(str(peer[0]))
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
        """Take a reserved place, if there is one or another can leave it."""
        reserve = cast("dict[GuardedConnection, None]", self.counts.reserve)
        if len(reserve) >= RESERVED_MAX:
            leaving = next((one for one in reserve if not one.is_receiving), None)
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
        return (
            len(self.server_state.connections) - self.counts.reserved <= self.limits.connections_max
        )

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
        """Refuse the request, and close: its client has as many connections as it may."""
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
        return self.phase is not Phase.REST and not self._refused

    def give_up_reserve(self) -> None:
        """Close in favour of a newcomer; silent connections must not lock others out."""
        del self.counts.reserve[self]
        if not self.is_receiving:  # it has been refused before
            self.transport.close()
            return
        self._count_refusal()
        self._turn_away(TooManyConnections(_TOO_MANY), linger=False)

    def _count_refusal(self) -> None:
        setattr(self.counts, self._beyond, getattr(self.counts, self._beyond) + 1)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        cast("set[object]", self.server_state.connections).discard(self)
        for exchange in (self._at_work, self.exchange):
            if exchange is not None:
                exchange.disconnect()
        self._at_work = self.exchange = None
        self.unsent.close(in_order=exc is None and not (self._is_cut or self.flow.write_paused))
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()
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

    @override
    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._stalled_since = self.loop.time()

    @override
    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self._stalled_since = None
        self.unsent.resumed()

    def until_sent(self, answer: Response) -> None:
        """Watch over a written answer; see `UnsentAnswers.watch`."""
        self.unsent.watch(answer, self.loop)

    # -- deadlines -----------------------------------------------------------------------------

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count time in which the process stood still: it did not read what the client sent.

        Args:
            seconds: how late the next `sweep` is.
            now: loop time.
        """
        self._since = min(self._since + seconds, now)
        if self._stalled_since is not None:
            self._stalled_since = min(self._stalled_since + seconds, now)
        if self._closing_since is not None:
            self._closing_since = min(self._closing_since + seconds, now)
        if self._idle_since:
            self._idle_since = min(self._idle_since + seconds, now)

    def sweep(self, now: float) -> None:
        """Close the connection if its phase has lasted too long. Called a few times a second.

        Args:
            now: loop time.
        """
        if self.transport.is_closing():
            self._sweep_closing(now)
            return
        if self._discarded is not None:
            return
        self.unsent.look()
        if self._stalled_since is not None:
            if now - self._stalled_since > self.limits.body_timeout_s:
                self.counts.write_timeouts += 1
                self._abort()
        elif self.flow.read_paused or self.flow.is_held:
            self._since = now  # we do not read
        elif self.phase is Phase.HEAD:
            self._sweep_head(now)
        elif self.phase is Phase.BODY and now - self._since > self.limits.body_timeout_s:
            self.counts.body_timeouts += 1
            self._turn_away(RequestTimeout("the request body did not arrive in time"))
        elif self.phase is Phase.REST:
            self._sweep_idle(now)

    def _sweep_closing(self, now: float) -> None:
        """Wait until the last answer is read, with a deadline."""
        if self._closing_since is None:
            self._closing_since = now
        elif now - self._closing_since > self.limits.body_timeout_s:
            self.counts.write_timeouts += 1
            self._abort()

    def _sweep_idle(self, now: float) -> None:
        since = self._idle_since
        if since == 0.0:
            self._idle_since = now
        elif since is not None and now - since > self._keep_alive_s:
            self.transport.close()

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
        self._abort()

    def _abort(self) -> None:
        self._is_cut = True
        self.transport.abort()

    def _sweep_head(self, now: float) -> None:
        if self._awaits_disk is not None or self._unanswered() is not None:
            self._since = now  # the head of a later request, while an answer is owed
        elif now - self._since > self.limits.header_timeout_s:
            self.counts.header_timeouts += 1
            if self._head_bytes:
                self._turn_away(RequestTimeout("the request head did not arrive in time"))
            else:
                self.transport.close()

    @abstractmethod
    def flush(self) -> None:
        """Send the answers that are ready."""

    def _stamp(self) -> None:
        self._stamped = self.phase
        self._since = self.loop.time()

    def _unanswered(self) -> Exchange | None:
        """Return the newest exchange if its answer is not out."""
        exchange = self.exchange
        return None if exchange is None or exchange.response_complete else exchange

    def _turn_away(self, error: ServiceError, *, linger: bool = True) -> None:
        """Answer with a refusal if an answer is due, and close."""
        self.flush()  # earlier answers
        self._refused = True
        due = self._is_refusal_due()
        for exchange in (self._at_work, self._unanswered()):
            if exchange is not None:
                exchange.disconnect()
        if due:
            status, body = problem(error)
            content = encode(body)
            seconds = retry_after(error)
            again = b"" if seconds is None else b"retry-after: %d\r\n" % seconds
            head = status_line(status) + again + _REFUSAL_HEAD % len(content)
            self.transport.write(head + content)
        if linger:
            self._linger()
        else:
            self.transport.close()

    def _is_refusal_due(self) -> bool:
        """Return whether a refusal would be taken for the answer to the request it refuses."""
        if self._awaits_disk is not None:
            return False
        exchange = self._unanswered()
        if exchange is None:
            # In phase BODY without a debt: answered before its body had arrived.
            return self.phase is not Phase.BODY or self._owes_answer
        is_next = exchange is self._at_work
        return is_next and self.phase is Phase.BODY and not exchange.response_started

    # -- closing -------------------------------------------------------------------------------

    @property
    def is_receiving(self) -> bool:
        """Whether the sending side of the connection is still open."""
        return self._discarded is None

    def close_after_answer(self) -> None:
        """Close once an answer is out; linger if the client is still sending its request."""
        if self.phase is Phase.BODY:
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
                self._abort()


def _number(transport: asyncio.BaseTransport) -> int:
    """Return the descriptor of a connection; -1: it has none."""
    connected = transport.get_extra_info("socket")
    return -1 if connected is None else int(connected.fileno())
