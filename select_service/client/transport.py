"""Where selectors are and how to talk to them: addresses, TLS, tokens, pooled connections (httpx).

One transport for each selector, with connections that are kept. httpx's transports are used without
its client: no redirects, no cookies, no proxies out of the environment stand between.
"""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from select_service.client.core.exchange import Failure, Outcome
from select_service.client.core.wire import ACCEPT
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.client.core.exchange import Send
    from select_service.client.core.options import Options

__all__ = ["DEFAULT_SELECTOR", "Address", "Doors", "failed", "read_address"]

DEFAULT_SELECTOR: Final = "http://127.0.0.1:8092"
_UNIX: Final = "unix:"
_PATHS_REMEMBERED: Final = 64
_WITH_IDS: Final = ("/leases/", "/decisions/", "/workers/")
_KEEPALIVE_S: Final = 30.0  # below the service's own, so that we are the first to close


class Address(NamedTuple):
    """One selector."""

    name: str
    url: str
    uds: str | None


def read_address(text: str) -> Address:
    """Read `http://host:port`, `https://…` or `unix:/path/of.sock`.

    Raises:
        ValueError: it is none of them.
    """
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path:
            raise ValueError(f"{text}: no path of a socket")
        return Address(text, "http://select-service", path)
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{text}: neither http://, https:// nor unix:/path")
    return Address(text, text.rstrip("/"), None)


class Doors:
    """What the transports of all selectors have in common; makes their requests."""

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
        self._token = token
        self._connect_s = options.connect_timeout_ms / 1e3
        self.connections_max = options.connections_max
        is_secure = any(one.url.startswith("https") for one in self.addresses)
        self._tls: ssl.SSLContext | bool = _tls_context(ca, cert) if is_secure else False
        self._url = lru_cache(_PATHS_REMEMBERED)(self._make_url)

    @property
    def names(self) -> list[str]:
        """How they are called in messages."""
        return [one.name for one in self.addresses]

    def asynchronous(self, selector: int) -> httpx.AsyncHTTPTransport:
        """Return one connection to a selector.

        httpx's own pool looks at all connections for each request, which costs more than the
        request from some twenty on.
        """
        one = self.addresses[selector]
        return httpx.AsyncHTTPTransport(verify=self._tls, uds=one.uds, limits=_limits(1))

    def synchronous(self) -> list[httpx.HTTPTransport]:
        """Return a transport for each selector."""
        return [
            httpx.HTTPTransport(verify=self._tls, uds=one.uds, limits=_limits(self.connections_max))
            for one in self.addresses
        ]

    def request(self, send: Send) -> httpx.Request:
        """Return what to hand to the transport of `send.selector`."""
        headers = {"accept": ACCEPT, "user-agent": f"select-service-client/{__version__}"}
        if send.content_type:
            headers["content-type"] = send.content_type
        if self._token is not None:
            token = self._token if isinstance(self._token, str) else self._token()
            headers["authorization"] = f"Bearer {token}"
        wait = send.timeout_s
        timeout = {
            "connect": min(self._connect_s, wait),
            "read": wait,
            "write": wait,
            "pool": wait,
        }
        make = self._make_url if send.path.startswith(_WITH_IDS) else self._url
        return httpx.Request(
            send.method,
            make(send.selector, send.path),
            headers=headers,
            content=send.body or None,
            extensions={"timeout": timeout},
        )

    def _make_url(self, selector: int, path: str) -> httpx.URL:
        return httpx.URL(self.addresses[selector].url + path)


def _limits(most: int) -> httpx.Limits:
    return httpx.Limits(
        max_connections=most, max_keepalive_connections=most, keepalive_expiry=_KEEPALIVE_S
    )


def answered(response: httpx.Response, body: bytes, now: float) -> Outcome:
    """Return an answer as the core takes it."""
    headers = response.headers
    return Outcome(
        now,
        response.status_code,
        body,
        headers.get("content-type", ""),
        _seconds(headers.get("retry-after")),
    )


def failed(error: httpx.TransportError, now: float) -> Outcome:
    """Return what it means that there is no answer."""
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
        kind = Failure.REFUSED
    elif isinstance(error, httpx.TimeoutException):
        kind = Failure.SLOW
    else:
        kind = Failure.BROKEN
    return Outcome(now, failure=kind, reason=reason)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdigit() else None


def _tls_context(ca: str | ssl.SSLContext | None, cert: tuple[str, str] | None) -> ssl.SSLContext:
    if isinstance(ca, ssl.SSLContext):
        return ca
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None:
        context.load_cert_chain(*cert)
    return context
