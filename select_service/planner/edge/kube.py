"""Single requests to a Kubernetes API server, for the connector, its pods and the lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import httpx
import msgspec
import orjson

from select_service.kubernetes_api import KubernetesError, KubernetesStatus
from select_service.planner.edge.http_answers import OK, whole_answer
from select_service.planner.errors import ConnectorError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.kubernetes_api import KubernetesApi

TIMEOUT_S: Final = 10.0
_REFUSED: Final = 300
Json: TypeAlias = dict[str, object]
_T = TypeVar("_T")


class KubeAnswer(msgspec.Struct, frozen=True):
    """Status and body of one answer."""

    status: int
    body: Json
    retry_after_s: float = 0.0
    """Seconds before the next request is welcome; 0: the server did not say."""

    @property
    def problem(self) -> str:
        """The server's error message."""
        message = self.body.get("message")
        return f"{self.status}: {message}" if message else str(self.status)

    def read(self, what: str, kind: type[_T]) -> _T:
        """Return the body.

        Raises:
            ConnectorError: it is a refusal, or the body is no such thing; `what` names it.
        """
        if self.status != OK:
            raise ConnectorError(f"{what}: {self.problem}")
        try:
            return msgspec.convert(self.body, type=kind)
        except msgspec.ValidationError as error:
            raise ConnectorError(f"{what}: {error}") from error


class _Spec(msgspec.Struct, frozen=True):
    replicas: int = 0


class _Status(msgspec.Struct, rename="camel", frozen=True):
    replicas: int | None = None
    ready_replicas: int | None = None
    selector: str = ""


class Scaled(msgspec.Struct, frozen=True):
    """A scale, or an object that has one; other fields are ignored."""

    spec: _Spec = _Spec()
    status: _Status = _Status()


class Kube:
    """One API server.

    Args:
        api: where it is, and our credentials.
        client: for tests.

    Raises:
        SettingsError: there is none, or its CA cannot be read.
    """

    def __init__(self, api: KubernetesApi, client: httpx.AsyncClient | None = None) -> None:
        self._api = api
        try:
            self.namespace = api.namespace
            self._url = api.url
            self._client = client or api.client(httpx.Timeout(TIMEOUT_S))
        except KubernetesError as error:
            raise SettingsError(str(error)) from error

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
        try:
            headers = self._api.headers()
            if body is not None:
                headers["content-type"] = kind
            page = await whole_answer(
                self._client,
                method,
                self._url + path,
                within_s=TIMEOUT_S,
                failure=ConnectorError,
                headers=headers,
                content=None if body is None else orjson.dumps(body),
            )
        except (ConnectorError, KubernetesError) as error:
            raise ConnectorError(f"{method} {path}: {error}") from error
        try:
            found = msgspec.json.decode(page.body or b"{}", type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if page.status < _REFUSED:
                raise ConnectorError(f"{method} {path}: {error}") from error
            found = {}
        wait_s = KubernetesStatus().retry_after_s(page.headers)
        return KubeAnswer(page.status, found, wait_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
