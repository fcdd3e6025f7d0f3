"""Picks one of several models: the last value, unless another one is surely better.

What it picks may lose no more against the last value than was saved before: forecasts are moved
from the last value only so far. So they are never worse in all, whatever comes.

A rolling back-test: all models forecast the same series, one and two intervals ahead, as engines
take time to start. Nothing is better than the last value on most series, so a model takes over only
when its errors were smaller by a margin and by more than chance, and it goes as soon as they are
not. Too few workers hurt more than too many: it must be better, too, where an error on the low side
counts three times.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from select_service.planner.core.recurrence import Recurrence, SameTime

if TYPE_CHECKING:
    from collections.abc import Mapping

UNDER_COSTS: Final = 3.0
_MEMORY: Final = 0.97  # factor on a loss per interval: about thirty intervals count
_MARGIN: Final = 0.03  # share of the first candidate's loss that another one has to save
_DEVIATIONS: Final = 2.0  # of the mean of what it saved: less is chance
_FAITH: Final = 0.95  # below this share of the loss of the one in use it takes over from that
_EARLY: Final = 8  # intervals in which the first candidate is used
_JUDGED: Final = (1, 2)  # intervals ahead
_CREDIT: Final = 0.001  # share of the last value's loss that may be lost before anything is saved
_KEPT: Final = 0.99  # factor on savings per interval: those of a hundred may be lost


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


def _error(forecast: float, actual: float) -> float:
    return abs(actual - forecast)


_LOSSES: Final = (_error, loss_of)


def _new_savings() -> tuple[_Savings, ...]:
    return tuple(_Savings() for _ in _LOSSES)


def _has_opinion(model: ForecastModel) -> bool:
    return not isinstance(model, Recurrence | SameTime) or model.period > 0


class _Savings:
    """What a model saved against the last value, per interval; later intervals count for more."""

    def __init__(self) -> None:
        self._weight = self._squared_weight = 0.0
        self._saved = self._squares = self._lost = 0.0

    def add(self, first: float, loss: float) -> None:
        """Add one interval: the loss of the first candidate, and of this model."""
        saved = first - loss
        self._weight = _MEMORY * self._weight + 1.0
        self._squared_weight = _MEMORY**2 * self._squared_weight + 1.0
        self._saved = _MEMORY * self._saved + saved
        self._squares = _MEMORY * self._squares + saved * saved
        self._lost = _MEMORY * self._lost + first

    @property
    def mean(self) -> float:
        """What it saved per interval; below 0: it was worse."""
        return self._saved / self._weight if self._weight else 0.0

    @property
    def loss(self) -> float:
        """Its own loss per interval."""
        return self._lost / self._weight - self.mean if self._weight else math.inf

    @property
    def is_sure(self) -> bool:
        """Whether that is more than a margin, and more than chance."""
        if self._weight < _EARLY / 2:
            return False
        variance = max(0.0, self._squares / self._weight - self.mean * self.mean)
        chance = math.sqrt(variance * self._squared_weight) / self._weight
        return self.mean > max(_MARGIN * self._lost / self._weight, _DEVIATIONS * chance)


class _Account:
    """What forecasts may lose against the last value, so many steps ahead.

    No forecast loses more than it differs from the last value. Where that is at most what earlier
    ones saved, all together lose nothing.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left = [0.0 for _ in _LOSSES]
        self._open: deque[tuple[float, float]] = deque()  # last value and forecast, oldest first

    def settle(self, actual: float) -> None:
        """Judge the forecast of this value, if there was one."""
        if len(self._open) < self._steps:
            return
        first, forecast = self._open.popleft()
        for at, loss in enumerate(_LOSSES):
            saved = (1.0 + _CREDIT) * loss(first, actual) - loss(forecast, actual)
            self._left[at] = _KEPT * self._left[at] + saved

    def forget(self) -> None:
        """Drop the forecasts of values that are not known."""
        self._open.clear()

    def note(self, first: float, forecast: float) -> None:
        """Add a forecast."""
        self._open.append((first, forecast))

    def within(self, first: float, own: float) -> float:
        """Return the forecast between the last value and a model's own that may be returned."""
        share = 1.0
        for loss, left in zip(_LOSSES, self._left, strict=True):
            worst = loss(own, first)
            if worst > 0:
                risked = sum(loss(forecast, one) for one, forecast in self._open)
                share = min(share, max(0.0, left - risked) / worst)
        return first + share * (own - first)


class Chooser:
    """Runs all candidates on the same series, as a rolling back-test.

    Args:
        candidates: by name; the first one, the last value, is used unless another one is surely
            better.
    """

    def __init__(self, candidates: Mapping[str, ForecastModel]) -> None:
        self._models = dict(candidates)
        self._first = self.chosen = next(iter(self._models))
        self._seen = 0
        self._period = 0
        self._made: deque[dict[str, tuple[float, ...]]] = deque(maxlen=max(_JUDGED))
        self._savings = {name: _new_savings() for name in self._models}
        self._accounts = {steps: _Account(steps) for steps in _JUDGED}
        self._forecasts: dict[int, float] = {}

    def add(self, value: float) -> None:
        """Judge every forecast by the value, then let all models learn it."""
        self._judge(value)
        for account in self._accounts.values():
            account.settle(value)
        for model in self._models.values():
            model.add(value)
        self._judge_period()
        self._made.append(
            {
                name: tuple(max(0.0, model.predict(steps)) for steps in _JUDGED)
                for name, model in self._models.items()
                if _has_opinion(model)
            }
        )
        self._seen += 1
        if self._seen > _EARLY:
            self._choose()
        self._forecasts = {steps: self._within(self.chosen, steps) for steps in _JUDGED}
        for steps, account in self._accounts.items():
            account.note(max(0.0, self._models[self._first].predict(steps)), self._forecasts[steps])

    def _within(self, name: str, steps: int) -> float:
        """Return a model's forecast, as far from the last value as may be lost."""
        first, own = (self._models[one].predict(steps) for one in (self._first, name))
        return self._accounts[min(steps, max(_JUDGED))].within(first, own)

    def _judge(self, value: float) -> None:
        made = list(self._made)[::-1]  # the first one is one interval old
        for name, savings in self._savings.items():
            if not made or any(name not in one for one in made):
                continue
            for loss, kept in zip(_LOSSES, savings, strict=True):
                first, own = (
                    sum(loss(one[candidate][at], value) for at, one in enumerate(made))
                    for candidate in (self._first, name)
                )
                kept.add(first, own)

    def _judge_period(self) -> None:
        """Judge a new period by the past: what it would have forecast there."""
        found = self.recurring
        if found is None or found.period == self._period:
            return
        self._period = found.period
        savings = _new_savings()
        before = None
        for forecast, actual in found.hindcast():
            if before is not None:
                for loss, kept in zip(_LOSSES, savings, strict=True):
                    kept.add(loss(before, actual), loss(forecast, actual))
            before = actual
        self._savings |= {name: savings for name, model in self._models.items() if model is found}

    def _choose(self) -> None:
        able = {name for name, model in self._models.items() if _has_opinion(model)}
        if self.chosen not in able or any(one.mean <= 0 for one in self._savings[self.chosen]):
            self.chosen = self._first
        sure = [
            name
            for name, savings in self._savings.items()
            if name in able and all(one.is_sure for one in savings)
        ]
        best = min(sure, key=self._loss, default=self.chosen)
        if self.chosen == self._first or self._loss(best) < _FAITH * self._loss(self.chosen):
            self.chosen = best

    def _loss(self, name: str) -> float:
        return self._savings[name][0].loss

    def skip(self, intervals: int) -> list[float]:
        """Let unknown time pass, as `Recurrence.skip`; forecasts for it are not judged."""
        self._made.clear()
        self._forecasts.clear()
        for account in self._accounts.values():
            account.forget()
        return self.recurring.skip(intervals) if self.recurring else []

    def opinions(self, steps: int = 1) -> dict[str, float]:
        """Return the forecast of every candidate that has its own, by name; all in full."""
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
        """Return what the chosen model forecasts, as far from the last value as may be lost."""
        forecast = self._forecasts.get(steps)
        return self._within(self.chosen, steps) if forecast is None else forecast
