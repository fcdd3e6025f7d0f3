"""Workers that the service names as cheapest to lose are: the hit rate stays."""

from __future__ import annotations

import random
import statistics
from collections.abc import Generator
from typing import TypeVar

import pytest
from msgspec.structs import replace

from bench.planner.scale_down import (
    TRACE,
    Task,
    advised_places,
    every_hit_rate,
    hit_rate_after,
    rates,
)
from select_service.drain_types import ScaleDownCandidate
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.settings import PoolSettings
from select_service.simulator.core.worker import EngineSettings
from select_service.simulator.core.workloads import WorkloadSettings, workload_of

T = TypeVar("T")
WORKERS, GONE, HALF_S = 6, 2, 150.0


def told(asked: Generator[None, None, T]) -> T:
    while True:
        try:
            next(asked)
        except StopIteration as ended:
            found: T = ended.value
            return found


def hit_rate_of_chats(removed: str, seed: int) -> float:
    router = CoreRouter(CoreSettings(), [random.Random(1)])
    engine = EngineSettings(kv_tokens=400_000)
    chats = WorkloadSettings(kind="chat", rate=1.5, requests=6_000)
    cluster = Cluster(
        ClusterSettings({"workers": PoolSettings("aggregated", engine)}, block_size=64),
        router,
        workload_of([chats], 64, [random.Random(seed)]),
    )
    for _ in range(WORKERS):
        cluster.add_worker("workers", 0.0)
    cluster.advance(HALF_S)
    cluster.observe()
    leaving: list[int] = []
    if removed == "advised":
        core = router.replicas[0].core
        asked: list[ScaleDownCandidate] = told(core.scale_down_candidates(GONE, None, None))
        leaving = [one.worker_id for one in asked]
    elif removed == "newest":
        leaving = cluster.worker_ids("workers")[-GONE:]
    for worker_id in leaving:
        cluster.remove_worker(worker_id, cluster.now)
    cluster.advance(2 * HALF_S)
    rate = cluster.observe().hit_rate
    assert rate is not None
    return rate


@pytest.mark.slow
def test_advised_workers_are_missed_less_than_the_newest() -> None:
    rates = {
        removed: sum(hit_rate_of_chats(removed, seed) for seed in (5, 6)) / 2
        for removed in ("none", "advised", "newest")
    }
    assert rates["advised"] >= rates["none"] - 0.02
    assert rates["advised"] > rates["newest"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not TRACE.exists(), reason=f"no recorded trace here: {TRACE}")
def test_on_a_recorded_trace_the_hit_rate_stays_within_two_points() -> None:
    """Caches are full all the time there: an eighth of the fleet is an eighth of all blocks."""
    like = Task(trace=str(TRACE), removed="none", workers=8, gone=1)
    found = {one: statistics.mean(values) for one, values in rates(like, 2, 2).items()}
    assert found["advised"] >= found["none"] - 0.02
    assert found["advised"] >= found["newest"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not TRACE.exists(), reason=f"no recorded trace here: {TRACE}")
def test_trying_every_worker_finds_what_the_advised_one_and_the_newest_cost() -> None:
    like = Task(trace=str(TRACE), removed="none", workers=4, gone=1, speed=4.0)
    found = every_hit_rate(like)
    assert len(found) == 4
    assert found[advised_places(like)] == hit_rate_after(replace(like, removed="advised"))
    assert found[(3,)] == hit_rate_after(replace(like, removed="newest"))
