"""A pod that leaves, or is not ready: no new work at once, and nothing is forgotten."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from msgspec.structs import replace

from indexer.types import Scope, Tier, WorkerRank
from select_service.edge.app import create_app, create_driver
from select_service.edge.discovery.followers import WorkerFollower
from select_service.edge.discovery.setup import create_discovery
from select_service.edge.driver.driver import Driver
from select_service.types import WorkerSpec
from tests.coroutines import within
from tests.select_service.edge.discovery.fake_kubernetes import FakeKubernetes, pod
from tests.select_service.edge.serving import PROMPT, SETTINGS, app_client, worker
from tests.wait import until

PODS, SLICES = "pods", "endpointslices"
Change = Callable[[FakeKubernetes], Awaitable[None]]


class Cluster:
    """Two pods named by Kubernetes, the first of which has a request and something cached."""

    def __init__(self, api: FakeKubernetes, service: Driver, client: httpx.AsyncClient) -> None:
        self.api, self.service, self.client = api, service, client
        self.now = 0.0

    @property
    def first(self) -> int:
        return self.id_of("10.0.0.1")

    def id_of(self, address: str) -> int:
        (found,) = [
            one.worker_id for one in self.service.workers() if address in (one.endpoint or "")
        ]
        return found

    @property
    def follower(self) -> WorkerFollower:
        assert self.service.discovery is not None
        (follower,) = self.service.discovery.followers
        assert isinstance(follower, WorkerFollower)
        return follower

    @property
    def schedulable(self) -> int:
        return self.service.core.reader.schedulable

    def lifecycle(self, worker_id: int) -> str | None:
        record = self.service.worker_record(worker_id)
        return None if record is None else record.lifecycle

    async def reasons(self, worker_id: int) -> list[str]:
        """Why it is not schedulable, as GET /workers tells it."""
        records = (await self.client.get("/workers")).json()
        (record,) = [one for one in records if one["worker_id"] == worker_id]
        assert record["lifecycle"] == "draining"
        return list(record["not_schedulable_reasons"])

    async def chosen(self, **wishes: Any) -> set[int]:
        """Ask some times for a prompt that the first has cached."""
        answers = [await self.client.post("/select", json=PROMPT | wishes) for _ in range(5)]
        assert {answer.status_code for answer in answers} == {200}
        return {answer.json()["worker_id"] for answer in answers}

    async def status(self, **wishes: Any) -> tuple[int, str | None]:
        answer = await self.client.post("/select", json=PROMPT | wishes)
        return answer.status_code, answer.json().get("code")

    def cached(self) -> int:
        index = self.service.core.partitions[Scope("default", "default")].index
        rank = WorkerRank(self.first, 0)
        return 0 if index.slot_of(rank) is None else sum(index.blocks_of(rank))

    def load(self) -> int:
        (scope,) = self.service.loads()
        rows = [row for row in scope.loads if row.worker_id == self.first]
        return sum(row.active_requests for row in rows)

    async def fill(self) -> None:
        index = self.service.core.partitions[Scope("default", "default")].index
        hashes = b"".join(n.to_bytes(8, "little") for n in PROMPT["block_hashes"])
        index.store(WorkerRank(self.first, 0), Tier.DEVICE, None, [1001, 1002], hashes)
        wish = {"worker_id": self.first, "dp_rank": 0}
        body = PROMPT | {"reservation_id": "r", "pinned_worker": wish}
        answer = await self.client.post("/select_and_reserve", json=body)
        assert answer.status_code == 200, answer.text
        assert await self.chosen() == {self.first}, "it has the prompt"


@contextlib.asynccontextmanager
async def in_cluster(*, slices: bool = False, **settings: Any) -> AsyncIterator[Cluster]:
    async with FakeKubernetes().serving() as api:
        await named(api)
        chosen = replace(
            SETTINGS,
            kubernetes_workers="app=vllm",
            kubernetes_workers_from=SLICES if slices else PODS,
            kubernetes_api=api.url,
            kubernetes_namespace="ns",
            kubernetes_credentials="/nonexistent",
            **settings,
        )
        service = create_driver(chosen)
        transport = httpx.ASGITransport(create_app(service, chosen))
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            cluster = Cluster(api, service, client)
            service.discovery = create_discovery(chosen, service, lambda: cluster.now)
            source: Any = cluster.follower.source
            source._backoff_s = 0.01  # how long it pauses is not what this is about
            await service.start()
            try:
                await until(lambda: service.core.reader.schedulable == 2)
                await cluster.fill()
                yield cluster
            finally:
                await service.close()


async def named(api: FakeKubernetes, **conditions: Any) -> None:
    """Two pods, and two endpoints, of which the first has these conditions."""
    for number in (1, 2):
        await api.put(PODS, f"w-{number}", **pod(f"10.0.0.{number}", block_size="16"))
    await api.put(SLICES, "s", **slice_of(conditions))


def slice_of(conditions: dict[str, Any] | None) -> dict[str, Any]:
    first, second = (
        {"addresses": [f"10.0.0.{n}"], "conditions": {}, "targetRef": {"name": f"w-{n}"}}
        for n in (1, 2)
    )
    return {
        "metadata": {"annotations": {"select-service.io/block-size": "16"}},
        "endpoints": [second]
        if conditions is None
        else [first | {"conditions": conditions}, second],
        "ports": [{"name": "http", "port": 8000}, {"name": "kv-events", "port": 5557}],
    }


def of_pod(*, ready: bool = True, deleted_at: str | None = None, **status: Any) -> Change:
    async def change(api: FakeKubernetes) -> None:
        fields = pod("10.0.0.1", ready=ready, block_size="16")
        fields["metadata"]["deletionTimestamp"] = deleted_at
        fields["status"] |= status
        await api.put(PODS, "w-1", **fields)

    return change


def of_endpoint(conditions: dict[str, Any] | None) -> Change:
    async def change(api: FakeKubernetes) -> None:
        await api.put(SLICES, "s", **slice_of(conditions))

    return change


async def deleted(api: FakeKubernetes) -> None:
    await api.delete(PODS, "w-1")


async def slice_deleted(api: FakeKubernetes) -> None:
    await api.delete(SLICES, "s")


async def unnamed_by_a_list(api: FakeKubernetes) -> None:
    """It went while nobody watched."""
    del api.objects[PODS, "w-1"]
    api.compact()
    await api.break_watches()


LEAVES: dict[str, tuple[bool, Change, bool]] = {  # from slices, how, whether it is still listed
    "not ready": (False, of_pod(ready=False), True),
    "terminating": (False, of_pod(deleted_at="2026-01-01T00:00:00Z"), True),
    "pending again": (False, of_pod(phase="Pending"), True),
    "node lost": (False, of_pod(phase="Unknown"), True),
    "without an address": (False, of_pod(podIP=None), True),
    "failed": (False, of_pod(phase="Failed", podIP=None), False),
    "succeeded": (False, of_pod(phase="Succeeded"), False),
    "deleted": (False, deleted, False),
    "not in a new list": (False, unnamed_by_a_list, False),
    "endpoint not ready": (True, of_endpoint({"ready": False}), True),
    "endpoint terminating": (True, of_endpoint({"ready": True, "terminating": True}), True),
    "serving, terminating": (
        True,
        of_endpoint({"ready": False, "serving": True, "terminating": True}),
        True,
    ),
    "published although not ready": (True, of_endpoint({"ready": True, "serving": False}), True),
    "endpoint gone": (True, of_endpoint(None), False),
}


@pytest.mark.parametrize("how", LEAVES)
async def test_no_new_work_at_once_and_nothing_is_forgotten(how: str) -> None:
    slices, leave, is_listed = LEAVES[how]
    async with in_cluster(slices=slices) as cluster:
        first, second = cluster.first, cluster.id_of("10.0.0.2")
        await leave(cluster.api)
        await until(lambda: cluster.schedulable == 1)
        assert await cluster.chosen() == {second}, "although the other has the prompt"
        batch = await cluster.client.post("/select_batch", json={"requests": [PROMPT] * 4})
        assert batch.status_code == 200, batch.text
        assert str(second) in batch.text
        assert str(first) not in batch.text, "nor any of a batch"
        (why,) = await cluster.reasons(first)
        assert why.startswith("kubernetes: ")
        assert (cluster.load(), cluster.cached()) == (1, 2)
        pinned = {"pinned_worker": {"worker_id": first, "dp_rank": 0}}
        assert await cluster.status(**pinned) == (503, "worker_draining")
        for path in ("prefill_complete", "output_block"):
            answer = await cluster.client.post(f"/reservations/r/{path}", json={})
            assert answer.status_code == 200, "what runs may end"
        cluster.now = 9.0
        await named(cluster.api)
        await until(lambda: cluster.schedulable == 2)
        assert (cluster.load(), cluster.cached()) == (1, 2)
        assert (await cluster.client.delete("/reservations/r")).status_code == 200
        assert await cluster.chosen() == {first}
        # longer than the grace: what is listed is kept, what is not is forgotten
        await leave(cluster.api)
        await until(lambda: cluster.schedulable == 1)
        cluster.now = 60.0
        if is_listed:
            await cluster.api.put(PODS, "w-3", **pod("10.0.0.3", block_size="16"))
            if slices:
                await cluster.api.put(SLICES, "t", **slice_of({"ready": False}))
            await until(lambda: cluster.follower.source.updates > 4)
            await named(cluster.api)
            await until(lambda: cluster.lifecycle(first) == "schedulable")
            assert cluster.cached() == 2
        else:
            await until(lambda: len(cluster.service.workers()) == 1)


@pytest.mark.parametrize("slices", [False, True])
async def test_a_blip_costs_nothing_without_a_grace(*, slices: bool) -> None:
    blip = of_endpoint({"ready": False}) if slices else of_pod(ready=False)
    async with in_cluster(slices=slices, discovery_grace_s=0.0) as cluster:
        await blip(cluster.api)
        await until(lambda: cluster.schedulable == 1)
        cluster.now = 3600.0
        await named(cluster.api)
        await until(lambda: cluster.schedulable == 2)
        assert (cluster.load(), cluster.cached()) == (1, 2)


@within(in_cluster)
async def test_an_operators_drain_and_readiness_do_not_undo_each_other(cluster: Cluster) -> None:
    first = cluster.first
    drain = f"/workers/{first}/drain"
    follower = cluster.follower
    answer = (await cluster.client.post(drain, json={"reason": "new image"})).json()
    assert answer["drains"]
    await of_pod(ready=False)(cluster.api)
    await until(lambda: follower.missed == 1)
    assert await cluster.reasons(first) == ["draining: new image", "kubernetes: not ready"]
    await named(cluster.api)
    await until(lambda: follower.missed == 0)
    assert cluster.schedulable == 1, "the operator has not said so"
    answer = (await cluster.client.delete(drain)).json()
    assert (answer["lifecycle"], cluster.schedulable) == ("schedulable", 2)
    await of_pod(ready=False)(cluster.api)
    await until(lambda: follower.missed == 1)
    answer = (await cluster.client.delete(drain)).json()
    assert (answer["lifecycle"], answer["drains"]) == ("draining", False)
    assert not answer["safe_to_terminate"], "it may be ready again"
    assert cluster.schedulable == 1
    await cluster.client.post(drain, json={})
    answer = (await cluster.client.delete(drain)).json()
    assert answer["lifecycle"] == "draining"


@within(in_cluster)
async def test_a_pod_that_was_never_ready_is_no_worker(cluster: Cluster) -> None:
    source = cluster.follower.source
    before = source.updates
    await cluster.api.put(PODS, "w-9", **pod("10.0.0.9", ready=False, block_size="16"))
    await until(lambda: source.updates > before)
    await until(lambda: not source.changed.is_set())
    assert len(cluster.service.workers()) == 2
    await cluster.api.put(PODS, "w-9", **pod("10.0.0.9", block_size="16"))
    await until(lambda: cluster.schedulable == 3)


@within(in_cluster)
async def test_the_engine_that_stays_connected_is_the_same_after_any_flap(cluster: Cluster) -> None:
    """Its pod is not listed for longer than the grace; only its connection proves what it is."""
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        engine = pod("127.0.0.1", block_size="16", kv_events_port=str(port))
        await cluster.api.put(PODS, "engine", **engine)
        await until(lambda: cluster.schedulable == 3)
        worker_id = cluster.id_of("127.0.0.1")
        streams = cluster.service.core.membership.streams()
        (stream,) = [one for one in streams if one.rank.worker_id == worker_id]
        link = cluster.service.sources.link
        await until(lambda: (state := link(stream)) is not None and state.is_connected)
        await cluster.api.delete(PODS, "engine")
        await until(lambda: cluster.schedulable == 2)
        cluster.now = 100.0
        await cluster.api.put(PODS, "w-2", **pod("10.0.0.2", block_size="32"))
        await until(lambda: not cluster.follower.source.changed.is_set())
        await cluster.api.put(PODS, "engine", **engine)
        await until(lambda: cluster.lifecycle(worker_id) == "schedulable")
        assert not stream.closed, "it was heard all the time"
        await cluster.api.delete(PODS, "engine")
        await until(lambda: cluster.lifecycle(worker_id) == "draining")
        cluster.now = 200.0
    # the engine has ended, and the connection with it
    await until(lambda: cluster.service.worker_record(worker_id) is None)


async def test_a_worker_that_the_file_names_no_longer_ends_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"

    def write(*bodies: dict[str, object]) -> None:
        path.with_suffix(".new").write_text(json.dumps(bodies))
        path.with_suffix(".new").replace(path)

    write(worker(1), worker(2))
    chosen = {"workers_file": str(path), "workers_file_poll_s": 0.01}
    async with app_client(**chosen) as (client, service):
        await until(lambda: service.core.reader.schedulable == 2)
        pinned = {"reservation_id": "r", "pinned_worker": {"worker_id": 1, "dp_rank": 0}}
        await client.post("/select_and_reserve", json=PROMPT | pinned)
        write(worker(2))
        await until(lambda: service.core.reader.schedulable == 1)
        (record,) = [one for one in service.workers() if one.worker_id == 1]
        assert record.not_schedulable_reasons == ["file: no longer named"]
        done = await client.post("/reservations/r/prefill_complete")
        assert done.status_code == 200
        write(worker(1), worker(2))
        await until(lambda: service.core.reader.schedulable == 2)
        (scope,) = service.loads()
        assert [row.active_requests for row in scope.loads] == [1, 0], "a blip costs nothing"
        write(worker(2))
        await until(lambda: service.core.reader.schedulable == 1)
        assert (await client.delete("/reservations/r")).status_code == 200
        await until(lambda: len(service.workers()) == 1)


async def test_who_is_no_longer_named_may_be_registered_by_anybody(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text(json.dumps([worker(1), worker(2)]))
    chosen = {"workers_file": str(path), "workers_file_poll_s": 0.01}
    async with app_client(**chosen) as (client, service):
        await until(lambda: service.core.reader.schedulable == 2)
        pinned = {"reservation_id": "r", "pinned_worker": {"worker_id": 1, "dp_rank": 0}}
        await client.post("/select_and_reserve", json=PROMPT | pinned)
        assert (await client.post("/workers", json=worker(1))).status_code == 409
        path.write_text(json.dumps([worker(2)]))
        await until(lambda: service.core.reader.schedulable == 1)
        answer = (await client.post("/workers", json=worker(1))).json()
        assert (answer["source"], answer["lifecycle"]) == ("api", "schedulable")
        (scope,) = service.loads()
        assert [row.active_requests for row in scope.loads] == [1, 0], "with what it has"


async def test_it_is_kept_over_a_restart(tmp_path: Path) -> None:
    """The API server may be away then, and a pod that leaves is no better for it."""
    settings = replace(SETTINGS, state_dir=str(tmp_path))
    service = create_driver(settings)
    await service.start()
    service.core.workers.sources.add("kubernetes")
    service.upsert_worker(msgspec.convert(worker(1), WorkerSpec), "kubernetes")
    service.hold_worker_back(1, "kubernetes", "terminating")
    await service.close()
    again = create_driver(settings)
    await again.start()
    (record,) = again.workers()
    assert record.lifecycle == "draining"
    assert record.not_schedulable_reasons == ["kubernetes: terminating"]
    await again.close()
