"""What the planner makes of a real API server: scenarios that are recorded, and played again.

See `tests/select_service/edge/discovery/apiserver_scenarios.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from select_service.kubernetes_api import KubernetesApi
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.kube import Kube
from select_service.planner.edge.leases.kubernetes_lease import KubeLease
from select_service.planner.edge.leases.lease import DURATION_S
from select_service.planner.types import PoolState
from tests.live.apiserver import NAMESPACE, Admin
from tests.live.recorded_apiserver import Scenario, World
from tests.select_service.edge.discovery import apiserver_scenarios as cluster
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, Clock, target

DEPLOYMENT: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/decode"
SET: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/prefill"
LEASES: Final = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
ROLE: Final = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/select-planner"
RESOURCES: Final = {DECODE: "deployments/decode", PREFILL: "statefulsets/prefill"}


def kube_of(world: World) -> Kube:
    return Kube(KubernetesApi(world.url, str(world.credentials)))


def deployment(admin: Admin) -> None:
    """Three replicas, two of which are ready."""
    labels = {"app": "vllm"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "vllm"}]},
    }
    spec = {"replicas": 3, "selector": {"matchLabels": labels}, "template": template}
    one = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "decode"}}
    admin.apply(one | {"spec": spec}, "deployments")
    status = {"replicas": 3, "readyReplicas": 2, "updatedReplicas": 3}
    admin.do("PATCH", f"{DEPLOYMENT}/status", {"status": status})


def stateful_set(admin: Admin) -> None:
    """Two replicas, none of which is ready."""
    labels = {"app": "prefill"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "vllm"}]},
    }
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    one = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "prefill"}}
    admin.apply(one | {"spec": spec | {"serviceName": "prefill"}}, "statefulsets")
    admin.do("PATCH", f"{SET}/status", {"status": {"replicas": 2}})


def status_of(path: str, **status: int) -> Callable[[Admin], object]:
    return cluster.patch(f"{path}/status", {"status": status})


async def scaling(world: World) -> None:
    """Counts are read and set."""
    await world.step("pools", cluster.both(deployment, stateful_set))
    connector = KubernetesConnector(kube_of(world), RESOURCES)
    pools = [DECODE, PREFILL]
    states = await connector.states(pools)
    assert states == {DECODE: PoolState(3, 2), PREFILL: PoolState(2, 0)}, connector.problems
    outcome = await connector.apply([target(DECODE, 5), target(PREFILL, 0)], [])
    assert not outcome.failed
    states = await connector.states(pools)
    assert states == {DECODE: PoolState(5, 2), PREFILL: PoolState(0, 0)}
    await world.step(
        "they follow",
        cluster.both(
            status_of(DEPLOYMENT, replicas=5, readyReplicas=5), status_of(SET, replicas=0)
        ),
    )
    assert await connector.states(pools) == {DECODE: PoolState(5, 5), PREFILL: PoolState(0, 0)}
    await world.step("one goes", lambda admin: admin.do("DELETE", DEPLOYMENT))
    assert DECODE not in await connector.states(pools)
    assert "there is none (404)" in connector.problems[DECODE]
    await connector.close()


async def pods_of_a_scale(world: World) -> None:
    """Which pods there are, and the mark of those that go first."""
    await world.step("pods", cluster.both(deployment, cluster.THREE))
    connector = KubernetesConnector(kube_of(world), RESOURCES)
    pods = connector.pods()[DECODE]
    found = {one.metadata.name: one for one in await pods.there()}
    assert set(found) == {"w-0", "w-1", "w-2"}
    assert found["w-0"].addresses == {"10.1.0.1"}
    await pods.mark(found["w-0"], goes_first=True)
    await world.step("one is deleted", cluster.delete("w-1", 30))
    found = {one.metadata.name: one for one in await pods.there()}
    assert set(found) == {"w-0", "w-2"}
    assert found["w-0"].goes_first
    await pods.mark(found["w-0"], goes_first=False)
    assert not any(one.goes_first for one in await pods.there())
    await world.step("and has gone", cluster.delete("w-2", 0))
    await pods.mark(found["w-2"], goes_first=True)  # needs no mark
    await connector.close()


async def leases(world: World) -> None:
    """The lease changes hands."""
    kube, clock = kube_of(world), Clock()
    one, two = (KubeLease(kube, "planner", name, clock) for name in ("one", "two"))
    assert sum(await asyncio.gather(one.held(), two.held())) == 1, "both create it"
    first, second = (one, two) if one.is_sure else (two, one)
    assert not second.problem
    clock.now += DURATION_S - 1
    assert await first.held()
    assert not await second.held()
    clock.now += DURATION_S
    assert await second.held(), "it was not renewed"
    assert not await first.held()
    await second.close()
    assert await first.held(), "it was given back"
    clock.now += 2 * DURATION_S
    assert sum(await asyncio.gather(one.held(), two.held())) == 1, "both take it over"
    await world.step("the rights are taken away", cluster.patch(ROLE, {"rules": []}))
    clock.now += DURATION_S
    assert not await one.held()
    assert "403" in one.problem
    await kube.close()


async def refusals(world: World) -> None:
    """What our requests never are, or ought not to be."""
    await world.step("a Deployment", deployment)
    kube = kube_of(world)

    async def refused(method: str, path: str, body: Any = None, *, merge: bool = True) -> int:
        return (await kube.ask(method, path, body, merge=merge)).status

    scale = f"{DEPLOYMENT}/scale"
    old = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 4}}
    assert await refused("PATCH", scale, old) == 409
    assert await refused("PATCH", scale, {"spec": {"replicas": -1}}) == 422
    assert await refused("PATCH", scale, {"spec": {"replicas": "two"}}) in (400, 422, 500)
    assert await refused("PATCH", scale, {"spec": {"replicas": 4}}, merge=False) == 415
    assert await refused("GET", scale.replace("decode", "none")) == 404
    assert await refused("GET", scale.replace("deployments", "things")) in (403, 404)
    assert await refused("GET", scale.replace("deployments", "replicasets")) == 403
    (world.credentials / "token").write_text("nobody's")
    assert await refused("GET", scale) == 401
    await kube.close()


PLANNER: Final[dict[str, Scenario]] = {
    "scaling": scaling,
    "pods_of_a_scale": pods_of_a_scale,
    "leases": leases,
    "planner_refusals": refusals,
}
