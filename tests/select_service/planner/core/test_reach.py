"""ITL targets near what a single request takes: engines are divided by what is left."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from select_service.planner.core.decode_sizing import BACK, NEAR, size_decode
from select_service.planner.core.demand import Forecast
from select_service.planner.core.engine_speed import EngineSpeed
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.sizing import Goals, Need
from select_service.planner.types import Value
from tests.select_service.planner.core.planned_fleet import SURFACE, Run, model
from tests.select_service.planner.core.test_engine_speed import known, measured, window

FORECAST = Forecast(30.0, Lengths.single(3_000.0), 300.0, 1.0)


@pytest.mark.parametrize(
    ("times", "reach", "is_reached"),
    [
        (1.001, NEAR, False),
        (1.04, NEAR, False),
        (1.06, NEAR, True),
        (1.06, BACK, False),
        (1.14, BACK, False),
        (1.16, BACK, True),
    ],
)
def test_a_target_next_to_what_a_single_request_takes_is_out_of_reach(
    times: float, reach: float, is_reached: bool
) -> None:
    alone_ms = SURFACE.decode.itl_ms(1.0, 3150.0)

    def need(itl_ms: float) -> Need:
        return size_decode(SURFACE, FORECAST, Goals(itl_ms=itl_ms), 1.0, gpus=1, reach=reach)

    found = need(times * alone_ms)
    assert bool(found.infeasible) is not is_reached
    if not is_reached:
        assert found.engines == need(0.5 * alone_ms).engines, "as many as keep up"


def test_engines_that_requests_hardly_slow_reach_a_target_next_to_it() -> None:
    speed = EngineSpeed(None)
    speed.learn(window(itl_moments=measured(0.020, 0.02e-6, (20e3, 40e3, 60e3), 100)), 1.0)
    found = size_decode(known(speed), FORECAST, Goals(itl_ms=20.9), 1.0, gpus=1)
    assert not found.infeasible
    assert found.engines < 20


@pytest.mark.parametrize("times", [1.0, 1.05, 1.12])
def test_counts_do_not_swing_with_what_is_measured(times: float) -> None:
    """Of a target next to what a single request takes: measurements find that now above it, now
    below."""
    rng, one = random.Random(1), model(stabilisation_s=0.0)
    one.speed = EngineSpeed(None)
    one.goals = replace(one.goals, itl_ms=10.0 * times)
    run = Run(one, prefill=4, decode=8, gpus_max=500, correct=True)
    counts = []
    for _ in range(24):
        base_s, slope, engines = 0.010 * rng.uniform(0.96, 1.04), 0.1e-6, run.counts[1]
        itl_s = base_s / (1.0 - slope * 30.0 * 300.0 * 3150.0 / engines)
        live = 30.0 * 300.0 * itl_s
        loads = tuple(share * live / engines * 3150.0 for share in (0.8, 1.0, 1.2))
        run.slow(
            window(
                itl_moments=measured(base_s, slope, loads, 100),
                itl_ms=Value(1e3 * itl_s),
                concurrency=Value(live),
            )
        )
        counts.append(run.counts[1])
    # in the first intervals one measurement decides
    changes = [before for before, after in pairwise(counts[10:]) if abs(after - before) > 2]
    assert not changes, counts


def test_once_out_of_reach_it_stays_so_until_there_is_a_margin() -> None:
    one = model()
    run = Run(one, prefill=3, decode=6)
    alone_ms = SURFACE.decode.itl_ms(1.0, 3150.0)
    found = []
    for times in (1.1, 1.0, 1.1, 1.2, 1.1):
        one.goals = replace(one.goals, itl_ms=times * alone_ms)
        found.append(bool(run.slow(window()).infeasible))
    assert found == [False, True, True, False, False]
