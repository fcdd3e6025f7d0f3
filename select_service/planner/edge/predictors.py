"""Predictors by name, as selected by flags.

In compatible mode a Kalman filter forecasts from its first point, and its forecasts and the last
value may be negative, like the reference's; in ours it waits for `points_min`, and no forecast is
negative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.planner.core.kalman import Kalman
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.predictor_choice import Chooser
from select_service.planner.core.recurrence import RECURRING, SAME_TIME, Recurrence, SameTime
from select_service.planner.core.smoothing import DampedSmoothing
from select_service.planner.edge import libraries
from select_service.planner.edge.fit_thread import DEADLINE_S, Fitter

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.predictor_choice import ForecastModel
    from select_service.planner.settings import TuningSettings

__all__ = ["PredictorSettings", "make_predictor", "predictor_settings"]


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
    "arima": lambda _, fitter: libraries.arima(fitter),
    "prophet": lambda settings, fitter: libraries.prophet(
        fitter, settings.prophet_window, settings.interval_s
    ),
    "auto": _chooser,
}
