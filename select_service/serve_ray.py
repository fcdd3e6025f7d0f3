"""The service as a Ray Serve application: `serve run select_service.serve_ray:app replicas=2`.

Every replica is a whole selector with its own address, which it registers at the meeting point
(`client/ray/registry.py`); there it finds the others, whose bookings it carries, and the workers of
the cluster. Serve's proxies reach any of them: what they receive for the catalog goes to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import ray
from msgspec.structs import replace
from ray import serve

from select_service import cli
from select_service.client.ray.registry import NAMESPACE, SelectorRegistry
from select_service.edge.app import create_application, create_driver
from select_service.edge.http.listening_sockets import ListeningSockets
from select_service.edge.logs import configure
from select_service.edge.server import Server
from select_service.ray_discovery import CATALOG, RayDiscovery
from select_service.tcp_listener import host_in_url, is_unspecified

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Message, Receive, Scope, Send

    from select_service.edge.http.application import Application
    from select_service.settings import Layers, Settings

__all__ = ["Selector", "app"]

_log = logging.getLogger("select_service")

_OWN: Final = ("replicas", "namespace", "num_cpus", "name")
_REPLICAS: Final = 2
_ONGOING_MAX: Final = 10_000  # selections may wait in a queue of ours, which has its own bounds
_LEAVE_S: Final = 10.0
_MOMENT_S: Final = 0.01
_RECORD_BYTES_MAX: Final = 2**20
_REFUSED: Final = 300


def app(args: dict[str, Any]) -> Any:
    """Return the application: `serve.run(app({"replicas": 3}))`.

    Args:
        args: `replicas` (2), `num_cpus` (1) of each, `namespace` ("select-service") of the meeting
            point, `name` of the deployment, and every flag of the service without its dashes:
            `{"host": "127.0.0.1", "max-queued-default": 8}`.

    Raises:
        ValueError: a flag that is none, or one that makes no sense here.
    """
    flags = [part for name, one in args.items() if name not in _OWN for part in _flag(name, one)]
    _read(flags)
    deployment: Any = Selector
    application = deployment.options(
        name=str(args.get("name", "selector")),
        num_replicas=int(args.get("replicas", _REPLICAS)),
        ray_actor_options={"num_cpus": float(args.get("num_cpus", 1))},
    )
    return application.bind(flags, str(args.get("namespace", NAMESPACE)))


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.removeprefix('--').replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]


def _read(flags: Sequence[str]) -> tuple[Settings, Layers]:
    try:
        settings, layers = cli.read(flags, os.environ)
    except SystemExit:
        raise ValueError(f"not flags of the service: {' '.join(flags)}") from None
    others = (settings.uds, settings.epp_port, settings.side_port)
    if any(one is not None for one in others):
        raise ValueError(
            "--uds, --epp-port and --side-port are not for Ray: a replica has one port of its own"
        )
    return settings, layers


class Front:
    """What Serve's proxies speak to: the selector of this process, and with it all the others.

    A proxy asks now this replica and now that. Bookings are carried between them anyway; what
    changes the catalog is sent to each.
    """

    application: Application | None = None
    discovery: RayDiscovery | None = None

    def add_exception_handler(self, *_: object) -> None:
        """For nothing: the application lets none out. Older Serves have one for every app."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        assert Front.application is not None, "Serve asks nothing before `__init__` is over"
        assert Front.discovery is not None
        scope = _below_prefix(scope)
        if scope["method"] == "GET" or not scope["path"].startswith(CATALOG):
            await Front.application(scope, receive, send)
            return
        body = await _read_body(receive)
        status = 0
        answer: list[Message] = []

        async def receive_again() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def keep(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.append(message)

        await Front.application(scope, receive_again, keep)
        if status < _REFUSED:
            await Front.discovery.pass_on(scope, body)
        for message in answer:
            await send(message)


def _below_prefix(scope: Scope) -> Scope:
    """Return a scope whose path is ours; Serve puts the route prefix before it, as ASGI has it."""
    prefix = scope.get("root_path", "").rstrip("/")
    if not prefix:
        return scope
    raw = scope.get("raw_path") or scope["path"].encode()
    return {
        **scope,
        "path": scope["path"].removeprefix(prefix) or "/",
        "raw_path": raw.removeprefix(prefix.encode()) or b"/",
        "root_path": "",
    }


async def _read_body(receive: Receive) -> bytes:
    """Read a body, and no more than any record of a worker needs."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body") or len(body) > _RECORD_BYTES_MAX:
            return bytes(body)


@serve.deployment(max_ongoing_requests=_ONGOING_MAX, graceful_shutdown_timeout_s=2 * _LEAVE_S)
@serve.ingress(Front())
class Selector:
    """One replica of the service."""

    async def __init__(self, flags: Sequence[str], namespace: str) -> None:  # type: ignore[misc]
        """Serve at an address of its own, and find the others."""
        settings, layers = _read(flags)
        configure(settings.log_format, settings.log_level, access_log=settings.access_log)
        host = ray.util.get_node_ip_address() if is_unspecified(settings.host) else settings.host
        self._entrances = ListeningSockets.bound((host, _port(layers, settings)), None, 0o600)
        scheme = "http" if settings.tls_cert is None else "https"
        self.url = f"{scheme}://{host_in_url(host)}:{self._entrances.port}"
        settings = replace(
            settings,
            replica_sync_port=settings.replica_sync_port or _free_port(),
            advertise_url=settings.advertise_url or self.url,
        )
        self._service = create_driver(settings)
        place = f"tcp://{host_in_url(host)}:{settings.replica_sync_port}"
        known = self._service.credentials
        passport = None if known is None else known.passport
        self._discovery = RayDiscovery(SelectorRegistry(namespace), self.url, place, passport)
        self._service.discovery = self._discovery.followed_by(self._service, settings)
        application, traffic = create_application(self._service, settings, layers)
        self._server = Server(
            settings, application, traffic, self._entrances, self._service.security
        )
        await self._service.start(self._entrances.port, settings.advertise_url)
        application.reloading.restore()
        serving = self._server.serve(sockets=self._entrances.sockets)
        self._serving = asyncio.get_running_loop().create_task(serving)
        while not (self._server.started or self._serving.done()):  # noqa: ASYNC110 - of uvicorn
            await asyncio.sleep(_MOMENT_S)  # a proxy that learns of us finds us listening
        await self._discovery.copy_catalog(self._service)
        Front.application, Front.discovery = application, self._discovery
        _log.info("listening", extra={"url": self.url, "replica_sync": place})

    async def check_health(self) -> None:
        """Raise if it serves no more: Serve then makes another one."""
        if self._serving.done():
            raise RuntimeError("the selector has ended")

    async def address(self) -> str:
        """Return where this replica is reached directly."""
        return self.url

    async def __del__(self) -> None:
        """Say goodbye, let go, close."""
        if not hasattr(self, "_serving"):
            return  # it has never begun
        with contextlib.suppress(Exception):  # they will see it anyway
            await self._discovery.leave()
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._serving
        await self._service.close()


def _port(layers: Layers, settings: Settings) -> int:
    """Return a free port unless one is asked for, which is right for one replica per machine."""
    return (settings.port or 0) if layers.source_of("port") != "default" else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
