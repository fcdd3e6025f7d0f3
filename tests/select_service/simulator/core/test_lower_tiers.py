"""Engines with memory below the device's: what is found there is loaded, and routers get its
events."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from indexer.types import Tier, WorkerRank
from select_service.simulator.core.cluster import Cluster
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.engine_settings import EngineSettings, SimulatedPool
from select_service.simulator.core.kv_events import Removed, Stored
from select_service.simulator.core.kv_pool import CommonCache, LowerTier, TieredKvPool
from select_service.simulator.core.requests import chain_of
from tests.select_service.simulator.core.engines import SMALL, played, some

HOST = replace(SMALL, host_tokens=400, host_token_s=1e-4)


def test_what_the_device_has_lost_is_loaded_from_below() -> None:
    host, disk = (
        LowerTier(tier, CommonCache(capacity), seconds)
        for tier, capacity, seconds in ((Tier.HOST_PINNED, 4, 0.5), (Tier.DISK, 9, 2.0))
    )
    pool = TieredKvPool(6, [host, disk])
    first, second = chain_of(range(1, 6)), chain_of(range(11, 17))
    for chain in (first, second):
        pool.take(len(chain))
        pool.name(chain, 0, len(chain))
        pool.release(chain, len(chain), 0)
        pool.check()
    assert pool.match(second, 6) == (6, 6), "on the device"
    assert pool.match(first, 5) == (3, 3), "two are in no memory any more"
    tiers = {tier: [one for one in pool.events if one.tier is tier] for tier in Tier}
    assert tiers[Tier.HOST_PINNED][0] == Stored(None, first, Tier.HOST_PINNED)
    assert [type(one) for one in tiers[Tier.DISK]] == [Stored, Stored, Removed]
    assert pool.loading_s() == 0.0
    pool.use(first, 2)
    assert pool.loading_s() == 4.0, "from the disk"
    assert pool.loading_s() == 0.0
    pool.release(first, 2, 0)
    pool.use(first, 2)
    assert pool.loading_s() == 0.0, "it is on the device now"
    pool.check()


def play(engine: EngineSettings, seed: int = 3) -> Cluster:
    pools = {"workers": SimulatedPool("aggregated", engine)}
    router = CoreRouter(CoreSettings(), [random.Random(1)])
    return played(router, some(seed, 60, 8.0), 2, pools=pools)


@pytest.mark.parametrize("seed", range(3))
def test_a_host_tier_finds_more_and_a_slow_one_costs_more(seed: int) -> None:
    def found(cluster: Cluster) -> int:
        return sum(one.cached_tokens for one in cluster.outcomes)

    def waited(cluster: Cluster) -> float:
        return sum(one.ttft_s for one in cluster.outcomes)

    without, below = play(SMALL, seed), play(HOST, seed)
    assert found(below) > found(without)
    assert waited(play(replace(HOST, host_token_s=0.1), seed)) > waited(below)


@pytest.mark.parametrize("seed", range(3))
def test_the_core_knows_what_is_below(seed: int) -> None:
    cluster = play(replace(HOST, disk_tokens=900), seed)
    router = cluster.router
    assert isinstance(router, CoreRouter)
    (index,) = router._indexes.values()
    for worker_id, worker in cluster.workers.items():
        pool = worker.pool
        assert isinstance(pool, TieredKvPool)
        counts = index.blocks_of(WorkerRank(worker_id, 0))
        assert counts[Tier.DEVICE] == pool.named
        assert [counts[one.tier] for one in pool.lower] == [len(one.blocks) for one in pool.lower]
        assert all(len(one.blocks) for one in pool.lower)


def test_lower_tiers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="host_token_s"):
        replace(HOST, host_token_s=-1.0).check()
