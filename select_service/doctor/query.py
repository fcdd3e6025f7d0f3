"""Queries a running service, over TCP or a Unix domain socket."""

from __future__ import annotations

import socket
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType
from typing_extensions import override

from select_service.types.doctor import Finding

__all__ = ["Answer", "CannotAskError", "Worker", "ask", "context"]

ANSWER_BYTES_MAX: Final = 256 << 20
"""Longest answer read: ten thousand workers take some ten megabytes."""

_PATH: Final = "/ready?verbose=true"
_NEEDS_TOKEN: Final = (401, 403)
_STATUSES: Final = (200, 503)  # both with the same body


class CannotAskError(Exception):
    """The service cannot be queried; the text says why."""


class Worker(Struct, frozen=True):
    """The parts of a worker's record that say where to reach it."""

    worker_id: int
    model_name: str = "default"
    tenant_id: str = "default"
    lifecycle: str = "schedulable"
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[str, str] = {}
    replay_endpoint: str | None = None


class Answer(Struct, frozen=True):
    """The parts of GET /ready?verbose=true needed here."""

    ready: bool
    schedulable_workers: int
    workers: list[Worker]
    waiting_for: list[str] = []
    findings: list[Finding] | UnsetType = UNSET
    findings_left_out: int = 0


def context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the context for https; None, the system's default, if nothing is given.

    Args:
        ca: file of certificates to trust instead of the system's.
        cert: file of a client certificate.
        key: file of its key, unless it is in the same one.

    Raises:
        CannotAskError: a file cannot be read, or is invalid.
    """
    if ca is None and cert is None:
        return None
    try:
        made = ssl.create_default_context(cafile=ca)
        if cert is not None:
            made.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        names = ", ".join(name for name in (ca, cert, key) if name is not None)
        raise CannotAskError(f"cannot use {names}: {error}") from error
    return made


def ask(
    url: str,
    uds: str | None,
    timeout_s: float,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Query a service for its findings.

    Args:
        url: http or https; its path is prepended to the route's.
        uds: a Unix domain socket to connect to instead of the URL's host.
        timeout_s: longest wait for the connection, and for each piece of the answer.
        token: with the scope read, if the service requires one.
        tls: the context for https; None: the system's certificates are trusted.

    Raises:
        CannotAskError: nothing answers, or something other than such a service.
    """
    connection, prefix = _connection(url, uds, timeout_s, tls)
    try:
        headers = {"accept": "application/json"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        connection.request("GET", prefix + _PATH, headers=headers)
        response = connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
    except (OSError, HTTPException) as error:
        raise CannotAskError(f"no answer: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status in _NEEDS_TOKEN:
        raise CannotAskError("it asks for a token that allows to read: --token-file")
    if response.status not in _STATUSES:
        raise CannotAskError(f"GET {_PATH} was answered with status {response.status}")
    try:
        answer = msgspec.json.decode(body, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotAskError(f"what answers is no select-service: {error}") from error
    if answer.findings is UNSET:
        raise CannotAskError("the service tells no findings: it is older than this command")
    return answer


def _connection(
    url: str, uds: str | None, timeout_s: float, tls: ssl.SSLContext | None
) -> tuple[HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise CannotAskError(f"{url}: {error}") from error
    prefix = parts.path.rstrip("/")
    if uds is not None:
        return _UnixConnection(uds, timeout_s), prefix
    if parts.scheme not in {"http", "https"} or not host:
        raise CannotAskError(f"{url}: not an http or https URL")
    if parts.scheme == "https":
        return HTTPSConnection(host, port, timeout=timeout_s, context=tls), prefix
    return HTTPConnection(host, port, timeout=timeout_s), prefix


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
