"""Assembles the edge: an ASGI app for embedding, a server for the command line.

`construction.py` builds the driver, `server.py` owns the connections. `serve` binds, starts the
service, serves until a signal, and exits with code 0 within `--shutdown-timeout-s`, whatever
clients are doing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import sys
from typing import TYPE_CHECKING, Final

from indexer.compiled import complaints, kernels_text
from indexer.errors import IndexerError
from select_service.edge import logs
from select_service.edge.codec.body_limits import BodyGuard
from select_service.edge.codec.encoder import show_hashes
from select_service.edge.config_reload import ConfigReload
from select_service.edge.console.console_app import ConsoleApp
from select_service.edge.construction import create_driver, create_security
from select_service.edge.driver.driver import Driver
from select_service.edge.garbage_collection import GarbageCollection
from select_service.edge.graceful_shutdown import GracefulShutdown
from select_service.edge.http.api import Api
from select_service.edge.http.application import Application
from select_service.edge.http.listening_sockets import (
    CannotListenError,
    ListeningSockets,
)
from select_service.edge.http.openapi_document import OpenApiDocument
from select_service.edge.http.traffic import Traffic
from select_service.edge.lazy_imports import load
from select_service.edge.security.exposure import open_doors, side_address
from select_service.edge.server import TICK_MIN_S, Server
from select_service.errors import (
    InvalidReplicaPeer,
    RecordingUnusable,
    SecurityFileUnusable,
    ServiceError,
    StateDirUnusable,
)
from select_service.settings import Layers
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.applications import Starlette

    from select_service.edge.epp.server import EndpointPicker
    from select_service.edge.metrics.exposition import Metrics
    from select_service.edge.security.authority import Authority
    from select_service.settings import Settings

__all__ = [
    "create_app",
    "create_application",
    "create_driver",
    "create_security",
    "loop_factory",
    "serve",
]


# Raises the limit on open files to what the system allows. A worker takes five or six descriptors
# and a client one, so the usual soft limit of 1,024 allows 170 workers.

ENOUGH: Final = 1 << 20
"""Requested when there is no hard limit; libzmq's own bound on sockets is a sixteenth of it."""


def raise_limit() -> int | None:
    """Raise the soft limit to the hard one; return the limit in force, None if unknown."""
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning("open files stay limited to %d: %s", soft, error)
        return soft
    _log.info("open files", extra={"limit": wanted, "before": soft})
    return wanted


_log = logging.getLogger("select_service")

TRACED_SWITCH_S: Final = 0.0005
"""How long the span-exporting thread may keep the event loop waiting; a tenth of Python's default.
"""


def create_app(service: Driver, settings: Settings) -> Starlette:
    """Return the HTTP API over a service that the caller starts and closes.

    Callers may add routes and middleware; `serve` does without this layer.
    """
    from starlette.applications import Starlette  # 20 ms, which `serve` saves

    load()
    app = Starlette()
    # Starlette's own matching decodes paths and folds slashes; ours must do neither.
    app.router.redirect_slashes = False
    app.router.default = create_application(service, settings)[0]
    return app


def create_application(
    service: Driver, settings: Settings, layers: Layers | None = None
) -> tuple[Application, Traffic]:
    """Return the bare ASGI application and its traffic counters.

    Raises:
        SecurityFileUnusable: tokens or certificates cannot be used.
        indexer.errors.KeyFileUnusable: keys cannot be used.
    """
    traffic = Traffic()
    if service.security is None:  # the driver was built without these settings
        service.security = create_security(settings)
    reloading = ConfigReload(layers or Layers.of(settings), service)
    service.show_hashes_with(show_hashes)

    @functools.cache
    def metrics() -> Metrics:
        from select_service.edge.metrics.exposition import (
            Metrics,  # loaded late, see `lazy_imports.py`
        )

        return Metrics(service, traffic, settings, reloading)

    authority = None if service.security is None else service.security.authority
    document = OpenApiDocument(settings.overload_status_code, with_tokens=authority is not None)
    guard = BodyGuard(settings.body_limits)
    reloading.followers.append(lambda settings: guard.follow(settings.body_limits))
    api = Api(
        service,
        settings.field_validation,
        metrics=lambda: metrics().render(),
        openapi=document.text,
        reloading=reloading,
        guard=guard,
        refused=traffic.refused,
    )
    console: ConsoleApp | None = None
    if not settings.no_console:
        console = ConsoleApp(
            service,
            traffic,
            clients_max=settings.console_clients_max,
            grafana_url=settings.console_grafana_url,
        )
    bytes_max, access_log = settings.max_body_bytes, settings.access_log
    if authority is not None:
        authority.on_change(functools.partial(_name_tenants, service, authority))
        _name_tenants(service, authority)
        traffic.connections.shares = service.core.shares
    tracer = None
    if service.tracing is not None:
        from select_service.edge.tracing.request_tracer import RequestTracer  # only with tracing

        tracer = RequestTracer(service.tracing)
    application = Application(
        api,
        traffic,
        max_body_bytes=bytes_max,
        access_log=access_log,
        authority=authority,
        console=console,
        tracer=tracer,
    )
    application.reloading, application.document = reloading, document
    reloading.followers.append(application.follow)
    return application, traffic


def _name_tenants(service: Driver, authority: Authority) -> None:
    """Keep parts of the bounds for the tenants of the token file in force."""
    tenants, others = authority.book.tenants()
    service.core.name_tenants(tenants, others=others)


def serve(settings: Settings, layers: Layers | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Args:
        settings: what to do.
        layers: the source of each setting, for changes at run time.
    """
    _configure_logs(settings)
    for warning in settings.router.warnings:
        _log.warning(warning)
    for complaint in complaints():
        _log.warning(complaint)
    if unguarded := open_doors(settings):
        _log.warning(
            "OPEN TO THE NETWORK: whoever reaches this port %s", "; ".join(unguarded.values())
        )
    raise_limit()
    address = None if settings.port is None else (settings.host, settings.port)
    try:
        entrances = ListeningSockets.bound(
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
        from select_service.edge.tracing.spans import HERE  # only if tracing is on

        sys.setswitchinterval(TRACED_SWITCH_S)
        ids = HERE.get
    form, level = settings.log_format, settings.log_level
    logs.configure(form, level, access_log=settings.access_log, ids=ids)


async def _serve(settings: Settings, layers: Layers | None, entrances: ListeningSockets) -> int:
    try:
        service = create_driver(settings)
    except (RecordingUnusable, StateDirUnusable, SecurityFileUnusable, IndexerError) as error:
        _log.error("cannot start: %s", error)
        return 1
    application, traffic = create_application(service, settings, layers)
    server = Server(settings, application, traffic, entrances, service.security)
    loop = asyncio.get_running_loop()
    garbage = GarbageCollection(traffic, loop.time)
    leaving = GracefulShutdown(
        service,
        settings.leave_notice_s,
        settings.leave_grace_s,
        server.close_answers,
        server.go,
    )

    _handle_signals(server, leaving, application)
    picker: EndpointPicker | None = None
    try:
        if settings.epp_port is not None:
            picker = _endpoint_picker(service, settings, traffic)
        await service.start(entrances.replica_port, settings.advertise_url)
        application.reloading.restore()
        _listen_to_replicas(service, settings.replica_sync_peers)
        await _hold(service, server, settings.recovery_hold_s)
        garbage.start()
        facts: dict[str, object] = {"version": __version__, "kernels": kernels_text()}
        if picker is not None:
            await picker.start()
            facts["epp_port"] = picker.port
        _log.info("listening", extra=entrances.describe() | facts)
        await server.serve(sockets=entrances.sockets)
    except CannotListenError as error:
        _log.error("cannot listen on %s", error)
        return 1
    except (IndexerError, InvalidReplicaPeer, StateDirUnusable) as error:
        _log.error("cannot start: %s", error)
        return 1
    finally:
        garbage.close()
        if picker is not None:
            await picker.close(settings.shutdown_timeout_s)
        await service.close()
    _log.info("stopped")
    return 0


def _handle_signals(server: Server, leaving: GracefulShutdown, application: Application) -> None:
    """Let signals end, announce and reload; from before the service starts."""
    loop = asyncio.get_running_loop()

    def leave() -> None:
        """Leave with notice, or at once if the server is not up yet and no client needs notice."""
        (leaving.begin if server.started else server.go)()

    def announce() -> None:
        """Announce leaving and wait for SIGTERM; before start-up there is no client to notify."""
        if server.started:
            leaving.announce()

    loop.add_signal_handler(signal.SIGINT, server.handle_exit, signal.SIGINT, None)
    loop.add_signal_handler(signal.SIGTERM, leave)
    loop.add_signal_handler(signal.SIGUSR1, announce)
    loop.add_signal_handler(signal.SIGHUP, application.reloading.hang_up)


def _endpoint_picker(service: Driver, settings: Settings, traffic: Traffic) -> EndpointPicker:
    """Return what listens to gateways.

    Raises:
        CannotListenError: gRPC is not installed.
    """
    try:
        from select_service.edge.epp.server import EndpointPicker  # an extra
    except ImportError as error:
        text = f"--epp-port: {error}: pip install 'grpcio>=1.63' 'protobuf>=5.26'"
        raise CannotListenError(text) from None
    return EndpointPicker(service, settings, traffic.epp)


async def _hold(service: Driver, server: Server, hold_s: float) -> None:
    """Keep the port closed until the index is recovered, for at most `hold_s`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + hold_s
    while not server.should_exit and (left := until - loop.time()) > 0:
        if await service.recovered(min(left, TICK_MIN_S)):
            break


def _listen_to_replicas(service: Driver, endpoints: Sequence[str]) -> None:
    """Register the peers given on the command line; duplicates are allowed.

    Raises:
        InvalidReplicaPeer: an endpoint is invalid or refused.
    """
    for endpoint in endpoints:
        try:
            service.replica_plane().register(endpoint)
        except (IndexerError, ServiceError) as error:
            raise InvalidReplicaPeer(endpoint, str(error)) from error


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop if installed: it takes a third off the cost of a request."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
