"""Replica counts as Kubernetes, Ray and clients of the virtual connector see them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from select_service.kubernetes_api import KubernetesApi
from select_service.planner.edge import kube as kube_module
from select_service.planner.edge.connectors import connector as connector_module
from select_service.planner.edge.connectors import ray as ray_module
from select_service.planner.edge.connectors.connector import READS_AT_ONCE, OneByOne
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.connectors.ray import RayConnector
from select_service.planner.edge.connectors.virtual import Completion, There, VirtualConnector
from select_service.planner.edge.kube import Kube
from select_service.planner.errors import ConnectorError, MissingExtra, SettingsError
from select_service.planner.types import ModelKey, PoolKey, PoolState
from tests.select_service.planner.edge.fakes import (
    DECODE,
    NOWHERE,
    PREFILL,
    Clock,
    target,
)


async def test_setting_a_pool_ends_before_another_may_have_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of three tries had a time-out of its own: longer than the rest of a lease."""
    monkeypatch.setattr(connector_module, "ACT_S", 0.05)

    class Endless(connector_module.OneByOne):
        async def _state(self, pool: PoolKey) -> PoolState:
            raise AssertionError

        async def _set(self, pool: PoolKey, replicas: int) -> None:
            await asyncio.Event().wait()

    outcome = await Endless().apply([target(PREFILL, 3)], [])
    assert outcome.failed == {PREFILL: "m prefill: not done within 0.05 s"}
    assert not outcome.done


def virtual(clock: Clock, **settings: Any) -> VirtualConnector:
    start = {PREFILL: PoolState(1, 1), DECODE: PoolState(2, 2)}
    return VirtualConnector(start, clock, lambda: 1.5, **settings)


async def test_virtual_decisions_are_issued_completed_and_overtaken() -> None:
    connector = virtual(Clock())
    assert await connector.next(0, 0.0) is None
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(connector.next(0, 30.0))
        await asyncio.sleep(0)  # it waits now
        await connector.apply([target(DECODE, 4)], ["because"])
    issued = waiting.result()
    assert issued is not None
    assert (issued.decision_id, issued.reason) == (1, "because")
    assert {one.role: one.replicas for one in issued.targets} == {"prefill": 1, "decode": 4}
    assert await connector.next(1, 0.0) is None  # nothing newer
    assert (await connector.states([DECODE]))[DECODE] == PoolState(4, 2)
    await connector.apply([target(DECODE, 5)], [])
    assert connector.complete(1, Completion("done"))  # overtaken: changes nothing
    assert (await connector.states([DECODE]))[DECODE] == PoolState(5, 2)
    assert connector.complete(2, Completion("done"))
    assert (await connector.states([DECODE]))[DECODE] == PoolState(5, 5)
    assert not connector.complete(3, Completion("done"))
    assert not connector.complete(0, Completion("done"))


async def test_virtual_failures_and_time_outs() -> None:
    clock = Clock()
    connector = virtual(clock, timeout_s=60.0, first_id=7)
    await connector.apply([target(DECODE, 4)], [])
    failed = Completion("failed", [There("m", "default", "decode", 3)], "no GPUs left")
    assert connector.complete(8, failed)
    assert (await connector.states([DECODE]))[DECODE] == PoolState(3, 3)
    assert "no GPUs left" in connector.problems[DECODE]
    await connector.apply([target(DECODE, 6)], [])
    assert connector.decision_id == 9  # ids go on after a restart
    clock.now += 59.0
    assert (await connector.states([DECODE]))[DECODE] == PoolState(6, 3)
    clock.now += 1.0
    assert (await connector.states([DECODE]))[DECODE] == PoolState(6, 6)
    assert connector.ends == {"done": 0, "failed": 1, "timed_out": 1}


async def test_virtual_decisions_that_were_under_way_are_issued_again_after_a_restart() -> None:
    start = {PREFILL: PoolState(9, 4), DECODE: PoolState(2, 2)}
    connector = VirtualConnector(start, Clock(), lambda: 1.5, first_id=7)
    issued = await connector.next(7, 0.0)
    assert issued is not None
    assert {one.role: one.replicas for one in issued.targets} == {"prefill": 9, "decode": 2}
    assert (await connector.states([PREFILL]))[PREFILL] == PoolState(9, 4)
    assert connector.complete(8, Completion("done"))
    assert (await connector.states([PREFILL]))[PREFILL] == PoolState(9, 9)


async def test_virtual_decisions_reach_clients_that_know_later_ones() -> None:
    """A planner that forgot its past began anew at 1, and a reader at 57 received no more."""
    connector = virtual(Clock())
    assert await connector.next(57, 0.0) is None
    await connector.apply([target(DECODE, 4)], [])
    issued = await connector.next(57, 0.0)
    assert issued is not None
    assert issued.decision_id == 58
    again = await connector.next(90, 0.0)  # another reader, or another planner's
    assert again is not None
    assert (again.decision_id, again.targets) == (91, issued.targets)
    assert connector.complete(58, Completion("done"))  # overtaken
    assert (await connector.states([DECODE]))[DECODE] == PoolState(4, 2)
    assert connector.complete(91, Completion("done"))
    assert (await connector.states([DECODE]))[DECODE] == PoolState(4, 4)
    assert await connector.next(91, 0.0) is None


async def test_virtual_replicas_that_come_after_the_report_are_counted() -> None:
    """Of three that were asked for two were there: the third was waited for, whatever was said."""
    clock = Clock()
    connector = virtual(clock, timeout_s=60.0)

    def done(replicas: int) -> Completion:
        return Completion("done", [There("m", "default", "decode", replicas)])

    await connector.apply([target(DECODE, 5)], [])
    for ready in (4, 5, 4):
        assert connector.complete(1, done(ready))
        assert (await connector.states([DECODE]))[DECODE] == PoolState(5, ready)
    assert connector.ends == {"done": 1, "failed": 0, "timed_out": 0}
    await connector.apply([target(DECODE, 7)], [])
    clock.now += 60.0
    assert (await connector.states([DECODE]))[DECODE] == PoolState(7, 7), "taken for done"
    assert connector.complete(2, done(6))
    assert (await connector.states([DECODE]))[DECODE] == PoolState(7, 6)
    assert connector.complete(1, done(1)), "overtaken"
    assert (await connector.states([DECODE]))[DECODE] == PoolState(7, 6)
    assert connector.ends == {"done": 1, "failed": 0, "timed_out": 1}


async def test_virtual_ids_are_never_led_to_where_nobody_can_follow() -> None:
    """One reader asked for the last id there is, and no other ever received anything again."""
    connector = virtual(Clock(), first_id=7)
    assert await connector.next(2**53 - 1, 0.0) is None
    await connector.apply([target(DECODE, 4)], [])
    issued = await connector.next(7, 0.0)
    assert issued is not None
    assert issued.decision_id == 8
    assert await connector.next(2**52, 0.0) is not None
    assert connector.decision_id < 2**53


async def test_virtual_waits_are_over_when_the_planner_ends() -> None:
    connector = virtual(Clock())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(connector.next(0, 60.0))
        await asyncio.sleep(0)  # it waits now
        connector.end()
    assert waiting.result() is None
    assert await connector.next(0, 60.0) is None  # nor does who comes back at once


class FakeServe:
    """Ray Serve's REST API."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {
            "name": "llm",
            "import_path": "a:b",
            "deployments": [{"name": "Prefill", "autoscaling_config": {"max_replicas": 9}}],
        }
        self.put: Any = None

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/serve/applications/"
        if request.method == "PUT":
            self.put = json.loads(request.content)
            return httpx.Response(200)
        running = [{"state": "RUNNING"}, {"state": "STARTING"}]
        deployments = {"Prefill": {"target_num_replicas": 2, "replicas": running}}
        application = {"deployed_app_config": self.config, "deployments": deployments}
        return httpx.Response(200, json={"applications": {"llm": application}})


async def test_ray_serve_changes_one_number() -> None:
    serve = FakeServe()
    client = httpx.AsyncClient(transport=httpx.MockTransport(serve.answer))
    resources = {PREFILL: "serve/llm/Prefill", DECODE: "serve/llm/Decode"}
    connector = RayConnector(resources, client=client)
    assert await connector.states([PREFILL, DECODE]) == {PREFILL: PoolState(2, 1)}
    assert "no deployment Decode" in connector.problems[DECODE]
    await connector.apply([target(PREFILL, 4)], [])
    (application,) = serve.put["applications"]
    assert application["import_path"] == "a:b"
    assert application["deployments"] == [{"name": "Prefill", "num_replicas": 4}]
    serve.config = None  # type: ignore[assignment] # deployed by code
    outcome = await connector.apply([target(PREFILL, 4)], [])
    assert "was not deployed by a config" in outcome.failed[PREFILL]


async def test_ray_actors_scale_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Method:
        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self, *arguments: int) -> Any:
            asked.append((self.name, *arguments))
            return (3, 2)

    def get_actor(name: str, namespace: str) -> Any:
        if name != "pool":
            raise ValueError(f"no actor {name}")
        asked.append(namespace)
        return SimpleNamespace(replicas=Method("replicas"), scale=Method("scale"))

    ray = SimpleNamespace(
        is_initialized=lambda: True,
        get_actor=get_actor,
        get=lambda found, timeout: found,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    resources = {PREFILL: "actor/llm/pool", DECODE: "actor/llm/gone"}
    connector = RayConnector(resources)
    assert await connector.states([PREFILL, DECODE]) == {PREFILL: PoolState(3, 2)}
    assert "no actor gone" in connector.problems[DECODE]
    await connector.apply([target(PREFILL, 5)], [])
    assert asked == ["llm", ("replicas",), "llm", ("scale", 5)]
    await connector.close()


def test_ray_is_an_extra_and_names_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"the extra ray: pip install 'ray"):
        RayConnector({PREFILL: "actor/a/b"})
    with pytest.raises(SettingsError, match="want serve/APPLICATION/DEPLOYMENT"):
        RayConnector({PREFILL: "deployments/x"})


@pytest.mark.parametrize("replicas", [-1, 2**40])
def test_a_report_of_replicas_nobody_can_have_is_refused(replicas: int) -> None:
    """Below zero they came into the state file, which the next start took for damaged."""
    there = {"model_name": "m", "tenant_id": "default", "role": "decode", "replicas": replicas}
    with pytest.raises(msgspec.ValidationError, match=r"replicas"):
        msgspec.convert({"status": "done", "replicas": [there]}, type=Completion)


async def test_an_answer_that_never_ends_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray_module, "TIMEOUT_S", 0.1)

    class Dribble(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

    def client() -> httpx.AsyncClient:
        answer = httpx.Response(200, stream=Dribble())
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))

    kube = Kube(KubernetesApi("http://kube", str(NOWHERE), "inference"), client())
    for connector in (
        KubernetesConnector(kube, {DECODE: "deployments/decode"}),
        RayConnector({DECODE: "serve/app/decode"}, "http://ray", client=client()),
    ):
        assert await connector.states([DECODE]) == {}
        assert "no whole answer within 0.1 s" in connector.problems[DECODE]


class Slow(OneByOne):
    """Pools of which every read takes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[PoolKey] = []
        self.go = asyncio.Event()

    async def _state(self, pool: PoolKey) -> PoolState:
        self.asked.append(pool)
        await self.go.wait()
        if pool.role == "decode":
            raise ConnectorError(f"{pool}: no answer")
        return PoolState(len(self.asked), 0)

    async def _set(self, pool: PoolKey, replicas: int) -> None:
        raise AssertionError


async def test_one_pool_that_hangs_holds_up_no_other() -> None:
    """They were read one after the other: ten seconds for each where the server hangs."""
    pools = [
        PoolKey(ModelKey(f"m{index}"), role)
        for index in range(READS_AT_ONCE)
        for role in ("prefill", "decode")
    ]
    slow = Slow()
    reading = asyncio.ensure_future(slow.states(pools))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(slow.asked) == READS_AT_ONCE, "a server is not asked for hundreds at once"
    slow.go.set()
    found = await reading
    assert list(found) == [one for one in pools if one.role == "prefill"]
    assert list(slow.problems) == [one for one in pools if one.role == "decode"]
