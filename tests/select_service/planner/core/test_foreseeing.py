"""What comes again is foreseen, and what was not foreseen is prepared for."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from select_service.planner.core.forecast_errors import EXACT, POINTS_MIN, ForecastErrors
from select_service.planner.core.kalman import Kalman
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.predictor_choice import Chooser, ForecastModel, loss_of
from select_service.planner.core.recurrence import Recurrence
from select_service.planner.core.smoothing import DampedSmoothing


def bursts(count: int, period: int = 15, noise: float = 20.0) -> list[float]:
    rng = random.Random(4)
    return [
        max(0.0, (2100.0 if step % period >= period - 2 else 600.0) + rng.gauss(0, noise))
        for step in range(count)
    ]


def test_a_period_is_found_and_forecast_ahead() -> None:
    model, series = Recurrence(), bursts(75)
    for value in series[:60]:
        model.add(value)
    assert model.period == 15
    for steps in (1, 2, 15, 16):
        assert model.predict(steps) == pytest.approx(bursts(80)[59 + steps], rel=0.15)


@pytest.mark.parametrize(
    "shape",
    [
        lambda step: 10.0 + 7.5 * step,
        lambda step: 500.0 + random.Random(step).gauss(0, 30),
        lambda _: 100.0,
        lambda _: 0.0,
        lambda step: 1e300 * (step % 2),
    ],
    ids=["ramp", "noise", "constant", "nothing", "enormous"],
)
def test_what_has_no_period_is_given_none(shape: object) -> None:
    model = Recurrence()
    for step in range(120):
        model.add(shape(step))  # type: ignore[operator]
        assert math.isfinite(model.predict())
    assert model.predict() == shape(119) or model.period  # type: ignore[operator]


def test_a_day_at_another_level_is_forecast_at_that_level() -> None:
    model = Recurrence()
    for step in range(169):
        model.add((1.5 if step >= 144 else 1.0) * (300 + 200 * math.sin(step * math.pi / 24)))
    assert model.period == 48
    ahead = 300 + 200 * math.sin(169 * math.pi / 24)
    assert model.predict() == pytest.approx(1.5 * ahead, rel=0.1)


def test_the_chooser_lets_what_recurs_speak_after_some_periods() -> None:
    chooser = Chooser({"constant": Constant(), "recurring": Recurrence()})
    for value in bursts(90):
        assert chooser.chosen == "constant" or value
        chooser.add(value)
    assert chooser.chosen == "recurring"
    assert chooser.predict(15) > 3 * chooser.predict(1)
    for _ in range(60):
        chooser.add(600.0)  # the bursts have ended
    assert chooser.predict(15) == pytest.approx(600.0, rel=0.1)


@given(st.lists(st.floats(0, 1e6), min_size=20, max_size=80), st.sampled_from((1, 2)))
def test_what_is_chosen_loses_to_the_last_value_only_what_it_saved(
    values: list[float], steps: int
) -> None:
    models: dict[str, ForecastModel] = {"constant": Constant(), "ets": DampedSmoothing()}
    chooser, forecasts = Chooser(models | {"kalman": Kalman()}), []
    for value in values:
        chooser.add(value)
        forecasts.append(chooser.predict(steps))
    for loss in (lambda forecast, actual: abs(forecast - actual), loss_of):
        lost = sum(map(loss, forecasts[:-steps], values[steps:]))
        assert lost <= 1.001 * sum(map(loss, values[:-steps], values[steps:])) + 1e-6


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 10))
def test_every_model_is_linear_in_steps_or_forecasts_the_same_twice(
    values: list[float], steps: int
) -> None:
    models: list[ForecastModel] = [Constant(), Kalman(), DampedSmoothing(), Recurrence()]
    for model in models:
        for value in values:
            model.add(value)
        forecast = model.predict(steps)
        assert math.isfinite(forecast)
        assert model.predict(steps) == forecast
        assert model.predict(1) == model.predict()
    kalman = models[1]
    level, slope = kalman.predict(1), kalman.predict(2) - kalman.predict(1)
    scale = max(1.0, *values)
    assert kalman.predict(steps) == pytest.approx(level + (steps - 1) * slope, abs=1e-6 * scale)
    predictor = Predictor(Chooser({"constant": Constant(), "kalman": Kalman()}), log1p=True)
    for value in values:
        predictor.add(value)
    assert predictor.opinions(steps)[predictor.speaker] == predictor.planned(steps)
    last = predictor.opinions(steps)["constant"]
    careful, slack = predictor.predict(steps), 1e-9 * max(1.0, *values)
    assert min(last, predictor.planned(steps)) - slack <= careful
    assert careful <= max(last, predictor.planned(steps)) + slack


@pytest.mark.parametrize("gap", [1, 5, 15, 38, 10**9])
@pytest.mark.parametrize("log1p", [False, True])
def test_what_recurs_is_on_time_after_a_while_of_which_nothing_is_known(
    gap: int, *, log1p: bool
) -> None:
    """Whatever was not counted was left out: bursts were expected that much too late."""
    predictor, rng = Predictor(Recurrence(), log1p=log1p), random.Random(3)

    def at(step: int) -> float:
        return (2100.0 if step % 15 >= 13 else 600.0) + rng.gauss(0, 20)

    for step in range(90):
        predictor.add(at(step))
    assert predictor.period == 15
    stood_in = predictor.skip(gap)
    assert stood_in == pytest.approx([at(90 + step) for step in range(gap % 15)], rel=0.15)
    for step in range(90 + gap, 90 + gap + 40):
        came = at(step)
        assert predictor.predict() == pytest.approx(came, rel=0.2)
        predictor.add(came)


def test_a_period_is_found_although_some_of_it_was_not_counted() -> None:
    chooser = Chooser({"constant": Constant(), "recurring": Recurrence()})
    assert chooser.skip(9) == []
    series = bursts(90)
    for step, value in enumerate(series):
        if step == 20:
            assert chooser.skip(3) == [series[19]] * 3
        if not 20 <= step < 23:
            chooser.add(value)
    assert chooser.recurring is not None
    assert chooser.recurring.period == 15
    assert chooser.skip(10**6) != [], "a share of a period"
    fresh = Chooser({"constant": Constant(), "recurring": Recurrence()})
    for value in series[:20]:
        fresh.add(value)
    assert fresh.skip(6) == [], "more than a quarter of what is known"


def test_what_is_foreseen_costs_no_headroom() -> None:
    forecast_errors, rng = ForecastErrors(), random.Random(2)
    for _ in range(POINTS_MIN - 1):
        forecast_errors.add(1000.0, 3000.0)
    assert forecast_errors.spread(1000.0) == EXACT, "too few to know"
    forecast_errors = ForecastErrors()
    for _ in range(100):
        forecast_errors.add(1000.0, 1000.0 + rng.gauss(0, 30))
    assert max(factor for factor, _ in forecast_errors.spread(1000.0)) < 1.1
    assert forecast_errors.usual == pytest.approx(2 * 30 / (2 * 1000**0.5), rel=0.3)


def test_one_event_is_chance_and_two_are_a_pattern() -> None:
    forecast_errors = ForecastErrors()
    for step in range(60):
        forecast_errors.add(600.0, 2100.0 if step in (30, 31) else 600.0)
    assert max(factor for factor, _ in forecast_errors.spread(600.0)) < 1.1
    for step in range(60):
        forecast_errors.add(600.0, 2100.0 if step in (30, 31) else 600.0)
    burst = [(factor, share) for factor, share in forecast_errors.spread(600.0) if factor > 1.1]
    assert [factor for factor, _ in burst] == pytest.approx([3.5] * len(burst), rel=1e-3)
    assert sum(share for _, share in burst) == pytest.approx(
        2 * 2100 / (2 * 2100 + 116 * 600), rel=0.05
    )
    assert max(factor for factor, _ in forecast_errors.spread(2100.0)) < 1.1, (
        "never on top of itself"
    )


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e7)), max_size=80), st.floats(0, 1e7))
@example([*[(0.0, 0.0)] * 10, (1.0, 5e-324), (2.0, 2.0)], 1.0)
def test_shares_add_up_whatever_came(pairs: list[tuple[float, float]], forecast: float) -> None:
    forecast_errors = ForecastErrors()
    for expected, actual in pairs:
        forecast_errors.add(expected, actual)
    spread = forecast_errors.spread(forecast)
    assert sum(share for _, share in spread) == pytest.approx(1.0)
    assert all(math.isfinite(factor) and factor >= 0 and share > 0 for factor, share in spread)
