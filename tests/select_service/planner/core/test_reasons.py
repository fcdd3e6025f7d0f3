"""Whoever reads /decisions finds, for every count, the rule that made it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest

from select_service.planner.core.demand import Interval, Predictors
from select_service.planner.core.engine_speed import EngineSpeed
from select_service.planner.core.fleet_plan import FleetPlan, PlannedModel, PoolSettings
from select_service.planner.core.parts import PARTS
from select_service.planner.core.sizing import Goals
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from select_service.planner.types import Load, PoolKey, PoolState, ScalingDecision, Value, Window
from tests.select_service.planner.core.planned_fleet import DECODE, KEY, PREFILL, SURFACE

INTERVAL_S, LOOK_S = 60.0, 5.0
START_S = 60.0


def burst(now: float, rise_s: float) -> float:
    """At 20 a second, and to 120 within `rise_s` every twenty minutes or so."""
    number, at = divmod(now, 1200.0)
    begin = random.Random(int(number)).uniform(0.0, 900.0 - rise_s)
    up = (at - begin) / max(rise_s, 1.0)
    down = 1.0 - (at - begin - rise_s - 150.0) / max(rise_s, 1.0)
    return 20.0 + 100.0 * min(max(min(up, down), 0.0), 1.0)


TRAFFIC: dict[str, Callable[[float], float]] = {
    "steady": lambda _: 95.0,
    "day": lambda now: 60.0 - 40.0 * math.cos(now / 600.0),
    "bursts that rise": lambda now: burst(now, 300.0),
    "bursts": lambda now: burst(now, 0.0),
    "ramp": lambda now: 20.0 + 0.02 * max(0.0, now + 7200.0),
}


def fleet() -> FleetPlan:
    tuning = PredictorSettings(name="auto", interval_s=INTERVAL_S)
    pool = PoolSettings(step_up=8, step_down=3, stabilisation_s=180.0, start_s=START_S)
    model = PlannedModel(
        KEY,
        {"prefill": pool, "decode": pool},
        EngineSpeed(SURFACE),
        Predictors(*(make_predictor(tuning) for _ in range(3))),
        Goals(ttft_ms=600.0, itl_ms=20.0, attainment=0.99),
    )
    return FleetPlan([model], 60, INTERVAL_S)


def _explained(
    decision: ScalingDecision, before: dict[PoolKey, PoolState], *, is_slow: bool
) -> set[str]:
    """Check it; returns the rules that were reported, their numbers left out."""
    rules = set()
    for one in decision.targets:
        mine = [text for text in decision.reasons if text.startswith(f"{one.pool}: ")]
        counts = [re.match(rf"{one.pool}: (\d+)(?:,|:| at once)", text) for text in mine]
        reported = [int(found[1]) for found in counts if found is not None]
        if is_slow:
            (said,) = (
                float(found[1])
                for text in mine
                if (found := re.search(r"expected, ([\d.]+) engines serve them", text))
            )
            reported.insert(0, max(1, math.ceil(said)))
        elif not reported:
            reported.append(before[one.pool].desired)
        assert one.replicas == reported[-1], (before[one.pool], one, decision.reasons)
        rules |= {re.sub(r"[\d.+-]+", "N", text.split(": ", 1)[1]) for text in mine}
    return rules


@pytest.mark.parametrize(
    "name",
    [
        name if name == "bursts that rise" else pytest.param(name, marks=pytest.mark.heavy)
        for name in TRAFFIC
    ],
)
def test_every_count_has_its_reason(name: str) -> None:
    rng, planned = random.Random(name), fleet()
    model = planned.models[0]
    rate = TRAFFIC[name]

    def draw(begin: float, seconds: float) -> float:
        mean = rate(begin + seconds / 2) * seconds
        return max(0.0, float(round(rng.gauss(mean, math.sqrt(mean)))))

    past = []
    for number in range(-90, 0):
        parts = tuple(draw(INTERVAL_S * number + 10.0 * part, 10.0) for part in range(PARTS))
        past.append(Interval(sum(parts), 3000.0, 300.0, parts))
    model.warm_up(past, INTERVAL_S)
    states = {PREFILL: PoolState(5, 5), DECODE: PoolState(9, 9)}
    started: list[tuple[float, PoolKey, int]] = []
    counted, rules = 0.0, set()
    for look in range(1, 25 * 12 + 1):
        now = LOOK_S * look
        came = draw(now - LOOK_S, LOOK_S)
        counted += came
        for at, pool, count in started:
            if at <= now and states[pool].desired >= count:
                states[pool] = PoolState(states[pool].desired, count)
        is_slow = look % 12 == 0
        if is_slow:
            window = Window(
                seconds=INTERVAL_S,
                requests=Value(counted) if counted else Value(1.0),
                isl=Value(3000.0),
                osl=Value(300.0),
            )
            decision, counted = planned.slow({KEY: window}, states, now), 0.0
        else:
            load = Load(arrived=Value(came), seconds=LOOK_S)
            decision = planned.fast({KEY: load}, states, now)
        rules |= _explained(decision, states, is_slow=is_slow)
        for one in decision.targets:
            ready = min(states[one.pool].ready, one.replicas)
            if one.replicas > states[one.pool].desired:
                started.append((now + START_S, one.pool, one.replicas))
            states[one.pool] = PoolState(one.replicas, ready)
    assert len(rules) > 1
