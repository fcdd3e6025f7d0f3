"""Which of several models to believe: the one whose forecasts cost least lately.

Too few workers hurt more than too many: what was forecast too low counts three times. The last
value is always among the candidates: on bursts nothing does better, and whoever is clever has to
be better than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.planner.core.prediction import Model

__all__ = ["UNDER_COSTS", "Chooser", "loss_of"]

UNDER_COSTS: Final = 3.0
_MEMORY: Final = 0.96  # of a loss, per interval: about twenty-five intervals count
_FAITH: Final = 0.95  # another has to be better than this share of the loss to take over
_EARLY: Final = 8  # intervals in which the first candidate speaks


def loss_of(forecast: float, actual: float) -> float:
    """Return what a forecast costs: its error, three times where it was too low."""
    missing = actual - forecast
    return UNDER_COSTS * missing if missing > 0 else -missing


class Chooser:
    """Runs every candidate on the same series; a rolling backtest of one step.

    Args:
        candidates: by name; the first one speaks until there is something to judge by.
    """

    def __init__(self, candidates: Mapping[str, Model]) -> None:
        self._models = dict(candidates)
        self.losses = dict.fromkeys(self._models, 0.0)
        self.chosen = next(iter(self._models))
        self._seen = 0

    def add(self, value: float) -> None:
        """Judge every forecast by the value, then let everybody learn it."""
        for name, model in self._models.items():
            if self._seen:
                loss = loss_of(max(0.0, model.predict()), value)
                self.losses[name] = _MEMORY * self.losses[name] + loss
            model.add(value)
        self._seen += 1
        if self._seen > _EARLY:
            best = min(self.losses, key=self.losses.__getitem__)
            if self.losses[best] < _FAITH * self.losses[self.chosen]:
                self.chosen = best

    def predict(self) -> float:
        """Return what the chosen model forecasts."""
        return self._models[self.chosen].predict()
