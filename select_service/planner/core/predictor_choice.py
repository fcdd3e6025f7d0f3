"""Picks one of several models: the one whose recent forecasts cost least.

Too few workers hurt more than too many: an error on the low side counts three times. The last value
is always among the candidates: on bursts nothing is better, and a complex model must beat it.
Forecasts one and two intervals ahead are judged, as engines take time to start.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from select_service.planner.core.recurrence import Recurrence

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNDER_COSTS", "Chooser", "ForecastModel", "loss_of"]

UNDER_COSTS: Final = 3.0
_MEMORY: Final = 0.96  # factor on a loss per interval: about twenty-five intervals count
_FAITH: Final = 0.95  # a challenger must be below this share of the loss to take over
_EARLY: Final = 8  # intervals in which the first candidate is used
_JUDGED: Final = (1, 2)  # intervals ahead


class ForecastModel(Protocol):
    """Learns one value at a time and forecasts the next."""

    def add(self, value: float) -> None:
        """Learn the value of the interval that ended; finite."""

    def predict(self, steps: int = 1) -> float:
        """Return the value this many steps after the last; 0 before the first `add`.

        Calling it twice changes nothing.
        """


def loss_of(forecast: float, actual: float) -> float:
    """Return the cost of a forecast: its error, three times if it was too low."""
    missing = actual - forecast
    return UNDER_COSTS * missing if missing > 0 else -missing


def _has_opinion(model: ForecastModel) -> bool:
    return not isinstance(model, Recurrence) or model.period > 0


class Chooser:
    """Runs all candidates on the same series, as a rolling backtest.

    Args:
        candidates: by name; the first one is used until there is enough to judge.
    """

    def __init__(self, candidates: Mapping[str, ForecastModel]) -> None:
        self._models = dict(candidates)
        self.losses = dict.fromkeys(self._models, 0.0)
        self.chosen = next(iter(self._models))
        self._seen = 0
        self._forecasts = {
            name: deque[dict[int, float]](maxlen=max(_JUDGED)) for name in self._models
        }

    def add(self, value: float) -> None:
        """Judge every forecast by the value, then let all models learn it."""
        for name, model in self._models.items():
            made = self._forecasts[name]  # the last one is one interval old
            loss = sum(
                loss_of(made[-steps][steps], value) for steps in _JUDGED if steps <= len(made)
            )
            self.losses[name] = _MEMORY * self.losses[name] + loss
            model.add(value)
            made.append({steps: max(0.0, model.predict(steps)) for steps in _JUDGED})
        self._seen += 1
        if self._seen > _EARLY:
            able = [name for name, model in self._models.items() if _has_opinion(model)]
            best = min(able, key=self.losses.__getitem__)
            is_mute = self.chosen not in able
            if is_mute or self.losses[best] < _FAITH * self.losses[self.chosen]:
                self.chosen = best

    def skip(self, intervals: int) -> list[float]:
        """Let unknown time pass, as `Recurrence.skip`; forecasts for it are not judged."""
        for made in self._forecasts.values():
            made.clear()
        return self.recurring.skip(intervals) if self.recurring else []

    def opinions(self, steps: int = 1) -> dict[str, float]:
        """Return the forecast of every candidate that has its own, by name."""
        return {
            name: model.predict(steps)
            for name, model in self._models.items()
            if _has_opinion(model) or name == self.chosen
        }

    @property
    def recurring(self) -> Recurrence | None:
        """The candidate that looks for periods, if there is one."""
        found = (one for one in self._models.values() if isinstance(one, Recurrence))
        return next(found, None)

    def predict(self, steps: int = 1) -> float:
        """Return what the chosen model forecasts."""
        return self._models[self.chosen].predict(steps)
