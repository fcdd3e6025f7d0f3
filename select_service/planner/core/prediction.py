"""One time series of a model's traffic, and its forecasts.

A model forecasts; a `Predictor` decides what the model sees: no leading zeros, no NaN, logarithms
on request. `kalman.py`, `smoothing.py` and `fitted.py` are models, `predictor_choice.py` picks
among several; `demand.py` uses the forecasts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.core.fitted import Fitted
from select_service.planner.core.predictor_choice import Chooser
from select_service.planner.core.recurrence import RECURRING, Recurrence

if TYPE_CHECKING:
    from select_service.planner.core.predictor_choice import ForecastModel


class Constant:
    """Forecasts the last value."""

    def __init__(self) -> None:
        self._last = 0.0

    def add(self, value: float) -> None:
        """Replace the last value."""
        self._last = value

    def predict(self, steps: int = 1) -> float:
        """Return the last value."""
        return self._last


class Predictor:
    """Wraps a model with rules for load series.

    Args:
        model: the forecaster.
        log1p: show it log1p(value): relative errors count, and no forecast is negative.
        clamp: no forecast below 0. The reference's Kalman filter has no such floor.
        points_min: with fewer values the last one is the forecast.
    """

    def __init__(
        self, model: ForecastModel, *, log1p: bool = False, clamp: bool = True, points_min: int = 0
    ) -> None:
        self._model = model
        self._log1p = log1p
        self._clamp = clamp
        self._points_min = points_min
        self._is_leading = True
        self._last = 0.0
        self.points = 0

    @property
    def failed(self) -> int:
        """The number of failed or late fits."""
        return self._model.failed if isinstance(self._model, Fitted) else 0

    @property
    def why(self) -> str:
        """Why the last forecast is not the model's own, as text; usually empty."""
        return self._model.why if isinstance(self._model, Fitted) else ""

    @property
    def speaker(self) -> str:
        """The model behind the forecast; a key of `opinions`."""
        if isinstance(self._model, Chooser):
            return self._model.chosen
        recurs = isinstance(self._model, Recurrence) and self._model.period > 0
        return RECURRING if recurs else ""

    @property
    def period(self) -> int:
        """Intervals after which the traffic recurs, whichever model forecasts; 0: it does not."""
        return self._recurring.period if self._recurring else 0

    def hindcast(self) -> list[tuple[float, float]]:
        """Return the forecasts that period would have made of the past, with the actual values."""
        pairs = self._recurring.hindcast() if self._recurring else []
        return [
            (self._inverse_transform(forecast), self._inverse_transform(actual))
            for forecast, actual in pairs
        ]

    @property
    def _recurring(self) -> Recurrence | None:
        if isinstance(self._model, Chooser):
            return self._model.recurring
        return self._model if isinstance(self._model, Recurrence) else None

    def opinions(self, steps: int = 1) -> dict[str, float]:
        """Return the forecast of every candidate model, by name."""
        if not isinstance(self._model, Chooser) or not self.points:
            return {self.speaker: self.predict(steps)}
        forecasts = self._model.opinions(steps)
        return {name: self._inverse_transform(forecast) for name, forecast in forecasts.items()}

    def begin_live(self) -> None:
        """Start live operation after a trace: zeros until the first traffic are leading again."""
        self._is_leading = True

    def add(self, value: float) -> None:
        """Add one interval; NaN and infinity count as 0, leading zeros not at all."""
        value = value if math.isfinite(value) else 0.0
        if self._is_leading and value == 0.0:
            return
        self._is_leading = False
        self.points += 1
        self._last = value
        self._model.add(math.log1p(max(0.0, value)) if self._log1p else value)

    def skip(self, intervals: int) -> list[float]:
        """Let unknown time pass; returns the values that stand in for it, if any.

        Only models with periods depend on when something came.
        """
        if not self.points or not isinstance(self._model, Chooser | Recurrence):
            return []
        return [self._inverse_transform(value) for value in self._model.skip(intervals)]

    def predict(self, steps: int = 1) -> float:
        """Return the forecast this many intervals ahead; 0 before the first traffic."""
        if not self.points:
            return 0.0
        if self.points < self._points_min:
            return max(0.0, self._last) if self._clamp else self._last
        return self._inverse_transform(self._model.predict(steps))

    def planned(self, steps: int = 1) -> float:
        """Return the forecast in full, of the model that seems best: what engines are planned for.

        Its errors are known by model, and prepared for. Expecting more in vain costs minutes of
        engines, and what comes without engines costs its requests.
        """
        return self.opinions(steps)[self.speaker]

    def _inverse_transform(self, forecast: float) -> float:
        if self._log1p:
            forecast = math.expm1(min(forecast, _LOG_MAX))
        return max(0.0, forecast) if self._clamp or self._log1p else forecast


_LOG_MAX: Final = 60.0  # expm1 of more is no realistic load
