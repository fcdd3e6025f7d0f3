"""The whole decision: what is not known, budgets, patience, both loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from select_service.planner.core.budget import PoolNeed, share_out
from select_service.planner.core.correction import Correction
from select_service.planner.core.demand import Demand, Interval, Predictors
from select_service.planner.core.fleet_plan import FleetPlan, PlannedModel, PoolSettings
from select_service.planner.core.kalman import Kalman
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.recurrence import Recurrence
from select_service.planner.core.sizing import Goals
from select_service.planner.core.stabilization_window import (
    PoolLimits,
    StabilizationWindow,
    StartTime,
)
from select_service.planner.core.surface import Surface
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.types import (
    IDLE,
    Load,
    Missing,
    ModelKey,
    PoolKey,
    PoolState,
    Reading,
    ScalingDecision,
    Target,
    Value,
    Window,
)
from tests.select_service.planner.golden import PROFILE

SURFACE = Surface(read_profile(PROFILE))
KEY = ModelKey("m")
PREFILL, DECODE = PoolKey(KEY, "prefill"), PoolKey(KEY, "decode")
INTERVAL = 180.0
BUSY = Window(
    seconds=INTERVAL,
    requests=Value(5400.0),
    isl=Value(3000.0),
    osl=Value(300.0),
    ttft_ms=Value(150.0),
    itl_ms=Value(18.0),
    concurrency=Value(180.0),
)


def model(key: ModelKey = KEY, weight: float = 1.0, **limits: Any) -> PlannedModel:
    pool = PoolSettings(gpus=1, limits=PoolLimits(**{"step_up": 99, "step_down": 99, **limits}))
    predictors = Predictors(*(Predictor(Constant()) for _ in range(3)))
    goals = Goals(ttft_ms=500.0, itl_ms=20.0, pooled=False)
    return PlannedModel(key, {"prefill": pool, "decode": pool}, SURFACE, predictors, goals, weight)


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


class Run:
    """A fleet whose replicas start at once."""

    def __init__(
        self,
        *models: PlannedModel,
        gpus_max: int = 64,
        prefill: int = 3,
        decode: int = 6,
        correct: bool = False,
    ) -> None:
        self.fleet = FleetPlan(models or [model()], gpus_max, INTERVAL, correct=correct)
        self.states = {PREFILL: PoolState(prefill, prefill), DECODE: PoolState(decode, decode)}
        for one in models[1:]:
            self.states |= {pool.key: PoolState(1, 1) for pool in one.pools}
        self.now = 0.0

    def slow(self, window: Window, seconds: float = INTERVAL) -> ScalingDecision:
        self.now += seconds
        windows = {one.key: window for one in self.fleet.models}
        return self._apply(self.fleet.slow(windows, self.states, self.now))

    def slow_each(self, windows: dict[ModelKey, Window]) -> ScalingDecision:
        self.now += INTERVAL
        return self._apply(self.fleet.slow(windows, self.states, self.now))

    def fast(self, load: Load) -> ScalingDecision:
        self.now += 5.0
        return self._apply(self.fleet.fast({KEY: load}, self.states, self.now))

    def _apply(self, decision: ScalingDecision) -> ScalingDecision:
        for one in decision.targets:
            self.states[one.pool] = PoolState(one.replicas, one.replicas)
        return decision

    @property
    def counts(self) -> tuple[int, int]:
        return self.states[PREFILL].desired, self.states[DECODE].desired


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
def test_a_length_that_was_never_told_takes_no_busy_engine_away(
    name: str, reading: Reading
) -> None:
    """Callers that tell no output: a fleet at work was made as small as it may be, in silence."""
    run = Run(model(stabilisation_s=0.0))
    before = run.counts
    for _ in range(8):
        decision = run.slow(_with(name, reading))
        assert run.counts == before
        words = f"m: nobody has told any {name.upper()}: replicas are held"
        assert words in decision.reasons
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
        isl=Missing("no selector tells it"),
        osl=Missing("no selector tells it"),
    )
    run.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert run.counts == (0, 0)
    decision = run.slow(unserved)
    assert run.counts == (1, 1)
    assert "m: nobody has told any ISL and OSL: one replica each, to learn it" in decision.reasons


def test_idle_intervals_hold_the_lengths() -> None:
    """Fault 4: ISL 0 and OSL 0 of a quiet interval are averaged into the next."""
    run = Run(model(stabilisation_s=0.0))
    run.slow(BUSY)
    run.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert run.counts == (1, 1)
    run.slow(replace(BUSY, isl=Missing("late"), osl=Missing("late")))
    assert run.counts == (4, 6)  # sized with the lengths from before


def test_an_interval_that_took_longer_is_no_more_traffic() -> None:
    """A machine that slept, or a source that was away, tells of more than one interval."""
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

    planned = model()
    planned.demand = Demand(
        Predictors(Predictor(Recurrence()), Predictor(Constant()), Predictor(Constant()))
    )
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
    planned = model()
    planned.demand = Demand(
        Predictors(Predictor(Recurrence()), Predictor(Constant()), Predictor(Constant()))
    )
    run, past = Run(planned), [Interval(6_000.0, 3000.0, 300.0)] * 40
    planned.recall(past, 1.0, 1.0, 1.0, INTERVAL)
    for _ in range(2):
        run.slow(Window(seconds=INTERVAL, requests=Missing("no Prometheus")))
    run.slow(BUSY)
    assert [one.requests for one in planned.demand.history[-3:]] == [6_000.0, 6_000.0, 5_400.0]
    assert len(planned.demand.history) == len(past) + 3


def test_turns_that_are_late_now_and_then_are_no_intervals_more() -> None:
    """Of decisions that take long by turns: a gap was seen behind each, and filled."""
    planned = model()
    planned.demand = Demand(
        Predictors(Predictor(Recurrence()), Predictor(Constant()), Predictor(Constant()))
    )
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


def test_down_only_after_the_window_and_first_what_has_not_started() -> None:
    steady = StabilizationWindow(PoolLimits(stabilisation_s=300.0, step_down=1, step_up=4))
    assert steady.next(9, 3, 0, now=0.0)[0] == 7  # at most four more
    assert steady.next(2, 7, 0, now=100.0) == (7, "7 were wanted within 300 s")
    assert steady.next(2, 7, 2, now=200.0) == (7, "7 were wanted within 300 s")
    told = "2 of 2 that have not started are given up: 5 are ready, and 2 do"
    assert steady.next(2, 7, 2, now=301.0) == (5, told), "nobody who serves goes with them"
    assert steady.next(2, 5, 0, now=303.0)[0] == 4
    assert steady.next(0, 2, 0, now=700.0) == (1, "kept within 1 and 1000")


def test_down_at_once_where_the_forecasts_are_sure() -> None:
    steady = StabilizationWindow(PoolLimits(stabilisation_s=300.0, step_down=9))
    assert steady.next(9, 9, 0, now=0.0) == (9, "")
    assert steady.next(4, 9, 0, now=60.0, sure=6)[0] == 6
    assert steady.next(4, 6, 0, now=120.0, sure=3) == (4, "")
    assert steady.next(2, 4, 1, now=180.0, sure=2)[0] == 3, "whose start matters no more"


def test_what_starts_is_kept_while_it_may_still_be_wanted() -> None:
    """It is missing from what suffices for sure, and was wanted a moment ago."""
    steady = StabilizationWindow(PoolLimits(stabilisation_s=300.0))
    assert steady.next(9, 9, 4, now=0.0)[0] == 9
    told = "4 are starting: nothing is taken away meanwhile"
    assert steady.next(7, 9, 4, now=60.0, sure=7) == (9, told)
    told = "2 of 4 that have not started are given up: 5 are ready, and 7 do"
    assert steady.next(7, 9, 4, now=361.0, sure=7) == (7, told), "the newer decision has lasted"
    assert steady.next(9, 7, 2, now=362.0) == (9, "")


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


def test_what_was_given_up_was_no_start() -> None:
    start = StartTime(prior_s=120.0)
    start.follow(PoolState(2, 2), 0.0)
    start.follow(PoolState(4, 2), 10.0)
    start.follow(PoolState(2, 2), 900.0)
    assert start.seconds == 120.0


def test_noise_does_not_flap() -> None:
    steady = StabilizationWindow(PoolLimits(stabilisation_s=600.0))
    current, changes = 5, 0
    for step in range(100):
        count, _ = steady.next(5 + step % 2, current, 0, now=180.0 * step)
        changes += count != current
        current = count
    assert changes == 1


def test_the_fast_loop_adds_at_once_and_does_not_pile_up() -> None:
    run = Run()
    run.slow(BUSY)
    run.fast(Load(prefill_backlog_tokens=Value(5_000.0)))
    assert run.counts[0] == 4  # a short queue is chance
    burst = Load(prefill_backlog_tokens=Value(400_000.0))
    decision = run.fast(burst)
    added = run.counts[0]
    assert 5 < added < 20
    assert any("400000 tokens wait" in one for one in decision.reasons)
    for tokens in (410_000.0, 420_000.0, 425_000.0, 425_000.0):  # the rest is starting
        run.states[PREFILL] = PoolState(added, 4)
        run.fast(Load(prefill_backlog_tokens=Value(tokens)))
        assert run.states[PREFILL].desired == added
    run.states[PREFILL] = PoolState(added, added)


def test_a_queue_that_grows_fast_asks_for_as_many_as_its_work_arrives() -> None:
    slow, fast = Run(), Run()
    for run, step in ((slow, 10_000.0), (fast, 200_000.0)):
        run.slow(BUSY)
        for turn in range(1, 5):
            run.states[PREFILL] = PoolState(run.counts[0], 4)
            run.fast(Load(prefill_backlog_tokens=Value(100_000.0 + step * turn)))
    assert fast.counts[0] > slow.counts[0]


@pytest.mark.parametrize("arrived", [Value(1.0), IDLE])
def test_a_queue_to_which_nobody_comes_is_worked_off_by_those_who_are_there(
    arrived: Reading,
) -> None:
    """That nobody came was taken for not knowing it, and more engines were asked for."""
    run = Run()
    run.slow(BUSY)
    before = run.counts
    for step in range(3):
        tokens = Value(3e6 - 1e5 * step)
        run.fast(Load(prefill_backlog_tokens=tokens, arrived=arrived, seconds=5.0))
    assert run.counts == before


def test_live_requests_beyond_the_target_are_more_decode_engines() -> None:
    run = Run()
    run.slow(BUSY)
    run.fast(Load(concurrency=Value(500.0), context_tokens=Value(3150.0)))
    # as fast as those that there is room for end, as many come: eight serve them in time. Fifteen
    # would hold all that are live, but those stay where they are
    assert run.counts == (4, 8)


def test_a_queue_on_a_decode_engine_is_not_taken_for_traffic() -> None:
    """Live requests pile up for a minute, until engines have started: that is no load of 16."""
    run = Run()
    run.slow(BUSY)
    for turn in range(12):
        run.states[DECODE] = PoolState(run.counts[1], 6)
        run.fast(Load(concurrency=Value(200.0 + 60.0 * turn), context_tokens=Value(3150.0)))
    assert run.counts[1] <= 11


def test_arrivals_that_were_counted_are_sized_at_once_and_held_until_the_next_interval() -> None:
    run = Run()
    run.slow(BUSY)
    calm = Load(arrived=Value(160.0), seconds=5.0)
    run.fast(calm)
    assert run.counts == (4, 6), "160 instead of 150 are chance"
    decision = run.fast(Load(arrived=Value(450.0), seconds=5.0))
    assert any("450 requests came in 5 s, 150 were planned" in one for one in decision.reasons)
    surge = run.counts
    assert surge[0] >= 9
    assert surge[1] >= 15
    for _ in range(20):
        run.fast(calm)
    assert run.counts == surge, "what was there a moment ago is not taken away on the spot"


def test_a_burst_after_hours_of_nothing_is_seen_within_a_look() -> None:
    run = Run(model(stabilisation_s=0.0))
    run.slow(BUSY)
    for _ in range(40):
        run.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert run.counts == (1, 1)
    run.fast(Load(arrived=Value(150.0), seconds=5.0))
    assert run.counts == (4, 6)


def test_blind_planners_size_what_they_can_count() -> None:
    run = Run(model(stabilisation_s=60.0))
    run.slow(BUSY)
    for _ in range(4):
        run.slow(Window(seconds=INTERVAL, requests=Missing("no Prometheus")))
    for _ in range(30):
        run.fast(Load(arrived=Value(75.0), seconds=5.0))
    assert run.counts == (2, 3)


@pytest.mark.parametrize("live", [Value(80 * 300 * 0.0155), Missing("no series")])
def test_a_short_queue_is_no_reason_to_take_busy_engines_away(live: Reading) -> None:
    """One of two selectors was away for ten minutes: of nine prefill engines two were left."""
    run = Run()
    for _ in range(4):
        run.slow(replace(BUSY, requests=Value(80 * INTERVAL)))
    before = run.counts
    gone = Missing("http://b: refused")
    prompts = 80 * 0.0922 * 1.5  # that are computed, or about to be
    load = Load(
        prefill_backlog_tokens=Value(1500.0 * prompts), concurrency=live, arrived=gone, seconds=5.0
    )
    for _ in range(8):
        run.slow(Window(seconds=INTERVAL, requests=gone))
        for _ in range(35):
            run.fast(load)
    assert run.fleet.models[0].demand.missed == 8
    prefill, decode = run.counts
    assert before[0] - 1 <= prefill <= before[0] + 1
    assert before[1] - 1 <= decode <= before[1] + 1
    run.fast(replace(load, prefill_backlog_tokens=Value(2e6)))
    assert run.counts[0] > before[0] + 1, "a long one is a reason for more"


def test_engines_that_start_slowly_are_asked_for_earlier() -> None:
    counts = []
    for start_s in (60.0, 900.0):
        climbing = model(start_s=start_s)
        climbing.demand = Demand(
            Predictors(Predictor(Kalman()), Predictor(Constant()), Predictor(Constant()))
        )
        run = Run(climbing, prefill=1, decode=1)
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


def test_replicas_that_come_one_after_the_other_are_waited_for() -> None:
    time = StartTime(prior_s=100.0, give_up_s=1800.0)

    def overdue(ready: int, wanted: int, now: float) -> int:
        time.follow(PoolState(wanted, ready), now)
        return time.overdue

    assert not any(overdue(now // 600, 20, float(now)) for now in range(0, 7200, 600))
    assert overdue(11, 25, 8000.0) == 0  # five more were asked for
    assert overdue(11, 25, 9700.0) == 0
    assert overdue(11, 25, 9800.0) == 14
    assert overdue(12, 25, 9900.0) == 0


def test_corrections_are_slow_clamped_and_need_samples() -> None:
    one = Correction()
    assert not one.hear(Missing("no series"), 100.0, 1000, steady=True)
    assert not one.hear(Value(0.0), 100.0, 1000, steady=True)
    assert not one.hear(Value(500.0), 100.0, 5, steady=True)
    assert not one.hear(Value(500.0), 100.0, 1000, steady=False)
    assert one.factor == 1.0
    assert one.hear(Value(1600.0), 100.0, 1000, steady=True)
    assert 1.0 < one.factor < 1.3
    for _ in range(50):
        one.hear(Value(1600.0), 100.0, 1000, steady=True)
    assert one.factor == pytest.approx(2.0)


def test_a_slow_fleet_gets_more_engines() -> None:
    run = Run(correct=True)
    for _ in range(12):
        run.slow(replace(BUSY, itl_ms=Value(35.0)))
    assert run.counts[1] > 8


def test_starts_are_timed() -> None:
    time = StartTime(prior_s=100.0)
    seen = ((0.0, 1, 1), (10.0, 3, 1), (50.0, 3, 2), (70.0, 3, 3), (90.0, 3, 3))
    for now, desired, ready in seen:
        time.follow(PoolState(desired, ready), now)
    assert time.seconds == pytest.approx(100.0 + 0.3 * (60.0 - 100.0))


def test_who_is_not_ready_for_a_moment_has_not_started() -> None:
    """Ten readiness probes that failed once made starts of two minutes ones of eight seconds."""
    time = StartTime(prior_s=120.0)
    for blip in range(10):
        for at, ready in ((0.0, 6), (60.0, 5), (65.0, 6)):
            time.follow(PoolState(6, ready), 100.0 * blip + at)
    assert time.seconds == 120.0
    time.follow(PoolState(6, 5), 1000.0)  # one is lost, and two are asked for meanwhile
    time.follow(PoolState(8, 5), 1030.0)
    time.follow(PoolState(8, 8), 1130.0)
    assert time.seconds == pytest.approx(120.0 + 0.3 * (100.0 - 120.0))


def test_a_start_whose_begin_nobody_saw_is_no_measure() -> None:
    """A planner that is started again while engines start would take the rest for the whole."""
    time = StartTime(prior_s=120.0)
    for now, ready in ((0.0, 2), (5.0, 4)):
        time.follow(PoolState(4, ready), now)
    assert time.seconds == 120.0
