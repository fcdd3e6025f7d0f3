"""The part of a forecast's shortfall that the fast loop would have caught in time.

Engines are kept ready for unforeseen traffic only as far as they cannot be ordered once it shows: a
ten-minute rise surprises a forecast made two minutes ahead, but not a loop that counts every few
seconds and whose engines start in one. So forecasts are judged together with what the counts showed
when those engines had to be ordered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.core.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.planner.core.parts import Parts

COUNT_S: Final = 30.0
"""Arrivals are counted over this time, or less after a jump."""
COUNTED_MIN: Final = 20
"""Requests; fewer do not make a rate."""
DEVIATIONS: Final = 4.0
"""This many deviations above the expectation rule out chance in Poisson arrivals."""

PARTS_BEFORE: Final = 11 * PARTS
"""The most parts looked back at: engines are ordered at most ten intervals ahead."""


def is_surge(count: float, expected: float, dispersion: float = 1.0) -> bool:
    """Return whether a count exceeds the expectation by more than chance.

    Args:
        count: of arrivals.
        expected: of them.
        dispersion: their variance, as a multiple of that of Poisson arrivals.
    """
    limit = DEVIATIONS * math.sqrt(dispersion)
    return count >= COUNTED_MIN and deviations(count, expected) >= limit


def deviations(count: float, expected: float) -> float:
    """Return how far a count exceeds the expectation, in deviations of Poisson arrivals."""
    return (count - expected) / math.sqrt(max(expected, 1.0))


def caught(
    forecast: float,
    before: Sequence[float],
    parts: Parts,
    lead_s: float,
    part_s: float,
    dispersion: float = 1.0,
) -> float:
    """Return the requests of an interval for which both loops together would have engines.

    Args:
        forecast: of the interval's requests, by the slow loop.
        before: requests of the parts right before it, oldest first.
        parts: of the interval itself.
        lead_s: from a look until engines it orders have started, plus the next look.
        part_s: length of a part.
        dispersion: of arrivals, see `is_surge`.
    """
    planned = forecast / PARTS
    counts = [*before, *parts]
    span = max(1, round(COUNT_S / part_s))
    # a part is counted when it is over; what is ordered then starts this many parts later
    lead = -int(-lead_s // part_s)
    found = 0.0
    for index in range(len(before), len(counts)):
        end = index - lead
        seen = sum(counts[end - span : end]) if end >= span else 0.0
        found += planned
        if is_surge(seen, planned * span, dispersion):
            found += max(0.0, seen / span - planned)
    return found
