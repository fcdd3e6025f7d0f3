"""Uvicorn's server with our listening sockets, connection deadlines and graceful exit.

`app.py` creates and runs one. It creates an `HttpConnection` (`http/connection.py`) for each
client, all in front of the same application.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Final, cast

import msgspec
import uvicorn
from typing_extensions import override

from select_service.edge.graceful_shutdown import CLOSE
from select_service.edge.http.connection import READ_BYTES_MAX, HttpConnection
from select_service.edge.http.connection_limits import ConnectionLimits
from select_service.edge.http.header_cache import GUARDED, KEPT, HeaderCache, Heads, Peers
from select_service.edge.http.listening_sockets import NOT_AT_THE_SIDE, SIDE_PATHS
from select_service.edge.lazy_imports import load_in_turns

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Generator, Iterable, Iterator

    from select_service.core.tenancy.shares import Bound, Party
    from select_service.edge.http.application import Application
    from select_service.edge.http.handshakes import Handshakes
    from select_service.edge.http.listening_sockets import ListeningSockets
    from select_service.edge.http.traffic import Connections, Traffic
    from select_service.edge.security.security_files import SecurityFiles
    from select_service.settings import Settings

TICK_S: Final = 0.5
"""How often the `Date` header and connection deadlines are checked; little else wakes an idle
process."""

TICK_MIN_S: Final = 0.1
_SHARE_OF_DEADLINE: Final = 0.25
"""How late a short connection deadline may be enforced, as a share of it."""

LATE_S: Final = 0.05
"""A look at the deadlines that is later than this found a process that got no time, or that was
stopped: its clients are not the slow ones, and get as much longer."""

LAST_WORDS_S: Final = 0.1
"""How long shutdown waits, after the port is closed, for requests on their way: a client that was
just accepted or answered has most likely sent one."""

_LOOK_S: Final = 0.01

GOODBYE_S: Final = 0.1
"""How long a client may take to close its side of TLS once everything has been sent."""


class Server(uvicorn.Server):
    """Uvicorn with our connection deadlines and graceful exit."""

    _exit: asyncio.Event

    def __init__(
        self,
        settings: Settings,
        application: Application,
        traffic: Traffic,
        entrances: ListeningSockets,
        security: SecurityFiles | None = None,
    ) -> None:
        limits = msgspec.convert(settings, ConnectionLimits, from_attributes=True)
        super().__init__(
            uvicorn.Config(
                application,
                http=http_protocol(application, limits, traffic.connections),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=settings.listen_backlog,
                timeout_keep_alive=settings.keep_alive_timeout_s,
                timeout_graceful_shutdown=settings.shutdown_timeout_s,
            )
        )
        application.reloading.followers.append(self._follow)
        self._limits = limits
        self._second = 0
        self._tick_due = math.inf
        self._application = application
        self._security = security
        self._entrances = entrances
        self._counts = counts = traffic.connections
        self._unread: Bound | None = None
        if (shares := counts.shares) is not None:
            counts.tenants = shares.bound("connections_max", lambda: limits.connections_max)
            self._unread = shares.bound("unread_bytes_max", lambda: limits.unread_bytes_max)
        self._side: type[HttpConnection] | None = None
        self._handshakes: Handshakes | None = None  # only with TLS
        if entrances.side:
            side_application = application.narrowed(SIDE_PATHS, NOT_AT_THE_SIDE)
            self._side = http_protocol(side_application, limits, traffic.connections)

    def _follow(self, settings: Settings) -> None:
        """Apply new limits to connections, open ones included."""
        limits = self._limits
        for name in limits.__struct_fields__:
            setattr(limits, name, getattr(settings, name))

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        security = self._security
        if security is None or security.certificates is None:
            await super().startup(sockets)
            await self._start_side()
        else:
            await self._start_with_tls(security.certificates.context)
        self._entrances.appear()
        self._application.enter(asyncio.get_running_loop())
        self._loading = asyncio.get_running_loop().create_task(
            load_in_turns(self._application.document.steps())
        )

    async def _start_side(self) -> None:
        loop, backlog = asyncio.get_running_loop(), self.config.backlog
        for side in self._entrances.side:
            server = await loop.create_server(self._aside, sock=side, backlog=backlog)
            self.servers.append(server)

    async def _start_with_tls(self, context: ssl.SSLContext) -> None:
        """Speak TLS on TCP; on a Unix socket the file mode controls access."""
        unix = self._entrances.unix
        await super().startup([] if unix is None else [unix.socket])
        by_tcp = self._tcp_makers()
        if by_tcp:
            from select_service.edge.http.handshakes import Handshakes  # only with TLS

            server = Handshakes(by_tcp, self._limits, self._counts)
            server.start(context, self.config.backlog)
            self._handshakes = server
            self.servers.append(cast("asyncio.Server", server))

    def _tcp_makers(self) -> dict[socket.socket, Callable[[], asyncio.Protocol]]:
        """Return what makes the connections of each TCP listener."""
        at = self._entrances
        return dict.fromkeys(at.tcp, self._connection) | dict.fromkeys(at.side, self._aside)

    def _connection(self) -> asyncio.Protocol:
        """Create a protocol, as uvicorn does."""
        make = cast("type[HttpConnection]", self.config.http_protocol_class)
        return make(self.config, self.server_state, self.lifespan.state)

    def _aside(self) -> asyncio.Protocol:
        """Create a protocol for the side entrance."""
        assert self._side is not None
        return self._side(self.config, self.server_state, self.lifespan.state)

    @property
    def should_exit(self) -> bool:
        """Whether to exit; setting it wakes the main loop."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, is_time: bool) -> None:
        if is_time:
            self._exit.set()
        else:  # uvicorn's constructor sets it to False first
            self._exit = asyncio.Event()

    @override
    async def main_loop(self) -> None:
        """Tick until exit; uvicorn's own loop wakes ten times a second to check."""
        while not await self.on_tick(0):
            deadline_s = min(self._limits.header_timeout_s, self._limits.body_timeout_s)
            pause_s = max(TICK_MIN_S, min(TICK_S, deadline_s * _SHARE_OF_DEADLINE))
            self._tick_due = asyncio.get_running_loop().time() + pause_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._exit.wait()

    @override
    async def on_tick(self, counter: int) -> bool:
        connections = cast("list[HttpConnection]", list(self.server_state.connections))
        self._counts.open = len(connections)
        now = asyncio.get_running_loop().time()
        late_s = now - self._tick_due
        for connection in connections:
            if late_s > LATE_S:
                connection.excuse(late_s, now)
            connection.sweep(now)
        most = self._limits.unread_bytes_max
        self._counts.unread_bytes = _cut_unread(connections, most, self._unread)
        if self._security is not None:
            self._security.tick(now)
        self._update_date()
        return self.should_exit

    def _update_date(self) -> None:
        """Update the `Date` header; uvicorn's own way leaves objects behind."""
        second = int(time.time())  # noqa: TID251 - an HTTP date is wall-clock time
        if second != self._second:
            self._second = second
            own = self.config.encoded_headers
            self.server_state.default_headers = [(b"date", http_date(second)), *own]

    def close_answers(self) -> None:
        """Make every answer close its connection."""
        self.config.encoded_headers.append(CLOSE)  # `_update_date` copies these
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        for kind in (self.config.http_protocol_class, self._side):
            if kind is not None:
                cast("type[HttpConnection]", kind).part_with_answers()

    def go(self) -> None:
        """Exit; takes effect at once."""
        self.should_exit = True

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._entrances.vanish()
        await self._answer_the_last()
        self._application.leave()
        hanging_up = asyncio.get_running_loop().create_task(self._hang_up())
        try:
            await super().shutdown(sockets)
        finally:
            hanging_up.cancel()

    async def _hang_up(self) -> None:
        """End connections that only wait for their client to close.

        Closing TLS takes both sides, and a connection idle in a client's pool never answers:
        shutdown would wait for it as for a request.
        """
        while True:
            await asyncio.sleep(GOODBYE_S)
            for connection in cast("list[HttpConnection]", list(self.server_state.connections)):
                transport = connection.transport
                # After a second close, asyncio's own transport has dropped its inner one.
                with contextlib.suppress(AttributeError):
                    if transport.is_closing() and not transport.get_write_buffer_size():
                        transport.abort()

    async def _answer_the_last(self) -> None:
        """Answer what has arrived: closing a socket with an unread request resets the client.

        The port is closed first, so that answered clients do not come back to it, and connections
        still in the backlog are accepted. Then each answer ends its connection.
        """
        late = [*self._let_in_the_last()]
        handshakes: object = self._handshakes
        for server in self.servers:
            if server is not handshakes:
                server.close()
        if self._handshakes is not None:
            self._handshakes.stop()
        loop = asyncio.get_running_loop()
        for client, make in late:
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(make, client)
        if CLOSE not in self.config.encoded_headers:
            self.close_answers()
        until = loop.time() + LAST_WORDS_S
        while loop.time() < until:
            if not self.server_state.connections and (
                self._handshakes is None or self._handshakes.is_quiet
            ):
                break
            await asyncio.sleep(_LOOK_S)

    def _let_in_the_last(self) -> Iterator[tuple[socket.socket, Callable[[], asyncio.Protocol]]]:
        """Yield connections still in the backlog, except those by TLS."""
        has_tls = self._security is not None and self._security.certificates is not None
        at = self._entrances
        plain = {} if has_tls else self._tcp_makers()
        if at.unix is not None:
            plain[at.unix.socket] = self._connection
        for listener, make in plain.items():
            with contextlib.suppress(OSError):  # the backlog is empty, or no descriptor is left
                while True:
                    yield listener.accept()[0], make

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # `app.py` handles signals from before the service starts until after it has closed. Uvicorn
        # would raise them again at the end, and a clean exit would not have code 0.
        yield


def _cut_unread(
    connections: Iterable[HttpConnection], most: int, tenants: Bound | None = None
) -> int:
    """Cut off the longest-stalled clients until at most `most` bytes lie unread.

    Args:
        connections: all that are open.
        most: bytes.
        tenants: the account of these bytes; clients of a tenant within its part are spared.

    Returns:
        The unread bytes left. O(connections), and a sort if over the limit.
    """
    unread = [(one.unread_bytes, one) for one in connections]
    total = sum(size for size, _ in unread)
    if tenants is not None:
        held: dict[Party, int] = {}
        for size, one in unread:
            held[one.holder] = held.get(one.holder, 0) + size
        tenants.recount(held)
    if total <= most:
        return total
    unread.sort(key=lambda row: (row[1].stalled_since, -row[0]))
    for size, one in unread:
        if size and (tenants is None or tenants.is_beyond(one.holder)):
            one.cut_off()
            if tenants is not None:
                tenants.give(one.holder, size)
                tenants.refuse(one.holder)
            total -= size
            if total <= most:
                break
    return total


# The timestamp of an answer's `Date` header. The standard library's `email.utils.formatdate` looks
# up daylight saving by an attribute name created for that call, and Python's attribute cache
# retains each one: one small object a second, scattered among the allocations of that moment. After
# a load they alone pinned 40 of the 80 megabytes that could not be returned.

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)


def http_date(at: int) -> bytes:
    """Format seconds since 1970 per RFC 9110 5.6.7, whatever the locale."""
    of = time.gmtime(at)
    day, month = _DAYS[of.tm_wday], _MONTHS[of.tm_mon - 1]
    clock = f"{of.tm_hour:02}:{of.tm_min:02}:{of.tm_sec:02}"
    return f"{day}, {of.tm_mday:02} {month} {of.tm_year:04} {clock} GMT".encode()


def http_protocol(
    application: Application, limits: ConnectionLimits, counts: Connections
) -> type[HttpConnection]:
    """Create the protocol class of one server, which creates the instances itself."""
    kind: type[HttpConnection] = type("HttpConnection", (HttpConnection,), {})
    kind.application, kind.limits, kind.counts = application, limits, counts
    kind.heads, kind.peers, kind.outbox = Heads(), Peers(), []
    kind.read_bytes_max = min(READ_BYTES_MAX, limits.head_bytes_max)
    kind.header_cache = HeaderCache(KEPT if application.authority is None else GUARDED)
    if application.authority is not None:
        application.authority.on_change(kind.heads.forget)
        application.authority.on_change(kind.peers.forget)
    return kind
