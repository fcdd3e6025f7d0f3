"""Data-parallel ranks that publish and replay on port + rank, as engines do, and lose batches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from msgspec.structs import replace

from select_service import SelectionService
from select_service.client import AsyncClient
from select_service.edge.app import create_driver
from select_service.edge.discovery.setup import create_discovery
from select_service.edge.driver.driver import Driver
from select_service.types import OverlapScoresRequest, WorkerSpec
from tests import wait
from tests.indexer.edge.fake_engine import FakeEngine
from tests.indexer.encoding import encode_batch, stored
from tests.live.ports import HOST, free_base
from tests.select_service.edge.discovery.fake_kubernetes import FakeKubernetes, pod
from tests.select_service.edge.serving import SETTINGS, listening

RANKS = range(3)
BLOCK, BLOCKS = 16, 6
LOST = ({2, 4}, {0, 3}, {1, 2, 3, 4})
"""The numbers of the batches that each rank loses; the last batch comes and shows the gap."""
REPLAY = 50
"""What lies between the configured ports of events and of replays."""


class Fleet:
    """One engine with three ranks, each of which publishes and replays on the base + its rank."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], base: int, start: int = 0) -> None:
        self.events, self.replay = base, base + REPLAY
        self.start = start
        self.ranks = [
            FakeEngine(context, (self.events + start + rank, self.replay + start + rank))
            for rank in RANKS
        ]

    def spec(self, **fields: Any) -> dict[str, Any]:
        numbers = [self.start + rank for rank in RANKS]
        return {
            "worker_id": 1,
            "endpoint": "http://w1",
            "block_size": BLOCK,
            "data_parallel_start_rank": self.start,
            "data_parallel_size": len(RANKS),
            "kv_events_endpoints": {str(n): f"tcp://{HOST}:{self.events + n}" for n in numbers},
            "replay_endpoint": f"tcp://{HOST}:{self.replay}",
            **fields,
        }

    def prompt(self, rank: int) -> list[int]:
        return [1000 * (rank + 1) + at for at in range(BLOCK * BLOCKS)]

    async def publish(self) -> None:
        """Store a prompt at each rank, a block in a batch; some batches get lost."""
        for engine in self.ranks:
            await wait.until(engine.has_subscriber)
        for rank, engine in enumerate(self.ranks):
            tokens = self.prompt(rank)
            for at in range(BLOCKS):
                block = tokens[at * BLOCK : (at + 1) * BLOCK]
                event = stored([at + 1], block, at or None, block_size=BLOCK)
                payload = encode_batch([event], rank=self.start + rank)
                engine.publish(payload, is_lost=at in LOST[rank])

    async def is_healed(self, service: Driver) -> None:
        """Publish, and answer replays until each rank is known to hold all of its prompt."""
        await self.publish()

        def found() -> list[int]:
            for engine in self.ranks:
                engine.serve()
            held = []
            for rank in RANKS:
                request = OverlapScoresRequest(token_ids=self.prompt(rank))
                rows = service.overlap_scores(request).workers
                held += [row.device_blocks for row in rows if row.dp_rank == self.start + rank]
            return held

        await wait.until(lambda: found() == [BLOCKS] * len(RANKS), found)
        assert all(engine.requests for engine in self.ranks)

    def close(self) -> None:
        for engine in self.ranks:
            engine.close()


@contextlib.contextmanager
def three_ranks(start: int = 0) -> Iterator[Fleet]:
    numbers = [start + rank for rank in RANKS]
    offsets = [base + number for base in (0, REPLAY) for number in numbers]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with free_base(offsets) as base:
        fleet = Fleet(context, base, start)
        try:
            yield fleet
        finally:
            fleet.close()
            context.destroy(linger=0)


def by_rank(fleet: Fleet) -> dict[str, Any]:
    """Every rank's replay endpoint by name, and no single one."""
    there = {str(fleet.start + n): one.replay_endpoint for n, one in enumerate(fleet.ranks)}
    return fleet.spec(replay_endpoint=None, replay_endpoints=there)


def beside(fleet: Fleet) -> dict[str, Any]:
    """One rank's by name, the others' from the single one."""
    return fleet.spec(replay_endpoints={str(fleet.start + 1): fleet.ranks[1].replay_endpoint})


FORMS: dict[str, Callable[[Fleet], dict[str, Any]]] = {
    "single": Fleet.spec,
    "by_rank": by_rank,
    "beside": beside,
}


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True], ids=["json", "msgpack"])
async def test_over_http(form: str, start: int, packed: bool) -> None:
    with three_ranks(start) as fleet:
        spec = FORMS[form](fleet)
        async with listening() as (port, service, _), httpx.AsyncClient() as client:
            kind = "application/msgpack" if packed else "application/json"
            answer = await client.post(
                f"http://{HOST}:{port}/workers",
                content=msgspec.msgpack.encode(spec) if packed else json.dumps(spec).encode(),
                headers={"content-type": kind},
            )
            assert answer.status_code == 201, answer.text
            (record,) = (await client.get(f"http://{HOST}:{port}/workers")).json()
            assert record["lifecycle"] == "schedulable"
            assert record["replay_endpoint"] == spec["replay_endpoint"]
            assert record.get("replay_endpoints") == spec.get("replay_endpoints")
            await fleet.is_healed(service)


@pytest.mark.parametrize("form", FORMS)
async def test_after_a_restart_from_a_state_directory(form: str, tmp_path: Path) -> None:
    with three_ranks() as fleet:
        async with SelectionService(state_dir=tmp_path) as service:
            record = await service.upsert_worker(FORMS[form](fleet))
            for engine in fleet.ranks:
                await wait.until(engine.has_subscriber)
        async with SelectionService(state_dir=tmp_path) as service:
            assert await service.workers() == [record]
            await fleet.is_healed(service.driver)


@pytest.mark.parametrize("form", FORMS)
async def test_through_the_client(form: str) -> None:
    with three_ranks() as fleet:
        spec = msgspec.convert(FORMS[form](fleet), WorkerSpec)
        async with listening() as (port, service, _):
            async with AsyncClient(f"http://{HOST}:{port}") as client:
                record = await client.upsert_worker(spec)
                assert record.lifecycle == "schedulable"
            await fleet.is_healed(service)


@pytest.mark.parametrize("form", FORMS)
async def test_from_a_workers_file(form: str, tmp_path: Path) -> None:
    with three_ranks() as fleet:
        path = tmp_path / "workers.json"
        path.write_text(json.dumps([FORMS[form](fleet)]))
        async with discovering(workers_file=str(path)) as service:
            await fleet.is_healed(service)


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("source", ["pods", "endpointslices"])
async def test_from_kubernetes(source: str, start: int) -> None:
    """Annotations name the ports of the pod's first rank."""
    with three_ranks(start) as fleet:
        annotations: dict[str, Any] = {
            "block_size": str(BLOCK),
            "data_parallel_start_rank": str(start),
            "data_parallel_size": str(len(RANKS)),
            "kv_events_port": str(fleet.events + start),
            "kv_replay_port": str(fleet.replay + start),
        }
        named = pod(HOST, **annotations)
        slices = {
            "metadata": {"annotations": named["metadata"]["annotations"]},
            "endpoints": [{"addresses": [HOST], "targetRef": {"name": "w-0"}}],
            "ports": [{"name": "http", "port": 8000}],
        }
        async with FakeKubernetes().serving() as api:
            await api.put(source, "w-0", **(named if source == "pods" else slices))
            async with discovering(
                kubernetes_workers="app=vllm",
                kubernetes_workers_from=source,
                kubernetes_api=api.url,
                kubernetes_namespace="ns",
                kubernetes_credentials="/nonexistent",
            ) as service:
                await fleet.is_healed(service)


@contextlib.asynccontextmanager
async def discovering(**settings: Any) -> AsyncIterator[Driver]:
    """A service whose workers come from a source."""

    chosen = replace(SETTINGS, **settings)
    service = create_driver(chosen)
    service.discovery = create_discovery(chosen, service, lambda: 0.0)
    await service.start()
    try:
        await wait.until(lambda: service.core.reader.schedulable == 1)
        yield service
    finally:
        await service.close()
