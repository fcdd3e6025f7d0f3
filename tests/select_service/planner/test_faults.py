"""Faults of the reference planner, each with what it does and what ours does instead.

What it does is computed by our copy of its formulas, which `core/test_compatible.py` and
`edge/test_predictors.py` hold to its recorded answers; where there is no copy, what was recorded of
it stands here as a number. Others are where their room is tested: a model's name that nobody awaits
(9, `edge/test_http_server.py`), bins of a warm-up trace (10, `core/test_warm_up.py`), GPUs per
engine (11, `core/test_sizing.py`), frontends that weigh the same (12, `edge/test_sources.py`),
starts that are timed (12, `core/test_stabilization_window.py`) and replicas that do not pile up
(12, `core/test_fast_loop.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from select_service.planner.core.budget import PoolNeed, share_out
from select_service.planner.core.compatible_lookup import CompatibleLookup
from select_service.planner.core.compatible_sizing import (
    CompatibleDemand,
    CompatibleLimits,
    CompatiblePlan,
    plan_as_they,
    terms_of,
)
from select_service.planner.core.decode_sizing import size_decode
from select_service.planner.core.demand import Demand, Forecast, Predictors
from select_service.planner.core.fitted import Fitted
from select_service.planner.core.fleet_plan import FleetPlan
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.predictor_choice import ForecastModel
from select_service.planner.core.prefill_sizing import PrefillQueue, size_prefill
from select_service.planner.core.sizing import Goals
from select_service.planner.edge.baselines import Reference
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.trace_replay import DECODE, KEY, PREFILL, ReplaySettings
from select_service.planner.errors import InfeasiblePlan
from select_service.planner.types import IDLE, Missing, PoolState, Value, Window
from tests.select_service.planner.core import planned_fleet
from tests.select_service.planner.core.planned_fleet import INTERVAL, SURFACE, model
from tests.select_service.planner.core.test_sizing import MIXED, waits
from tests.select_service.planner.golden import PROFILE, golden

pytest.importorskip("scipy", reason="the extra `planner`")

LIMITS = CompatibleLimits(
    interval_s=INTERVAL,
    itl_ms=20.0,
    gpus_max=64,
    endpoints_min=1,
    prefill_gpus=1,
    decode_gpus=1,
)
GOALS = Goals(ttft_ms=500.0, itl_ms=20.0, pooled=False)
STATES = {PREFILL: PoolState(4, 4), DECODE: PoolState(9, 9)}
BUSY = replace(planned_fleet.BUSY, request_s=Value(6.0))


@pytest.fixture(scope="module")
def lookup() -> CompatibleLookup:
    return CompatibleLookup(read_profile(PROFILE))


def reference() -> Reference:
    tuning = PredictorSettings(name="constant", compatible=True, interval_s=INTERVAL)
    settings = ReplaySettings(interval_s=INTERVAL, itl_ms=20.0)
    return Reference(read_profile(PROFILE), tuning, settings, gpus_max=64)


def fleet(requests: ForecastModel | None = None) -> FleetPlan:
    return FleetPlan([model(KEY, requests=requests)], 64, INTERVAL)


def asked_for(planned: FleetPlan, windows: Sequence[Window]) -> dict[Any, int]:
    """Return what is asked for after the last window, of a fleet that gets what it asks for."""
    states = dict(STATES)
    for turn, window in enumerate(windows):
        decision = planned.slow({KEY: window}, states, INTERVAL * (turn + 1))
        states = {one.pool: PoolState(one.replicas, one.replicas) for one in decision.targets}
    return {pool: state.desired for pool, state in states.items()}


def theirs(lookup: CompatibleLookup, limits: CompatibleLimits, **more: float) -> CompatiblePlan:
    demand = CompatibleDemand(requests=5400, isl=3000, osl=300, **more)
    return plan_as_they(terms_of(lookup, demand, limits), limits)


@pytest.mark.parametrize(("name", "pool"), [("ttft_ms", PREFILL), ("itl_ms", DECODE)])
def test_1_a_metric_that_stops_while_traffic_flows(name: str, pool: Any) -> None:
    """Theirs reads 0, and takes engines away that are busy; ours knows that it does not know."""
    busy = replace(BUSY, itl_ms=Value(30.0))
    lost: Any = {name: Value(0.0)}
    they = reference()
    before = they.slow(busy, STATES, INTERVAL)[pool]
    assert they.slow(replace(busy, **lost), STATES, 2 * INTERVAL)[pool] < before
    missing: Any = {name: Missing("no series")}
    known = asked_for(fleet(), [busy] * 6)
    for silent in (replace(busy, **missing), replace(busy, **lost)):
        assert asked_for(fleet(), [*[busy] * 6, *[silent] * 6])[pool] >= known[pool]


def test_2_engines_that_are_slower_than_their_profile(lookup: CompatibleLookup) -> None:
    """Theirs adds none at sixteen times the TTFT, and has no TTFT target at all."""
    assert theirs(lookup, LIMITS, p_correction=16.0) == theirs(lookup, LIMITS)
    slow = replace(BUSY, ttft_ms=Value(16 * 92.2))
    usual = asked_for(fleet(), [BUSY] * 8)[PREFILL]
    assert asked_for(fleet(), [slow] * 8)[PREFILL] > usual
    forecast = Forecast(30.0, Lengths.single(3000), 300.0, 1.0)
    loose, tight = (
        size_prefill(SURFACE, forecast, replace(GOALS, ttft_ms=target), 1.0).engines
        for target in (500.0, 110.0)
    )
    assert tight > loose


@pytest.mark.parametrize(
    ("gpus", "budget", "recorded"),
    [((1, 1), 1, (1, 1)), ((1, 4), 10, (3, 2)), ((4, 4), 6, (1, 1))],
)
def test_3_a_budget(
    lookup: CompatibleLookup, gpus: tuple[int, int], budget: int, recorded: tuple[int, int]
) -> None:
    """Theirs is exceeded by rounding, and by minima; ours never, or there is no plan."""
    limits = replace(LIMITS, gpus_max=budget, prefill_gpus=gpus[0], decode_gpus=gpus[1])
    plan = theirs(lookup, limits)
    assert (plan.num_p, plan.num_d) == recorded
    assert plan.num_p * gpus[0] + plan.num_d * gpus[1] > budget
    needs = [PoolNeed(PREFILL, gpus[0], 1, 3, 2.8), PoolNeed(DECODE, gpus[1], 1, 6, 6.0)]
    if sum(gpus) > budget:
        with pytest.raises(InfeasiblePlan):
            share_out(needs, budget)
        return
    counts = share_out(needs, budget)
    assert counts[PREFILL] * gpus[0] + counts[DECODE] * gpus[1] <= budget


def test_4_an_idle_interval() -> None:
    """Theirs remembers prompts of no tokens, ours prompts of the lengths there were."""
    series = [3000.0, 3000.0, 3000.0, 0.0, 3000.0]
    they = make_predictor(PredictorSettings(name="kalman", compatible=True))
    for isl in series:
        they.add(isl)
    assert abs(they.predict() - 3000.0) > 300.0
    ours = Demand(Predictors(*(make_predictor(PredictorSettings(name="kalman")) for _ in range(3))))
    for step, isl in enumerate(series):
        idle = Window(seconds=INTERVAL, requests=IDLE)
        ours.observe(replace(BUSY, isl=Value(isl)) if isl else idle, INTERVAL * step)
    forecast = ours.forecast(INTERVAL)
    assert forecast is not None
    assert forecast.lengths.mean == pytest.approx(3000.0)


def test_5_the_next_interval_of_a_ramp() -> None:
    """Theirs (Prophet) forecasts the second after the last interval's begin: 11, not 197.5."""
    predictor = make_predictor(PredictorSettings())
    for step in range(25):
        predictor.add(10.0 + 7.5 * step)
    assert predictor.predict() == pytest.approx(197.5, abs=8.0)


@pytest.mark.parametrize("name", ["step", "noisy_trend"])
def test_6_a_load_that_changes_after_five_intervals(name: str) -> None:
    """Theirs (ARIMA, its default) is fitted to the first five for ever; ours is our default."""
    recorded = golden("predictors_golden")["results"]["arima"][name]
    series = [value or 0.0 for value in recorded["series"]]
    predictor, forecasts = make_predictor(PredictorSettings()), []
    for value in series:
        predictor.add(value)
        forecasts.append(predictor.predict())

    def error(forecasts: list[float]) -> float:
        later = zip(forecasts[5:-1], series[6:], strict=True)
        return sum(abs(forecast - value) for forecast, value in later)

    assert error(forecasts) < error(recorded["pred_after_each"])


def test_7_fewer_than_nothing_is_no_forecast() -> None:
    """Theirs sees a trend in three points, and a load of -7.35."""
    series = [0.0, 0.0, 0.0, 5.0, 8.0, 0.0]
    they, ours = (
        make_predictor(PredictorSettings(name="kalman", compatible=compatible))
        for compatible in (True, False)
    )
    for value in series:
        they.add(value)
        ours.add(value)
    assert they.predict() == pytest.approx(-7.35, abs=0.01)
    assert ours.predict() == 0.0


def test_8_a_forecast_that_fails() -> None:
    """Theirs ends in an UnboundLocalError; ours goes on with what it knows, and says so."""

    def fit(_: Sequence[float]) -> Any:
        raise ValueError("no convergence")

    planned = fleet(Fitted(fit, failures=(ValueError,)))
    windows = [replace(BUSY, requests=Value(5400.0 + turn)) for turn in range(8)]
    assert asked_for(planned, windows)[PREFILL] >= 3
    decision = planned.slow({KEY: BUSY}, STATES, 9 * INTERVAL)
    assert any("requests goes on without a new fit: no conv" in one for one in decision.reasons)


def test_12_a_target_nobody_can_meet(lookup: CompatibleLookup) -> None:
    """Theirs asks for 59 engines without a word; ours says what is wrong, and keeps up."""
    assert theirs(lookup, replace(LIMITS, itl_ms=1.0)).num_d == 59
    forecast = Forecast(30.0, Lengths.single(3000), 300.0, 1.0)
    need = size_decode(SURFACE, forecast, replace(GOALS, itl_ms=1.0), 1.0, gpus=1)
    assert need.engines < 7
    assert "takes 6.5 ms on an engine of its own: raise the target" in need.infeasible


def test_12_lengths_that_are_not_their_mean(lookup: CompatibleLookup) -> None:
    """Theirs plans for the mean: prompts of 500 and of 9000 tokens are prompts of 2100."""
    rate, target_s = 100.0, 0.5
    demand = CompatibleDemand(requests=rate * INTERVAL, isl=MIXED.mean, osl=300)
    they = plan_as_they(terms_of(lookup, demand, LIMITS), LIMITS).num_p
    queue = PrefillQueue(SURFACE.prefill, MIXED)
    ours = math.ceil(queue.need(rate, target_s, 0.99, pooled=True).engines)

    def in_time(engines: int) -> float:
        ttfts_s = waits(queue, rate, engines, seed=4)
        return sum(one <= target_s for one in ttfts_s) / len(ttfts_s)

    assert in_time(they) < 0.1
    assert in_time(ours) >= 0.99
    assert ours <= they + 2
