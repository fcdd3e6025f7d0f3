"""Workers that the service names as cheapest to lose are: the hit rate stays."""

from __future__ import annotations

import random

import pytest

from bench.planner.scale_down import (
    STAGES_S,
    TRACE,
    Fleet,
    advised_places,
    every_hit_rate,
    halfway,
    never_there,
    removals,
    result_of,
    rows_of,
)
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.engine_settings import EngineSettings, SimulatedPool
from select_service.simulator.core.workloads import WorkloadSettings, workload_of
from select_service.types.workers import ScaleDownCandidate

WORKERS, GONE, HALF_S = 6, 2, 150.0


def hit_rate_of_chats(removed: str, seed: int) -> float:
    router = CoreRouter(CoreSettings(), [random.Random(1)])
    engine = EngineSettings(kv_tokens=400_000)
    chats = WorkloadSettings(kind="chat", rate=1.5, requests=6_000)
    cluster = Cluster(
        ClusterSettings({"workers": SimulatedPool("aggregated", engine)}, block_size=64),
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
        asked: list[ScaleDownCandidate] = result_of(core.scale_down.candidates(GONE, None, None))
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


needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"no recorded trace here: {TRACE}")


@pytest.mark.slow
@pytest.mark.long
@needs_trace
def test_on_a_recorded_trace_the_hit_rate_stays_within_two_points() -> None:
    """Caches are full all the time there: an eighth of the fleet is an eighth of all blocks."""
    runs = [run for seed in (1, 2) for run in removals(Fleet(workers=8, seed=seed), [1])]
    lost = {row.choice: row.lost for row in rows_of(runs)}
    assert lost["advised"] <= 2.0
    assert lost["advised"] <= lost["newest"]


@pytest.mark.slow
@pytest.mark.long
@needs_trace
def test_of_a_fleet_with_half_the_load_those_may_go_whom_nobody_misses() -> None:
    runs = removals(Fleet(workers=64, speed=4.0), [8])
    lost = {row.choice: row.lost for row in rows_of(runs)}
    assert lost["advised"] <= 0.5
    assert lost["advised"] < lost["newest"]


@pytest.mark.slow
@pytest.mark.long
@needs_trace
def test_trying_every_worker_finds_what_the_advised_one_and_the_newest_cost() -> None:
    like = Fleet(workers=4, speed=4.0)
    found = every_hit_rate(like, 1)
    assert len(found) == 4
    runs = {run.choice: run.after.hit_rate for run in removals(like, [1])}
    assert found[advised_places(like, 1)] == runs["advised"]
    assert found[(3,)] == runs["newest"]
    with halfway(like) as there:
        one_after_the_other = there.without(there.ids[:1:-1], pause_s=STAGES_S[-1])
    assert one_after_the_other.hit_rate == found[(3,)], "the next goes when all is over"
    smaller = never_there(like, 1).after
    assert runs["none"] > smaller.hit_rate
    assert len(smaller.stages) == len(STAGES_S)
