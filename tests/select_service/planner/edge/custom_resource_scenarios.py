"""What the planner makes of custom resources on a real API server.

See `tests/select_service/edge/discovery/apiserver_scenarios.py`.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.errors import ConnectorError
from select_service.planner.types import PoolState
from tests.live import custom_resources as custom
from tests.live.apiserver import Admin
from tests.live.recorded_apiserver import Scenario, World
from tests.select_service.edge.discovery import apiserver_scenarios as cluster
from tests.select_service.planner.edge.apiserver_scenarios import ROLE, kube_of, status_of
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, target

SET: Final = custom.path(custom.LEADER_WORKER_SET, "decode")
ADAPTER: Final = custom.path(custom.SCALING_ADAPTER, "decode")
LWS_LABEL: Final = "leaderworkerset.sigs.k8s.io"
LEADERS: Final = f"{LWS_LABEL}/name=decode,{LWS_LABEL}/worker-index=0"
"""A set's selector names the leaders of its groups alone."""
GROUP: Final = {"leaderWorkerTemplate": {"size": 2, "workerTemplate": {"spec": {}}}}
TARGET: Final = {"dgdRef": {"name": "llama", "serviceName": "Decode"}}


def leader_worker_set(admin: Admin) -> None:
    """Three groups, of which nobody has said anything yet."""
    custom.define(admin, custom.LEADER_WORKER_SET)
    custom.create(admin, custom.LEADER_WORKER_SET, "decode", {"replicas": 3, **GROUP})


def groups(admin: Admin) -> None:
    """Two groups of a leader and a worker."""
    for group in range(2):
        for worker in range(2):
            name = f"decode-{group}" + (f"-{worker}" if worker else "")
            cluster.run(name, f"10.2.{group}.{worker + 1}")(admin)
            labels = {f"{LWS_LABEL}/name": "decode", f"{LWS_LABEL}/worker-index": str(worker)}
            cluster.patch(f"{cluster.PODS}/{name}", {"metadata": {"labels": labels}})(admin)


async def leader_worker_sets(world: World) -> None:
    """Groups are counted, scaled and drained by their leaders."""
    await world.step("a set", leader_worker_set)
    connector = KubernetesConnector(kube_of(world), {DECODE: "leaderworkersets/decode"})
    pods = connector.pods()[DECODE]

    async def is_now(desired: int, ready: int) -> None:
        states = await connector.states([DECODE])
        assert states == {DECODE: PoolState(desired, ready)}, connector.problems

    await is_now(3, 0)
    with pytest.raises(ConnectorError, match="names no selector"):
        await pods.there()
    said: Any = {"status": {"replicas": 3, "readyReplicas": 2, "hpaPodSelector": LEADERS}}
    await world.step(
        "two groups are ready", cluster.both(cluster.patch(f"{SET}/status", said), groups)
    )
    await is_now(3, 2)
    found = await pods.there()
    assert [one.metadata.name for one in pods.by_ordinal(found)] == ["decode-1", "decode-0"]
    assert not (await connector.apply([target(DECODE, 5)], [])).failed
    await is_now(5, 2)
    none: Any = {"status": {"readyReplicas": None}}
    await world.step("none is ready", cluster.patch(f"{SET}/status", none))
    await is_now(5, 0)
    assert not (await connector.apply([target(DECODE, 0)], [])).failed
    await is_now(0, 0)
    await world.step("its kind goes", lambda admin: custom.forget(admin, custom.LEADER_WORKER_SET))
    assert await connector.states([DECODE]) == {}
    assert "there is none (404)" in connector.problems[DECODE]
    await connector.close()


def scaling_adapter(admin: Admin) -> None:
    custom.define(admin, custom.SCALING_ADAPTER)
    custom.create(admin, custom.SCALING_ADAPTER, "decode", {"replicas": 4, **TARGET})


def allow(group: str, plural: str) -> Any:
    """Add to our rights what the page about the planner says of other kinds."""

    def done(admin: Admin) -> None:
        rules = admin.do("GET", ROLE)["rules"]
        rules.append({"apiGroups": [group], "resources": [plural], "verbs": ["get"]})
        scale = {"resources": [f"{plural}/scale"], "verbs": ["get", "patch"]}
        rules.append({"apiGroups": [group], **scale})
        admin.do("PATCH", ROLE, {"rules": rules})

    return done


async def scaling_adapters(world: World) -> None:
    """An adapter does not say how many are ready: those that its scale counts are."""
    await world.step("an adapter", scaling_adapter)
    plural = "dynamographdeploymentscalingadapters"
    resources = {DECODE: f"{plural}/decode", PREFILL: f"nvidia.com/v1beta1/{plural}/decode"}
    connector = KubernetesConnector(kube_of(world), resources)
    assert await connector.states([DECODE]) == {}
    assert f'cannot get resource "{plural}/scale"' in connector.problems[DECODE]
    await world.step("we have the right", allow("nvidia.com", plural))
    both = [DECODE, PREFILL]  # two versions of one object

    async def is_now(desired: int, ready: int) -> None:
        expected = PoolState(desired, ready)
        states = await connector.states(both)
        assert states == dict.fromkeys(both, expected), connector.problems

    await is_now(4, 0)
    await world.step("its controller counts", status_of(ADAPTER, replicas=4))
    await is_now(4, 4)
    assert not (await connector.apply([target(DECODE, 1)], [])).failed
    assert not (await connector.apply([target(PREFILL, 0)], [])).failed
    await is_now(0, 4)
    await world.step("it has followed", status_of(ADAPTER, replicas=0))
    await is_now(0, 0)
    await connector.close()


def kinds(admin: Admin) -> None:
    leader_worker_set(admin)
    scaling_adapter(admin)
    custom.define(admin, custom.ENGINE, custom.UNSCALED)
    custom.create(admin, custom.ENGINE, "decode", {})
    custom.create(admin, custom.UNSCALED, "decode", {})
    for definition in (custom.SCALING_ADAPTER, custom.ENGINE, custom.UNSCALED):
        spec = definition["spec"]
        allow(spec["group"], spec["names"]["plural"])(admin)


async def custom_refusals(world: World) -> None:
    """What our requests never are, or ought not to be."""
    await world.step("objects", kinds)
    kube = kube_of(world)

    async def refused(method: str, path: str, body: Any = None, *, merge: bool = True) -> int:
        return (await kube.ask(method, path, body, merge=merge)).status

    for path in (SET, ADAPTER):
        scale = f"{path}/scale"
        old = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 4}}
        assert await refused("PATCH", scale, old) == 409
        assert await refused("PATCH", scale, {"spec": {"replicas": -1}}) == 422
        assert await refused("PATCH", scale, {"spec": {"replicas": "two"}}) in (400, 422, 500)
        assert await refused("PATCH", scale, {"spec": {"replicas": 4}}, merge=False) == 415
        assert await refused("GET", scale.replace("decode", "none")) == 404
    resources = {DECODE: "example.org/v1/engines/decode", PREFILL: "example.org/v1/models/decode"}
    connector = KubernetesConnector(kube, resources)
    assert await connector.states([DECODE, PREFILL]) == {}
    problems = connector.problems
    assert "500" in problems[DECODE], problems
    assert "there is none (404)" in problems[PREFILL]
    outcome = await connector.apply([target(DECODE, 2)], [])
    assert not outcome.failed, outcome
    assert await connector.states([DECODE]) == {DECODE: PoolState(2, 0)}
    await connector.close()


CUSTOM: Final[dict[str, Scenario]] = {
    "leader_worker_sets": leader_worker_sets,
    "scaling_adapters": scaling_adapters,
    "custom_refusals": custom_refusals,
}
