"""Replicas of any Kubernetes resource with a /scale subresource.

A resource is named as `deployments/NAME`, `statefulsets/NAME`, `leaderworkersets/NAME`, or with
group and version as `GROUP/VERSION/PLURAL/NAME`. Counts are set by a merge patch of the scale
alone, never of the object, so no other fields are touched; the answer is verified. A conflict is
retried; a count that another scaler set instead of ours is reported. While a server asks for a
pause (Retry-After) it is not queried: replicas stay, and the next look after that tries again.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.planner.edge.connectors.connector import OneByOne
from select_service.planner.edge.connectors.pods import Pods
from select_service.planner.edge.kube import Scaled
from select_service.planner.errors import ConnectorError, SettingsError
from select_service.planner.types import PoolState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.planner.edge.kube import Kube, KubeAnswer
    from select_service.planner.types import PoolKey

TRIES_MAX: Final = 3
_FORBIDDEN, _NOT_FOUND, _CONFLICT = 403, 404, 409
_TOO_MANY, _UNAVAILABLE = 429, 503
_KNOWN: Final = {
    "deployments": "apps/v1",
    "statefulsets": "apps/v1",
    "replicasets": "apps/v1",
    "leaderworkersets": "leaderworkerset.x-k8s.io/v1",
    "dynamographdeploymentscalingadapters": "nvidia.com/v1alpha1",
}
_COUNTING: Final = frozenset({"deployments", "statefulsets", "replicasets", "leaderworkersets"})
"""Kinds that report `readyReplicas` and omit it if it is 0. A scaling adapter does not have it."""
_SHORT, _LONG = 2, 4


def path_of(resource: str, namespace: str) -> str:
    """Return the path of a resource.

    Raises:
        SettingsError: its name has another form.
    """
    parts = resource.split("/")
    if len(parts) == _SHORT and parts[0] in _KNOWN:
        parts = [*_KNOWN[parts[0]].split("/"), *parts]
    if len(parts) != _LONG or not all(parts):
        known = ", ".join(f"{one}/NAME" for one in _KNOWN)
        raise SettingsError(f"resource {resource!r}: want {known} or GROUP/VERSION/PLURAL/NAME")
    group, version, plural, name = parts
    return f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}"


class KubernetesConnector(OneByOne):
    """Scales resources of one namespace.

    Args:
        kube: the API server.
        resources: by pool.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        kube: Kube,
        resources: Mapping[PoolKey, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._kube = kube
        self._clock = clock
        self._again_at = -math.inf  # no requests before that time
        self._paths = {
            pool: path_of(resource, kube.namespace) for pool, resource in resources.items()
        }
        self._count_ready = {
            path for path in self._paths.values() if path.rsplit("/", 2)[1] in _COUNTING
        }

    def pods(self) -> dict[PoolKey, Pods]:
        """Return the pods of every pool, to choose which of them go."""
        namespace = self._kube.namespace
        return {pool: Pods(self._ask, namespace, path) for pool, path in self._paths.items()}

    async def close(self) -> None:
        """Close the connections."""
        await self._kube.close()

    @override
    async def _state(self, pool: PoolKey) -> PoolState:
        path = self._paths[pool]
        scale = _scaled(await self._ask("GET", f"{path}/scale"), f"{path}/scale")
        parent = await self._ask("GET", path)
        ready = None
        if parent.status != _FORBIDDEN:
            ready = _scaled(parent, path).status.ready_replicas
            if ready is not None:
                self._count_ready.add(path)
            elif path in self._count_ready:
                ready = 0
        if ready is None:  # it may only be scaled, or does not show it: take what the scale says
            ready = scale.status.replicas or 0
        return PoolState(scale.spec.replicas, ready)

    @override
    async def _set(self, pool: PoolKey, replicas: int) -> None:
        path = self._paths[pool]
        body = {"spec": {"replicas": replicas}}
        answer = await self._ask("PATCH", f"{path}/scale", body)
        for _ in range(TRIES_MAX - 1):
            if answer.status != _CONFLICT:
                break
            answer = await self._ask("PATCH", f"{path}/scale", body)
        got = _scaled(answer, f"{path}/scale").spec.replicas
        if got != replicas:
            raise ConnectorError(f"{path}/scale: asked for {replicas}, it says {got}")

    async def _ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> KubeAnswer:
        left_s = self._again_at - self._clock()
        if left_s > 0:
            raise ConnectorError(
                f"{path}: not asked, the server wants to be left alone for {left_s:.0f} s more"
            )
        answer = await self._kube.ask(method, path, body, merge=body is not None)
        if answer.retry_after_s and answer.status in (_TOO_MANY, _UNAVAILABLE):
            self._again_at = self._clock() + answer.retry_after_s
        return answer


def _scaled(answer: KubeAnswer, path: str) -> Scaled:
    if answer.status == _NOT_FOUND:
        raise ConnectorError(f"{path}: there is none (404): a wrong name, or it has no /scale")
    return answer.read(path, Scaled)
