"""Where selectors are and how to talk to them: addresses, TLS, tokens, requests (with httpcore).

httpx's httpcore is used without the layers above it: no redirects, no cookies, no proxies from the
environment, and a request costs half of what it does through httpx. `streams.py` is below it,
`connections.py` and the two clients are above.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, urlsplit

import httpcore

from indexer.followed_trust import FollowedTrust
from indexer.redaction import redact
from select_service.client.core.codec import ACCEPT
from select_service.client.core.exchange import ExchangeOutcome, Failure
from select_service.client.streams import AsyncioConnection, SocketConnection
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.client.core.exchange import Send
    from select_service.client.core.options import Options

DEFAULT_SELECTOR: Final = "http://localhost:8092"
_UNIX: Final = "unix:"
_KEEPALIVE_S: Final = 30.0  # below the service's own, so that we are the first to close
_PORTS: Final = {"http": 80, "https": 443}
_IN_TARGETS: Final = "/%:?&=@!$'()*+,;~#[]-._"  # characters that are not percent-encoded


class Address(NamedTuple):
    """The address of one selector."""

    name: str
    origin: httpcore.Origin
    host: str  # for the Host header
    prefix: str = ""  # of every path
    uds: str | None = None


def read_address(text: str) -> Address:
    """Parse `http://host:port`, `https://…` or `unix:/path/of.sock`.

    Raises:
        ValueError: it is none of them, or contains credentials.
    """
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path:
            raise ValueError(f"{text}: no path of a socket")
        host = "select-service"
        return Address(text, httpcore.Origin(b"http", host.encode(), 80), host, uds=path)
    if "@" in text:
        why = "a user's name is in it, which is not sent: a token is given by itself"
        raise ValueError(f"{redact(text)}: {why}")
    parts = urlsplit(text)
    if parts.scheme not in _PORTS or not parts.hostname:
        host = "" if "://" in text else f"localhost:{text}" if text.isdecimal() else text
        meant = f" (is http://{redact(host)} meant?)" if host else ""
        raise ValueError(f"{redact(text)}: neither http://, https:// nor unix:/path{meant}")
    if parts.query or parts.fragment:
        raise ValueError(f"{redact(text)}: it has a query, which would not be sent")
    port = parts.port or _PORTS[parts.scheme]
    try:
        name = parts.hostname.encode("idna")  # refuses names that a resolver cannot be asked for
    except UnicodeError as error:
        raise ValueError(
            f"{redact(text)}: {parts.hostname} is no name of a host: {error}"
        ) from None
    host = f"[{name.decode()}]" if b":" in name else name.decode()
    origin = httpcore.Origin(parts.scheme.encode(), name, port)
    host = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
    return Address(text, origin, host, parts.path.rstrip("/"))


class SelectorEndpoints:
    """What the connections to all selectors share; creates connections and requests."""

    def __init__(
        self,
        selectors: Sequence[str],
        options: Options,
        *,
        token: str | Callable[[], str] | None,
        ca: str | ssl.SSLContext | None,
        cert: tuple[str, str] | None,
    ) -> None:
        self.addresses = [read_address(one) for one in selectors or (DEFAULT_SELECTOR,)]
        self.connections_max = options.connections_max
        self.answer_bytes_max = options.answer_bytes_max
        self._token = token
        self._connect_s = options.connect_timeout_ms / 1e3
        is_secure = any(one.origin.scheme == b"https" for one in self.addresses)
        self._tls = _tls_context(ca, cert) if is_secure else None
        user_agent = f"select-service-client/{__version__}".encode()
        self._headers = [
            [
                (b"host", one.host.encode()),
                (b"accept", ACCEPT.encode()),
                (b"user-agent", user_agent),
            ]
            for one in self.addresses
        ]

    @property
    def names(self) -> list[str]:
        """Names of the selectors for messages."""
        return [one.name for one in self.addresses]

    def asynchronous(self, selector: int) -> AsyncioConnection:
        """Return a new connection to a selector; it connects on first use.

        httpcore's own pool scans all its connections for each request, which costs more than the
        request itself from about twenty on.
        """
        one = self.addresses[selector]
        return AsyncioConnection(one.origin, self._tls, _KEEPALIVE_S, one.uds)

    def synchronous(self, selector: int) -> SocketConnection:
        """The same for threads."""
        one = self.addresses[selector]
        return SocketConnection(one.origin, self._tls, _KEEPALIVE_S, one.uds)

    def request(self, send: Send) -> httpcore.Request:
        """Return the request to hand to a connection to `send.selector`."""
        address = self.addresses[send.selector]
        headers = self._headers[send.selector].copy()
        if send.content_type:
            headers.append((b"content-type", send.content_type.encode()))
        if send.body or send.method != "GET":
            headers.append((b"content-length", b"%d" % len(send.body)))
        if self._token is not None:
            headers.append((b"authorization", f"Bearer {self._shown_token()}".encode()))
        wait = send.timeout_s
        timeout = {"connect": min(self._connect_s, wait), "read": wait, "write": wait}
        scheme, host, port = address.origin.scheme, address.origin.host, address.origin.port
        target = _target(address.prefix + send.path)
        url = httpcore.URL(scheme=scheme, host=host, port=port, target=target)
        return httpcore.Request(
            send.method, url, headers=headers, content=send.body, extensions={"timeout": timeout}
        )

    def _shown_token(self) -> str:
        """Return the token; failing to get one counts as having no connection.

        Raises:
            httpcore.ConnectError: the token callable raised, whatever that was: background work
                must resume once the token is available again.
        """
        assert self._token is not None
        if isinstance(self._token, str):
            return self._token
        try:
            return self._token()
        except Exception as error:
            raise httpcore.ConnectError(f"no token: {error}") from error


def _target(path: str) -> bytes:
    if not (path.isascii() and path.isprintable()) or " " in path:
        path = quote(path, safe=_IN_TARGETS)
    return path.encode()


class Gathering:
    """An answer as its bytes arrive, up to a limit."""

    def __init__(self, response: httpcore.Response, bytes_max: int) -> None:
        names = (b"content-type", b"content-length", b"retry-after")
        headers = {name.lower(): value for name, value in response.headers if name.lower() in names}
        self._status = response.status
        self._content_type = headers.get(b"content-type", b"").decode("latin-1")
        self._retry_after_s = _seconds(headers.get(b"retry-after"))
        self._bytes_max = bytes_max
        self._bytes = int(headers.get(b"content-length", b"0"))
        self.is_too_large = self._bytes > bytes_max
        self._bytes = 0
        self._parts: list[bytes] = []

    def take(self, part: bytes) -> bool:
        """Add a part; False if the limit is exceeded, and the rest is not wanted."""
        self._bytes += len(part)
        self.is_too_large |= self._bytes > self._bytes_max
        self._parts.append(part)
        return not self.is_too_large

    def outcome(self, now: float) -> ExchangeOutcome:
        """Return the answer as an outcome for the core."""
        if self.is_too_large:
            reason = f"an answer of more than {self._bytes_max} bytes (answer_bytes_max)"
            return ExchangeOutcome(now, failure=Failure.TOO_LARGE, reason=reason)
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        return ExchangeOutcome(now, self._status, body, self._content_type, self._retry_after_s)


ERRORS: Final = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError)
"""What an attempt may fail with; OSError: no descriptor left for what must be opened first."""


def failed(error: Exception, now: float) -> ExchangeOutcome:
    """Return the outcome of an attempt without an answer."""
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
        kind = Failure.REFUSED
    elif isinstance(error, httpcore.TimeoutException):
        kind = Failure.SLOW
    else:
        kind = Failure.BROKEN
    return ExchangeOutcome(now, failure=kind, reason=reason)


def _seconds(text: bytes | None) -> float | None:
    return float(text) if text is not None and text.isdigit() else None


def _tls_context(ca: str | ssl.SSLContext | None, cert: tuple[str, str] | None) -> ssl.SSLContext:
    if isinstance(ca, ssl.SSLContext):
        return ca
    try:
        return FollowedTrust(ca, cert)
    except OSError as error:  # it does not say of which file
        names = ", ".join(filter(None, (ca, *(cert or ()))))
        raise ValueError(f"cannot use {names}: {error.strerror or error}") from error
