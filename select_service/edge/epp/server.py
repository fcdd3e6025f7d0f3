"""The gRPC server of the endpoint picker: streams of gateways, and probes of its health.

It runs on the service's event loop. Messages are decoded here and not by gRPC, so that bytes that
are no message end their stream with a reason. `app.py` starts one where `--epp-port` is given.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from select_service.edge.epp import messages
from select_service.edge.epp.messages import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
)
from select_service.edge.epp.picker import Picker
from select_service.edge.epp.processing_stream import OutOfOrder, ProcessingStream
from select_service.edge.http.listening_sockets import CannotListenError
from select_service.edge.http.routes import OPERATIONS
from select_service.edge.security.authority import certificate_names
from select_service.errors import MissingScope, ServiceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from select_service.edge.driver.driver import Driver
    from select_service.edge.epp.picker_traffic import PickerTraffic
    from select_service.settings import Settings

_log = logging.getLogger("select_service")

_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_READY: Final = frozenset({"", "readiness", _SERVICE})
"""Names of health checks that ask whether requests can be placed; `liveness` asks for an answer."""

_SERVING, _NOT_SERVING = 1, 2
_MESSAGE_BYTES: Final = 1 << 20
"""What a message may be longer than the longest body: headers, metadata."""

_PROBES: Final = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""A gateway that vanished without a word is noticed: its requests hold reservations."""


class EndpointPicker:
    """Listens for gateways. `start`, and `close` in the end."""

    def __init__(self, driver: Driver, settings: Settings, traffic: PickerTraffic) -> None:
        """Listen nowhere yet.

        Args:
            driver: chooses and books.
            settings: where to listen, how much to hold, with which certificates.
            traffic: counts.
        """
        self._driver, self._settings, self._traffic = driver, settings, traffic
        self._limits = settings.picker_limits
        self._picker = Picker(driver, self._limits, traffic)
        self._server: Any = None
        self.port = 0
        """Once it listens."""

    async def start(self) -> None:
        """Listen, on the running loop.

        Raises:
            CannotListenError: the address cannot be bound.
        """
        settings = self._settings
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # another process on this port is a mistake
                ("grpc.max_receive_message_length", self._limits.body_bytes_max + _MESSAGE_BYTES),
                *_PROBES,
            )
        )
        server.add_generic_rpc_handlers((_handlers(self._process, self._check),))
        host = settings.host if settings.epp_host is None else settings.epp_host
        address = f"{_bracketed(host)}:{settings.epp_port}"
        try:
            if settings.tls_cert is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, _tls(settings))
        except (RuntimeError, OSError) as error:
            await server.stop(None)
            text = f"{host} port {settings.epp_port} (--epp-port): {error}"
            raise CannotListenError(text) from None
        await server.start()
        self._server = server

    async def close(self, grace_s: float = 0.0) -> None:
        """End all streams, after a time for those that end by themselves. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
        await self._picker.close()

    # -- streams -----------------------------------------------------------------------------------

    async def _process(self, _: object, context: Any) -> None:
        traffic = self._traffic
        if traffic.streams >= self._limits.streams_max:
            traffic.limit_hits["epp_streams_max"] += 1
            await self._refuse(context, _TooManyStreams(self._limits.streams_max))
            return
        traffic.streams += 1
        traffic.opened += 1
        try:
            await self._converse(context)
        except (grpc.aio.AbortError, grpc.aio.UsageError):  # the stream has its status, or is gone
            raise
        except Exception:
            traffic.crashes += 1
            _log.exception("a stream of the endpoint picker failed")
            raise
        finally:
            traffic.streams -= 1

    async def _converse(self, context: Any) -> None:
        try:
            tenant_id = self._tenant_of(context)
        except ServiceError as error:
            code = grpc.StatusCode.UNAUTHENTICATED
            if isinstance(error, MissingScope):
                code = grpc.StatusCode.PERMISSION_DENIED
            await _abort(context, code, str(error))
        stream = ProcessingStream(
            self._picker, self._limits, self._traffic, self._driver.now, tenant_id
        )
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                for answer in await stream.receive(ProcessingRequest.FromString(data)):
                    await context.write(answer.SerializeToString())
        except ServiceError as error:
            await self._refuse(context, error)
        except (OutOfOrder, DecodeError) as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error) or "no message")
        finally:
            stream.close()

    async def _refuse(self, context: Any, error: ServiceError) -> None:
        """Let the gateway answer its client; the stream ends with it."""
        self._traffic.refused[messages.status_of(error)] += 1
        await context.write(messages.refusal(error).SerializeToString())

    def _tenant_of(self, context: Any) -> str:
        """Return whose requests a stream may place.

        Raises:
            Unauthenticated, MissingScope: a token is asked for, and there is none that allows it.
        """
        security = self._driver.security
        authority = None if security is None else security.authority
        if authority is None:
            return "default"
        credentials: bytes | None = None
        for name, value in context.invocation_metadata():
            if name == "authorization":
                credentials = value.encode() if isinstance(value, str) else value
        grant = authority.grant(credentials, certificate_names(None))
        authority.check(grant, OPERATIONS["select_and_reserve"])
        return grant.whose or "default"

    # -- health ------------------------------------------------------------------------------------

    async def _check(self, data: bytes, context: Any) -> bytes:
        try:
            service = HealthCheckRequest.FromString(data).service
        except DecodeError:
            return await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "no HealthCheckRequest")
        if service != "liveness" and service not in _READY:
            return await _abort(context, grpc.StatusCode.NOT_FOUND, "no such service")
        is_serving = service == "liveness" or self._picker.is_ready
        status = _SERVING if is_serving else _NOT_SERVING
        answer: bytes = HealthCheckResponse(status=status).SerializeToString()
        return answer


class _TooManyStreams(ServiceError):
    status = 429
    code = "too_many_streams"

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} requests are under way (--epp-streams-max)")


async def _abort(context: Any, code: Any, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("gRPC's abort raises")


def _handlers(
    process: Callable[[object, Any], Awaitable[None]],
    check: Callable[[bytes, Any], Awaitable[bytes]],
) -> Any:
    """Return gRPC's table of methods; what it does not have is UNIMPLEMENTED."""
    methods = {
        f"/{_SERVICE}/Process": grpc.stream_stream_rpc_method_handler(process),
        "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(check),
    }

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc] # gRPC ships no types
        def service(self, call: Any) -> Any:
            return methods.get(call.method)

    return Handlers()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _tls(settings: Settings) -> Any:
    """Return credentials that read the files again at each handshake."""
    cert, key, ca = settings.tls_cert, settings.tls_key or settings.tls_cert, settings.tls_client_ca
    assert cert is not None
    assert key is not None

    def read() -> Any:
        with suppress(OSError):  # half-replaced files: the old ones are good
            roots = None if ca is None else _bytes_of(ca)
            return grpc.ssl_server_certificate_configuration(
                [(_bytes_of(key), _bytes_of(cert))], root_certificates=roots
            )
        return None

    first = read()
    if first is None:
        raise CannotListenError(f"certificate {cert} cannot be read")
    return grpc.dynamic_ssl_server_credentials(
        first, read, require_client_authentication=ca is not None
    )


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
