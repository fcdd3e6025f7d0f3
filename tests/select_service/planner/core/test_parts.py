"""Where in an interval requests lay, and how what recurs is planned by it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from select_service.planner.core.demand import Demand, Interval, Predictors, intervals_of
from select_service.planner.core.forecast_errors import ForecastErrors
from select_service.planner.core.parts import PARTS, Looks, runs
from select_service.planner.core.pool import NeedStretch, PlannedPool
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.recurrence import RECURRING, Recurrence
from select_service.planner.core.stabilization_window import PoolSettings
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.types import (
    IDLE,
    ModelKey,
    PoolKey,
    PoolState,
    Value,
    Window,
)

INTERVAL, PERIOD = 60.0, 10
counts = st.floats(0, 1e6)


@example([(2.0, 0.0)], 4.0, 1.0, 0.0)  # a part was covered for longer than it lasts
@given(
    st.lists(st.tuples(st.floats(0.1, 60), counts), max_size=20),
    st.floats(1, 600),
    counts,
    st.floats(0, 60),
)
def test_parts_add_up_to_what_came(
    looks: list[tuple[float, float]], seconds: float, requests: float, ago_s: float
) -> None:
    counter, now = Looks(), 1000.0
    for span, count in looks:
        now += span
        counter.count(count, span, now - ago_s)
    parts = counter.end(requests, seconds, now)
    assert counter.end(requests, seconds, now) == (), "every interval begins anew"
    assert not parts or len(parts) == PARTS
    if parts:
        assert sum(parts) == pytest.approx(requests)
        assert min(parts) >= 0
    if sum(span for span, _ in looks) < seconds / 2 - 1e-6 or not requests:
        assert not parts


def test_looks_are_laid_where_they_were() -> None:
    looks = Looks()
    for step in range(11):  # the slow loop takes the twelfth
        looks.count(180.0 if step >= 6 else 50.0, 5.0, 5.0 * (step + 1))
    assert looks.end(6 * 50.0 + 6 * 180.0, 60.0, 60.0) == pytest.approx((100,) * 3 + (360,) * 3)
    looks.count(600.0, 60.0, 120.0)
    parts = looks.end(600.0, 60.0, 120.0)
    assert parts == pytest.approx((100.0,) * PARTS), "one look over all of them"


def test_looks_that_were_scraped_earlier_are_laid_where_they_were_scraped() -> None:
    """They were taken for the seconds right before the look, half a part or more too late."""
    looks = Looks()
    for end in (40.0, 55.0, 70.0):  # of the interval that begins at 30, counted a while later
        looks.count(15.0 * (20.0 if end > 55.0 else 10.0), 15.0, end)
    assert looks.end(10.0 * 25 + 20.0 * 35, 60.0, 90.0) == pytest.approx(
        (100.0, 100.0, 150.0, 200.0, 200.0, 200.0)
    ), "what is missing came evenly after the last of them"
    looks.count(15.0 * 20.0, 15.0, 100.0)
    looks.count(15.0 * 10.0, 15.0, 115.0)
    looks.count(15.0 * 10.0, 15.0, 130.0)
    assert looks.end(20.0 * 10 + 10.0 * 50, 60.0, 150.0) == pytest.approx(
        (200.0, 100.0, 100.0, 100.0, 100.0, 100.0)
    ), "half of a look belongs to the interval before"


@given(
    st.lists(
        st.tuples(counts, st.lists(counts, min_size=PARTS, max_size=PARTS).map(tuple)), max_size=6
    )
)
def test_runs_cover_all_the_time_in_order(intervals: list[tuple[float, tuple[float, ...]]]) -> None:
    found = runs(intervals)
    edges = [0.0, *(one.end for one in found)]
    assert [one.begin for one in found] == edges[:-1]
    assert edges[-1] == PARTS * len(intervals)
    assert all(math.isfinite(one.share) and one.share >= 0 for one in found)


def test_what_differs_by_chance_is_one_and_a_burst_is_as_long_as_it_was() -> None:
    rng = random.Random(3)
    calm = [600.0 + rng.gauss(0, 20) for _ in range(5)]
    even = tuple(100.0 + rng.gauss(0, 8) for _ in range(PARTS))
    assert len({round(one.share) for one in runs([(one, even) for one in calm])}) <= 2
    edge = (100.0, 100.0, 100.0, 260.0, 360.0, 360.0)
    found = runs([(600.0, even), (1280.0, edge), (2160.0, (360.0,) * PARTS), (600.0, even)])
    burst = [one for one in found if one.share > 150]
    assert (burst[0].begin, burst[-1].end) == (9.0, 18.0)
    assert min(one.share for one in burst) == pytest.approx(360.0), "the part it begins in is full"


def bursts(steps: int, seed: int = 5) -> list[Interval]:
    """10 a second, and 36 from the middle of every tenth interval to the end of the next."""
    rng, now, found = random.Random(seed), 0.0, []
    while now < steps * INTERVAL:
        at = now % (PERIOD * INTERVAL)
        rate = 36.0 if at >= (PERIOD - 1.5) * INTERVAL and at < PERIOD * INTERVAL else 10.0
        now += rng.expovariate(rate)
        found.append(TracedRequest(now, 100.0, 10.0))
    return intervals_of([*found, TracedRequest((steps + 1) * INTERVAL, 1.0, 1.0)], INTERVAL)[:steps]


def recurring() -> Demand:
    return Demand(Predictors(Predictor(Recurrence()), *(Predictor(Constant()) for _ in range(2))))


def test_what_recurs_is_forecast_part_by_part() -> None:
    demand = recurring()
    demand.warm_up(bursts(6 * PERIOD))
    assert demand.recurs
    stretches = demand.stretches(INTERVAL, PERIOD)[:PARTS]
    high = [one for one in demand.stretches(INTERVAL, PERIOD) if one.forecast.rate > 30]
    assert high[0].begin_s == (PERIOD - 1.5) * INTERVAL
    assert high[-1].end_s == PERIOD * INTERVAL
    assert all(one.forecast.rate == pytest.approx(10, rel=0.15) for one in stretches[:3])


def test_looks_of_the_fast_loop_become_parts_and_zeros_at_the_start_shift_none() -> None:
    demand = recurring()
    demand.warm_up(bursts(6 * PERIOD))
    window = Window(seconds=INTERVAL, requests=IDLE)
    now = 0.0
    for _ in range(3):  # idle before the first traffic: predictors do not see it
        now += INTERVAL
        demand.observe(window, now, INTERVAL)
    for one in bursts(2 * PERIOD, seed=6):
        for part in one.parts:
            now += INTERVAL / PARTS
            demand.count(part, INTERVAL / PARTS, now)
        window = Window(
            seconds=INTERVAL, requests=Value(one.requests), isl=Value(100.0), osl=Value(10.0)
        )
        demand.observe(window, now, INTERVAL)
        assert demand.history[-1].parts == pytest.approx(one.parts)
    high = [one for one in demand.stretches(INTERVAL, PERIOD) if one.forecast.rate > 30]
    assert high[0].begin_s == (PERIOD - 1.5) * INTERVAL


def test_another_period_is_judged_by_the_whole_past() -> None:
    """What an earlier one got wrong is not held against it, nor does it begin with nothing."""
    demand = recurring()
    demand.warm_up(bursts(3 * PERIOD))
    assert demand.recurs
    forecast_errors = demand.forecast_errors
    assert len(forecast_errors) >= 2 * PERIOD - 5
    assert max(factor for factor, _ in forecast_errors.spread(600.0)) < 1.3


def test_forecasts_are_judged_by_the_interval_they_were_made_for() -> None:
    """The time engines take to start is measured, and so the distance of forecasts changes."""
    demand = recurring()
    demand.look_ahead(2, 60.0, 60.0)
    for step, one in enumerate(bursts(9 * PERIOD)):
        demand.look_ahead(3 if step % 7 > 3 else 2, 60.0, 60.0)
        demand._learn(one)
    wrong = [
        abs(difference)
        for difference, _ in list(demand._forecast_errors[RECURRING]._seen)[4 * PERIOD :]
    ]
    assert wrong
    assert max(wrong) < 4.0, "in roots of counts; a burst taken for its neighbour is 20"


def test_chance_is_no_surprise_and_a_burst_remains_one() -> None:
    forecast_errors, rng = ForecastErrors(), random.Random(8)
    for _ in range(200):
        forecast_errors.add(600.0, rng.gauss(600.0, math.sqrt(600.0)))
    assert max(factor for factor, _ in forecast_errors.spread(600.0)) < 1.10
    assert sum(factor * share for factor, share in forecast_errors.spread(600.0)) < 1.01


POOL = PoolKey(ModelKey("m"), "prefill")


def planned(desired: int, *courses: tuple[float, float, float]) -> PlannedPool:
    pool = PlannedPool(POOL, PoolSettings())
    pool.look(PoolState(desired, desired), 0.0)
    pool.start_time.seconds = 60.0
    pool.plan(
        [NeedStretch(begin, end, need, 0.95 * need, need) for begin, end, need in courses], None
    )
    return pool


def test_engines_are_ordered_when_they_are_due_and_let_go_when_arrivals_were_counted() -> None:
    pool = planned(1, (0, 90, 1.0), (90, 150, 3.0), (150, 300, 1.0))
    wanted = {}
    for now in range(0, 200, 5):
        pool.follow(float(now), 5.0, 5.0)
        wanted[now] = pool.slow
    assert [now for now, count in wanted.items() if count == 3] == list(range(30, 155, 5))
    pool.follow(1000.0, 5.0, 5.0)
    assert pool.slow == 1, "the slow loop is late: what was planned last goes on"


def test_the_count_that_is_there_stays_while_only_chance_decides() -> None:
    for there, want in ((1, 2), (2, 2), (3, 3), (4, 3)):
        pool = planned(there, (0, 300, 2.05))  # 1.95 at least
        pool.follow(0.0, 5.0, 5.0)
        assert pool.slow == want


def test_who_was_surprised_is_sure_of_nothing_until_the_interval_after() -> None:
    pool = planned(3, (0, 300, 1.0))
    sure: list[int | None] = []
    for begin in (0.0, 300.0, 600.0):
        pool.plan([NeedStretch(begin, begin + 300, 1.0, 1.0, 1.0)], None)
        pool.follow(begin, 5.0, 5.0)
        sure.append(pool.sure)
        if not begin:
            pool.surge()
            sure.append(pool.sure)
            pool.follow(begin + 5.0, 5.0, 5.0)
            sure.append(pool.sure)
    assert sure == [1, None, None, None, 1]
