"""One model's traffic: turns the windows of its past into forecasts.

An idle interval has a rate of 0, but its lengths are unknown, not zero: the last ones are held. A
missing interval carries no information and is not shown to any predictor. `model.py` uses the
forecasts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from select_service.planner.core.catch_up import PARTS_BEFORE, caught
from select_service.planner.core.forecast_errors import EXACT, ForecastErrors
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.lumps import Lumps
from select_service.planner.core.parts import NEIGHBOURS, PARTS, Looks, runs
from select_service.planner.core.recurrence import RECURRING, WINDOW
from select_service.planner.core.warm_up import whole_bins
from select_service.planner.types import Idle, Missing, Value, number_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.parts import Parts
    from select_service.planner.core.prediction import Predictor
    from select_service.planner.core.warm_up import TracedRequest
    from select_service.planner.types import Window

HISTORY_MAX: Final = WINDOW
"""Intervals that survive a restart: as many as periods are searched in, three days of three-minute
ones. With fewer, a day was forgotten at each restart."""
CACHED_MOST: Final = 0.95
"""The largest share of prompts assumed to be cached."""
_USUAL: Final = 60  # intervals: an hour of one-minute ones
_WEIGHT: Final = 0.3  # weight of a new interval, in the cached share and in the mix of lengths
_SAME: Final = 1e-6  # rounding error tolerated at 0 and at 1
_SHARE_LEAST: Final = 1e-4  # shares of a length below this are forgotten


class Interval(NamedTuple):
    """One interval as the predictors saw it; a length of None was unknown."""

    requests: float
    isl: float | None
    osl: float | None
    parts: tuple[float, ...] = ()
    """Requests of each equal part, if counted that often."""


@dataclass(frozen=True, slots=True)
class Predictors:
    """One predictor per series."""

    requests: Predictor
    isl: Predictor
    osl: Predictor


class Forecast(NamedTuple):
    """The forecast of one interval."""

    rate: float  # requests per second
    lengths: Lengths
    osl: float
    computed: float  # share of prompt tokens not cached on any worker
    spread: Spread = EXACT  # what may come instead of the rate
    lumps_s: float = 0.0  # of how many seconds requests come at once; 0: they come one by one


class Stretch(NamedTuple):
    """A forecast, and the time it covers."""

    begin_s: float  # from now
    end_s: float
    forecast: Forecast


def intervals_of(requests: Iterable[TracedRequest], interval_s: float) -> list[Interval]:
    """Turn a trace into a past of at most HISTORY_MAX intervals."""
    requests = list(requests)
    part_s = interval_s / PARTS
    parts = Counter(math.floor(one.at_s / part_s) for one in requests)
    return [
        Interval(
            float(one.requests),
            one.isl,
            one.osl,
            tuple(float(parts[round(one.start_s / part_s) + index]) for index in range(PARTS)),
        )
        if one.requests
        else Interval(0.0, None, None)
        for one in whole_bins(requests, interval_s, HISTORY_MAX)
    ]


def resampled(history: Sequence[Interval], had_s: float, interval_s: float) -> list[Interval]:
    """Return the same past, with the same end, in at most HISTORY_MAX intervals of another length.

    Traffic within an interval without parts is taken as even. Parts are dropped: those of another
    length do not show when in an interval requests come.

    Args:
        history: oldest first.
        had_s: length of its intervals.
        interval_s: length of the new ones.
    """
    if had_s == interval_s or not history:
        return list(history)
    ends, counted = [0.0], [(0.0, 0.0, 0.0, 0.0, 0.0)]
    for one in history:
        for requests in one.parts or (one.requests,):
            ends.append(ends[-1] + had_s / max(1, len(one.parts)))
            isl = (requests, requests * one.isl) if one.isl is not None else (0.0, 0.0)
            osl = (requests, requests * one.osl) if one.osl is not None else (0.0, 0.0)
            counted.append((requests, *isl, *osl))
    count = math.floor(min(len(history) * had_s / interval_s + _SAME, HISTORY_MAX))
    cuts = [ends[-1] - index * interval_s for index in range(count, -1, -1)]
    totals = np.cumsum(np.array(counted), axis=0)
    rows = np.array([np.interp(cuts, ends, column) for column in totals.T])
    return [
        Interval(
            float(requests),
            float(isl / isl_known) if isl_known > _SAME else None,
            float(osl / osl_known) if osl_known > _SAME else None,
        )
        for requests, isl_known, isl, osl_known, osl in np.diff(rows, axis=1).T
    ]


class Demand:
    """The traffic of one model."""

    def __init__(self, predictors: Predictors) -> None:
        self._predictors = predictors
        self._mix: dict[float, float] = {}  # share of prompts by length, smoothed
        self._looks = Looks()
        # of the intervals shown to the predictor
        self._parts: deque[Parts] = deque(maxlen=HISTORY_MAX)
        self.history: list[Interval] = []
        self.computed = 1.0
        self.lumps = Lumps()
        self.is_watched = True
        """Whether a fast loop counts arrivals, and orders engines for unforeseen ones."""
        self.missed = 0
        """Unknown intervals in a row."""
        self._forecast_errors: dict[
            str, ForecastErrors
        ] = {}  # by model, as each has its own errors
        self._ahead = 1  # intervals ahead at which forecasts are judged
        # of the fast loop, and the length of a part, in seconds
        self._lead: tuple[float, float] | None = None
        self._before: deque[float] = deque(maxlen=PARTS_BEFORE)  # requests per part, oldest first
        self._learnt = 0  # number of intervals
        self._period = 0  # after which the traffic recurs
        self._expected: dict[int, dict[str, float]] = {}  # interval → model → forecast of requests

    def warm_up(self, intervals: Iterable[Interval]) -> None:
        """Learn a trace, without taking zeros before the first live traffic as values."""
        self.recall(intervals)
        for predictor in self._all:
            predictor.begin_live()

    def recall(self, intervals: Iterable[Interval]) -> None:
        """Learn the past from before a restart, and continue from it: zeros are zeros."""
        for one in intervals:
            self._learn(one)

    def skip(self, intervals: int) -> None:
        """Let unknown intervals pass: time advances, and nothing is learnt."""
        if intervals <= 0:
            return
        self._learnt += intervals
        self._expected = {
            at: forecasts for at, forecasts in self._expected.items() if at > self._learnt
        }
        self._before.clear()
        for requests in self._predictors.requests.skip(intervals):
            self._parts.append(())
            self._note(Interval(requests, None, None))
        self._predictors.isl.skip(intervals)
        self._predictors.osl.skip(intervals)

    def count(self, requests: float, seconds: float, end: float) -> None:
        """Add the arrivals of the seconds until `end`, monotonic."""
        self._looks.count(requests, seconds, end)
        self.lumps.observe(requests, seconds)

    def observe(self, window: Window, now: float, interval_s: float | None = None) -> list[str]:
        """Add one interval; returns remarks worth reporting.

        Args:
            window: the measurements; its requests are scaled to the length of an interval.
            now: its end, monotonic seconds.
            interval_s: of forecasts; None: as long as the window.
        """
        requests = window.requests
        counted = requests.value if isinstance(requests, Value) else 0.0
        parts = self._looks.end(counted, window.seconds, now)
        if isinstance(requests, Missing):
            self.missed += 1
            return [f"requests are not known: {requests.why}"]
        self.missed = 0
        if isinstance(requests, Idle) or not requests.value:
            self._learn(Interval(0.0, None, None))
            return ["idle: lengths are held"]
        isl, osl = number_of(window.isl), number_of(window.osl)
        scale = interval_s / window.seconds if interval_s and window.seconds > 0 else 1.0
        self._learn(Interval(scale * requests.value, isl, osl, parts))
        self._blend(window.isl_mix)
        effective = number_of(window.effective_isl)
        if isl and effective is not None:
            share = min(max(effective / isl, 1.0 - CACHED_MOST), 1.0)
            self.computed += _WEIGHT * (share - self.computed)
        return [
            f"{name} is not known and held: {reading.why}"
            for name, reading in (("ISL", window.isl), ("OSL", window.osl))
            if isinstance(reading, Missing)
        ]

    def _blend(self, mix: Sequence[tuple[float, float]]) -> None:
        """Smooth the mix of lengths: one interval is a sample, and its tail is half chance."""
        total = sum(share for _, share in mix)
        if not total:
            return
        weight = _WEIGHT if self._mix else 1.0
        blended = {tokens: (1 - weight) * share for tokens, share in self._mix.items()}
        for tokens, share in mix:
            blended[tokens] = blended.get(tokens, 0.0) + weight * share / total
        self._mix = {tokens: share for tokens, share in blended.items() if share > _SHARE_LEAST}

    @property
    def forecast_errors(self) -> ForecastErrors:
        """The forecast errors of the model in use."""
        return self._forecast_errors.setdefault(self._predictors.requests.speaker, ForecastErrors())

    @property
    def recurs(self) -> bool:
        """Whether the traffic recurs, and the forecast is that of the recurring model."""
        return self._predictors.requests.speaker == RECURRING

    def is_foreseen(self, late_most: float) -> bool:
        """Return whether it recurs so well that at most this share of requests is unforeseen."""
        return self.recurs and self.forecast_errors.unforeseen <= late_most

    def look_ahead(self, intervals: int, lead_s: float, interval_s: float) -> None:
        """Set how far ahead forecasts are judged: engines take that long to start.

        Args:
            intervals: from a forecast until what it orders has started, plus the next one.
            lead_s: the same for orders of the fast loop.
            interval_s: of forecasts.
        """
        self._ahead, self._lead = intervals, (lead_s, interval_s / PARTS)

    def forecast(self, interval_s: float, steps: int = 1) -> Forecast | None:
        """Return the forecast, 1: of the next interval; None before the first traffic."""
        isl, osl = self._predictors.isl.planned(steps), self._predictors.osl.planned(steps)
        if isl <= 0 or osl <= 0:
            return None
        lengths = Lengths.of(self._mix.items(), isl) or Lengths.single(isl)
        requests = max(0.0, self._predictors.requests.planned(steps))
        spread = self.forecast_errors.spread(requests)
        rate = requests / interval_s
        return Forecast(rate, lengths, osl, self.computed, spread, self.lumps.seconds)

    @property
    def usual_isl(self) -> float:
        """Mean length of recent prompts; those of a single interval are a sample."""
        known = [one for one in self.history[-_USUAL:] if one.isl is not None]
        total = sum(one.requests for one in known)
        if not total:
            return self._predictors.isl.planned()
        return sum(one.requests * one.isl for one in known if one.isl is not None) / total

    @property
    def missing_lengths(self) -> list[str]:
        """Lengths never reported although requests are expected: nothing can be sized."""
        if self._predictors.requests.predict() <= 0:
            return []
        lengths = (("ISL", self._predictors.isl), ("OSL", self._predictors.osl))
        return [name for name, predictor in lengths if predictor.predict() <= 0]

    def stretches(self, interval_s: float, intervals: int) -> list[Stretch]:
        """Return the forecasts of the coming intervals; of recurring traffic, part by part."""
        more = NEIGHBOURS if self.recurs else 0
        forecasts = [self.forecast(interval_s, step) for step in range(1, intervals + more + 1)]
        known = [one for one in forecasts if one is not None]
        if not self.recurs:
            return [
                Stretch(index * interval_s, (index + 1) * interval_s, one)
                for index, one in enumerate(known)
            ]
        part_s = interval_s / PARTS
        lie = runs(
            [
                (one.rate * interval_s, self._parts_before(step))
                for step, one in enumerate(known, start=1)
            ],
            [one.requests for one in self.history[-NEIGHBOURS:]],
        )
        return [
            Stretch(
                one.begin * part_s,
                one.end * part_s,
                known[int(one.begin / PARTS)]._replace(rate=one.share / part_s),
            )
            for one in lie
        ]

    def _parts_before(self, steps: int) -> Parts:
        """Return the parts of the past interval that a recurring forecast copies."""
        period = self._predictors.requests.period
        back = period - (steps - 1) % period if period else 0
        return self._parts[-back] if 0 < back <= len(self._parts) else ()

    @property
    def fit_failures(self) -> int:
        """The number of failed or late fits of predictors."""
        return sum(one.failed for one in self._all)

    @property
    def doubts(self) -> list[str]:
        """Reasons why forecasts may be worse than usual, as text."""
        names = ("requests", "isl", "osl")
        return [
            f"the forecast of {name} goes on without a new fit: {one.why}"
            for name, one in zip(names, self._all, strict=True)
            if one.why
        ]

    @property
    def _all(self) -> tuple[Predictor, ...]:
        return self._predictors.requests, self._predictors.isl, self._predictors.osl

    def _judge_period(self) -> None:
        """Judge a new period by the past: its errors are not those of the former period."""
        self._period = self._predictors.requests.period
        for expected in self._expected.values():
            expected.pop(RECURRING, None)
        found = self._forecast_errors[RECURRING] = ForecastErrors()
        for forecast, actual in self._predictors.requests.hindcast():
            found.add(forecast, actual)

    def _caught(self, name: str, forecast: float, one: Interval) -> float:
        """Add to a forecast of requests what the fast loop would have ordered in time."""
        if not self.is_watched or self._lead is None or not one.parts:
            return forecast
        if name == RECURRING:
            return forecast  # its parts are ordered one by one
        lead_s, part_s = self._lead
        dispersion = self.lumps.dispersion
        return caught(forecast, self._before, one.parts, lead_s, part_s, dispersion)

    def _learn(self, one: Interval) -> None:
        predictor = self._predictors.requests
        self._learnt += 1
        for name, forecast in self._expected.pop(self._learnt, {}).items():
            forecast_errors = self._forecast_errors.setdefault(name, ForecastErrors())
            forecast_errors.add(self._caught(name, forecast, one), one.requests)
        if one.parts:
            self._before.extend(one.parts)
        else:
            self._before.clear()
        known = predictor.points
        predictor.add(one.requests)
        if predictor.points > known:
            self._parts.append(one.parts)
        if predictor.period != self._period:
            self._judge_period()
        if predictor.points:
            self._expected[self._learnt + self._ahead] = predictor.opinions(self._ahead)
        if one.isl is not None:
            self._predictors.isl.add(one.isl)
        if one.osl is not None:
            self._predictors.osl.add(one.osl)
        self._note(one)

    def _note(self, one: Interval) -> None:
        self.history.append(one)
        del self.history[:-HISTORY_MAX]
