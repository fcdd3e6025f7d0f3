"""A fit that takes too long keeps nobody waiting, and what was learnt before goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from select_service.planner.core.demand import Demand, Interval, Predictors
from select_service.planner.core.fitted import Fitted
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.edge.fit_thread import Fitter
from tests.wait import PATIENCE_S, block_until


class Library:
    """Forecasts the mean of what it was fitted to; slow whenever that is set."""

    def __init__(self) -> None:
        self.fits = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self.ended = threading.Semaphore(0)

    def fit(self, history: Sequence[float]) -> object:
        self.fits += 1
        self.may_end.wait()
        if history[-1] == 13.0:
            raise ValueError("no convergence")
        mean = sum(history) / len(history)
        self.ended.release()
        return lambda _, steps, age: [mean + age] * steps


def fitted(library: Library, fitter: Fitter, *, keeps: bool = True) -> Fitted:
    fit = fitter.bounded(library.fit, keeps=keeps)  # type: ignore[arg-type] # a Fit
    return Fitted(fit, failures=(TimeoutError, ValueError), refit_every=2)


def grow(model: Fitted, values: Sequence[float]) -> float:
    for value in values:
        model.add(value)
    return model.predict()


def test_a_late_fit_leaves_the_model_from_before_and_is_taken_when_it_is_there() -> None:
    library, fitter = Library(), Fitter(PATIENCE_S)
    model = fitted(library, fitter)
    first = grow(model, [float(step) for step in range(20)])
    assert first == 9.5
    library.may_end.clear()
    fitter.deadline_s = 0.02
    assert grow(model, [20.0, 21.0]) == 9.5 + 2, "the old model, two values later"
    assert model.failed == 1
    assert model.why == "a fit took longer than 0.02 s"
    assert grow(model, [22.0]) == 9.5 + 3
    assert model.why == "another fit is still running"
    block_until(lambda: library.fits == 2)  # the thread has begun
    assert library.fits == 2, "nothing piles up behind it"
    other = fitted(Library(), fitter)
    assert grow(other, [float(step) for step in range(9)]) == 8.0, "no model yet: the last value"
    assert other.failed == 1
    fitter.deadline_s = PATIENCE_S
    library.may_end.set()
    for _ in range(2):
        assert library.ended.acquire(timeout=PATIENCE_S)
    block_until(lambda: fitter._running is None or fitter._running.done())
    assert grow(model, [23.0]) == sum(range(22)) / 22
    assert model.why == ""


def test_what_forecasts_fixed_times_is_not_taken_late() -> None:
    library, fitter = Library(), Fitter(0.02)
    model = fitted(library, fitter, keeps=False)
    library.may_end.clear()
    assert grow(model, [float(step) for step in range(20)]) == 19.0
    fitter.deadline_s = PATIENCE_S
    library.may_end.set()
    assert library.ended.acquire(timeout=PATIENCE_S)
    block_until(lambda: fitter._running is None or fitter._running.done())
    assert grow(model, [20.0]) == 10.0, "fitted anew"
    assert library.fits == 2


def test_a_fit_that_fails_is_reported_and_the_last_value_stands_in() -> None:
    model = fitted(Library(), Fitter())
    predictors = Predictors(*(Predictor(one) for one in (model, Constant(), Constant())))
    demand = Demand(predictors)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0, 13.0):
        demand._learn(Interval(value, 10.0, 10.0))
    forecast = demand.forecast(1.0)
    assert forecast is not None
    assert forecast.rate == 13.0
    assert demand.fit_failures == 1
    assert demand.doubts == ["the forecast of requests goes on without a new fit: no convergence"]
