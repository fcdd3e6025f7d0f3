"""When the past decides, and when it says nothing."""

from __future__ import annotations

import numpy as np

from select_service.planner.core.analog_forecast import LEARNT_MIN, AnalogForecast
from select_service.planner.core.demand import Interval
from select_service.planner.core.marginal_value import Table, table_of
from select_service.planner.core.parts import PARTS
from select_service.planner.core.profile import Floats
from select_service.planner.types import ModelKey, PoolKey
from tests.select_service.planner.core.test_marginal_value import late, needed
from tests.select_service.planner.core.test_similar_past import rising

POOL = PoolKey(ModelKey("m"), "decode")
PART_S, LOOK_S = 10.0, 5.0


def tables_of(grid: Floats) -> dict[PoolKey, Table]:
    return {POOL: table_of(grid, needed, late, 1)}


def plan(analog_forecast: AnalogForecast, *, is_known: bool = False) -> AnalogForecast:
    analog_forecast.plan(PART_S, 65.0, is_known=is_known, tables_of=tables_of)
    return analog_forecast


def learnt(intervals: int = 200, late_most: float | None = 0.03) -> AnalogForecast:
    analog_forecast = AnalogForecast(late_most)
    counts = rising(12, rise=60)
    for at in range(0, min(intervals * PARTS, len(counts)), PARTS):
        parts = tuple(counts[at : at + PARTS])
        analog_forecast.learn(Interval(sum(parts), 1000.0, 100.0, parts))
    return analog_forecast


class Live:
    """Traffic that is counted every five seconds."""

    def __init__(self, analog_forecast: AnalogForecast) -> None:
        self.analog_forecast, self.now = analog_forecast, 0.0
        self._rng = np.random.default_rng(4)

    def come(self, rate: float, seconds: float = LOOK_S) -> None:
        for _ in range(int(seconds / LOOK_S)):
            self.now += LOOK_S
            self.analog_forecast.observe(float(self._rng.poisson(rate * LOOK_S)), LOOK_S, self.now)


def test_engines_follow_a_rise_and_its_end() -> None:
    live = Live(plan(learnt()))
    assert live.analog_forecast.engines(POOL, 1) is None, "nobody has counted yet"
    live.come(10.0, 300.0)
    assert live.analog_forecast.engines(POOL, 1) == 1
    for step in range(60):
        live.come(10.0 + 26.0 * step / 60, 10.0)
    assert live.analog_forecast.engines(POOL, 1) == 3
    assert "after times like this" in live.analog_forecast.why
    live.come(36.0, 100.0)
    for step in range(60):
        live.come(36.0 - 26.0 * step / 60, 10.0)
    live.come(10.0, 120.0)
    assert live.analog_forecast.engines(POOL, 3) == 1


def test_it_says_nothing_where_it_knows_nothing() -> None:
    few = Live(plan(learnt(LEARNT_MIN - 1)))
    few.come(10.0, 60.0)
    assert few.analog_forecast.engines(POOL, 1) is None
    foreseen = Live(plan(learnt(), is_known=True))
    foreseen.come(10.0, 60.0)
    assert foreseen.analog_forecast.engines(POOL, 1) is None
    on_average = Live(plan(learnt(late_most=None)))
    on_average.come(10.0, 60.0)
    assert on_average.analog_forecast.engines(POOL, 1) is None
    forbidden = learnt()
    forbidden.is_asked = False
    assert plan(forbidden).price is None


def test_where_no_price_keeps_the_promise_it_says_nothing() -> None:
    analog_forecast = AnalogForecast(0.01)
    for index in range(100):  # of a burst that came once no other shows
        rate = 400.0 if 50 <= index < 60 else 100.0
        analog_forecast.learn(Interval(6 * rate, 1000.0, 100.0, (rate,) * PARTS))
    assert plan(analog_forecast).price is None


def test_more_than_ever_came_is_unlike_everything_and_less_is_not() -> None:
    live = Live(plan(learnt()))
    live.come(36.0, 120.0)
    assert live.analog_forecast.engines(POOL, 3) == 3
    live.come(80.0, 60.0)
    assert live.analog_forecast.engines(POOL, 3) is None
    live.come(36.0, 60.0)
    assert live.analog_forecast.engines(POOL, 3) is not None
    live.come(2.0, 120.0)
    assert live.analog_forecast.engines(POOL, 3) == 1


def test_what_is_not_counted_is_not_planned() -> None:
    live = Live(plan(learnt()))
    live.come(10.0, 60.0)
    live.analog_forecast.lose()
    assert live.analog_forecast.engines(POOL, 1) is None
    live.come(10.0, 60.0)
    assert live.analog_forecast.engines(POOL, 1) == 1


def test_after_a_while_of_which_nothing_is_known_it_looks_for_its_place_anew() -> None:
    live = Live(plan(learnt()))
    live.come(10.0, 60.0)
    live.analog_forecast.skip()
    live.come(10.0, 60.0)
    assert live.analog_forecast.engines(POOL, 1) is None, "until the next plan"
    plan(live.analog_forecast)
    live.come(10.0, 60.0)
    assert live.analog_forecast.engines(POOL, 1) == 1
    for _ in range(600):  # however often: the past that is remembered has an end
        live.analog_forecast.skip()
    plan(live.analog_forecast)
    live.come(10.0, 60.0)
    assert live.analog_forecast.engines(POOL, 1) is None, "nothing of it is left"


def test_while_traffic_rises_above_all_that_was_it_says_nothing() -> None:
    analog_forecast = AnalogForecast(0.03)
    rng = np.random.default_rng(5)
    for index in range(LEARNT_MIN + 40):
        parts = tuple(float(one) for one in rng.poisson(40.0 + 4.0 * index, PARTS))
        analog_forecast.learn(Interval(sum(parts), 1000.0, 100.0, parts))
    live = Live(plan(analog_forecast))
    live.come(44.0, 60.0)
    assert live.analog_forecast.engines(POOL, 3) is None
