from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.drain import PRIOR_TOKENS_PER_S, DrainMeter
from select_service.core.admission.pool_load import PoolLoad, RankLoad, SaturationLimits


def pool_of(ranks: int, rate: float = 1000.0) -> PoolLoad:
    pool = PoolLoad(SaturationLimits(), DrainMeter(prior_tokens_per_s=rate))
    for slot in range(ranks):
        pool.seat(slot, 100)
    return pool


def test_saturation_is_the_mean_of_the_worst_of_each_rank() -> None:
    pool = pool_of(4)
    pool.note(0, RankLoad(prefill_tokens=500, requests=1, prefilling=1), 0.0)
    pool.note(1, RankLoad(decode_blocks=80, requests=5), 0.0)
    pool.note(2, RankLoad(waiting=10, requests=12), 0.0)
    assert pool.saturation == pytest.approx((0.5 + 1.0 + 2.0 + 0.0) / 4)
    assert pool.prefill_backlog == 500
    pool.check()
    pool.unseat(2, 0.0)
    assert pool.saturation == pytest.approx(0.5)
    pool.check()


def test_nobody_and_the_silent_are_full() -> None:
    pool = pool_of(2)
    pool.mark_stale(0, stale=True)
    assert pool.saturation == pytest.approx(0.5)
    pool.mark_stale(0, stale=False)
    assert pool.saturation == 0.0
    assert PoolLoad().saturation == 1.0
    pool.unseat(0, 0.0)
    pool.unseat(1, 0.0)
    pool.unseat(1, 0.0)
    pool.unseat(99, 0.0)
    assert pool.saturation == 1.0
    assert pool.instances == 0


def test_columns_for_the_policies_of_others() -> None:
    pool = pool_of(2)
    pool.note(0, RankLoad(1000, 50, requests=9, prefilling=3), 0.0)
    pool.note(1, RankLoad(0, 10, requests=4, waiting=1), 0.0)
    assert pool.queue_depth.tolist() == [2, 1]
    assert pool.batch_size.tolist() == [7, 3]
    assert pool.in_flight.tolist() == [9, 4]
    assert pool.kv_utilization.tolist() == [0.5, 0.1]


def test_a_faster_pool_is_less_saturated() -> None:
    pool = pool_of(1, rate=1000.0)
    pool.note(0, RankLoad(4000, requests=2), 0.0)
    assert pool.saturation == pytest.approx(4.0)
    for second in range(1, 200):
        pool.prefilled(4000, float(second))
    assert pool.prefill_rate == pytest.approx(4000, rel=0.05)
    assert pool.saturation == pytest.approx(1.0, rel=0.1)


def test_tenants_are_counted_while_they_have_requests() -> None:
    pool = pool_of(1)
    pool.began("a")
    pool.began("a")
    pool.ended("a", 1.0)
    assert pool.tenant_in_flight("a") == 1
    pool.ended("a", 1.0)
    pool.ended("b", 1.0)
    assert pool.tenant_in_flight("a") == pool.tenant_in_flight("b") == 0
    pool.check()


loads = st.builds(
    RankLoad,
    st.integers(0, 10**7).map(float),
    st.integers(0, 1000).map(float),
    st.integers(0, 50),
    st.integers(0, 50),
    st.none() | st.integers(0, 20),
)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["note", "seat", "leave"]), loads)))
def test_sums_follow_every_change(steps: list[tuple[int, str, RankLoad]]) -> None:
    pool = PoolLoad()
    seated: set[int] = set()
    for number, (slot, what, load) in enumerate(steps):
        if what == "seat":
            pool.seat(slot, 1000)
            seated.add(slot)
        elif what == "leave":
            pool.unseat(slot, float(number))
            seated.discard(slot)
        elif slot in seated:
            pool.note(slot, load, float(number))
        pool.check()
    for slot in seated:
        pool.note(slot, RankLoad(), float(len(steps)))
    assert pool.saturation == (0.0 if seated else 1.0), "an idle pool is empty, exactly"


# -- the meter -------------------------------------------------------------------------------------


def test_the_prior_holds_until_something_is_measured() -> None:
    meter = DrainMeter()
    assert meter.tokens_per_s == PRIOR_TOKENS_PER_S
    assert meter.requests_per_s == 0.0


def run(meter: DrainMeter, start: float, seconds: int, *, ranks: int, rate: float) -> float:
    meter.computing(ranks, start)
    for second in range(1, seconds + 1):
        meter.computed(int(rate * ranks), start + second)
        meter.ended(start + second)
    meter.computing(0, start + seconds)
    return start + seconds


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_rate_is_that_of_one_computing_rank(ranks: int) -> None:
    meter = DrainMeter(prior_tokens_per_s=1.0)
    run(meter, 0.0, 100, ranks=ranks, rate=500.0)
    assert meter.tokens_per_s == pytest.approx(500, rel=0.03)
    assert meter.requests_per_s == pytest.approx(1.0, rel=0.03)


def test_an_idle_night_changes_nothing() -> None:
    meter = DrainMeter()
    end = run(meter, 0.0, 60, ranks=4, rate=900.0)
    before = meter.tokens_per_s, meter.requests_per_s
    meter.computing(4, end + 40_000.0)
    assert (meter.tokens_per_s, meter.requests_per_s) == before


def test_old_times_are_forgotten() -> None:
    meter = DrainMeter(memory_s=10.0)
    end = run(meter, 0.0, 100, ranks=1, rate=5000.0)
    run(meter, end, 50, ranks=1, rate=100.0)
    assert 100 <= meter.tokens_per_s < 180


def test_time_that_goes_back_is_no_time() -> None:
    meter = DrainMeter()
    meter.computing(1, 10.0)
    before = meter.tokens_per_s
    meter.computed(0, 5.0)
    assert meter.tokens_per_s == before
