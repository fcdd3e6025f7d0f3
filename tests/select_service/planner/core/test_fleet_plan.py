"""The whole decision: what is not known, budgets, patience, both loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from select_service.planner.core.budget import PoolNeed, share_out
from select_service.planner.core.correction import Correction
from select_service.planner.core.demand import Demand, Interval, Predictors
from select_service.planner.core.kalman import Kalman
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.recurrence import Recurrence
from select_service.planner.types import (
    IDLE,
    Load,
    Missing,
    ModelKey,
    PoolKey,
    PoolState,
    Reading,
    Target,
    Value,
    Window,
)
from tests.select_service.planner.core.planned_fleet import (
    BUSY,
    DECODE,
    INTERVAL,
    KEY,
    PREFILL,
    Run,
    model,
)


def test_minutes_in_which_nobody_counts_are_a_gap_in_what_is_remembered() -> None:
    one = model()
    one.recall([Interval(9.0, 1.0, 1.0, (1.0,) * 9), Interval(9.0, 1.0, 1.0)], 1.0, 1.0, 1.0, 180.0)
    for now in (5.0, 10.0, 600.0, 605.0):
        one.react(Load(arrived=Value(10.0), seconds=5.0), now, 5.0)
    ends = [count.end_s for count in one.steady_fleet._counts][-5:]
    assert [end - ends[0] for end in ends] == [0.0, 185.0, 190.0, 780.0, 785.0]


def test_lengths_of_one_interval_do_not_change_what_is_usual() -> None:
    """A fleet that was to stay as it is went up and down with the mean length of each minute."""
    demand = Demand(Predictors(*(Predictor(Constant()) for _ in range(3))))
    demand.recall([Interval(300.0, 1000.0, 9.0), Interval(0.0, None, None)])
    demand.recall([Interval(100.0, 3000.0, 9.0)])
    assert demand.usual_isl == 1500.0
    demand.recall([Interval(0.0, None, None)] * 60)
    assert demand.usual_isl == 3000.0, "of the last interval with any"


def test_slow_engines_are_known_to_be_slow_where_requests_come_in_lumps() -> None:
    """What was learnt of them was forgotten, at each restart for one, and never learnt again."""
    one = model()
    one.recall([Interval(5400.0, 3000.0, 300.0)], 1.0, 1.6, 1.0, INTERVAL)
    for pool in one.pools:
        pool.state, pool.was_steady = PoolState(12, 12), True
    for look in range(60):
        one.demand.count(140.0 + 60.0 * (look % 2), 5.0, 5.0 * look)
    one._correct(BUSY)
    assert one.demand.lumps.seconds > 0
    assert one.p_correction.factor > 1.3
    for _ in range(12):
        one._correct(replace(BUSY, ttft_ms=Value(2_000.0)))
    assert one.p_correction.factor > 1.9
    assert one.demand.lumps.seconds <= one.demand.lumps.most_s(5400.0, INTERVAL)


def _target(pool: PoolKey, replicas: int) -> Target:
    return Target(pool.model.model_name, pool.model.tenant_id, pool.role, replicas)


def test_traffic_becomes_replicas_with_reasons() -> None:
    run = Run(prefill=1, decode=1)
    decision = run.slow(BUSY)
    assert run.counts == (4, 6)
    assert decision.gpus == 10
    assert any("m prefill: 30.00 requests/s are expected" in one for one in decision.reasons)
    assert decision.terms["m prefill:engines"] > 3


def _with(name: str, reading: Reading) -> Window:
    changes: Any = {name: reading}
    return replace(BUSY, **changes)


@pytest.mark.parametrize("name", ["ttft_ms", "itl_ms", "concurrency", "isl", "osl"])
@pytest.mark.parametrize("reading", [Missing("no series"), IDLE])
def test_a_missing_metric_scales_nothing_away(name: str, reading: Reading) -> None:
    """Fault 1: a TTFT of 0 makes the prefill pool fall from three to one."""
    run = Run()
    run.slow(BUSY)
    before = run.counts
    for _ in range(10):
        run.slow(_with(name, reading))
    assert run.counts == before


@pytest.mark.parametrize("name", ["isl", "osl"])
@pytest.mark.parametrize("reading", [Missing("workers do not report it"), Value(0.0), IDLE])
def test_a_length_that_was_never_reported_takes_no_busy_engine_away(
    name: str, reading: Reading
) -> None:
    """Callers that report no output: a fleet at work was made as small as it may be, in silence."""
    run = Run(model(stabilisation_s=0.0))
    before = run.counts
    for _ in range(8):
        decision = run.slow(_with(name, reading))
        assert run.counts == before
        reason = f"m: no source reports any {name.upper()}: replicas are held"
        assert reason in decision.reasons
        run.fast(Load(arrived=Value(150.0), seconds=5.0))
        assert run.counts == before
    run.slow(BUSY)
    assert run.counts == (4, 6)
    nobody = Run(model(stabilisation_s=0.0))
    for _ in range(2):
        nobody.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert nobody.counts == (1, 1), "who has never been asked for anything is not held"


def test_a_fleet_at_nothing_whose_lengths_nobody_knows_begins_with_one_of_each() -> None:
    """Where nobody serves, nothing has a length: who was asked for never had an engine."""
    run = Run(model(least=0), prefill=0, decode=0)
    unserved = Window(
        seconds=INTERVAL,
        requests=Value(3.0),
        isl=Missing("no selector reports it"),
        osl=Missing("no selector reports it"),
    )
    run.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert run.counts == (0, 0)
    decision = run.slow(unserved)
    assert run.counts == (1, 1)
    assert "m: no source reports any ISL and OSL: one replica each, to learn it" in decision.reasons


def test_idle_intervals_hold_the_lengths() -> None:
    """Fault 4: ISL 0 and OSL 0 of a quiet interval are averaged into the next."""
    run = Run(model(stabilisation_s=0.0))
    run.slow(BUSY)
    run.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert run.counts == (1, 1)
    run.slow(replace(BUSY, isl=Missing("late"), osl=Missing("late")))
    assert run.counts == (4, 6)  # sized with the lengths from before


def test_an_interval_that_took_longer_is_no_more_traffic() -> None:
    """A machine that slept, or a source that was away, reports more than one interval."""
    run = Run(prefill=1, decode=1)
    run.slow(replace(BUSY, seconds=3 * INTERVAL, requests=Value(3 * 5400.0)))
    assert run.counts == (4, 6)


def test_missing_intervals_hold_replicas_and_then_the_load_decides() -> None:
    run = Run()
    run.slow(BUSY)
    lost = Window(seconds=INTERVAL, requests=Missing("connection refused"))
    for _ in range(3):
        assert any("connection refused" in one for one in run.slow(lost).reasons)
        assert run.counts == (4, 6)
    decision = run.slow(lost)
    assert any("the load alone decides" in one for one in decision.reasons)
    assert run.counts == (4, 6)  # nothing is known of the load either
    quiet = Load(
        prefill_backlog_tokens=Value(3000.0), concurrency=Value(10.0), context_tokens=Value(3150.0)
    )
    for _ in range(70):
        run.fast(quiet)
    assert run.counts == (1, 1)


@pytest.mark.parametrize("how", ["missing", "asleep"])
def test_what_recurs_is_foreseen_on_time_after_what_nobody_counted(how: str) -> None:
    """Every interval without metrics, or without a planner, moved all bursts to come by one."""
    lost, period = 7, 15

    def window(step: int) -> Window:
        return replace(BUSY, requests=Value(21_000.0 if step % period >= 13 else 6_000.0))

    planned = model(requests=Recurrence())
    run, known = Run(planned), 90
    for step in range(known):
        run.slow(window(step))
    for _ in range(lost):
        if how == "missing":
            run.slow(Window(seconds=INTERVAL, requests=Missing("no Prometheus")))
        else:
            run.now += INTERVAL
    for step in range(known + lost, known + lost + 2 * period):
        run.slow(window(step))
        forecast = planned.demand.forecast(INTERVAL)
        assert forecast is not None
        expected = window(step + 1).requests
        assert isinstance(expected, Value)
        assert forecast.rate * INTERVAL == pytest.approx(expected.value, rel=0.1)


def test_time_passes_while_metrics_are_missing_from_the_start() -> None:
    planned = model(requests=Recurrence())
    run, past = Run(planned), [Interval(6_000.0, 3000.0, 300.0)] * 40
    planned.recall(past, 1.0, 1.0, 1.0, INTERVAL)
    for _ in range(2):
        run.slow(Window(seconds=INTERVAL, requests=Missing("no Prometheus")))
    run.slow(BUSY)
    assert [one.requests for one in planned.demand.history[-3:]] == [6_000.0, 6_000.0, 5_400.0]
    assert len(planned.demand.history) == len(past) + 3


def test_turns_that_are_late_now_and_then_are_no_intervals_more() -> None:
    """Of decisions that take long by turns: a gap was seen behind each, and filled."""
    planned = model(requests=Recurrence())
    run = Run(planned)
    for turn in range(40):
        run.now = INTERVAL * (turn + (0.8 if turn % 2 else 0.0))
        run.slow(BUSY, seconds=0.0)
    assert 40 <= len(planned.demand.history) <= 41


@pytest.mark.parametrize("budget", range(2, 16))
def test_the_budget_is_a_ceiling(budget: int) -> None:
    """Fault 3: rounding goes over it there."""
    run = Run(gpus_max=budget, prefill=1, decode=1)
    decision = run.slow(BUSY)
    assert decision.gpus <= budget
    assert decision.gpus == min(budget, 10)
    if budget < 10:
        assert any(f"{budget} GPUs are allowed" in one for one in decision.reasons)


def test_several_models_share_by_weight() -> None:
    second = model(ModelKey("n"), weight=3.0)
    run = Run(model(), second, gpus_max=12, prefill=1, decode=1)
    run.slow(BUSY)
    theirs = sum(run.states[pool.key].desired for pool in second.pools)
    assert theirs > sum(run.counts)
    assert theirs + sum(run.counts) == 12


def test_who_surges_has_the_same_share_as_who_was_forecast() -> None:
    """What was planned for it before was taken for its need: it got two engines of a kind."""
    other = ModelKey("other")
    run = Run(model(), model(other), gpus_max=14)
    quiet = replace(BUSY, requests=Value(900.0))
    run.slow_each({KEY: BUSY, other: quiet})
    assert [run.states[pool.key].desired for pool in run.fleet.models[1].pools] == [1, 1]
    load = Load(arrived=Value(150.0), seconds=5.0)  # as many as of the first
    decision = run.fleet.fast({KEY: load, other: load}, run.states, run.now + 5.0)
    assert [one.replicas for one in decision.targets] == [3, 4, 3, 4]


def test_who_is_held_has_the_same_share_as_who_was_forecast() -> None:
    """Metrics were lost after a quiet interval, before anything was taken away."""
    other = ModelKey("other")
    run = Run(model(), model(other), gpus_max=20)
    quiet = replace(BUSY, requests=Value(180.0))
    lost = Window(seconds=INTERVAL, requests=Missing("no Prometheus"))
    run.slow_each({KEY: quiet, other: BUSY})
    run.slow_each({KEY: quiet, other: quiet})
    run.slow_each({KEY: BUSY, other: lost})
    run.fleet.gpus_max = 14
    decision = run.slow_each({KEY: BUSY, other: lost})
    assert [one.replicas for one in decision.targets] == [3, 4, 3, 4]


def test_engines_of_different_sizes_fill_the_budget_and_never_more() -> None:
    needs = [PoolNeed(PREFILL, 1, 1, 9, 8.5), PoolNeed(DECODE, 4, 1, 5, 4.2)]
    for budget in range(5, 40):
        counts = share_out(needs, budget)
        total = counts[PREFILL] + 4 * counts[DECODE]
        assert total <= budget
        assert counts[PREFILL] == 9 or counts[DECODE] == 5 or budget - total < 4


def test_a_pod_that_never_starts_holds_nothing() -> None:
    """Two without a machine: for half an hour nothing was taken away."""
    run = Run()
    run.slow(BUSY)
    run.slow(replace(BUSY, requests=Value(27_000.0)))
    wanted, ready = run.states[PREFILL].desired, run.states[PREFILL].desired - 2
    quiet = replace(BUSY, requests=Value(900.0))
    counts: list[int] = []
    reasons: list[str] = []
    for _ in range(12):
        state = run.states[PREFILL]
        run.states[PREFILL] = PoolState(state.desired, min(state.desired, ready))
        decision = run.slow(quiet)
        reasons += decision.reasons
        counts.append(run.states[PREFILL].desired)
    assert counts[-1] < ready < wanted
    assert sum("have not started are given up" in one for one in reasons) == 1
    assert ready in counts, "who has not started goes alone"


def test_engines_that_start_slowly_are_asked_for_earlier() -> None:
    counts = []
    for start_s in (60.0, 900.0):
        run = Run(model(requests=Kalman(), start_s=start_s), prefill=1, decode=1)
        for step in range(10):
            run.slow(replace(BUSY, requests=Value(600.0 * step)))
            run.states = {pool: PoolState(1, 1) for pool in run.states}
        counts.append(run.slow(replace(BUSY, requests=Value(6000.0))).targets[0].replicas)
    assert counts[1] > counts[0]


def test_a_pool_that_cannot_be_read_keeps_its_share_of_the_budget() -> None:
    """Left alone, it has what it had: whoever was given some of that went over the ceiling."""
    run = Run(gpus_max=10, prefill=8, decode=2)
    light = replace(BUSY, requests=Value(900.0))
    run.fleet.slow({KEY: light}, run.states, 0.0)
    decision = run.fleet.slow({KEY: BUSY}, {DECODE: PoolState(2, 2)}, INTERVAL)
    assert [(one.role, one.replicas) for one in decision.targets] == [("decode", 2)]
    assert decision.gpus == 10


def test_a_pool_that_was_asked_for_more_and_cannot_be_read_since_has_all_of_it() -> None:
    run = Run(gpus_max=10, prefill=1, decode=1)
    first = run.slow(BUSY)
    asked = {one.role: one.replicas for one in first.targets}
    assert asked["prefill"] > 1
    more = replace(BUSY, requests=Value(54_000.0))
    decision = run.fleet.slow({KEY: more}, {DECODE: PoolState(*[asked["decode"]] * 2)}, 360.0)
    (decode,) = decision.targets
    assert decode.replicas + asked["prefill"] <= 10
    # by hand it was given more than all: nobody else is, and that is no fault of the planner
    run.fleet.slow({KEY: BUSY}, {PREFILL: PoolState(12, 12), DECODE: PoolState(4, 4)}, 540.0)
    decision = run.fleet.slow({KEY: BUSY}, {DECODE: PoolState(4, 4)}, 720.0)
    assert [one.replicas for one in decision.targets] == [1]


def test_what_is_not_given_back_is_not_given_away() -> None:
    run = Run(gpus_max=10, prefill=6, decode=4)
    less, more = _target(PREFILL, 3), _target(DECODE, 7)
    states = dict(run.states)
    assert run.fleet.affordable([more, less], states) == [less, more], "first who gives"
    assert run.fleet.affordable([more], states) == [], "the others are still there"
    states[PREFILL] = PoolState(5, 5)
    assert run.fleet.affordable([more], states) == [_target(DECODE, 5)]
    states[PREFILL] = PoolState(12, 12)
    assert run.fleet.affordable([more], states) == []


def test_replicas_that_never_start_are_not_waited_for_for_ever() -> None:
    """A pod without a GPU to run on stays pending, and its count cannot be lowered either."""
    run = Run(model(stabilisation_s=0.0, give_up_s=1800.0), prefill=4, decode=6)
    idle = Window(seconds=INTERVAL, requests=IDLE)
    run.slow(BUSY)
    prior_s = run.fleet.models[0].pools[1].start_time.seconds
    decided: list[int] = []
    reasons: tuple[str, ...] = ()
    for turn in range(1, 12):
        run.states[DECODE] = PoolState(6, 4)  # two of them never come
        decision = run.fleet.slow({KEY: idle}, run.states, run.now + turn * INTERVAL)
        decided.append(decision.targets[1].replicas)
        reasons = decision.reasons
    assert decided[:10] == [4] * 10, "they alone are given up"
    assert decided[10] == 1, "nothing is waited for"
    assert any("2 have not started within 1800 s" in one for one in reasons)
    (_, pool) = run.fleet.models[0].pools
    assert pool.overdue == 2
    pool.look(PoolState(4, 4), run.now + 1e5)
    assert pool.start_time.seconds == prior_s, "that was no start, and says nothing of others"
    assert pool.overdue == 0


def test_corrections_are_slow_clamped_and_need_samples() -> None:
    one = Correction()
    assert not one.observe(Missing("no series"), 100.0, 1000, steady=True)
    assert not one.observe(Value(0.0), 100.0, 1000, steady=True)
    assert not one.observe(Value(500.0), 100.0, 5, steady=True)
    assert not one.observe(Value(500.0), 100.0, 1000, steady=False)
    assert one.factor == 1.0
    assert one.observe(Value(1600.0), 100.0, 1000, steady=True)
    assert 1.0 < one.factor < 1.3
    for _ in range(50):
        one.observe(Value(1600.0), 100.0, 1000, steady=True)
    assert one.factor == pytest.approx(2.0)


def test_a_slow_fleet_gets_more_engines() -> None:
    run = Run(correct=True)
    for _ in range(12):
        run.slow(replace(BUSY, itl_ms=Value(35.0)))
    assert run.counts[1] > 8
