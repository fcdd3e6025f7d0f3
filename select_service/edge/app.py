"""Puts the edges together: an app for embedding, a server for the command line.

The only file that knows all edges. `serve` binds, starts the service, serves until a signal, and
ends with exit code 0 within `--shutdown-timeout-s`, whatever clients are doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from indexer.compiled import complaints, kernels_in_use
from indexer.errors import IndexerError
from select_service.config import Durability, Layers
from select_service.core.pricing.policy import PolicyBook, PolicyError, read_policy
from select_service.edge import logs
from select_service.edge.codec.bulk import BodyGuard
from select_service.edge.codec.json_codec import show_hashes
from select_service.edge.console.routes import Booth
from select_service.edge.descriptors import raise_limit
from select_service.edge.driver import Driver
from select_service.edge.garbage import GarbageCollection
from select_service.edge.http.api import Api
from select_service.edge.http.asgi import Door
from select_service.edge.http.dates import http_date
from select_service.edge.http.fast_lane import FastLane, fast_lane, status_line
from select_service.edge.http.listening import (
    NOT_AT_THE_SIDE,
    SIDE_PATHS,
    CannotListenError,
    Entrances,
)
from select_service.edge.http.protocol import ConnectionLimits, cut_unread
from select_service.edge.http.traffic import Traffic
from select_service.edge.late import load, load_in_turns
from select_service.edge.leaving import CLOSE, Leaving
from select_service.edge.reloading import Reloading
from select_service.edge.security.openness import open_doors, side_address
from select_service.errors import (
    InvalidReplicaPeer,
    RecordingUnusable,
    SecurityFileUnusable,
    ServiceError,
    StateDirUnusable,
)
from select_service.version import __version__

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Generator, Sequence

    from starlette.applications import Starlette
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from select_service.config import PolicyFile, Settings
    from select_service.edge.discovery.followers import Discovery
    from select_service.edge.http.protocol import GuardedProtocol
    from select_service.edge.metrics.exposition import Metrics
    from select_service.edge.security.security import Security
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording import Recording
    from select_service.edge.tracing.tracing import Tracing

__all__ = [
    "Server",
    "create_app",
    "create_door",
    "create_driver",
    "create_security",
    "loop_factory",
    "serve",
]

_log = logging.getLogger("select_service")

_TICK_S: Final = 0.5
"""How often the time in answers and the deadlines of connections are looked at; an idle process is
woken by little else."""

_TICK_MIN_S: Final = 0.1
_SHARE_OF_DEADLINE: Final = 0.25
"""So much later than said may a connection with a short deadline be closed."""

TRACED_SWITCH_S: Final = 0.0005
"""How long the thread that exports spans may keep the loop waiting; Python's default is ten times
that."""


def create_driver(settings: Settings) -> Driver:
    """Build the service from settings; nothing is opened before its `start`.

    Raises:
        SecurityFileUnusable: tokens or certificates cannot be used.
        indexer.errors.KeyFileUnusable: keys cannot.
        RecordingUnusable: the file to record to cannot be had.
    """
    security = create_security(settings)
    router = settings.router
    service = Driver(
        settings.router_config,
        limits=settings.core_limits,
        stream_limits=settings.stream_limits,
        on_event_loss=settings.on_event_loss,
        policies=_policies(router.policy, router.config.queue_threshold),
        replica_sync_port=settings.replica_sync_port,
        replica_limits=settings.replica_limits,
        dump_limits=settings.dump_limits,
        keeper=_keeper(settings),
        snapshot_limits=settings.snapshot_limits,
        indexer_peers=settings.indexer_peers,
        recovery_limits=settings.recovery_limits,
        ready_timeout_s=settings.ready_timeout_s,
        admission=settings.admission,
        reach=settings.reach,
        security=security,
        tracing=_tracing(settings),
        doctor_limits=settings.doctor_limits,
        trust=settings.trust,
        recording=_recording(settings),
        shadow=settings.shadow,
    )
    service.discovery = _discovery(settings, service)
    return service


def create_security(settings: Settings) -> Security | None:
    """Read tokens, certificates and keys; None when there are none.

    Raises:
        SecurityFileUnusable, indexer.errors.KeyFileUnusable: one of them cannot be used.
    """
    if not settings.is_guarded:
        return None
    from select_service.edge.security.security import Security  # noqa: PLC0415 - OpenSSL, for who is

    return Security(settings)


def _tracing(settings: Settings) -> Tracing | None:
    if settings.tracing == "none":
        return None
    from select_service.edge.tracing.tracing import (  # noqa: PLC0415 - for who traces
        TracingUnavailableError,
        create_tracing,
    )

    try:
        return create_tracing(settings)
    except TracingUnavailableError as error:  # a service without traces is better than none
        _log.error("nothing is traced: %s", error)
        return None


def _keeper(settings: Settings) -> Keeper | None:
    if settings.state_dir is None:
        return None
    from select_service.edge.state.keeper import Keeper  # noqa: PLC0415 - SQLite, for who keeps state

    strict = settings.durability is Durability.STRICT
    directory = Path(settings.state_dir)
    return Keeper(directory, strict=strict, interval_s=settings.durability_window_s)


def _recording(settings: Settings) -> Recording | None:
    if settings.record is None:
        return None
    from select_service.edge.state.recording import (  # noqa: PLC0415 - for who records
        SWITCH_S,
        Recording,
        RecordSettings,
    )

    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
    bounds = RecordSettings(
        path=Path(settings.record),
        bytes_max=settings.record_bytes_max,
        files_max=settings.record_files_max,
        queue_bytes_max=settings.record_queue_bytes_max,
        flush_s=settings.record_flush_s,
    )
    recording = Recording(bounds, settings.router_config)
    recording.open()
    return recording


def _discovery(settings: Settings, service: Driver) -> Discovery | None:
    asked_for = (
        settings.workers_file,
        settings.kubernetes_workers,
        settings.kubernetes_replicas,
        settings.replica_sync_dns,
    )
    if all(source is None for source in asked_for):
        return None
    from select_service.edge.discovery.setup import create_discovery  # noqa: PLC0415 - as above

    return create_discovery(settings, service)


def create_app(service: Driver, settings: Settings) -> Starlette:
    """Return the HTTP API over a service that the caller starts and closes.

    Routes and middleware may be added to it; `serve` does without this layer.
    """
    from starlette.applications import Starlette  # noqa: PLC0415 - 20 ms that `serve` needs not

    load()
    app = Starlette()
    # Its own matching decodes paths and folds slashes; ours must do neither (contract 0.1).
    app.router.redirect_slashes = False
    app.router.default = create_door(service, settings)[0]
    return app


def create_door(
    service: Driver, settings: Settings, layers: Layers | None = None
) -> tuple[Door, Traffic]:
    """Return the bare ASGI application, and what it counts.

    Raises:
        SecurityFileUnusable: tokens or certificates cannot be used.
        indexer.errors.KeyFileUnusable: keys cannot.
    """
    traffic = Traffic()
    if service.security is None:  # made without these settings
        service.security = create_security(settings)
    reloading = Reloading(layers or Layers.of(settings), service)
    service.answer_doors(show_hashes)

    @functools.cache
    def metrics() -> Metrics:
        from select_service.edge.metrics.exposition import Metrics  # noqa: PLC0415 - see `late`

        return Metrics(service, traffic, settings, reloading)

    guard = BodyGuard(settings.body_limits)
    reloading.followers.append(lambda settings: guard.follow(settings.body_limits))
    api = Api(
        service,
        settings.field_validation,
        metrics=lambda: metrics().render(),
        openapi=_describe,
        reloading=reloading,
        guard=guard,
        refused=traffic.refused,
    )
    booth: Booth | None = None
    if not settings.no_console:
        booth = Booth(service, traffic, clients_max=settings.console_clients_max)
    bytes_max, access_log = settings.max_body_bytes, settings.access_log
    authority = None if service.security is None else service.security.authority
    if service.tracing is None:
        door = Door(
            *(api, traffic),
            max_body_bytes=bytes_max,
            access_log=access_log,
            authority=authority,
            booth=booth,
        )
    else:
        from select_service.edge.tracing.traced_door import TracedDoor  # noqa: PLC0415 - for who traces

        door = TracedDoor(
            *(api, traffic, service.tracing),
            max_body_bytes=bytes_max,
            access_log=access_log,
            authority=authority,
            booth=booth,
        )
    door.reloading = reloading
    reloading.followers.append(door.follow)
    return door, traffic


def _lane(door: Door) -> type[FastLane]:
    """Return the protocol that goes with a door."""
    if type(door) is Door:
        return FastLane
    from select_service.edge.tracing.traced_door import TracedLane  # noqa: PLC0415 - for who traces

    return TracedLane


@functools.cache
def _describe() -> bytes:
    from select_service.edge.http.openapi import describe  # noqa: PLC0415 - see `late`

    return describe()


def serve(settings: Settings, layers: Layers | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Args:
        settings: what to do.
        layers: who said so, for what may change while we run.
    """
    _configure_logs(settings)
    for warning in settings.router.warnings:
        _log.warning(warning)
    for complaint in complaints():
        _log.warning(complaint)
    if unguarded := open_doors(settings):
        _log.warning(
            "OPEN TO THE NETWORK: whoever reaches us may %s", "; ".join(unguarded.values())
        )
    raise_limit()
    address = None if settings.port is None else (settings.host, settings.port)
    try:
        entrances = Entrances.bound(
            address, settings.uds, int(settings.uds_mode, 8), side_address(settings)
        )
    except CannotListenError as error:
        _log.error("cannot listen on %s", error)
        return 1
    with entrances, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(settings, layers, entrances))


def _configure_logs(settings: Settings) -> None:
    ids = None
    if settings.tracing != "none":
        from select_service.edge.tracing.tracing import HERE  # noqa: PLC0415 - for who traces

        sys.setswitchinterval(TRACED_SWITCH_S)
        ids = HERE.get
    form, level = settings.log_format, settings.log_level
    logs.configure(form, level, access_log=settings.access_log, ids=ids)


async def _serve(settings: Settings, layers: Layers | None, entrances: Entrances) -> int:
    try:
        service = create_driver(settings)
    except (RecordingUnusable, StateDirUnusable, SecurityFileUnusable, IndexerError) as error:
        _log.error("cannot start: %s", error)
        return 1
    door, traffic = create_door(service, settings, layers)
    server = Server(settings, door, traffic, entrances, service.security)
    loop = asyncio.get_running_loop()
    garbage = GarbageCollection(traffic, loop.time)
    leaving = Leaving(
        *(service, settings.leave_notice_s, settings.leave_grace_s),
        *(server.close_answers, server.go),
    )

    def leave() -> None:
        """Go with notice, if there is anybody to give notice to."""
        (leaving.begin if server.started else server.go)()

    def announce() -> None:
        """Say so, and wait for the order; who has not started yet is not awaited by anybody."""
        if server.started:
            leaving.announce()

    loop.add_signal_handler(signal.SIGINT, server.handle_exit, signal.SIGINT, None)
    loop.add_signal_handler(signal.SIGTERM, leave)
    loop.add_signal_handler(signal.SIGUSR1, announce)
    loop.add_signal_handler(signal.SIGHUP, door.reloading.hang_up)
    try:
        await service.start(entrances.replica_port, settings.advertise_url)
        door.reloading.restore()
        _listen_to_replicas(service, settings.replica_sync_peers)
        await _hold(service, server, settings.recovery_hold_s)
        garbage.start()
        told = {"version": __version__, "kernels": kernels_in_use()}
        _log.info("listening", extra=entrances.describe() | told)
        await server.serve(sockets=entrances.sockets)
    except CannotListenError as error:
        _log.error("cannot listen on %s", error)
        return 1
    except (IndexerError, InvalidReplicaPeer) as error:
        _log.error("cannot start: %s", error)
        return 1
    finally:
        garbage.close()
        await service.close()
    _log.info("stopped")
    return 0


async def _hold(service: Driver, server: Server, hold_s: float) -> None:
    """Keep the port closed until the index is recovered (contract 7.2), but not for long."""
    loop = asyncio.get_running_loop()
    until = loop.time() + hold_s
    while not server.should_exit and (left := until - loop.time()) > 0:
        if await service.recovered(min(left, _TICK_MIN_S)):
            break


def _listen_to_replicas(service: Driver, endpoints: Sequence[str]) -> None:
    """Register the peers of the command line; one may be named twice.

    Raises:
        InvalidReplicaPeer: an endpoint that cannot be one (contract 9).
    """
    for endpoint in endpoints:
        try:
            service.replica_plane().register(endpoint)
        except (IndexerError, ServiceError) as error:
            raise InvalidReplicaPeer(endpoint, str(error)) from error


class Server(uvicorn.Server):
    """Uvicorn with our deadlines on connections and our way of leaving."""

    _exit: asyncio.Event

    def __init__(
        self,
        settings: Settings,
        door: Door,
        traffic: Traffic,
        entrances: Entrances,
        security: Security | None = None,
    ) -> None:
        limits = ConnectionLimits(
            header_timeout_s=settings.header_timeout_s,
            body_timeout_s=settings.body_timeout_s,
            connections_max=settings.connections_max,
            head_bytes_max=settings.head_bytes_max,
            header_lines_max=settings.header_lines_max,
            connections_per_address_max=settings.connections_per_address_max,
            tls_handshakes_max=settings.tls_handshakes_max,
            unread_bytes_max=settings.unread_bytes_max,
        )
        overload = settings.overload_status_code  # may be one that uvicorn has no line for
        STATUS_LINE.setdefault(overload, status_line(overload))
        super().__init__(
            uvicorn.Config(
                door,
                http=fast_lane(door, limits, traffic.connections, _lane(door)),
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
        door.reloading.followers.append(self._follow)
        self._limits = limits
        self._second = 0
        self._door = door
        self._security = security
        self._entrances = entrances
        self._counts = traffic.connections
        self._side: type[FastLane] | None = None
        if entrances.side is not None:
            aside = door.narrowed(SIDE_PATHS, NOT_AT_THE_SIDE)
            self._side = fast_lane(aside, limits, traffic.connections, _lane(aside))

    def _follow(self, settings: Settings) -> None:
        """Hold connections to other limits, those that are open too."""
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
        self._door.enter(asyncio.get_running_loop())
        self._loading = asyncio.get_running_loop().create_task(load_in_turns())

    async def _start_side(self) -> None:
        side = self._entrances.side
        if side is not None:
            loop, backlog = asyncio.get_running_loop(), self.config.backlog
            server = await loop.create_server(self._aside, sock=side, backlog=backlog)
            self.servers.append(server)

    async def _start_with_tls(self, context: ssl.SSLContext) -> None:
        """Speak TLS to whoever comes by TCP; a Unix socket's file says who may come."""
        unix = self._entrances.unix
        await super().startup([] if unix is None else [unix.socket])
        makers = {self._entrances.tcp: self._connection, self._entrances.side: self._aside}
        by_tcp = {one: make for one, make in makers.items() if one is not None}
        if by_tcp:
            from select_service.edge.http.handshakes import Handshakes  # noqa: PLC0415 - for who has TLS

            server = Handshakes(by_tcp, self._limits, self._counts)
            server.start(context, self.config.backlog)
            self.servers.append(cast("asyncio.Server", server))

    def _connection(self) -> asyncio.Protocol:
        """Make a protocol, as uvicorn does."""
        make = cast("type[HttpToolsProtocol]", self.config.http_protocol_class)
        return make(self.config, self.server_state, self.lifespan.state)

    def _aside(self) -> asyncio.Protocol:
        """Make one for who has come by the side entrance."""
        assert self._side is not None
        lane = self._side(self.config, self.server_state, self.lifespan.state)
        lane.app = lane.door  # uvicorn has set the main one
        return lane

    @property
    def should_exit(self) -> bool:
        """Whether it is time to go; setting it is heard at once."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, is_time: bool) -> None:
        if is_time:
            self._exit.set()
        else:  # uvicorn says so before anything else happens
            self._exit = asyncio.Event()

    @override
    async def main_loop(self) -> None:
        """Tick until it is time to go; uvicorn's own looks ten times a second whether it is."""
        while not await self.on_tick(0):
            deadline_s = min(self._limits.header_timeout_s, self._limits.body_timeout_s)
            pause_s = max(_TICK_MIN_S, min(_TICK_S, deadline_s * _SHARE_OF_DEADLINE))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._exit.wait()

    @override
    async def on_tick(self, counter: int) -> bool:
        connections = cast("list[GuardedProtocol]", list(self.server_state.connections))
        self._counts.open = len(connections)
        now = asyncio.get_running_loop().time()
        for connection in connections:
            connection.sweep(now)
        self._counts.unread_bytes = cut_unread(connections, self._limits.unread_bytes_max)
        if self._security is not None:
            self._security.tick(now)
        self._tell_date()
        return self.should_exit

    def _tell_date(self) -> None:
        """Begin answers with another `Date`; uvicorn's own way makes objects that stay."""
        second = int(time.time())  # noqa: TID251 - for people, who read wall clocks
        if second != self._second:
            self._second = second
            own = self.config.encoded_headers
            self.server_state.default_headers = [(b"date", http_date(second)), *own]

    def close_answers(self) -> None:
        """Have every answer end its connection."""
        self.config.encoded_headers.append(CLOSE)  # what uvicorn begins all of its answers with
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        for lane in (self.config.http_protocol_class, self._side):
            if lane is not None:
                cast("type[FastLane]", lane).part_with_answers()

    def go(self) -> None:
        """End; heard at once."""
        self.should_exit = True

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.leave()
        self._entrances.vanish()
        await super().shutdown(sockets)

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # `_serve` listens for signals from before the service starts until after it has closed;
        # uvicorn would raise them again at the end, and a clean end would not be exit code 0.
        yield


def _policies(file: PolicyFile | None, queue_threshold: float) -> PolicyBook | PolicyError | None:
    if file is None:
        return None
    if file.text is None:
        return PolicyError(file.error)
    try:
        return read_policy(file.text, file.path, queue_threshold)
    except PolicyError as error:
        _log.error("%s", error)
        return error


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Uvloop where it exists: it takes a third off the cost of a request."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.Loop
