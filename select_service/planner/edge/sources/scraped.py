"""Arrivals from counters that are scraped now and then, each target at its own time.

Between two scrapes a counter stands still, and then it jumps: the difference of two looks is
nothing, nothing, and a lump. So arrivals are counted in the time of the samples: up to the moment
to which every target has been scraped, and of a target that was scraped later too, the part that
came before, as if they had come evenly. A target that stays away for longer than its scrapes are
apart usually is not waited for: it is gone, or does not answer. Several servers may report the
same target in turns, each with its own samples.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from select_service.planner.types import IDLE, Missing, Value

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from select_service.planner.types import Reading

AWAITED: Final = 2.0
"""How many usual distances of its scrapes a target may be late before others go on without it."""
_SPACING_S: Final = 60.0  # assumed until it is known: Prometheus' default
_DISTANCES: Final = 4  # of scrapes, by which it is known
_KNOWN_S: Final = 300.0  # Prometheus returns no older samples; beyond them counts begin anew
_SKEW_S: Final = 60.0  # clocks of two that scrape the same may differ by this much


class ScrapedSample(NamedTuple):
    """One counter of one target."""

    target: Hashable
    series: Hashable
    at: float  # seconds, by the clock of the scraper
    value: float


class Arrived(NamedTuple):
    """Requests of a span of time that follows on the one before."""

    requests: Reading
    seconds: float = 0.0
    ago_s: float = 0.0  # since the end of the span


class ScrapedArrivals:
    """Counts the arrivals of one model over all targets."""

    def __init__(self) -> None:
        self._targets: dict[Hashable, _Target] = {}
        self._latest: set[Hashable] = set()  # targets of the latest samples, however old those are
        self._until: float | None = None  # everything up to then has been returned

    def take(self, samples: Iterable[ScrapedSample]) -> None:
        """Add the latest sample of each counter; those that were seen before change nothing."""
        seen: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
        times: dict[Hashable, float] = defaultdict(lambda: -math.inf)
        for one in samples:
            seen[one.target][one.series] = one.value
            times[one.target] = max(times[one.target], one.at)
        self._latest = set(seen)
        for name, counts in seen.items():
            if name in self._targets:
                self._targets[name].take(times[name], counts)
            else:
                self._targets[name] = _Target(times[name], counts)

    def next(self, now: float) -> Arrived:
        """Return the arrivals that have become known since the last call.

        Args:
            now: by the clock of the samples.
        """
        age_s = 0.0 if self._until is None else now - self._until
        if not -_SKEW_S <= age_s <= _KNOWN_S:
            self._targets.clear()
            self._until = None
            why = "the clock went back" if age_s < 0 else f"nothing is known of {age_s:.0f} s"
            return Arrived(Missing(why))
        awaited = [one.last_at for one in self._targets.values() if one.due_at >= now]
        if not awaited:
            last = max((one.last_at for one in self._targets.values()), default=None)
            self._forget(now, math.inf)
            self._until = None
            if last is None:
                return Arrived(Missing("no series"))
            return Arrived(Missing(f"nothing has been scraped for {now - last:.0f} s"))
        if self._until is None:
            self._until = max(awaited)
            return Arrived(Missing("counting begins"))
        begin, end = self._until, min(awaited)
        if end <= begin:
            return Arrived(IDLE, 0.0, max(0.0, now - begin))
        requests = sum(one.between(begin, end) for one in self._targets.values())
        self._until = end
        self._forget(now, end)
        reading = Value(requests) if requests > 0 else IDLE
        return Arrived(reading, end - begin, max(0.0, now - end))

    def _forget(self, now: float, returned: float) -> None:
        """Drop targets that are gone, of which everything has been returned.

        One whose last sample is still reported would look like a new one, to be waited for.
        """
        self._targets = {
            name: one
            for name, one in self._targets.items()
            if name in self._latest or one.due_at >= now or one.last_at > returned
        }


class _Target:
    """One target's counters as one course of arrivals, which begins when it is first seen."""

    def __init__(self, at: float, counts: dict[Hashable, float]) -> None:
        self._counts = counts
        self._at = [at]
        self._arrived = [0.0]
        self._distances = deque([_SPACING_S] * _DISTANCES, maxlen=_DISTANCES)

    @property
    def last_at(self) -> float:
        return self._at[-1]

    @property
    def due_at(self) -> float:
        """Until when its next sample is waited for.

        Of two that scrape it every second distance is short, and a single long one was not usual: a
        scrape failed, or none could be asked.
        """
        return self.last_at + AWAITED * sorted(self._distances)[-2]

    def take(self, at: float, counts: dict[Hashable, float]) -> None:
        if at <= self.last_at:
            return
        arrived = 0.0
        # where none goes on, a label was added, or another process has the name
        if self._counts.keys() & counts.keys():
            # a new series beside known ones, such as that of another status, begins at zero
            arrived = sum(
                _grown(self._counts.get(one, 0.0), count) for one, count in counts.items()
            )
        self._counts |= counts
        self._distances.append(at - self.last_at)
        self._at.append(at)
        self._arrived.append(self._arrived[-1] + arrived)

    def between(self, begin: float, end: float) -> float:
        """Return the arrivals of a span; earlier ones are forgotten."""
        first, last = np.interp((begin, end), self._at, self._arrived)
        passed = int(np.searchsorted(self._at, end, side="right")) - 1
        if passed > 0:
            del self._at[:passed], self._arrived[:passed]
        return float(last - first)


def _grown(before: float, count: float) -> float:
    """Return how much a counter has grown; one that restarts loses most of what it had.

    It loses little where an earlier count is reported later, by another that scrapes it, and where
    a sum loses a part: that is no growth.
    """
    if count >= before:
        return count - before
    return count if count < before / 2 else 0.0
