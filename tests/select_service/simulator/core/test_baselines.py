"""Policies of other systems choose by the formulas they have published."""

from __future__ import annotations

import random

import pytest

from select_service.simulator.core.baselines import BASELINES, IMPOSSIBLE
from select_service.simulator.core.baselines.cache_aware import CacheAware
from select_service.simulator.core.baselines.d2lpm import QUANTUM_TOKENS, D2Lpm
from select_service.simulator.core.baselines.dynamo_agentic import agentic_weights
from select_service.simulator.core.baselines.llm_d import SCRAPE_S, LlmD
from select_service.simulator.core.baselines.lmetric import LMetric
from select_service.simulator.core.baselines.oracle import BoundRouter, OracleRouter
from select_service.simulator.core.baselines.preble import WINDOW_S, PrebleE2
from select_service.simulator.core.baselines.sglang import BALANCE_ABS, SglangCacheAware
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.kv_events import Removed, Stored
from select_service.simulator.core.kv_pool import CommonCache, SharingKvPool
from select_service.simulator.core.requests import chain_of
from select_service.simulator.core.routers import Counting, Placed
from select_service.simulator.core.worker import EngineJob, EngineWorker
from tests.select_service.simulator.core.engines import BLOCK, SMALL, Given, played, request, some


def fleet(kind: type[Counting], workers: int = 3) -> tuple[Counting, list[EngineWorker]]:
    router = kind(random.Random(1))
    engines = [EngineWorker(number, SMALL, BLOCK) for number in range(workers)]
    for one in engines:
        router.add(one, 0.0)
    return router, engines


def chosen(router: Counting, number: int, isl: int = 40, first: int = 0, now: float = 0.0) -> int:
    verdict = router.route(str(number), request(number, now, isl, 4, first), now)
    assert isinstance(verdict, Placed)
    return verdict.worker_id


def holds(router: Counting, worker_id: int, first: int, blocks: int) -> None:
    chain = request(0, 0.0, BLOCK * blocks, 0, first).blocks
    router.apply(worker_id, [Stored(None, chain)], 0.0)


def test_a_router_knows_what_events_said_up_to_the_last_token() -> None:
    router, _ = fleet(LMetric)
    assert isinstance(router, CacheAware)
    holds(router, 0, 0, 10)
    holds(router, 1, 0, 3)
    asked = request(0, 0.0, 40, 4, first=0)
    assert router.cached([0, 1, 2], asked) == {0: 36, 1: 12, 2: 0}
    router.apply(0, [Removed(asked.blocks[2:4])], 0.0)
    assert router.cached([0, 1], asked) == {0: 8, 1: 12}
    router.remove(1, 0.0)
    router.check()


@pytest.mark.parametrize("kind", [one for one in (*BASELINES, *IMPOSSIBLE) if one is not PrebleE2])
def test_prompts_go_where_their_beginning_is(kind: type[Counting]) -> None:
    requests = [request(number, number * 3.0, 40, 4, first=0) for number in range(4)]
    cluster = played(kind(random.Random(1)), requests, 3)
    assert [outcome.cached_tokens for outcome in cluster.outcomes] == [0, 36, 36, 36]


def test_lmetric_multiplies_what_is_to_compute_by_the_batch() -> None:
    router, _ = fleet(LMetric, 2)
    holds(router, 0, 0, 10)
    assert chosen(router, 0) == 0, "nobody has a batch: less to compute"
    assert chosen(router, 1) == 1, "an empty batch is worth 0"
    # 0: (4 + 4) · 1, 1: (40 + 40) · 1
    assert chosen(router, 2) == 0
    # 0: (8 + 40) · 2, 1: (40 + 40) · 1
    assert chosen(router, 3, first=7) == 1


def test_llm_d_weighs_prefix_queue_and_kv_use_as_they_were_scraped() -> None:
    router, engines = fleet(LlmD, 2)
    holds(router, 0, 0, 10)
    assert chosen(router, 0) == 0
    for number in range(9):
        engines[0].submit(EngineJob(request(number, 0.0, 16, 4)), 0.0)
    assert engines[0].waiting
    assert chosen(router, 1) == 0, "of the last scrape"
    # 0: 3 · 0.9 + 2 · 0 + 2 · 0.9, 1: 3 · 0 + 2 · 1 + 2 · 1
    assert chosen(router, 2, now=SCRAPE_S) == 0
    assert chosen(router, 3, first=7, now=SCRAPE_S) == 1


def test_sglang_follows_its_own_tree_until_loads_differ() -> None:
    router, _ = fleet(SglangCacheAware, 2)
    holds(router, 1, 0, 10)
    first = chosen(router, 0)
    assert {chosen(router, number) for number in range(1, 5)} == {first}, "events show it nothing"
    other = chosen(router, 5, first=7)
    assert other == 1 - first, "the smallest tree takes what nobody has"
    sent = [chosen(router, number) for number in range(6, 6 + 2 * BALANCE_ABS)]
    assert set(sent) == {0, 1}


def test_d2lpm_takes_the_longest_prefix_where_the_client_has_credit() -> None:
    router, _ = fleet(D2Lpm, 2)
    holds(router, 0, 0, 10)
    assert chosen(router, 0) == 0
    assert isinstance(router, D2Lpm)
    spent = QUANTUM_TOKENS + 1
    router._credit[""][0] -= spent
    assert chosen(router, 1) == 1, "the other worker has credit"
    router._credit[""][1] -= spent
    assert chosen(router, 2) == 0, "all have a new quantum"
    router.finished("2", 0.0)
    router.finished("2", 0.0)  # of a request that is gone: nothing


def test_preble_exploits_a_prefix_and_explores_by_computing_time() -> None:
    router, _ = fleet(PrebleE2, 2)
    holds(router, 0, 0, 10)
    assert chosen(router, 0) == 0, "more cached than new"
    assert chosen(router, 1, first=7) == 1, "the least computing time"
    assert chosen(router, 5) == 0
    heavy = chosen(router, 2, isl=60, first=8)
    light = 1 - heavy
    holds(router, heavy, 9, 10)
    assert chosen(router, 3, first=9) == light, "too far ahead of the lightest"
    assert chosen(router, 4, first=9, now=WINDOW_S + 1.0) == heavy, "the window has passed"


def test_the_agentic_preset_counts_a_request_as_1024_tokens() -> None:
    assert agentic_weights(16).decode_active_request_weight == 64.0
    assert agentic_weights(512).decode_active_request_weight == 2.0


def test_the_oracle_knows_what_waits_and_how_long_answers_are() -> None:
    router, engines = fleet(OracleRouter, 2)
    engines[0].submit(EngineJob(request(0, 0.0, 60, 40)), 0.0)
    assert chosen(router, 1) == 1
    engines[1].submit(EngineJob(request(1, 0.0, 60, 40)), 0.0)
    engines[1].submit(EngineJob(request(2, 0.0, 60, 40)), 0.0)
    assert chosen(router, 3) == 0


def test_a_common_cache_finds_what_another_has_computed() -> None:
    common = CommonCache()
    one, other = (SharingKvPool(6, common) for _ in range(2))
    chain = chain_of(range(1, 5))
    one.take(4)
    one.name(chain, 0, 4)
    one.release(chain, 4, 0)
    assert other.match(chain, 4) == (4, 4), "it needs the room of four"
    other.use(chain, 3)
    assert (other.used, other.match(chain, 3)) == (3, (3, 0))
    for pool in (one, other):
        pool.check()
    more = chain_of(range(10, 22))
    common.add(more)
    assert [block in common for block in (1, 4, 10)] == [False, False, True], "as large as both"


def test_the_bound_finds_as_much_as_one_cache_would() -> None:
    requests = some(3, 60, 2.0)
    found = []
    for router in (OracleRouter(random.Random(1)), BoundRouter(random.Random(1))):
        settings = ClusterSettings(
            block_size=BLOCK, has_common_cache=isinstance(router, BoundRouter)
        )
        cluster = Cluster(settings, router, Given(requests))
        for _ in range(4):
            cluster.add_worker("workers", 0.0)
        cluster.finish()
        cluster.check()
        found.append(sum(one.cached_tokens for one in cluster.outcomes))
    assert found[1] > found[0]
