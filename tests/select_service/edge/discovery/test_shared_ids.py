"""One worker-id annotation on several pods: one of them has it, by a rule that never flaps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from select_service.core.fleet.roster import Unready
from select_service.edge.app import create_app, create_driver
from select_service.edge.discovery.objects import (
    NOT_READY,
    TERMINATING,
    DiscoveredPod,
    WorkerIdClaims,
)
from select_service.edge.discovery.setup import create_discovery
from select_service.settings.environment import RouterSettings
from select_service.types import RouterConfig, WorkerSpec
from tests.coroutines import within
from tests.select_service.edge.discovery.fake_kubernetes import FakeKubernetes, pod
from tests.select_service.edge.discovery.test_kubernetes import (
    Workers,
    endpoints,
    slice_of,
    watching,
)
from tests.select_service.edge.serving import SETTINGS, app_client, worker
from tests.wait import until

NO_EVENTS = RouterSettings(RouterConfig(use_kv_events=False), None, ())
ENDED = Unready("phase Failed", has_ended=True)


def claim(
    name: str, created: str = "", unready: Unready | None = None, worker_id: int = 5
) -> DiscoveredPod:
    spec = None if unready else WorkerSpec(worker_id=worker_id, endpoint=name)
    return DiscoveredPod(worker_id, f"ns/{name}", created, spec, unready)


def owner(claims: WorkerIdClaims, *found: DiscoveredPod) -> str:
    (one,) = claims.settle(found)
    return one.pod.removeprefix("ns/")


def test_the_oldest_that_does_not_leave_has_it_whatever_its_readiness() -> None:
    old, new = claim("b", "2026-01-01T00:00:00Z"), claim("a", "2026-01-02T00:00:00Z")
    claims = WorkerIdClaims()
    for order in itertools.permutations([old, new]):
        assert owner(claims, *order) == "b"
    assert claims.shared == {5: ["ns/b", "ns/a"]}
    assert claims.refused == {"ns/a": "worker-id 5 is that of ns/b"}
    unready = old._replace(spec=None, unready=NOT_READY)
    assert owner(claims, unready, new) == "b", "it would go back and forth"
    for leaves in (TERMINATING, ENDED):
        assert owner(claims, old._replace(spec=None, unready=leaves), new) == "a"
        assert (claims.shared, claims.refused) == ({}, {}), "a successor is no mistake"
    assert owner(claims, new) == "a"


def test_the_first_by_name_of_those_of_one_age() -> None:
    at = "2026-01-01T00:00:00Z"
    for order in itertools.permutations([claim(name, at) for name in "cab"]):
        assert owner(WorkerIdClaims(), *order) == "a"


def test_without_ages_one_that_has_it_keeps_it() -> None:
    claims = WorkerIdClaims()
    assert owner(claims, claim("a", unready=NOT_READY), claim("c"), claim("d")) == "c"
    assert owner(claims, claim("a"), claim("b"), claim("c", unready=NOT_READY)) == "c"
    assert owner(claims, claim("a"), claim("b"), claim("c", unready=TERMINATING)) == "a"
    assert owner(claims, claim("a", unready=NOT_READY), claim("b"), claim("c")) == "a"


ages = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])
states = st.sampled_from([None, NOT_READY])


@given(
    st.dictionaries(st.sampled_from("abcd"), ages, min_size=2),
    st.lists(st.lists(states, min_size=4, max_size=4), max_size=6),
)
def test_readiness_never_moves_an_id(created: dict[str, str], history: list[list[Any]]) -> None:
    claims, found = WorkerIdClaims(), set()
    for now in [[None] * 4, *history]:
        ready = dict(zip("abcd", now, strict=True))
        found.add(owner(claims, *(claim(one, at, ready[one]) for one, at in created.items())))
        found.add(
            owner(WorkerIdClaims(), *(claim(one, at, ready[one]) for one, at in created.items()))
        )
    assert len(found) == 1, "and another selector says the same"


def test_two_objects_that_name_one_pod_are_one_claim() -> None:
    """As the slices of both address families do."""
    claims = WorkerIdClaims()
    other = WorkerSpec(worker_id=5, endpoint="[fd00::1]")
    both = [claim("a"), claim("a")._replace(spec=other)]
    assert claims.settle(both) == [both[0]]
    assert claims.settle(both[::-1]) == [both[0]], "whichever slice comes first"
    assert claims.shared == {}
    assert claims.settle([claim("a", unready=NOT_READY), both[1]]) == [both[1]]
    (one,) = claims.settle([both[0], claim("a", unready=TERMINATING)])
    assert (one.spec, one.unready) == (None, TERMINATING)


def templated(number: int, **more: Any) -> dict[str, Any]:
    fields = pod(f"10.0.0.{number}", worker_id="5", block_size="16", **more)
    fields["metadata"]["creationTimestamp"] = f"2026-01-0{number}T00:00:00Z"
    return fields


@pytest.mark.parametrize("slices", [False, True])
@within(watching, "tmp_path", "slices")
async def test_the_others_are_refused_by_name(
    api: FakeKubernetes, source: Workers, *, slices: bool
) -> None:
    if slices:
        piece = slice_of("10.0.0.1", "10.0.0.2", "10.0.0.3")
        piece["metadata"] = {"annotations": {"select-service.io/worker-id": "5"}}
        await api.put("endpointslices", "s", **piece)
        names = [f"ns/pod-10.0.0.{number}" for number in (1, 2, 3)]
    else:
        for number in (1, 2, 3):
            await api.put("pods", f"w-{number - 1}", **templated(number))
        names = ["ns/w-0", "ns/w-1", "ns/w-2"]
    await until(lambda: source.shared == {5: names})
    assert source.rejected == dict.fromkeys(names[1:], f"worker-id 5 is that of {names[0]}")
    assert len(endpoints(source)) == 1


@within(watching, "tmp_path")
async def test_ids_are_derived_from_the_pod_by_default(
    api: FakeKubernetes, source: Workers
) -> None:
    await until(lambda: len(source.latest or {}) == 3)
    assert (source.shared, source.rejected) == ({}, {})


async def codes(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    findings = (await client.get("/ready?verbose=true")).json()["findings"]
    return {one["code"]: one for one in findings}


async def test_a_finding_and_a_metric_tell() -> None:
    """And both are over when the annotation is gone, as the remedy says."""
    now = 0.0
    async with FakeKubernetes().serving() as api:
        for number in (1, 2, 3):
            await api.put("pods", f"w-{number}", **templated(number))
        settings = replace(
            SETTINGS,
            kubernetes_workers="app=vllm",
            kubernetes_api=api.url,
            kubernetes_namespace="ns",
            kubernetes_credentials="/nonexistent",
            router=NO_EVENTS,
            doctor_interval_s=0.0,
        )
        service = create_driver(settings)
        service.discovery = create_discovery(settings, service, lambda: now)
        transport = httpx.ASGITransport(create_app(service, settings))
        await service.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            await until(lambda: service.core.reader.schedulable == 1)
            finding = (await codes(client))["worker-id-shared"]
            assert finding["subject"] == {"source": "kubernetes", "worker_id": 5}
            assert finding["what"] == "ns/w-1 has the id, left out are ns/w-2, ns/w-3"
            metrics = (await client.get("/metrics")).text
            name = 'discovery_rejected{reason="worker_id_shared",source="kubernetes"}'
            assert f"select_service_{name} 2.0" in metrics
            assert 'discovery_rejected{reason="malformed",source="kubernetes"} 0.0' in metrics
            for number in (1, 2, 3):
                fields = pod(f"10.0.0.{number}", block_size="16")
                await api.put("pods", f"w-{number}", **fields)
            await until(lambda: service.core.reader.schedulable == 3)
            assert service.diagnosed is not None
            await service.diagnosed.examine()
            assert "worker-id-shared" not in await codes(client)
        await service.close()


async def test_a_source_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text(json.dumps([worker(1)]))
    chosen = {
        "workers_file": str(path),
        "workers_file_poll_s": 0.01,
        "router": NO_EVENTS,
        "doctor_interval_s": 0.0,
    }
    async with app_client(**chosen) as (client, service):
        await until(lambda: service.core.reader.schedulable == 1)
        assert service.discovery is not None
        (follower,) = service.discovery.followers
        path.write_text("[{")
        await until(lambda: follower.source.failures.get("malformed", 0) > 0)
        assert "discovery-stale" not in await codes(client)
        late = service.now() + 121.0
        follower.source.clock = lambda: late
        assert 'discovery_age_seconds{source="file"} 12' in (await client.get("/metrics")).text
        assert service.diagnosed is not None
        await service.diagnosed.examine()
        finding = (await codes(client))["discovery-stale"]
        assert finding["subject"] == {"source": "file"}
        assert finding["what"].startswith("file was last read 12")
        assert finding["what"].endswith(": Input data was truncated"), "and why"
        path.write_text(json.dumps([worker(1), worker(2)]))
        await until(lambda: service.core.reader.schedulable == 2)
        await service.diagnosed.examine()
        assert "discovery-stale" not in await codes(client)
