"""The fixed number of engines that recent traffic would have needed, and when to keep to it.

Clumps of requests that last some seconds and come without a pattern cannot be followed with engines
that take a minute to start: they come too late, and for a burst that is over. A fleet that does not
change serves such traffic better, and for less. So both are tried on the last hour: what following
would have had ready, and the smallest fixed number that keeps the promise. Where following breaks
it, the fixed number is kept, until following keeps it again. Before there is enough to try,
following has to wait.

One event is chance: what came within an engine's start time of the worst moment does not count.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.planner.core.profile import Floats
    from select_service.planner.types import PoolKey

REMEMBERED_S: Final = 3600.0
COUNT_S: Final = 1.0
"""Shorter counts are added up, so that an hour has a few thousand at the most."""
KNOWN_S: Final = 900.0
"""Counted time from which both are tried; before it no engine goes away where traffic clumps."""
CLUMPED: Final = 10.0
"""Variance of counts around their course, as a multiple of chance, that is called clumps."""
_BREAKS: Final = 2.0
"""Following breaks the promise with this multiple of the late share; it keeps it with 1."""
_WITHIN: Final = 1.1
"""The rate within a count, relative to its mean: clumps have clumps in them."""
_ROUGH: Final = 0.5
"""Standard deviation of such counts, relative to their course, at the least."""
_SURPASSED: Final = 1.5
"""What comes for so long as engines take to start, relative to the most before: no clump."""
_SPARED: Final = 0.5
"""Share of the late requests allowed that fewer engines may use up."""
_ENGINES_MOST: Final = 512
"""Requests late with so many are late by their lengths, and no fault of either."""
_COUNTS_MIN: Final = 12


class _Count(NamedTuple):
    """One count of arrivals."""

    end_s: float  # of all counted time
    requests: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


class _Columns(NamedTuple):
    """All counts, by column."""

    end_s: Floats
    requests: Floats
    seconds: Floats


class SteadyFleet:
    """Recent counts of one model's arrivals, with what following wanted at the time.

    Args:
        late_most: share of requests that may be late; None: nothing is promised, so follow.
    """

    def __init__(self, late_most: float | None) -> None:
        self.is_asked = True
        """Whether a fast loop counts arrivals."""
        self._late_most = late_most
        self._counts: deque[_Count] = deque()
        self._wanted: deque[dict[PoolKey, int]] = deque()  # beside `_counts`
        self._clock_s = 0.0
        self._engines: dict[PoolKey, int] = {}
        self._is_holding = False
        self._first: dict[PoolKey, int] = {}
        self._start_s = 0.0

    def observe(self, requests: float, seconds: float) -> None:
        """Add the arrivals of the last seconds."""
        if seconds <= 0:
            return
        last = self._counts[-1] if self._counts else None
        is_next = last is not None and self._clock_s - last.end_s < COUNT_S
        self._clock_s += seconds
        if last is not None and is_next and last.seconds + seconds <= COUNT_S:
            both = last.requests + requests, last.seconds + seconds
            self._counts[-1] = _Count(self._clock_s, *both)
            return
        self._counts.append(_Count(self._clock_s, requests, seconds))
        self._wanted.append({})
        self._forget()

    def skip(self, seconds: float) -> None:
        """Let time pass in which nothing was counted."""
        self._clock_s += max(0.0, seconds)
        self._forget()

    def _forget(self) -> None:
        while self._counts and self._counts[0].end_s <= self._clock_s - REMEMBERED_S:
            self._counts.popleft()
            self._wanted.popleft()
        if not self._counts:  # as at the beginning
            self._engines, self._is_holding, self._first = {}, False, {}

    def follow(self, wanted: Mapping[PoolKey, int], current: Mapping[PoolKey, int]) -> None:
        """Note what following wants now, and what there is."""
        self._first = self._first or dict(current)
        if self._wanted:
            self._wanted[-1] = dict(wanted)

    def plan(
        self,
        start_s: float,
        *,
        is_known: bool,
        late_of: Mapping[PoolKey, Callable[[float, int], float]],
    ) -> None:
        """Try both on the past.

        Args:
            start_s: how long engines take to start, plus the time until the next look.
            is_known: the course of traffic is known, so follow it.
            late_of: per pool, the share of requests late at a rate with so many engines.
        """
        self._start_s = start_s
        if (
            not self.is_asked
            or self._late_most is None
            or is_known
            or len(self._counts) < _COUNTS_MIN
            or not self.is_clumped
        ):
            self._engines, self._is_holding = {}, False
            return
        late_of = {pool: _avoidable(late) for pool, late in late_of.items()}
        counts = list(self._counts)
        followed = self._followed(counts)
        known_s = sum(one.seconds for one, had in zip(counts, followed, strict=True) if had)
        if known_s >= KNOWN_S:
            share = max(self._late(counts, followed, pool, late_of[pool]) for pool in late_of)
            self._is_holding = share > self._late_most * (1.0 if self._is_holding else _BREAKS)
        else:
            self._is_holding = True
        before = self._engines
        self._engines = {}
        for pool, late in late_of.items() if self._is_holding else ():
            fewest = self._fewest(counts, late, 1.0)
            if fewest < before.get(pool, 0):  # engines go only where clearly fewer do
                fewest = min(before[pool], self._fewest(counts, late, _SPARED))
            self._engines[pool] = fewest

    def engines(self, pool: PoolKey) -> int | None:
        """Return the engines to keep; None: follow the traffic."""
        if pool not in self._engines or self._is_surpassed:
            return None
        is_young = self._counted_s < KNOWN_S
        return max(self._engines[pool], self._first.get(pool, 0) if is_young else 0)

    @property
    def why(self) -> str:
        """The reason for keeping to a number, as text."""
        minutes = self._counted_s / 60
        return (
            f"the last {minutes:.0f} minutes came in bursts that are over before engines "
            "start, and a fleet that stays as it is serves them best"
        )

    @property
    def _counted_s(self) -> float:
        return sum(one.seconds for one in self._counts)

    @property
    def is_clumped(self) -> bool:
        """Whether counts vary far more than chance around what engines could follow."""
        columns = self._columns()
        expected = self._course(columns) * columns.seconds
        squares = float(((columns.requests - expected) ** 2).sum())
        chance = CLUMPED * float(expected.sum())
        return squares > max(chance, _ROUGH**2 * float((expected**2).sum()))

    def _columns(self) -> _Columns:
        """Return the counts: every look goes through an hour of them."""
        numbers = np.fromiter(chain.from_iterable(self._counts), np.float64)
        return _Columns(numbers[0::3], numbers[1::3], numbers[2::3])

    def _course(self, counts: _Columns) -> Floats:
        """Return the mean rate around each count, as far as an engine's start time on each side."""
        first = np.searchsorted(counts.end_s, counts.end_s - self._start_s, side="left")
        last = np.searchsorted(counts.end_s, counts.end_s + self._start_s, side="right")
        requests, seconds = (
            sums[last] - sums[first]
            for sums in (
                np.append(0.0, np.cumsum(column)) for column in (counts.requests, counts.seconds)
            )
        )
        return np.asarray(requests / seconds)

    @property
    def _is_surpassed(self) -> bool:
        """Whether more comes, for the start time of an engine, than at any time remembered."""
        counts = self._columns()
        begin_s = self._clock_s - self._start_s
        now = int(np.searchsorted(counts.end_s, begin_s, side="right"))
        now = min(now, len(counts.end_s) - 1)
        seconds = float(counts.seconds[now:].sum())
        if now <= 0 or seconds < self._start_s / 2:  # before that nothing was counted
            return False
        rate = float(counts.requests[now:].sum()) / seconds
        return rate > _SURPASSED * float(self._course(counts)[:now].max())

    def _followed(self, counts: Sequence[_Count]) -> list[dict[PoolKey, int]]:
        """Return what following had ready at each count: what it wanted a start time before."""
        wanted, found, before = list(self._wanted), [], -1
        for one in counts:
            while counts[before + 1].end_s <= one.end_s - self._start_s:
                before += 1
            found.append(wanted[before] if before >= 0 else {})
        return found

    def _late(
        self,
        counts: Sequence[_Count],
        followed: Sequence[Mapping[PoolKey, int]],
        pool: PoolKey,
        late: Callable[[float, int], float],
    ) -> float:
        """Return the share of requests late by following, without the worst event."""
        rows = [
            (one, one.requests * late(one.rate, had[pool]))
            for one, had in zip(counts, followed, strict=True)
            if pool in had
        ]
        worst = max(rows, key=lambda row: row[1])[0].end_s
        rest = [row for row in rows if abs(row[0].end_s - worst) > self._start_s]
        requests = sum(one.requests for one, _ in rest)
        return sum(count for _, count in rest) / requests if requests else 0.0

    def _fewest(
        self, counts: Sequence[_Count], late: Callable[[float, int], float], share: float
    ) -> int:
        """Return the fewest engines with which so much of what may be late would have been."""
        by_rate: dict[float, float] = {}
        for one in counts:
            rate = _WITHIN * one.rate
            by_rate[rate] = by_rate.get(rate, 0.0) + one.requests
        allowed = share * (self._late_most or 0.0) * sum(by_rate.values())

        def keeps(engines: int) -> bool:
            return sum(count * late(rate, engines) for rate, count in by_rate.items()) <= allowed

        high = 1
        while high < _ENGINES_MOST and not keeps(high):
            high *= 2
        low = high // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(middle) else (middle, high)
        return high


def _avoidable(late: Callable[[float, int], float]) -> Callable[[float, int], float]:
    """Return the share that is late for lack of engines."""
    by_length: dict[float, float] = {}

    def found(rate: float, engines: int) -> float:
        if rate not in by_length:
            by_length[rate] = late(rate, _ENGINES_MOST)
        return late(rate, engines) - by_length[rate] if rate else 0.0

    return found
