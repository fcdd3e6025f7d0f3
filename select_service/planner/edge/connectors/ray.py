"""Replicas inside Ray: deployments of Ray Serve, or an actor that scales a pool of its own.

`serve/APPLICATION/DEPLOYMENT` uses Serve's REST API, without Ray in this process: the running
configuration is read, one number is changed, and it is put back. `actor/NAMESPACE/NAME` is an actor
with `replicas() -> (desired, ready)` and `scale(replicas)`; that needs Ray, imported only then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec
from typing_extensions import override

from indexer.http_client import http_client
from select_service.planner.edge.connectors.connector import OneByOne
from select_service.planner.edge.http_answers import OK, whole_answer
from select_service.planner.edge.ray_cluster import joined
from select_service.planner.errors import ConnectorError, SettingsError
from select_service.planner.types import PoolState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import httpx

    from select_service.planner.types import PoolKey

PATH: Final = "/api/serve/applications/"
TIMEOUT_S: Final = 10.0
_JSON: Final = {"content-type": "application/json"}
_PARTS: Final = 3
_REFUSED: Final = 300
_RUNNING: Final = "RUNNING"


class _Deployment(msgspec.Struct):
    target_num_replicas: int | None = None
    replicas: list[dict[str, Any]] = []
    deployment_config: dict[str, Any] = {}


class _Application(msgspec.Struct):
    deployments: dict[str, _Deployment] = {}
    deployed_app_config: dict[str, Any] | None = None


class _Applications(msgspec.Struct):
    applications: dict[str, _Application] = {}


class RayConnector(OneByOne):
    """Scales pools of one Ray cluster.

    Args:
        resources: by pool.
        dashboard: address of Serve's REST API, for `serve/` resources.
        credentials: returns the header with the bearer token, if the cluster requires one
            (`RAY_AUTH_MODE=token`).
        client: asks; it is closed with this.

    Raises:
        SettingsError: a resource has another form, or is an actor and there is no cluster.
        MissingExtra: a resource is an actor, and Ray is not installed.
    """

    def __init__(
        self,
        resources: Mapping[PoolKey, str],
        dashboard: str = "http://127.0.0.1:8265",
        credentials: Callable[[], Mapping[str, str]] | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__()
        self._parts = {pool: _parts(resource) for pool, resource in resources.items()}
        self._url = dashboard.rstrip("/") + PATH
        self._credentials = credentials or dict
        self._client = client or http_client(TIMEOUT_S, has_credentials=True)
        has_actors = any(parts[0] == "actor" for parts in self._parts.values())
        self._ray = joined("a resource actor/NAMESPACE/NAME") if has_actors else None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @override
    async def _state(self, pool: PoolKey) -> PoolState:
        kind, scope, name = self._parts[pool]
        if kind == "actor":
            desired, ready = await self._call(scope, name, "replicas")
            return PoolState(int(desired), int(ready))
        deployment = (await self._application(scope)).deployments.get(name)
        if deployment is None:
            raise ConnectorError(f"Serve application {scope} has no deployment {name}")
        ready = sum(one.get("state") == _RUNNING for one in deployment.replicas)
        desired = deployment.target_num_replicas
        if desired is None:
            desired = int(deployment.deployment_config.get("num_replicas") or ready)
        return PoolState(desired, ready)

    @override
    async def _set(self, pool: PoolKey, replicas: int) -> None:
        kind, scope, name = self._parts[pool]
        if kind == "actor":
            await self._call(scope, name, "scale", replicas)
            return
        answer = await self._applications()
        configs = []
        for app_name, application in answer.applications.items():
            config = application.deployed_app_config
            if config is None:
                raise ConnectorError(
                    f"Serve application {app_name} was not deployed by a config: its replicas "
                    "cannot be set over REST"
                )
            configs.append(_with(config, name, replicas) if app_name == scope else config)
        await self._send("PUT", {"applications": configs})

    async def _application(self, name: str) -> _Application:
        found = (await self._applications()).applications.get(name)
        if found is None:
            raise ConnectorError(f"{self._url}: no Serve application {name}")
        return found

    async def _applications(self) -> _Applications:
        return await self._send("GET", None)

    async def _send(self, method: str, body: dict[str, Any] | None) -> _Applications:
        try:
            page = await whole_answer(
                self._client,
                method,
                self._url,
                within_s=TIMEOUT_S,
                failure=ConnectorError,
                headers=lambda: {**self._credentials(), **({} if body is None else _JSON)},
                content=None if body is None else msgspec.json.encode(body),
            )
            if not OK <= page.status < _REFUSED:
                raise ConnectorError(f"answered {page.status}")  # noqa: TRY301 - reported below
            return msgspec.json.decode(page.body if method == "GET" else b"{}", type=_Applications)
        except (ConnectorError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ConnectorError(f"{self._url}: {error}") from error

    async def _call(self, namespace: str, name: str, method: str, *arguments: int) -> Any:
        ray = self._ray
        assert ray is not None, "an actor is named"

        def call() -> Any:
            actor = ray.get_actor(name, namespace=namespace)
            return ray.get(getattr(actor, method).remote(*arguments), timeout=TIMEOUT_S)

        try:
            return await asyncio.to_thread(call)
        except (ValueError, TimeoutError, AttributeError, ray.exceptions.RayError) as error:
            raise ConnectorError(f"actor {namespace}/{name}: {error}") from error


def _parts(resource: str) -> tuple[str, str, str]:
    parts = resource.split("/")
    if len(parts) != _PARTS or parts[0] not in ("serve", "actor") or not all(parts):
        raise SettingsError(
            f"resource {resource!r}: want serve/APPLICATION/DEPLOYMENT or actor/NAMESPACE/NAME"
        )
    kind, scope, name = parts
    return kind, scope, name


def _with(config: dict[str, Any], deployment: str, replicas: int) -> dict[str, Any]:
    """Return the configuration with another number of replicas for one deployment."""
    others = [one for one in config.get("deployments", []) if one.get("name") != deployment]
    mine = next(
        (one for one in config.get("deployments", []) if one.get("name") == deployment),
        {"name": deployment},
    )
    mine = {key: value for key, value in mine.items() if key != "autoscaling_config"}
    return config | {"deployments": [*others, mine | {"num_replicas": replicas}]}
