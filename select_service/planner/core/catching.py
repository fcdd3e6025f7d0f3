"""What of a forecast that was too low the fast loop would have caught in time.

Engines are kept ready for what nobody foresees, and only as many as nobody can order when it
shows: a rise of ten minutes surprises a forecast made two minutes ahead, but not a loop that counts
every few seconds and whose engines start in one. So forecasts are judged together with what the
counts said when those engines had to be ordered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.core.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.planner.core.parts import Parts

__all__ = ["COUNT_S", "PARTS_BEFORE", "caught", "deviations", "is_surge"]

COUNT_S: Final = 30.0
"""Arrivals are counted over that time, or less after a jump."""
COUNTED_MIN: Final = 20
"""Requests; fewer have no rate."""
DEVIATIONS: Final = 4.0
"""So far above what is expected is no chance of Poisson arrivals any more."""

PARTS_BEFORE: Final = 11 * PARTS
"""Parts that are looked back at, at most: engines are ordered ten intervals ahead at the most."""


def is_surge(count: float, expected: float) -> bool:
    """Say whether so many requests are more than was expected, and not by chance."""
    return count >= COUNTED_MIN and deviations(count, expected) >= DEVIATIONS


def deviations(count: float, expected: float) -> float:
    """Return how far a count is above what was expected, in those of Poisson arrivals."""
    return (count - expected) / math.sqrt(max(expected, 1.0))


def caught(
    forecast: float, before: Sequence[float], parts: Parts, lead_s: float, part_s: float
) -> float:
    """Return the requests of an interval that both loops together would have engines for.

    Args:
        forecast: of the interval's requests, by the slow loop.
        before: requests of the parts right before it, oldest first.
        parts: of the interval itself.
        lead_s: from a look until engines that it orders have started, and the next look.
        part_s: how long a part is.
    """
    planned = forecast / PARTS
    counts = [*before, *parts]
    span = max(1, round(COUNT_S / part_s))
    # a part is counted when it is over, and what is ordered then has started so many parts later
    lead = -int(-lead_s // part_s)
    found = 0.0
    for index in range(len(before), len(counts)):
        end = index - lead
        seen = sum(counts[end - span : end]) if end >= span else 0.0
        found += max(planned, seen / span) if is_surge(seen, planned * span) else planned
    return found
