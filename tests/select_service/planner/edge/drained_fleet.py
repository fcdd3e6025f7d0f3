"""Two selectors, an API server, and who lets engines go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from msgspec.structs import replace
from typing_extensions import override

from select_service.edge.app import create_app, create_driver
from select_service.edge.driver.driver import Driver
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.connectors.pods import DELETION_COST
from select_service.planner.edge.engine_drain import EngineDrain
from select_service.planner.edge.selectors import SelectorFleet
from select_service.planner.types import PoolState
from tests.live.simulated_transport import answered_by
from tests.select_service.edge.serving import SETTINGS, add_worker
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, Clock, FakeKube, target
from tests.wait import run

NAMES = ("one", "two")
MOST_S = 300.0


class Selecting(httpx.AsyncBaseTransport):
    """Two selectors of one fleet, each at a host of its own."""

    def __init__(self) -> None:
        self.services: dict[str, Driver] = {}
        self.transports: dict[str, httpx.ASGITransport] = {}
        self.down: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []

    async def start(self, name: str) -> None:
        settings = replace(SETTINGS)
        self.services[name] = create_driver(settings)
        await self.services[name].start()
        self.transports[name] = httpx.ASGITransport(create_app(self.services[name], settings))

    def add_worker(self, worker_id: int, **fields: Any) -> None:
        plain = {"model_name": "m", "role": "decode", "endpoint": f"http://10.0.0.{worker_id}:8000"}
        for service in self.services.values():
            add_worker(service, worker_id, **plain | fields)

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        self.asked.append((name, request.method, request.url.path))
        if name in self.down:
            raise httpx.ConnectError("connection refused")
        return await self.transports[name].handle_async_request(request)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self)

    async def book(
        self, name: str, worker_id: int, reservation_id: str, model_name: str = "m"
    ) -> None:
        body = {"model_name": model_name, "sequence_hashes": [1], "isl_tokens": 16}
        body |= {"worker_id": worker_id}
        body |= {"reservation_id": reservation_id, "effective_prefill_tokens": 16, "dp_rank": 0}
        async with self.client() as client:
            answer = await client.post(f"http://{name}/reservations", json=body)
            assert answer.is_success, answer.text

    async def end(self, name: str, reservation_id: str) -> None:
        async with self.client() as client:
            assert (await client.delete(f"http://{name}/reservations/{reservation_id}")).is_success

    def drained(self, name: str = "one") -> dict[int, str]:
        """Who drains, and why, by one of them."""
        core = self.services[name].core
        found = {one.worker_id: core.drains.status(one.worker_id) for one in core.workers.workers()}
        return {id_: str(one.reason) for id_, one in found.items() if one.drains}

    async def close(self) -> None:
        for service in self.services.values():
            await service.close()


def selectors_at(urls: list[str], transport: httpx.AsyncBaseTransport) -> SelectorFleet:
    selectors = SelectorFleet(urls)
    for client in selectors._clients.values():
        answered_by(client, transport)
    return selectors


class DrainedFleet:
    """Selectors, an API server, and who lets engines go."""

    def __init__(self, plural: str = "deployments") -> None:
        self.selecting = Selecting()
        self.fake = FakeKube()
        self.plural = plural
        self.clock = Clock()
        self.connector = KubernetesConnector(
            self.fake.kube(), {DECODE: f"{plural}/decode", PREFILL: "deployments/prefill"}
        )
        self.retiring = self.another()
        self.kept = 0

    def another(self) -> EngineDrain:
        """A planner, as if the one before had ended."""
        urls = [f"http://{name}" for name in NAMES]
        selectors = selectors_at(urls, self.selecting)
        return EngineDrain(selectors, self.connector.pods(), self.clock, MOST_S)

    async def wants(self, replicas: int, desired: int, ready: int | None = None) -> str:
        """Return what the lower count waits for."""
        state = PoolState(desired, desired if ready is None else ready)
        waiting = await self.retiring.settle([target(DECODE, replicas)], {DECODE: state})
        for leaving in self.retiring.pools.values():
            leaving.check()
        self.kept = waiting[DECODE].replicas if DECODE in waiting else replicas
        return waiting[DECODE].why if DECODE in waiting else ""

    async def keeps_busy(self) -> None:
        """Book a request on each of four workers at the first selector."""
        for worker_id in (1, 2, 3, 4):
            await self.selecting.book("one", worker_id, f"r{worker_id}")

    async def drains_one(self) -> int:
        """Keep all four busy and want three of them: return who drains."""
        await self.keeps_busy()
        assert await self.wants(3, 4)
        (named,) = self.selecting.drained()
        return named

    def marked(self) -> set[str]:
        return {
            pod["status"]["podIP"]
            for pod in self.fake.pods.values()
            if DELETION_COST in pod["metadata"]["annotations"]
        }

    def scaled(self, replicas: int) -> set[int]:
        """The count is lowered, and the controllers act on it; returns whose pods went."""
        path = f"/apis/apps/v1/namespaces/inference/{self.plural}/decode"
        self.fake.objects[path]["spec"]["replicas"] = replicas
        gone = {int(ip.rpartition(".")[2]) for ip in self.fake.control("decode", self.plural)}
        for service in self.selecting.services.values():
            for worker_id in gone:
                service.delete_worker(worker_id)
        return gone


def in_cluster(
    use: Callable[[DrainedFleet], Awaitable[None]], plural: str = "deployments", workers: int = 4
) -> None:
    async def whole() -> None:
        cluster = DrainedFleet(plural)
        try:
            for name in NAMES:
                await cluster.selecting.start(name)
            cluster.fake.deployment("decode", workers, workers, plural)
            cluster.fake.deployment("prefill", 1, 1)
            for worker_id in range(1, 1 + workers):
                cluster.selecting.add_worker(worker_id)
                cluster.fake.pod(f"decode-{worker_id}", "decode", f"10.0.0.{worker_id}")
            cluster.selecting.add_worker(50, role="prefill")
            cluster.fake.pod("prefill-z", "prefill", "10.0.0.50")
            await use(cluster)
        finally:
            await cluster.retiring.close()
            await cluster.selecting.close()

    run(whole())
