"""The Kubernetes API server: where it is, who we are there, and what its refusals say.

Discovery (lists and watches) and the planner (scales, pods, leases) build on it. The token is read
again for every request and the CA for every connection, as both rotate.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from indexer.followed_trust import FollowedTrust
from indexer.http_client import ProxyUnusable, http_client

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

MOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where pods find token, ca.crt and namespace."""

RETRY_AFTER_MAX_S: Final = 60.0
"""A longer Retry-After of a server, or of another source of discovery, is shortened to this."""

_GONE: Final = 410
_EXPIRED: Final = frozenset({"Expired", "Gone"})


class KubernetesError(Exception):
    """The server cannot be asked: `kind` is "unconfigured" or "credentials", the text says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class _Details(msgspec.Struct):
    retryAfterSeconds: float | None = None


class KubernetesStatus(msgspec.Struct):
    """The body of a refusal, and of an ERROR in a watch."""

    code: int | None = 0
    reason: str | None = ""
    message: str | None = ""
    details: _Details | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the version watched from is too old."""
        return self.code == _GONE or self.reason in _EXPIRED

    def retry_after_s(self, headers: Mapping[str, str] | None = None) -> float:
        """Return the seconds before the next request is welcome; 0: the server did not say."""
        delay = "" if headers is None else headers.get("retry-after", "")
        if delay.isdecimal():  # API servers send whole seconds; a date would come from a proxy
            wait_s = float(delay)
        else:
            wait_s = 0.0 if self.details is None else self.details.retryAfterSeconds or 0.0
        return min(wait_s, RETRY_AFTER_MAX_S)


class KubernetesApi:
    """The API server and our credentials."""

    def __init__(
        self,
        url: str | None,
        credentials: str = MOUNT,
        namespace: str | None = None,
        *,
        objects_max: int | None = None,
        proxy_from_environment: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            url: of the API server; None: from the environment.
            credentials: the folder with token, ca.crt and namespace, as mounted into pods.
            namespace: None: that of the service account.
            objects_max: most objects a list may have; None: any number.
            proxy_from_environment: ask through the proxy that the environment names.
        """
        self.objects_max = objects_max
        self._url = url
        self._folder = Path(credentials)
        self._namespace = namespace
        self._proxy_from_environment = proxy_from_environment

    @property
    def url(self) -> str:
        """The URL of the API server.

        Raises:
            KubernetesError: it is not configured.
        """
        if self._url is not None:
            return self._url.rstrip("/")
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise KubernetesError("unconfigured", "no --kubernetes-api, and not in a cluster")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    @property
    def namespace(self) -> str:
        """The namespace to look in.

        Raises:
            KubernetesError: that of the service account cannot be read.
        """
        return self._namespace or self._mounted("namespace") or "default"

    def headers(self) -> dict[str, str]:
        """Return the request headers; the token is replaced every hour or so.

        Raises:
            KubernetesError: the token cannot be read.
        """
        token = self._mounted("token")
        headers = {"accept": "application/json"}
        return headers | ({"authorization": f"Bearer {token}"} if token else {})

    def client(self, timeout: httpx.Timeout) -> httpx.AsyncClient:
        """Open a client that trusts the cluster's current CA.

        Args:
            timeout: of its requests.

        Raises:
            KubernetesError: there is no server, or the CA or the proxy cannot be used.
        """
        ca = self._folder / "ca.crt"
        try:
            trust = FollowedTrust(ca) if ca.exists() else ssl.create_default_context()
        except (OSError, ssl.SSLError) as error:
            raise KubernetesError("credentials", f"{ca}: {error}") from None
        try:
            return http_client(
                timeout,
                tls=trust,
                has_credentials=True,
                from_environment=self._proxy_from_environment,
                base_url=self.url,
            )
        except ProxyUnusable as error:
            raise KubernetesError("unconfigured", str(error)) from None

    def _mounted(self, name: str) -> str:
        try:
            return (self._folder / name).read_text("ascii").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise KubernetesError("credentials", f"{self._folder / name}: {error}") from None
