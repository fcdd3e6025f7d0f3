"""One series of an interval each, and what its next value will be.

A model forecasts; a `Predictor` decides what a model gets to see: no leading zeros, nothing that
is not a number, logarithms where asked for. `kalman.py`, `smoothing.py` and `fitted.py` are models,
`choosing.py` picks among several; the sizer stands behind them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.core.choosing import Chooser
from select_service.planner.core.fitted import Fitted
from select_service.planner.core.recurring import RECURRING, Recurring

if TYPE_CHECKING:
    from select_service.planner.core.choosing import Model

__all__ = ["Constant", "Predictor"]


class Constant:
    """Tomorrow is like today."""

    def __init__(self) -> None:
        self._last = 0.0

    def add(self, value: float) -> None:
        """Replace what is remembered."""
        self._last = value

    def predict(self, steps: int = 1) -> float:
        """Return the last value."""
        return self._last


class Predictor:
    """A model behind a door that knows what a load series looks like.

    Args:
        model: who forecasts.
        log1p: show it log1p(value): relative errors count, and no forecast is negative.
        clamp: no forecast below 0. The reference's Kalman filter has no such floor.
        points_min: with fewer values the last one is the forecast.
    """

    def __init__(
        self, model: Model, *, log1p: bool = False, clamp: bool = True, points_min: int = 0
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
        """How many fits have failed or were late."""
        return self._model.failed if isinstance(self._model, Fitted) else 0

    @property
    def why(self) -> str:
        """Why the last forecast is not what the model would say, in words; mostly empty."""
        return self._model.why if isinstance(self._model, Fitted) else ""

    @property
    def speaker(self) -> str:
        """Whose forecast it is; a key of `opinions`."""
        if isinstance(self._model, Chooser):
            return self._model.chosen
        recurs = isinstance(self._model, Recurring) and self._model.period > 0
        return RECURRING if recurs else ""

    @property
    def period(self) -> int:
        """Intervals after which the traffic comes again, whoever speaks; 0: it does not."""
        return self._recurring.period if self._recurring else 0

    def hindcast(self) -> list[tuple[float, float]]:
        """Return what that period would have forecast of the past, and what came."""
        pairs = self._recurring.hindcast() if self._recurring else []
        return [(self._told(forecast), self._told(actual)) for forecast, actual in pairs]

    @property
    def _recurring(self) -> Recurring | None:
        if isinstance(self._model, Chooser):
            return self._model.recurring
        return self._model if isinstance(self._model, Recurring) else None

    def opinions(self, steps: int = 1) -> dict[str, float]:
        """Return the forecast of every model there is to choose from, by name."""
        if not isinstance(self._model, Chooser) or not self.points:
            return {self.speaker: self.predict(steps)}
        told = self._model.opinions(steps)
        return {name: self._told(forecast) for name, forecast in told.items()}

    def begin_live(self) -> None:
        """What came so far was a trace: zeros until the first traffic are no news again."""
        self._is_leading = True

    def add(self, value: float) -> None:
        """Take in one interval; what is not a number counts as 0, zeros at the start not at all."""
        value = value if math.isfinite(value) else 0.0
        if self._is_leading and value == 0.0:
            return
        self._is_leading = False
        self.points += 1
        self._last = value
        self._model.add(math.log1p(max(0.0, value)) if self._log1p else value)

    def skip(self, intervals: int) -> list[float]:
        """Let time pass of which nothing is known; returns what stands in for it, where anything.

        Only who looks for periods cares when something came.
        """
        if not self.points or not isinstance(self._model, Chooser | Recurring):
            return []
        return [self._told(value) for value in self._model.skip(intervals)]

    def predict(self, steps: int = 1) -> float:
        """Return the forecast, so many intervals ahead; 0 before the first traffic."""
        if not self.points:
            return 0.0
        if self.points < self._points_min:
            return max(0.0, self._last) if self._clamp else self._last
        return self._told(self._model.predict(steps))

    def _told(self, forecast: float) -> float:
        if self._log1p:
            forecast = math.expm1(min(forecast, _LOG_MAX))
        return max(0.0, forecast) if self._clamp or self._log1p else forecast


_LOG_MAX: Final = 60.0  # expm1 of more is no load of anything
