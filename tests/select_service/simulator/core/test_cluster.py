"""Simulated clusters: nothing is lost, whatever happens to workers; one seed is one history."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.simulator.core.baselines.d2lpm import D2Lpm
from select_service.simulator.core.baselines.llm_d import LlmD
from select_service.simulator.core.baselines.lmetric import LMetric
from select_service.simulator.core.baselines.oracle import BoundRouter, OracleRouter
from select_service.simulator.core.baselines.preble import PrebleE2
from select_service.simulator.core.baselines.sglang import SglangCacheAware
from select_service.simulator.core.cluster import Cluster
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.engine_settings import SimulatedPool
from select_service.simulator.core.observation import ISL_EDGES, middle_of_bin
from select_service.simulator.core.replicated import Replicated
from select_service.simulator.core.requests import RequestOutcome
from select_service.simulator.core.routers import (
    Counting,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RandomChoice,
    RoundRobinRouter,
    WorkerRouter,
)
from select_service.types.admission import AdmissionSettings
from tests.effort import examples
from tests.select_service.simulator.core.engines import (
    PARTS,
    WHOLE,
    cluster_of,
    played,
    request,
    some,
)


def core(replicas: int = 1, **more: object) -> CoreRouter:
    made = CoreSettings(replicas=replicas, sync_delay_s=0.02, **more)  # type: ignore[arg-type]
    return CoreRouter(made, [random.Random(seed) for seed in range(replicas)])


def queueing() -> CoreRouter:
    """Requests wait at the service, and some too long."""
    return core(admission=AdmissionSettings(max_inflight=3, max_queued=2, queue_deadline_s=0.7))


def seeded(kind: type[Counting]) -> Counting:
    return kind(random.Random(1))


ROUTERS: dict[str, Callable[[], WorkerRouter]] = {
    "round-robin": lambda: RoundRobinRouter(random.Random(1)),
    "random": lambda: RandomChoice(random.Random(1)),
    "least-loaded": lambda: LeastLoaded(random.Random(1)),
    "least-loaded, 3 replicas": lambda: Replicated(
        [LeastLoaded(random.Random(seed)) for seed in range(3)], sync_delay_s=0.02
    ),
    "power-of-two": lambda: PowerOfTwo(random.Random(1)),
    "prefix-affinity": lambda: PrefixAffinity(random.Random(1)),
    **{
        kind.name: partial(seeded, kind)
        for kind in (LMetric, PrebleE2, D2Lpm, LlmD, SglangCacheAware, OracleRouter, BoundRouter)
    },
    "preble-e2, 3 replicas, predicted events": lambda: Replicated(
        [PrebleE2(random.Random(seed), "predicted") for seed in range(3)], sync_delay_s=0.02
    ),
    "core": core,
    "core, queueing": queueing,
    "core, 3 replicas": lambda: core(3),
    "core, 2 replicas, predicted events": lambda: core(2, kv_events="predicted"),
}


def built(
    router: WorkerRouter, requests: int, seed: int, pools: dict[str, SimulatedPool]
) -> Cluster:
    return cluster_of(
        router,
        some(seed, requests, 15.0),
        3,
        pools,
        event_lag_s=0.05,
        load_lag_s=0.01,
        transfer_token_s=1e-4,
        detect_s=0.3,
        sample_s=0.5,
        has_common_cache=isinstance(router, BoundRouter),
    )


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("pools", [WHOLE, PARTS], ids=["whole", "parts"])
@given(data=st.data())
@settings(max_examples=examples(6))
def test_every_request_ends_once_and_nothing_is_left(
    name: str, pools: dict[str, SimulatedPool], data: st.DataObject
) -> None:
    cluster = built(ROUTERS[name](), 40, data.draw(st.integers(0, 10**6)), pools)
    for _ in range(data.draw(st.integers(0, 4))):
        cluster.advance(cluster.now + data.draw(st.floats(0.0, 1.5)))
        pool = data.draw(st.sampled_from(sorted(pools)))
        ids = cluster.worker_ids(pool)
        what = data.draw(st.sampled_from(["add", "start", "drain", "fail", "back"]))
        if what in {"add", "start"} or len(ids) < 2:
            cluster.add_worker(pool, cluster.now, 0.5 * (what == "start"))
        elif what == "drain":
            gone = data.draw(st.sampled_from(ids))
            cluster.remove_worker(gone, cluster.now)
        else:
            gone = data.draw(st.sampled_from(ids))
            cluster.fail_worker(gone, cluster.now, 0.2 if what == "back" else None)
        cluster.check()
    cluster.finish(limit_s=10_000.0)
    assert cluster.is_done
    cluster.check()
    assert len(cluster.outcomes) == 40
    for outcome in cluster.outcomes:
        if outcome.is_ok:
            assert outcome.request.arrival <= outcome.first_token <= outcome.finished


def facts(outcomes: list[RequestOutcome]) -> list[tuple[object, ...]]:
    return [
        (one.request.number, one.end, one.finished, one.first_token, one.worker_id, one.reason)
        for one in outcomes
    ]


@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_seed_gives_the_same_to_the_last_bit(name: str) -> None:
    runs = []
    for _ in range(2):
        cluster = built(ROUTERS[name](), 80, 5, WHOLE)
        cluster.advance(1.0)
        cluster.fail_worker(0, 1.0, 0.5)
        cluster.finish()
        runs.append(facts(cluster.outcomes))
    assert runs[0] == runs[1]


def test_the_core_sends_a_prompt_where_its_beginning_is() -> None:
    requests = [request(number, number * 3.0, 40, 4, first=0) for number in range(4)]
    cluster = played(core(), requests, 3)
    assert len({outcome.worker_id for outcome in cluster.outcomes}) == 1
    assert [outcome.cached_tokens for outcome in cluster.outcomes] == [0, 36, 36, 36]
    assert cluster.reasons == {"no rank holds any": 1, "longest prefix": 3}


def test_each_decision_has_one_reason_also_after_a_wait() -> None:
    requests = [request(number, 0.0, 40, 40) for number in range(8)]
    cluster = played(queueing(), requests)
    assert cluster.reasons["after waiting"] > 0
    assert sum(cluster.reasons.values()) == 8, cluster.reasons


def test_events_that_come_late_are_not_known_yet() -> None:
    requests = [request(number, number * 3.0, 40, 4, first=0) for number in range(2)]
    cluster = played(core(), requests, event_lag_s=60.0)
    assert cluster.reasons == {"no rank holds any": 2}
    assert cluster.outcomes[1].cached_tokens == 36, "the engine knows all the same"


def test_a_load_that_is_reported_late_is_carried_longer() -> None:
    router = LeastLoaded(random.Random(1))
    cluster = cluster_of(router, [request(0, 0.0, 8, 2)], load_lag_s=5.0)
    cluster.finish()
    assert router.load(0) == 1
    cluster.advance(cluster.now + 5.0)
    assert router.load(0) == 0


def test_replicas_learn_each_others_bookings_as_late_as_they_are_sent() -> None:
    for delay, expected in ((0.01, {0, 1}), (1e9, {0})):
        router = CoreRouter(
            CoreSettings(replicas=2, sync_delay_s=delay), [random.Random(1), random.Random(1)]
        )
        requests = [request(0, 0.0, 60, 30), request(1, 0.1, 60, 30)]
        used = {outcome.worker_id for outcome in played(router, requests, 2).outcomes}
        if delay == 1e9:  # both draw alike and see an idle fleet
            assert len(used) == 1
        else:
            assert used == expected


def test_a_worker_that_starts_is_not_chosen_and_one_that_drains_ends_its_work() -> None:
    requests = [request(0, 0.0, 8, 40), request(1, 0.1, 8, 4), request(2, 2.0, 8, 4)]
    cluster = cluster_of(RoundRobinRouter(random.Random(1)), requests)
    (first,) = cluster.worker_ids("workers")
    second = cluster.add_worker("workers", 0.0, startup_s=1.0)
    cluster.advance(0.2)
    assert cluster.observe().pools["workers"].starting == 1
    cluster.advance(1.0)
    cluster.remove_worker(first, 1.0)
    assert first not in cluster.workers, "it had nothing left to do"
    cluster.finish()
    assert [outcome.worker_id for outcome in cluster.outcomes] == [first, first, second]


def test_a_prefill_worker_that_drains_goes_once_its_last_prompt_is_elsewhere() -> None:
    requests = [request(0, 0.0, 40, 40), request(1, 0.0, 40, 1)]
    router = RoundRobinRouter(random.Random(1))
    cluster = cluster_of(router, requests, pools=PARTS, transfer_token_s=2e-2)
    ids = {pool: cluster.worker_ids(pool)[0] for pool in PARTS}
    cluster.advance(0.01)
    for worker_id in ids.values():
        cluster.remove_worker(worker_id, 0.01)
    cluster.advance(0.5)
    assert set(cluster.workers) == set(ids.values()), "the cache is under way"
    assert cluster.observe().pools["prefill"].draining == 1
    cluster.advance(0.95)
    assert set(cluster.workers) == {ids["decode"]}
    cluster.finish()
    assert not cluster.workers
    assert [one.end for one in cluster.outcomes] == ["ok", "ok"]


def test_a_request_whose_workers_die_is_tried_again_and_then_lost() -> None:
    router, requests = RoundRobinRouter(random.Random(1)), [request(0, 0.0, 8, 40)]
    cluster = cluster_of(router, requests, workers=0, attempts_max=2, detect_s=0.1)
    for at in (0.0, 0.2):
        worker_id = cluster.add_worker("workers", at)
        cluster.advance(at + 0.1)
        cluster.fail_worker(worker_id, at + 0.11)
    cluster.finish()
    (outcome,) = cluster.outcomes
    assert (outcome.end, outcome.attempts) == ("lost", 2)
    cluster.check()


def test_an_interval_says_what_happened_in_it() -> None:
    requests = [request(0, 0.5, 20, 11), request(1, 1.5, 200, 5), request(2, 20.0, 8, 2)]
    cluster = cluster_of(RoundRobinRouter(random.Random(1)), requests)
    cluster.advance(10.0)
    seen = cluster.observe()
    assert (seen.start, seen.end, seen.num_req, seen.finished, seen.lost) == (0.0, 10.0, 2, 1, 1)
    assert seen.isl == 110.0
    assert seen.osl == 11.0
    assert sum(seen.isl_histogram) == 2
    assert seen.isl_histogram[0] == 1
    assert len(seen.isl_histogram) == len(ISL_EDGES) + 1
    (done,) = [one for one in cluster.outcomes if one.is_ok]
    assert seen.ttft_s == pytest.approx(done.ttft_s)
    assert seen.itl_s == pytest.approx(done.itl_s)
    assert seen.request_duration_s == pytest.approx(done.e2e_s)
    assert seen.concurrency == pytest.approx(done.e2e_s / 10.0)
    pool = seen.pools["workers"]
    assert (pool.ready, pool.worker_seconds, pool.waiting) == (1, 10.0, 0)
    assert pool.concurrency == pytest.approx(done.e2e_s / 10.0)
    assert pool.busy == pytest.approx(done.e2e_s / 10.0)
    cluster.advance(15.0)
    idle = cluster.observe()
    assert (idle.num_req, idle.isl, idle.ttft_s, idle.itl_s) == (0, None, None, None)


def test_whoever_waits_is_refused_when_his_time_is_up_and_not_when_somebody_looks() -> None:
    requests = [
        request(0, 0.0, 8, 100),
        *(request(1 + at, 0.1 + 0.2 * at, 8, 4) for at in range(3)),
    ]
    queues = AdmissionSettings(max_inflight=1, max_queued=5, queue_deadline_s=0.3)
    cluster = played(core(admission=queues), requests)
    late = [one for one in cluster.outcomes if not one.is_ok]
    waited = {one.request.number: one.finished - one.request.arrival for one in late}
    assert waited == {number: pytest.approx(0.3) for number in (1, 2, 3)}


def test_a_prompt_that_is_computed_again_after_a_death_is_no_hit() -> None:
    """Its decode worker dies, and the prefill worker has what it has computed for it."""
    router, requests = RoundRobinRouter(random.Random(1)), [request(0, 0.0, 40, 40)]
    cluster = cluster_of(router, requests, pools=PARTS, detect_s=0.1)
    (decoding,) = cluster.worker_ids("decode")
    cluster.advance(0.2)
    cluster.fail_worker(decoding, 0.2, back_after_s=0.01)
    cluster.finish()
    (outcome,) = cluster.outcomes
    assert outcome.is_ok
    assert outcome.attempts > 1
    assert outcome.first_token < 0.2
    assert outcome.cached_tokens == 0


@pytest.mark.parametrize("pools", [WHOLE, PARTS], ids=["whole", "parts"])
def test_times_between_tokens_add_up_to_what_answers_took(pools: dict[str, SimulatedPool]) -> None:
    """Also of who was preempted, or waited for a seat where answers are decoded."""
    requests = [request(number, 0.05 * number, 20, 30) for number in range(40)]
    router = RoundRobinRouter(random.Random(1))
    cluster = played(router, requests, pools=pools, transfer_token_s=1e-3)
    assert sum(one.preemptions for one in cluster.outcomes) > 3
    assert sum(cluster.gaps.values()) == 40 * 29
    took_s = sum(one.finished - one.first_token for one in cluster.outcomes)
    total_s = sum(middle_of_bin(at) * tokens for at, tokens in cluster.gaps.items())
    assert total_s == pytest.approx(took_s, rel=0.01)
    longest_s = max(map(middle_of_bin, cluster.gaps))
    assert longest_s > 10 * took_s / (40 * 29), "somebody had to wait"
