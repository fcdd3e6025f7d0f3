"""Small engines, and requests by the dozen, for tests of the simulator."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.engine_settings import EngineSettings, SimulatedPool
from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.core.requests import ClientRequest, RequestOutcome, chain_of
from select_service.simulator.core.routers import WorkerRouter
from select_service.simulator.core.worker import EngineJob, EngineWorker, Happening

BLOCK = 4
SMALL = EngineSettings(
    AnalyticLatency(1e-2, 1e-3, 1e-6, 1e-3, 1e-5),
    kv_tokens=160,
    step_tokens_max=16,
    sequences_max=6,
)


WHOLE = {"workers": SimulatedPool("aggregated", SMALL)}
PARTS = {"prefill": SimulatedPool("prefill", SMALL), "decode": SimulatedPool("decode", SMALL)}


class Given:
    """A workload of these requests and no others."""

    def __init__(self, requests: Iterable[ClientRequest], block_size: int = BLOCK) -> None:
        self.block_size = block_size
        self._requests = iter(sorted(requests, key=lambda one: one.arrival))

    def next(self) -> ClientRequest | None:
        return next(self._requests, None)

    def after(self, outcome: RequestOutcome) -> tuple[ClientRequest, ...]:
        return ()


def request(
    number: int, arrival: float, isl: int, osl: int, first: int | None = None
) -> ClientRequest:
    """A request whose blocks begin with number `first`; its own, unless that is said."""
    start = 1_000 * (number + 1) if first is None else 1_000_000 * (first + 1)
    blocks = chain_of(range(start, start + (isl + osl) // BLOCK))
    return ClientRequest(number=number, arrival=arrival, isl=isl, osl=osl, blocks=blocks)


def some(seed: int, count: int, rate: float) -> list[ClientRequest]:
    """Requests of all lengths, some of which share their prompts."""
    rng = random.Random(seed)
    now = 0.0
    found: list[ClientRequest] = []
    for number in range(count):
        now += rng.expovariate(rate)
        first = rng.choice((None, 0, 1))
        found.append(request(number, now, rng.randint(1, 60), rng.randint(1, 40), first))
    return found


def cluster_of(
    router: WorkerRouter,
    requests: Iterable[ClientRequest],
    workers: int = 1,
    pools: dict[str, SimulatedPool] = WHOLE,
    **settings: Any,
) -> Cluster:
    """A cluster with so many engines in each pool, before these requests come."""
    made = Cluster(ClusterSettings(pools, block_size=BLOCK, **settings), router, Given(requests))
    for pool in pools:
        for _ in range(workers):
            made.add_worker(pool, 0.0)
    return made


def played(
    router: WorkerRouter, requests: Iterable[ClientRequest], workers: int = 1, **settings: Any
) -> Cluster:
    """The same after them all."""
    made = cluster_of(router, requests, workers, **settings)
    made.finish()
    made.check()
    return made


class OneByOne(EngineWorker):
    """The naive twin: every step by itself."""

    def _steps_at_most(self) -> int:
        super()._steps_at_most()
        return 1


def play(worker: EngineWorker, requests: Sequence[ClientRequest]) -> list[tuple[float, str, int]]:
    """Submit requests at their times; returns what happened, when, and to whom."""
    to_come = deque(sorted(requests, key=lambda one: one.arrival))
    found: list[tuple[float, str, int]] = []

    def note(now: float, happened: Iterable[Happening]) -> None:
        found.extend((now, one.kind, one.job.request.number) for one in happened)

    while to_come or worker.due < float("inf"):
        if to_come and to_come[0].arrival <= worker.due:
            one = to_come.popleft()
            worker.submit(EngineJob(one), one.arrival)
            note(one.arrival, [Happening("too_large", job) for job in worker.take_refused()])
        else:
            now = worker.due
            note(now, worker.step(now))
        worker.check()
    return found
