"""Predictors by name, as selected by flags.

In compatible mode a Kalman filter forecasts from its first point, and its forecasts and the last
value may be negative, like the reference's; in ours it waits for `points_min`, and no forecast is
negative.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from select_service.planner.core.fitted import Fitted
from select_service.planner.core.kalman import Kalman
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.predictor_choice import Chooser
from select_service.planner.core.recurrence import RECURRING, SAME_TIME, Recurrence, SameTime
from select_service.planner.core.smoothing import DampedSmoothing
from select_service.planner.edge.fit_thread import DEADLINE_S, Fitter
from select_service.planner.errors import MissingExtra, PlannerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.planner.core.fitted import Fit, Forecast
    from select_service.planner.core.predictor_choice import ForecastModel
    from select_service.planner.settings import TuningSettings


# Forecasters from external packages: ARIMA (statsforecast) and Prophet. A package is imported once,
# on first use; a missing one is a start-up error that names the extra. A decision waits for a fit
# no longer than `Fitter` allows.

_WINDOW_ARIMA: Final = 240  # AutoARIMA takes 80 ms for this many
_REFIT_ARIMA: Final = 10  # in between, the fitted model is carried forward
_REFIT_PROPHET: Final = 1
_STEPS_MOST: Final = 10  # intervals ahead; more are not asked for
_SEARCH: Final = {"max_p": 2, "max_q": 2, "max_d": 1, "approximation": True, "seasonal": False}
# Ways in which a fit may fail without a bug of ours: too little variance, no convergence.
_FAILURES: Final = (TimeoutError, ValueError, ArithmeticError, RuntimeError, IndexError, KeyError)


def arima(fitter: Fitter) -> Fitted:
    """Return an ARIMA model whose order is searched again every ten intervals.

    Raises:
        MissingExtra: statsforecast is not installed.
    """
    models = _imported("statsforecast.models", "arima", "statsforecast>=2.0")
    return Fitted(
        fitter.bounded(_fit_arima(models), keeps=True),
        failures=_FAILURES,
        window=_WINDOW_ARIMA,
        refit_every=_REFIT_ARIMA,
    )


def prophet(fitter: Fitter, window: int = 50, interval_s: float = 180.0) -> Fitted:
    """Return a Prophet model of the last `window` intervals, refitted for each.

    Raises:
        MissingExtra: prophet is not installed.
        PlannerError: there is no directory for its files.
    """
    for name in ("prophet", "prophet.plot", "cmdstanpy"):
        logging.getLogger(name).disabled = True  # they log every fit
    module = _imported("prophet", "prophet", "prophet>=1.1.5")
    pandas = _imported("pandas", "prophet", "prophet>=1.1.5")
    fit = fitter.bounded(_fit_prophet(module, pandas, interval_s), keeps=False)
    return Fitted(fit, failures=_FAILURES, window=window, refit_every=_REFIT_PROPHET)


def _imported(name: str, extra: str, requirement: str) -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads make small fits ten times slower
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"the predictor {extra}", extra, requirement) from error
    except OSError as error:  # it keeps files of its own while it runs
        why = f"the predictor {extra} needs a directory that can be written: name one with TMPDIR"
        raise PlannerError(why) from error


def _fit_arima(models: Any) -> Fit:
    import numpy as np  # loaded by the library at the latest

    def fit(history: Sequence[float]) -> Forecast:
        model = models.AutoARIMA(**_SEARCH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(np.asarray(history, dtype=np.float64))

        def forecast(recent: Sequence[float], steps: int, age: int) -> Sequence[float]:  # noqa: ARG001
            values = np.asarray(recent, dtype=np.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [float(one) for one in model.forward(values, h=steps)["mean"]]

        return forecast

    return fit


def _fit_prophet(module: Any, pandas: Any, interval_s: float) -> Fit:
    def fit(history: Sequence[float]) -> Forecast:
        step = pandas.Timedelta(seconds=interval_s)
        start = pandas.Timestamp("2020-01-06")
        times = [start + step * index for index in range(len(history) + _STEPS_MOST)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = module.Prophet()
            count = len(history)
            model.fit(pandas.DataFrame({"ds": times[:count], "y": list(history)}))
            # the next interval is one step after the last, not one second
            ahead = model.predict(pandas.DataFrame({"ds": times[count:]}))["yhat"].tolist()
        return lambda _, steps, age: ahead[age : age + steps]

    return fit


class PredictorSettings(Struct, frozen=True, kw_only=True):
    """The predictor and its tuning."""

    name: str = "auto"
    log1p: bool = False
    q_level: float = 1.0
    q_trend: float = 0.1
    r: float = 10.0
    points_min: int = 5
    prophet_window: int = 50
    interval_s: float = 180.0
    compatible: bool = False
    fit_deadline_s: float = DEADLINE_S
    """How long a decision waits for a library's fit."""


def predictor_settings(
    name: str, tuning: TuningSettings, *, compatible: bool = False
) -> PredictorSettings:
    """Return the settings of a predictor out of those of a command."""
    return PredictorSettings(
        name=name,
        log1p=tuning.log1p,
        q_level=tuning.kalman_q_level,
        q_trend=tuning.kalman_q_trend,
        r=tuning.kalman_r,
        points_min=tuning.kalman_min_points,
        prophet_window=tuning.prophet_window_size,
        fit_deadline_s=tuning.load_predictor_fit_deadline,
        interval_s=tuning.adjustment_interval,
        compatible=compatible,
    )


_UNCLAMPED: Final = frozenset({"constant", "kalman"})  # in the reference


def make_predictor(settings: PredictorSettings, fitter: Fitter | None = None) -> Predictor:
    """Return a new predictor.

    Args:
        settings: its name and tuning.
        fitter: shared by the predictors of one decision; None: this is the only one.

    Raises:
        MissingExtra: its library is not installed.
    """
    is_kalman = settings.name == "kalman"
    return Predictor(
        _MODELS[settings.name](settings, fitter or Fitter(settings.fit_deadline_s)),
        log1p=settings.log1p and settings.name != "constant",  # where it would have no effect
        clamp=not (settings.compatible and settings.name in _UNCLAMPED),
        points_min=settings.points_min if is_kalman and not settings.compatible else 0,
    )


def _kalman(settings: PredictorSettings, _: Fitter) -> ForecastModel:
    return Kalman(q_level=settings.q_level, q_trend=settings.q_trend, r=settings.r)


def _chooser(settings: PredictorSettings, fitter: Fitter) -> ForecastModel:
    recurrence = Recurrence()
    return Chooser(
        {
            "constant": Constant(),
            "kalman": _kalman(settings, fitter),
            "ets": DampedSmoothing(),
            RECURRING: recurrence,
            SAME_TIME: SameTime(recurrence),
        }
    )


_MODELS: Final[dict[str, Callable[[PredictorSettings, Fitter], ForecastModel]]] = {
    "constant": lambda _, __: Constant(),
    "kalman": _kalman,
    "ets": lambda _, __: DampedSmoothing(),
    RECURRING: lambda _, __: Recurrence(),
    "arima": lambda _, fitter: arima(fitter),
    "prophet": lambda settings, fitter: prophet(
        fitter, settings.prophet_window, settings.interval_s
    ),
    "auto": _chooser,
}
