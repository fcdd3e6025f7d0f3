"""What one model's traffic has been and will be: the windows of its past, made into forecasts.

An idle interval is a rate of nothing, its lengths are not zero but unknown, and the last ones are
held. A missing interval says nothing at all and is not shown to any predictor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.lengths import Lengths
from select_service.planner.types import Idle, Missing, Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.planner.core.prediction import Predictor
    from select_service.planner.types import Reading, Window

__all__ = ["Demand", "Forecast", "Interval", "Predictors"]

HISTORY_MAX: Final = 500
"""Intervals that survive a restart: a day of three-minute ones."""
CACHED_MOST: Final = 0.95
"""Prompts are never taken to be more cached than that."""
_WEIGHT: Final = 0.3  # of a new interval, in the share that is cached


class Interval(NamedTuple):
    """One interval as the predictors saw it; a length of None was not known."""

    requests: float
    isl: float | None
    osl: float | None


@dataclass(frozen=True, slots=True)
class Predictors:
    """One per series."""

    requests: Predictor
    isl: Predictor
    osl: Predictor


class Forecast(NamedTuple):
    """The next interval."""

    rate: float  # requests per second
    lengths: Lengths
    osl: float
    computed: float  # share of prompt tokens that no worker has cached


class Demand:
    """The traffic of one model."""

    def __init__(self, predictors: Predictors) -> None:
        self._predictors = predictors
        self._mix: tuple[tuple[float, float], ...] = ()
        self.history: list[Interval] = []
        self.computed = 1.0
        self.missed = 0
        """Intervals in a row of which nothing is known."""

    def warm_up(self, intervals: Iterable[Interval]) -> None:
        """Learn a past: a trace, or what was there before a restart."""
        for one in intervals:
            self._learn(one)
        for predictor in self._all:
            predictor.begin_live()

    def observe(self, window: Window) -> list[str]:
        """Take in one interval; returns what is worth telling."""
        requests = window.requests
        if isinstance(requests, Missing):
            self.missed += 1
            return [f"requests are not known: {requests.why}"]
        self.missed = 0
        if isinstance(requests, Idle) or not requests.value:
            self._learn(Interval(0.0, None, None))
            return ["idle: lengths are held"]
        isl, osl = _number(window.isl), _number(window.osl)
        self._learn(Interval(requests.value, isl, osl))
        self._mix = window.isl_mix or self._mix
        effective = _number(window.effective_isl)
        if isl and effective is not None:
            share = min(max(effective / isl, 1.0 - CACHED_MOST), 1.0)
            self.computed += _WEIGHT * (share - self.computed)
        return [
            f"{name} is not known and held: {reading.why}"
            for name, reading in (("ISL", window.isl), ("OSL", window.osl))
            if isinstance(reading, Missing)
        ]

    def forecast(self, interval_s: float) -> Forecast | None:
        """Return what the next interval brings; None before the first traffic."""
        isl, osl = self._predictors.isl.predict(), self._predictors.osl.predict()
        if isl <= 0 or osl <= 0:
            return None
        lengths = Lengths.of(self._mix, isl) or Lengths.single(isl)
        rate = self._predictors.requests.predict() / interval_s
        return Forecast(max(0.0, rate), lengths, osl, self.computed)

    @property
    def _all(self) -> tuple[Predictor, ...]:
        return self._predictors.requests, self._predictors.isl, self._predictors.osl

    def _learn(self, one: Interval) -> None:
        self._predictors.requests.add(one.requests)
        if one.isl is not None:
            self._predictors.isl.add(one.isl)
        if one.osl is not None:
            self._predictors.osl.add(one.osl)
        self.history.append(one)
        del self.history[:-HISTORY_MAX]


def _number(reading: Reading) -> float | None:
    return reading.value if isinstance(reading, Value) else None
