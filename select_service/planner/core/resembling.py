"""Where in its past traffic is at this moment, and what came there: a begun rise told by past ones.

The past is a row of parts, each with its rate. Every look moves a belief about the place in that
row on by the time that has passed, and weighs each place by how likely what was counted is at its
rate (a Bayesian filter; a place in the past stands for all that was learnt there: how fast traffic
rose from it, how high, how long it stayed). Little of the belief begins anew anywhere, so that
traffic may leave one part of its past for another. What came within the time engines take to start
is then known of every place: the belief is a distribution of what will be needed.

How well that works is tried on the past itself: every part of it is told from all others but those
around it, which the event it belongs to has touched.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from select_service.planner.core.profile import Floats

    Truths: TypeAlias = NDArray[np.bool_]

__all__ = ["RATES", "ROUGH_MOST", "Past", "Place", "Trial", "tried"]

RATES: Final = 64
"""Rates that are told apart: nothing, and steps of as many per cent from the least to the most."""
SMOOTHED: Final = 0.6
"""Of the time an engine takes to start, the deviation of the bell a rate is the mean under."""
REACH: Final = 3.0
"""Such deviations on each side, that this mean knows."""
ANEW: Final = 0.01
"""Of the belief that begins anew at any place, per part."""
LEFT_OUT: Final = 10
"""Times an engine takes to start, on each side of a part that is told from the others."""
_ALIKE: Final = 0.05
"""Two times are never alike to better than that share: more requests are no better ruler."""
ROUGH_MOST: Final = 1.2
"""Times chance and _ALIKE, that counts of a past may vary around its course."""
_RECORD: Final = 2.0
"""Deviations of a mean, that an event has to be above all before it to be higher than any."""
_SPAN_MOST: Final = 100.0  # the highest rate over the least that are told apart


class Past:
    """Rates of equal parts of time, and the highest of each part and those that come soon after.

    Args:
        counts: requests of each part, oldest first; not a number: nobody counted.
        part_s: how long one is.
        lead_s: from a look until engines that it orders have started, and the next look.
    """

    def __init__(self, counts: Sequence[float], part_s: float, lead_s: float) -> None:
        self.part_s = part_s
        self.lead = max(1, math.ceil(lead_s / part_s - 1e-9))
        self.counts = np.asarray(counts, dtype=np.float64)
        known = np.isfinite(self.counts)
        bell = _bell(SMOOTHED * lead_s / part_s)
        self.rates = _smoothed(self.counts, known, bell) / part_s
        self.most = self.rates.copy()
        for ahead in range(1, self.lead + 1):
            np.maximum(self.most[:-ahead], self.rates[ahead:], out=self.most[:-ahead])
        self.usable = _all_known(known, self.lead)
        """Places whose rate is known, and what came after it."""
        self._ease = max(1.0, self._dispersion(known, float(bell.sum()), 0.0))
        self.is_surpassed = self._is_surpassed(known, bell)
        """It goes on as nothing before it did: what is happening now is higher than any event."""
        self.is_smooth = self._dispersion(known, float(bell.sum()), _ALIKE) <= ROUGH_MOST
        """It has a course: what jumps within the time an engine takes to start has none."""

    def __len__(self) -> int:
        return len(self.counts)

    def likelihood(self, requests: float, seconds: float) -> Floats:
        """Return of each place the logarithm of how likely a count is there; O(parts)."""
        expected = np.maximum(self.rates * seconds, 1e-3)
        told = requests * np.log(expected) - expected
        # a count is as sharp as its chance allows, what chance there was beside that, and _ALIKE
        told /= self._ease + _ALIKE**2 * requests
        return np.asarray(np.where(self.usable, told, -np.inf))

    def grid(self) -> Floats:
        """Return rates that are told apart, rising from 0 to the highest."""
        most = float(self.most.max(initial=0.0))
        positive = self.most[self.most > 0]
        if not most:
            return np.zeros(1)
        least = min(max(float(positive.min()), most / _SPAN_MOST), most / 2)
        return np.concatenate(([0.0], np.geomspace(least, most, RATES - 1)))

    def _is_surpassed(self, known: Truths, bell: Floats) -> bool:
        """Compare what the event of now has reached with everything before it.

        Places in the past are followed by nothing that was higher than the highest of them. While
        traffic rises above that, they would tell of every moment that it is the last of the rise.
        """
        now = max(0, len(self) - LEFT_OUT * self.lead)
        before, lately = (self.rates[part][known[part]] for part in (slice(now), slice(now, None)))
        if not len(before) or not len(lately):
            return True
        highest = float(before.max())
        under_s = self.part_s * float(bell.sum()) ** 2 / float((bell**2).sum())
        chance = math.sqrt(self._ease * max(highest, 1.0 / under_s) / under_s)
        return float(lately.max()) > highest + _RECORD * chance

    def _dispersion(self, known: Truths, weight: float, blur: float) -> float:
        """Return the variance of counts around their rates, 1: chance of Poisson arrivals.

        Args:
            known: parts that were counted.
            weight: of all under the bell; the middle one has 1.
            blur: share of a rate, that counts may differ by besides.
        """
        expected = np.maximum(self.rates * self.part_s, 1e-3)
        squares = ((self.counts - expected) ** 2 / (expected + (blur * expected) ** 2))[known]
        own = 1.0 / weight  # of a rate that is its own count
        return float(squares.mean()) / (1.0 - own) if len(squares) and own < 1.0 else 1.0


class Place:
    """A belief about where in a past traffic is; begins as nothing but ignorance."""

    def __init__(self, past: Past) -> None:
        self.past = past
        self.belief = _even(past.usable)
        self._gone = 0.0  # of a part, since it moved on last

    def move_to(self, past: Past, first: int) -> None:
        """Go on in a past that has grown; its place 0 was `first` in the one before."""
        belief = self.belief[first:]
        belief = np.concatenate((belief, np.zeros(max(0, len(past) - len(belief)))))
        self.past = past
        self.belief = _one(np.where(past.usable, belief, 0.0), past.usable)

    def hear(
        self,
        requests: float,
        seconds: float,
        passed_s: float,
        left_out: tuple[int, int] | None = None,
    ) -> None:
        """Take in what was counted in the last seconds. O(parts).

        Args:
            requests: that came.
            seconds: in which they did.
            passed_s: since this was told last.
            left_out: from and to: places it cannot be at.
        """
        past = self.past
        passed = passed_s / past.part_s
        self._gone += passed
        steps = min(int(self._gone + 1e-9), len(past))
        self._gone = max(0.0, self._gone - int(self._gone + 1e-9))
        moved = self.belief
        if steps:
            moved = np.concatenate((np.zeros(steps), moved[:-steps]))
        moved = _one(np.where(past.usable, moved, 0.0), past.usable)
        anew = 1.0 - (1.0 - ANEW) ** passed
        mixed = (1.0 - anew) * moved + anew * _even(past.usable)
        told = past.likelihood(requests, seconds)
        if left_out is not None:
            told[slice(*left_out)] = -np.inf
        best = float(told.max(initial=-math.inf))
        if not math.isfinite(best):
            self.belief = mixed  # nothing may be compared
            return
        self.belief = _one(mixed * np.exp(told - best), past.usable)

    @property
    def rate(self) -> float:
        """Requests a second that come now, by this belief."""
        return float(self.belief @ np.where(self.past.usable, self.past.rates, 0.0))

    def most(self, grid: Floats) -> Floats:
        """Return how likely each rate of a grid is the highest until engines have started."""
        where = np.minimum(np.searchsorted(grid, self.past.most), len(grid) - 1)
        return np.asarray(np.bincount(where, self.belief, len(grid)), dtype=np.float64)


class Trial(NamedTuple):
    """What would have been told of the past, part by part, and what came."""

    grid: Floats
    told: Floats
    """Of each part (rows) how likely each rate of the grid is the highest until engines start."""
    came: Floats
    """The rate when engines that were ordered in the part would have started."""


def tried(past: Past) -> Trial:
    """Tell every part of a past from those far from it. O(parts²)."""
    grid, place = past.grid(), Place(past)
    around = LEFT_OUT * past.lead
    told = np.zeros((len(past), len(grid)))
    for index, count in enumerate(past.counts):
        if not math.isfinite(count):
            place = Place(past)
            continue
        left_out = max(0, index - around), index + around
        place.hear(float(count), past.part_s, past.part_s, left_out)
        told[index] = place.most(grid)
    judged = past.usable & (told.sum(axis=1) > 0)
    came = np.append(past.rates[past.lead :], np.zeros(min(past.lead, len(past))))
    return Trial(grid, told[judged], came[judged])


def _bell(deviation: float) -> Floats:
    """Return weights of parts around one, its own is 1."""
    reach = math.ceil(REACH * deviation)
    if not reach:
        return np.ones(1)
    return np.asarray(np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2))


def _smoothed(counts: Floats, known: Truths, bell: Floats) -> Floats:
    """Return the mean around each, of those that are known."""
    reach, width = len(bell) // 2, len(counts)

    def around(values: Floats) -> Floats:
        return np.asarray(np.convolve(values, bell)[reach : reach + width])

    weights = around(known.astype(np.float64))
    sums = around(np.where(known, counts, 0.0))
    return np.asarray(np.divide(sums, weights, out=np.zeros(width), where=weights > 0))


def _all_known(known: Truths, lead: int) -> Truths:
    """Return where a part is known, and the `lead` after it."""
    total = np.concatenate(([0], np.cumsum(known)))
    found = np.zeros(len(known), dtype=bool)
    if len(known) > lead:
        found[: len(known) - lead] = total[lead + 1 :] - total[: -lead - 1] == lead + 1
    return found


def _even(usable: Truths) -> Floats:
    return np.asarray(usable / max(1, int(usable.sum())), dtype=np.float64)


def _one(belief: Floats, usable: Truths) -> Floats:
    """Return a belief that adds up to 1; where nothing is left of it, ignorance."""
    total = float(belief.sum())
    return belief / total if total > 0 else _even(usable)
