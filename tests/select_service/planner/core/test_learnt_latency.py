"""First tokens that take a while to arrive: nothing that an engine is busy with."""

from __future__ import annotations

import math

import pytest

from select_service.planner.core.demand import Forecast
from select_service.planner.core.engine_speed import BUSY_BASE_S, EngineSpeed
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.prefill_sizing import PrefillQueue, size_prefill
from select_service.planner.core.sizing import Goals
from select_service.planner.types import Load, Moments, Value
from tests.select_service.planner.core.planned_fleet import Run, model
from tests.select_service.planner.core.test_engine_speed import known, measured, window

FORECAST = Forecast(60.0, Lengths.single(3_000.0), 300.0, 1.0)


def learnt(latency_s: float) -> EngineSpeed:
    """The speed where networks and gateways add so much to every first token."""
    speed = EngineSpeed(None)
    speed.learn(window(prefill_moments=first_tokens(latency_s)), 1.0)
    return speed


def first_tokens(latency_s: float) -> Moments:
    lengths = (500.0, 3000.0, 12_000.0, 40_000.0)
    return measured(0.012 + latency_s, 28e-6, lengths, 100)


@pytest.mark.parametrize("latency_s", [0.05, 0.2, 0.4])
def test_time_on_the_way_takes_of_the_target_and_of_no_engine(latency_s: float) -> None:
    """It was planned for as if every prompt kept an engine busy for as long."""
    near, far = known(learnt(0.0)), known(learnt(latency_s))
    goals = Goals(ttft_ms=1e3)
    shifted = Goals(ttft_ms=1e3 * (1.0 + latency_s))
    engines = size_prefill(near, FORECAST, goals, 1.0).engines
    assert size_prefill(far, FORECAST, shifted, 1.0).engines <= math.ceil(1.2 * engines)
    as_if_busy = FORECAST.rate * (latency_s + near.prefill.ttft_ms(3000.0) / 1e3)
    assert size_prefill(far, FORECAST, goals, 1.0).engines < as_if_busy
    out_of_reach = size_prefill(far, FORECAST, Goals(ttft_ms=1e3 * latency_s), 1.0)
    assert out_of_reach.infeasible
    assert out_of_reach.engines <= math.ceil(1.2 * engines)


def test_what_is_left_of_the_target_is_what_may_be_waited() -> None:
    far = known(learnt(0.3)).prefill
    queue = PrefillQueue(far, FORECAST.lengths)
    assert queue.latency_s == pytest.approx(0.312 - BUSY_BASE_S, rel=0.1)
    for rate, engines in ((60.0, 8), (60.0, 7)):
        moved = PrefillQueue(far, FORECAST.lengths)
        moved.latency_s = 0.0
        assert queue.late_on(rate, 1.0, engines, pooled=True) == pytest.approx(
            moved.late_on(rate, 1.0 - queue.latency_s, engines, pooled=True)
        )


def test_an_overhead_that_engines_may_have_keeps_them_busy() -> None:
    assert known(learnt(0.0)).prefill.latency_ms == 0.0


def test_first_tokens_on_the_way_do_not_correct_engines() -> None:
    one = model()
    one.speed = learnt(0.3)
    run = Run(one, prefill=6, decode=6, correct=True)
    for _ in range(5):
        run.slow(window(prefill_moments=first_tokens(0.3), ttft_ms=Value(312.0 + 84.0 + 50.0)))
    assert one.p_correction.factor == pytest.approx(1.0, abs=0.1)
    before = run.counts
    run.fast(Load(prefill_backlog_tokens=Value(3_000.0)))
    assert run.counts == before
