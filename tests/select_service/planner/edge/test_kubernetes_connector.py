"""Replica counts in Kubernetes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from select_service.kubernetes_api import KubernetesApi
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector, path_of
from select_service.planner.edge.kube import Kube
from select_service.planner.errors import SettingsError
from select_service.planner.types import PoolState
from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server
from tests.select_service.planner.edge.fakes import (
    DECODE,
    NOWHERE,
    PREFILL,
    Clock,
    FakeKube,
    target,
)

RESOURCES = {PREFILL: "deployments/prefill", DECODE: "apps/v1/deployments/decode"}


async def test_kubernetes_patches_scales_and_nothing_else(tmp_path: Path) -> None:
    fake = FakeKube()
    fake.deployment("prefill", 3, 2)
    fake.deployment("decode", 6, 6)
    token = tmp_path / "token"
    token.write_text("first\n")
    connector = KubernetesConnector(fake.kube(tmp_path), RESOURCES)
    states = await connector.states([PREFILL, DECODE])
    assert states == {PREFILL: PoolState(3, 2), DECODE: PoolState(6, 6)}
    token.write_text("second\n")  # it is rotated
    outcome = await connector.apply([target(DECODE, 9)], [])
    assert [one.replicas for one in outcome.done] == [9]
    method, path, headers, body = fake.asked[-1]
    assert (method, body) == ("PATCH", {"spec": {"replicas": 9}})
    assert path == "/apis/apps/v1/namespaces/inference/deployments/decode/scale"
    assert headers["content-type"] == "application/merge-patch+json"
    assert headers["authorization"] == "Bearer second"
    assert (await connector.states([DECODE]))[DECODE] == PoolState(9, 6)
    await connector.close()


async def test_kubernetes_conflicts_are_tried_again_and_refusals_reported() -> None:
    fake = FakeKube()
    fake.deployment("prefill", 3, 3)
    connector = KubernetesConnector(fake.kube(), RESOURCES)
    fake.conflicts = 2
    outcome = await connector.apply([target(PREFILL, 5), target(DECODE, 2)], [])
    assert [one.pool for one in outcome.done] == [PREFILL]
    assert "there is none (404)" in outcome.failed[DECODE]
    fake.conflicts = 9
    outcome = await connector.apply([target(PREFILL, 4)], [])
    assert "409: the object has been modified" in outcome.failed[PREFILL]
    fake.conflicts, fake.caps_at = 0, 2  # somebody else scales it, too
    outcome = await connector.apply([target(PREFILL, 4)], [])
    assert "asked for 4, it says 2" in outcome.failed[PREFILL]
    assert DECODE not in await connector.states([PREFILL, DECODE])
    assert "404" in connector.problems[DECODE]
    fake.is_down = True
    assert await connector.states([PREFILL]) == {}
    assert "connection refused" in connector.problems[PREFILL]


@pytest.mark.parametrize("status", [401, 403, 410, 422, 429, 500, 503])
async def test_kubernetes_refusals_leave_pools_alone_until_they_are_over(
    status: int,
) -> None:
    fake = FakeKube()
    fake.deployment("prefill", 3, 3)
    connector = KubernetesConnector(fake.kube(), RESOURCES)
    fake.refuses = status
    assert await connector.states([PREFILL]) == {}
    assert str(status) in connector.problems[PREFILL]
    outcome = await connector.apply([target(PREFILL, 5)], [])
    assert not outcome.done
    assert str(status) in outcome.failed[PREFILL]
    fake.refuses = 0
    assert (await connector.states([PREFILL]))[PREFILL] == PoolState(3, 3)
    assert not connector.problems
    assert (await connector.apply([target(PREFILL, 5)], [])).done


@pytest.mark.parametrize("status", [429, 503])
async def test_kubernetes_is_left_alone_for_as_long_as_it_asks(status: int) -> None:
    fake, clock = FakeKube(), Clock()
    fake.deployment("prefill", 3, 3)
    connector = KubernetesConnector(fake.kube(), RESOURCES, clock)
    fake.refuses, fake.retry_after = status, "7"
    outcome = await connector.apply([target(PREFILL, 5)], [])
    assert str(status) in outcome.failed[PREFILL]
    asked = len(fake.asked)
    assert asked == 1, "not tried again at once"
    fake.refuses = 0
    clock.now += 6.5
    assert await connector.states([PREFILL]) == {}
    assert "left alone" in connector.problems[PREFILL]
    assert "left alone" in (await connector.apply([target(PREFILL, 5)], [])).failed[PREFILL]
    assert len(fake.asked) == asked
    clock.now += 0.5
    assert (await connector.apply([target(PREFILL, 5)], [])).done
    # a date, or hours: what no API server sends
    for retry_after, longest_s in (("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("86400", 60.0)):
        fake.refuses, fake.retry_after = status, retry_after
        assert await connector.states([PREFILL]) == {}
        fake.refuses = 0
        clock.now += longest_s
        assert await connector.states([PREFILL]) == {PREFILL: PoolState(5, 3)}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (httpx.RemoteProtocolError("peer closed connection"), "peer closed connection"),
        (httpx.ReadError("connection reset by peer"), "connection reset by peer"),
    ],
    ids=["slow", "ends", "reset"],
)
async def test_kubernetes_that_breaks_off_changes_nothing(broken: Exception, reason: str) -> None:
    fake = FakeKube()
    fake.deployment("prefill", 3, 3)
    fake.deployment("decode", 2, 2)
    connector = KubernetesConnector(fake.kube(), RESOURCES)
    fake.breaks = broken
    assert await connector.states([PREFILL, DECODE]) == {}
    assert reason in connector.problems[PREFILL]
    outcome = await connector.apply([target(PREFILL, 5), target(DECODE, 1)], [])
    assert not outcome.done
    assert reason in outcome.failed[DECODE]
    fake.breaks = None
    states = await connector.states([PREFILL, DECODE])
    assert states == {PREFILL: PoolState(3, 3), DECODE: PoolState(2, 2)}


async def test_kubernetes_that_is_slow_is_given_up() -> None:
    """A real socket that never answers."""
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side gives up
        gone.set()

    async with tcp_server(listen) as port:
        impatient = httpx.AsyncClient(timeout=httpx.Timeout(None, read=0.05))
        kube = Kube(KubernetesApi(f"http://{HOST}:{port}", str(NOWHERE), "n"), impatient)
        connector = KubernetesConnector(kube, RESOURCES)
        assert await connector.states([PREFILL]) == {}
        assert "ReadTimeout" in connector.problems[PREFILL]
        await connector.close()
        await gone.wait()


async def test_kubernetes_scales_to_nothing_and_back() -> None:
    """An API server leaves numbers out that are 0."""
    fake = FakeKube()
    fake.deployment("prefill", 3, 3)
    connector = KubernetesConnector(fake.kube(), RESOURCES)
    assert (await connector.apply([target(PREFILL, 0)], [])).done
    assert (await connector.states([PREFILL]))[PREFILL] == PoolState(0, 3)
    assert (await connector.apply([target(PREFILL, 2)], [])).done
    invalid = await connector.apply([target(PREFILL, -1)], [])
    assert "422: spec.replicas: Invalid value" in invalid.failed[PREFILL]


async def test_kubernetes_replicas_that_die_are_starting_again() -> None:
    fake = FakeKube()
    fake.deployment("prefill", 3, 0)
    path = "/apis/apps/v1/namespaces/inference/deployments/prefill"
    del fake.objects[path]["status"]["readyReplicas"]  # as Kubernetes does for none
    connector = KubernetesConnector(fake.kube(), RESOURCES)
    state = (await connector.states([PREFILL]))[PREFILL]
    assert (state.desired, state.ready, state.starting) == (3, 0, 3)


async def test_kubernetes_kinds_that_report_no_readiness_are_there_when_their_scale_says_so() -> (
    None
):
    """A scaling adapter has no readyReplicas: its replicas were starting for ever."""
    fake = FakeKube()
    base = "/apis/nvidia.com/v1alpha1/namespaces/inference/dynamographdeploymentscalingadapters"
    fake.objects[f"{base}/d"] = {
        "kind": "DynamoGraphDeploymentScalingAdapter",
        "metadata": {"name": "d", "resourceVersion": "1"},
        "spec": {"replicas": 3},
        "status": {"replicas": 3, "selector": "app=d"},
    }
    counted = "/apis/example.org/v1/namespaces/inference/engines/e"
    fake.objects[counted] = {
        "kind": "Engine",
        "metadata": {"name": "e", "resourceVersion": "1"},
        "spec": {"replicas": 2},
        "status": {"replicas": 2, "readyReplicas": 1},
    }
    resources = {
        PREFILL: "dynamographdeploymentscalingadapters/d",
        DECODE: "example.org/v1/engines/e",
    }
    connector = KubernetesConnector(fake.kube(), resources)
    states = await connector.states([PREFILL, DECODE])
    assert states == {PREFILL: PoolState(3, 3), DECODE: PoolState(2, 1)}
    del fake.objects[counted]["status"]["readyReplicas"]  # it reports that, and has none
    assert (await connector.states([DECODE]))[DECODE] == PoolState(2, 0)


async def test_kubernetes_objects_that_cannot_be_read_for_a_moment_are_not_all_ready() -> None:
    """Of who may not be read the scale has to do; who is not there just now is not known."""
    fake = FakeKube()
    fake.deployment("prefill", 8, 3)
    connector = KubernetesConnector(fake.kube(), RESOURCES)
    for status in (404, 429, 500, 503):
        fake.hides["prefill"] = status
        assert await connector.states([PREFILL]) == {}
        assert str(status) in connector.problems[PREFILL]
    fake.hides["prefill"] = 403
    assert (await connector.states([PREFILL]))[PREFILL] == PoolState(8, 8)
    fake.hides.clear()
    assert (await connector.states([PREFILL]))[PREFILL] == PoolState(8, 3)


def test_kubernetes_resources_are_named_in_full_or_by_kinds_we_know() -> None:
    lws = path_of("leaderworkersets/x", "n")
    assert lws == "/apis/leaderworkerset.x-k8s.io/v1/namespaces/n/leaderworkersets/x"
    for wrong in ("pods/x", "x", "", "a/b/c", "deployments/"):
        with pytest.raises(SettingsError, match="want deployments/NAME"):
            path_of(wrong, "n")


@pytest.mark.parametrize("page", ["<html>Service Unavailable</html>", "\xff", "[" * 9])
async def test_a_balancer_before_the_api_server_is_obeyed(page: str) -> None:
    """Its pages are no JSON, and its Retry-After is meant."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(503, content=page.encode("latin-1"), headers={"retry-after": "7"})

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    kube = Kube(KubernetesApi("http://kube", str(NOWHERE), "inference"), client)
    connector = KubernetesConnector(kube, {DECODE: "deployments/decode"}, Clock())
    assert await connector.states([DECODE]) == {}
    assert connector.problems[DECODE].endswith("/scale: 503")
    await connector.states([DECODE])
    assert "wants to be left alone" in connector.problems[DECODE]
    assert len(asked) == 1
