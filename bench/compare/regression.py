"""Has a ratio become worse, or is it the machine's noise?

A ratio counts as worse when its median over the rounds has grown by more than two runs of the same
code could differ: three standard errors of both medians together, as their rounds' spread shows
them, and never less than `targets.NOISE`, because what all rounds of a run have in common (where
memory lies, what neighbours do) shows in no spread.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.compare.targets import NOISE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.compare.results import ResultRow

__all__ = ["Regression", "allowed_growth", "regressions"]

_ERRORS = 3.0
_MEDIAN_ERROR = 1.2533  # standard error of a median by that of a mean: the root of π / 2
_MAD_TO_SIGMA = 1.4826  # median absolute deviation → standard deviation, normal noise
_RANGE_TO_SIGMA = {2: 1.128, 3: 1.693, 4: 2.059}  # expected range of so many, in deviations
_SPREAD_UNKNOWN = 0.25  # of a single round: whatever it says, a quarter more says nothing


@dataclass(frozen=True, slots=True)
class Regression:
    """One row that has become worse."""

    row: str
    pair: str
    before: float
    now: float
    allowed: float  # growth that would have passed

    def text(self) -> str:
        """For a terminal."""
        return (
            f"{self.row}: {self.pair} was {self.before:.2f}, is {self.now:.2f}"
            f" ({self.now / self.before:.2f} times; noise is up to {self.allowed:.2f})"
        )


def allowed_growth(before: Sequence[float], now: Sequence[float]) -> float:
    """How many times larger the median of `now` may be without meaning anything.

    Both are ratios of rounds; order does not matter.
    """
    errors = math.hypot(_relative_error(before), _relative_error(now))
    return max(NOISE, 1.0 + _ERRORS * errors)


def regressions(before: Iterable[ResultRow], now: Iterable[ResultRow]) -> list[Regression]:
    """Rows of both runs, by name and pair, that have become worse; others are not looked at."""
    known = {row.row: row for row in before}
    found = []
    for row in now:
        old = known.get(row.row)
        if old is None:
            continue
        for pair, ratio in row.ratios.items():
            was = old.ratios.get(pair)
            if was is None:
                continue
            allowed = allowed_growth(was.rounds, ratio.rounds)
            if ratio.of_medians > was.of_medians * allowed:
                found.append(Regression(row.row, pair, was.of_medians, ratio.of_medians, allowed))
    return found


def _relative_error(rounds: Sequence[float]) -> float:
    """Standard error of the median of some rounds, as a share of it."""
    count = len(rounds)
    if count < 2:
        return _SPREAD_UNKNOWN / _ERRORS
    centre = statistics.median(rounds)
    if count in _RANGE_TO_SIGMA:  # deviations from the median of so few say too little
        sigma = (max(rounds) - min(rounds)) / _RANGE_TO_SIGMA[count]
    else:
        sigma = _MAD_TO_SIGMA * statistics.median(abs(one - centre) for one in rounds)
    return _MEDIAN_ERROR * sigma / math.sqrt(count) / centre
