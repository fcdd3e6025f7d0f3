"""A client of a Kubernetes API server, using httpx and the token mounted into the pod.

The token is read again for every request, as it is rotated. The connector and the lease use this.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import httpx
import msgspec
import orjson

from select_service.planner.errors import ConnectorError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OK", "Kube", "KubeAnswer"]

MOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0
RETRY_AFTER_MAX_S: Final = 60.0
"""A longer Retry-After of the server is shortened to this."""
OK: Final = 200
Json: TypeAlias = dict[str, object]
_T = TypeVar("_T")


class KubeAnswer(msgspec.Struct, frozen=True):
    """Status and body of one answer."""

    status: int
    body: Json
    retry_after_s: float = 0.0
    """Seconds before the next request is welcome; 0: the server did not say."""

    @property
    def said(self) -> str:
        """The server's error message."""
        message = self.body.get("message")
        return f"{self.status}: {message}" if message else str(self.status)

    def read(self, what: str, kind: type[_T]) -> _T:
        """Return the body.

        Raises:
            ConnectorError: it is a refusal, or the body is no such thing; `what` names it.
        """
        if self.status != OK:
            raise ConnectorError(f"{what}: {self.said}")
        try:
            return msgspec.convert(self.body, type=kind)
        except msgspec.ValidationError as error:
            raise ConnectorError(f"{what}: {error}") from error


class Kube:
    """One API server.

    Args:
        url: of the server.
        namespace: of all requests.
        token_file: read for every request; None: no token is sent.
        ca_file: the authority of the server's certificate; None: the usual ones.
        client: for tests.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self.namespace = namespace
        self._url = url.rstrip("/")
        self._token_file = token_file
        if client is None:
            trust = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
            client = httpx.AsyncClient(verify=trust, timeout=TIMEOUT_S)
        self._client = client

    @classmethod
    def in_cluster(cls, url: str | None, namespace: str | None) -> Kube:
        """Return the API server of the pod this runs in, or the given one.

        Raises:
            SettingsError: there is none.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if url is None:
            if not host:
                raise SettingsError("--kubernetes-api is needed outside of a pod")
            port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        token, ca = MOUNT / "token", MOUNT / "ca.crt"
        mounted = MOUNT / "namespace"
        if namespace is None:
            namespace = mounted.read_text().strip() if mounted.is_file() else "default"
        return cls(
            url,
            namespace,
            token if token.is_file() else None,
            ca if ca.is_file() and url.startswith("https") else None,
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        merge: bool = False,
    ) -> KubeAnswer:
        """Send one request.

        An error need not be JSON: a load balancer in front of the server has pages of its own.

        Raises:
            ConnectorError: there was no complete answer in time, or a 200 without JSON.
        """
        kind = "application/merge-patch+json" if merge else "application/json"
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = kind
        try:
            if self._token_file is not None:
                headers["authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._client.request(
                    method,
                    self._url + path,
                    content=None if body is None else orjson.dumps(body),
                    headers=headers,
                )
        except TimeoutError as error:
            why = f"no whole answer within {TIMEOUT_S:g} s"
            raise ConnectorError(f"{method} {path}: {why}") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise ConnectorError(
                f"{method} {path}: {str(error) or type(error).__name__}"
            ) from error
        try:
            found = msgspec.json.decode(response.content or b"{}", type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if response.is_success:
                raise ConnectorError(f"{method} {path}: {error}") from error
            found = {}
        told = response.headers.get("retry-after", "")
        # API servers send whole seconds; a date would come from a proxy
        wait_s = min(float(told), RETRY_AFTER_MAX_S) if told.isdecimal() else 0.0
        return KubeAnswer(response.status_code, found, wait_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
