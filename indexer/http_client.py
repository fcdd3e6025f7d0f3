"""The one place where HTTP clients are constructed, for every process of the service and planner.

Peers are asked directly: a proxy named by the environment would see their tokens, and often cannot
reach them. It takes a flag to use one (`--proxy-from-environment`); even then credentials go
through it only inside TLS. The SDK has its own transport, which knows no proxies.
"""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import httpx
    import requests

    Timeout: TypeAlias = httpx.Timeout | float

_TRUST: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_DIRECT: Final = {"http://": None}


class ProxyUnusable(Exception):
    """The environment names a proxy that cannot be used."""


def http_client(
    timeout: Timeout,
    *,
    tls: ssl.SSLContext | bool = True,
    has_credentials: bool = False,
    from_environment: bool = False,
    **options: Any,
) -> httpx.AsyncClient:
    """Return a client that follows no redirects.

    Args:
        timeout: of each step of a request, in seconds.
        tls: what to trust; True: the authorities of SSL_CERT_FILE or SSL_CERT_DIR, or those that
            all trust; False: no server is verified, for clients of http:// alone.
        has_credentials: whether requests may carry any, which no proxy may read.
        from_environment: ask through the proxies that HTTP_PROXY, HTTPS_PROXY and ALL_PROXY name,
            except what NO_PROXY names.
        options: others of httpx.AsyncClient.

    Raises:
        ProxyUnusable: the environment names a proxy of an unknown kind.
    """
    import httpx  # a tenth of a second, only where it is needed

    if tls is True and any(map(os.environ.get, _TRUST)):
        tls = ssl.create_default_context()  # OpenSSL reads them; httpx would, with the proxies
    options["mounts"] = _DIRECT if has_credentials else None
    try:
        return httpx.AsyncClient(
            timeout=timeout,
            verify=tls,
            trust_env=from_environment,
            follow_redirects=False,
            **options,
        )
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        if not from_environment:
            raise
        raise ProxyUnusable(f"the proxy of the environment: {error}") from None


def collector_session(
    *, has_credentials: bool = False, from_environment: bool = False
) -> requests.Session:
    """Return a session for OpenTelemetry's exporter, which takes no other client.

    Args:
        has_credentials: as for `http_client`.
        from_environment: as for `http_client`; of certificates, too.
    """
    import requests

    class Session(requests.Session):
        def merge_environment_settings(self, url: Any, *settings: Any, **named: Any) -> Any:
            found = super().merge_environment_settings(url, *settings, **named)
            if has_credentials and str(url).startswith("http:"):
                found["proxies"] = {}
            return found

    session = Session()
    session.trust_env = from_environment
    session.auth = lambda request: request  # none out of a netrc
    return session
