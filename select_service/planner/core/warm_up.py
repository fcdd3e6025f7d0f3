"""Turns a trace into intervals, to warm up predictors before the first live interval.

There are two ways to read the same requests: the reference's skips empty intervals and counts the
last, partial one as whole; ours counts an empty interval as one without traffic and drops a partial
one, so that a trace's last request does not predict a load of one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class TracedRequest(NamedTuple):
    """One line of a trace."""

    at_s: float
    isl: float
    osl: float


class Bin(NamedTuple):
    """One interval; its means are NaN if it has no requests."""

    start_s: float
    requests: int
    isl: float
    osl: float


def compatible_bins(requests: Iterable[TracedRequest], interval_s: float) -> list[Bin]:
    """Return the intervals that have requests, in the order of their first request."""
    sums: dict[int, list[float]] = {}
    for one in requests:
        total = sums.setdefault(math.floor(one.at_s / interval_s), [0.0, 0.0, 0.0])
        total[0] += 1
        total[1] += one.isl
        total[2] += one.osl
    return [
        Bin(index * interval_s, int(count), isl / count, osl / count)
        for index, (count, isl, osl) in sums.items()
    ]


def whole_bins(
    requests: Iterable[TracedRequest], interval_s: float, most: int | None = None
) -> list[Bin]:
    """Return every interval from the first to the last whole one, including empty ones.

    Args:
        requests: in any order.
        interval_s: length of an interval.
        most: only the last so many; a single stray time may precede all others by ages.
    """
    known = {round(one.start_s / interval_s): one for one in compatible_bins(requests, interval_s)}
    if not known:
        return []
    first, last = min(known), max(known)
    if most is not None:
        first = max(first, last - most)
    nothing = math.nan
    return [
        known.get(index, Bin(index * interval_s, 0, nothing, nothing))
        for index in range(first, last)
    ]
