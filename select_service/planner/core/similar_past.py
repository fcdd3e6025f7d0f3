"""Locates the present in past traffic: a rise that has begun is predicted from earlier ones.

The past is a row of parts, each with its rate. Every look shifts a belief over the places in that
row by the time passed, and weighs each place by the likelihood of the latest count at its rate (a
Bayesian filter; a place represents all that followed it: how fast traffic rose, how high, how long
it stayed). A small share of the belief restarts anywhere, so that traffic may leave one part of its
past for another. For every place it is known what came within the start time of engines, so the
belief is a distribution of the coming need.

How well this works is tried on the past itself: every part is predicted from all others except
those around it, which belong to the same event. `analog_forecast.py` uses this.
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

RATES: Final = 64
"""Rates distinguished: 0, and equal ratios from the lowest to the highest."""
SMOOTHED: Final = 0.6
"""Standard deviation of the smoothing bell, as a share of an engine's start time."""
REACH: Final = 3.0
"""Standard deviations on each side that the bell covers."""
ANEW: Final = 0.01
"""Share of the belief that restarts at any place, per part."""
LEFT_OUT: Final = 10
"""Start times on each side of a part that are excluded when it is predicted."""
_ALIKE: Final = 0.05
"""Two times never match better than to this share, however many requests are compared."""
ROUGH_MOST: Final = 1.2
"""How much counts may vary around their course, as a multiple of chance and _ALIKE."""
_RECORD: Final = 2.0
"""Standard deviations of a mean by which an event must exceed all earlier ones to be a record."""
_SPAN_MOST: Final = 100.0  # ratio of the highest to the lowest rate distinguished


class Past:
    """Rates of equal parts of time, and for each part the highest rate until shortly after it.

    Args:
        counts: requests of each part, oldest first; NaN: not counted.
        part_s: length of a part.
        lead_s: from a look until engines it orders have started, plus the next look.
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
        """Places whose rate is known, and what followed."""
        self._ease = max(1.0, self._dispersion(known, float(bell.sum()), 0.0))
        self.is_surpassed = self._is_surpassed(known, bell)
        """Whether the present exceeds all earlier events: nothing in the past shows how it
        continues."""
        self.is_smooth = self._dispersion(known, float(bell.sum()), _ALIKE) <= ROUGH_MOST
        """Whether traffic has a course, rather than jumps within the start time of an engine."""

    def __len__(self) -> int:
        return len(self.counts)

    def likelihood(self, requests: float, seconds: float) -> Floats:
        """Return for each place the log likelihood of a count; O(parts)."""
        expected = np.maximum(self.rates * seconds, 1e-3)
        likelihoods = requests * np.log(expected) - expected
        # the precision of a count is limited by its chance, other chance variation, and _ALIKE
        likelihoods /= self._ease + _ALIKE**2 * requests
        return np.asarray(np.where(self.usable, likelihoods, -np.inf))

    def grid(self) -> Floats:
        """Return the distinguished rates, rising from 0 to the highest."""
        most = float(self.most.max(initial=0.0))
        positive = self.most[self.most > 0]
        if not most:
            return np.zeros(1)
        least = min(max(float(positive.min()), most / _SPAN_MOST), most / 2)
        return np.concatenate(([0.0], np.geomspace(least, most, RATES - 1)))

    def _is_surpassed(self, known: Truths, bell: Floats) -> bool:
        """Compare the present event with everything before it.

        No place in the past is followed by anything above the past's maximum. While traffic rises
        above that, they would predict the end of the rise at every moment.
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
        """Return the variance of counts around their rates; 1 is that of Poisson arrivals.

        Args:
            known: parts that were counted.
            weight: sum of the bell, whose centre is 1.
            blur: additional share of a rate by which counts may differ.
        """
        expected = np.maximum(self.rates * self.part_s, 1e-3)
        squares = ((self.counts - expected) ** 2 / (expected + (blur * expected) ** 2))[known]
        own = 1.0 / weight  # share of a rate that is its own count
        return float(squares.mean()) / (1.0 - own) if len(squares) and own < 1.0 else 1.0


class PastPosition:
    """A belief about the present's place in a past; starts out even."""

    def __init__(self, past: Past) -> None:
        self.past = past
        self.belief = _even(past.usable)
        self._gone = 0.0  # share of a part since the last shift

    def move_to(self, past: Past, first: int) -> None:
        """Continue in a past that has grown; its place 0 was `first` in the former one."""
        belief = self.belief[first:]
        belief = np.concatenate((belief, np.zeros(max(0, len(past) - len(belief)))))
        self.past = past
        self.belief = _one(np.where(past.usable, belief, 0.0), past.usable)

    def observe(
        self,
        requests: float,
        seconds: float,
        passed_s: float,
        left_out: tuple[int, int] | None = None,
    ) -> None:
        """Update the belief with the count of the last seconds. O(parts).

        Args:
            requests: counted.
            seconds: in which they came.
            passed_s: since the last call.
            left_out: excluded places: from and to.
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
        likelihoods = past.likelihood(requests, seconds)
        if left_out is not None:
            likelihoods[slice(*left_out)] = -np.inf
        best = float(likelihoods.max(initial=-math.inf))
        if not math.isfinite(best):
            self.belief = mixed  # no place can be compared
            return
        self.belief = _one(mixed * np.exp(likelihoods - best), past.usable)

    @property
    def rate(self) -> float:
        """The current requests per second, by this belief."""
        return float(self.belief @ np.where(self.past.usable, self.past.rates, 0.0))

    def most(self, grid: Floats) -> Floats:
        """Return the probability of each grid rate to be the maximum until engines have started."""
        where = np.minimum(np.searchsorted(grid, self.past.most), len(grid) - 1)
        return np.asarray(np.bincount(where, self.belief, len(grid)), dtype=np.float64)


class PastTrial(NamedTuple):
    """The predictions for the past, part by part, and what actually came."""

    grid: Floats
    predicted: Floats
    """Per part (row) the probability of each grid rate to be the maximum until engines start."""
    came: Floats
    """The rate at the time when engines ordered in the part would have started."""


def tried(past: Past) -> PastTrial:
    """Predict every part of a past from those far from it. O(parts²)."""
    grid, place = past.grid(), PastPosition(past)
    around = LEFT_OUT * past.lead
    predicted = np.zeros((len(past), len(grid)))
    for index, count in enumerate(past.counts):
        if not math.isfinite(count):
            place = PastPosition(past)
            continue
        left_out = max(0, index - around), index + around
        place.observe(float(count), past.part_s, past.part_s, left_out)
        predicted[index] = place.most(grid)
    judged = past.usable & (predicted.sum(axis=1) > 0)
    came = np.append(past.rates[past.lead :], np.zeros(min(past.lead, len(past))))
    return PastTrial(grid, predicted[judged], came[judged])


def _bell(deviation: float) -> Floats:
    """Return the weights of the parts around one, whose own weight is 1."""
    reach = math.ceil(REACH * deviation)
    if not reach:
        return np.ones(1)
    return np.asarray(np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2))


def _smoothed(counts: Floats, known: Truths, bell: Floats) -> Floats:
    """Return the weighted mean around each part, over known parts."""
    reach, width = len(bell) // 2, len(counts)

    def around(values: Floats) -> Floats:
        return np.asarray(np.convolve(values, bell)[reach : reach + width])

    weights = around(known.astype(np.float64))
    sums = around(np.where(known, counts, 0.0))
    return np.asarray(np.divide(sums, weights, out=np.zeros(width), where=weights > 0))


def _all_known(known: Truths, lead: int) -> Truths:
    """Return where a part is known, and the `lead` parts after it."""
    total = np.concatenate(([0], np.cumsum(known)))
    found = np.zeros(len(known), dtype=bool)
    if len(known) > lead:
        found[: len(known) - lead] = total[lead + 1 :] - total[: -lead - 1] == lead + 1
    return found


def _even(usable: Truths) -> Floats:
    return np.asarray(usable / max(1, int(usable.sum())), dtype=np.float64)


def _one(belief: Floats, usable: Truths) -> Floats:
    """Normalise a belief to a sum of 1; an empty one becomes even."""
    total = float(belief.sum())
    return belief / total if total > 0 else _even(usable)
