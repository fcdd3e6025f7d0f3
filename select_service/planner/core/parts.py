"""The distribution of requests within an interval: where in it a burst began and ended.

The slow loop counts whole intervals, the fast one every few seconds; its counts show how an
interval's requests are spread over equal parts. Recurring traffic is then forecast part by part, so
that engines for a burst are ordered when due and not an interval earlier. Parts that differ only by
chance are merged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    Parts: TypeAlias = tuple[float, ...]
    """Requests of each equal part of an interval; empty: not counted that often."""

PARTS: Final = 6
"""Of one interval."""
COVERED_MIN: Final = 0.5
"""The share of an interval the fast loop must have counted for its parts to be known."""
NEIGHBOURS: Final = 2
"""Intervals on each side that one is averaged with."""
_DEVIATIONS: Final = 3.0  # in a chi-square test, and between neighbouring counts
_SAME_S: Final = 1e-6  # rounding error of times


class TrafficStretch(NamedTuple):
    """A stretch of time with constant traffic."""

    begin: float  # in parts, from now
    end: float
    share: float  # requests per part


class Looks:
    """The fast loop's counts since the slow one last ran."""

    def __init__(self) -> None:
        self._counts: list[tuple[float, float, float]] = []  # (begin, end, requests), in order

    def count(self, requests: float, seconds: float, end: float) -> None:
        """Add the requests of the seconds until `end`, monotonic."""
        begin = max(end - seconds, self._counts[-1][1]) if self._counts else end - seconds
        if end > begin:
            self._counts.append((begin, end, requests))

    def end(self, requests: float, seconds: float, now: float) -> Parts:
        """Return the parts of the interval that ends now, which sum to `requests`.

        Uncounted requests came in the time not counted, evenly: after the last look, usually. A
        look across two parts is split between them, and one across the begin of the interval
        counts in part. Empty if too little was counted.
        """
        counts, self._counts = self._counts, []
        if not requests or seconds <= 0:
            return ()
        start, part_s = now - seconds, seconds / PARTS
        found, covered = [0.0] * PARTS, [0.0] * PARTS
        for begin, end, count in counts:
            for part in range(PARTS):
                inside = min(end, start + (part + 1) * part_s) - max(begin, start + part * part_s)
                if inside > 0:
                    found[part] += count * inside / (end - begin)
                    covered[part] += inside
        covered = [min(one, part_s) for one in covered]  # rounding may add up to more
        counted_s = sum(covered)
        if counted_s < COVERED_MIN * seconds:
            return ()
        rest = max(0.0, requests - sum(found))
        if counted_s < seconds - _SAME_S:
            uncounted_s = seconds - counted_s
            for part, known_s in enumerate(covered):
                found[part] += rest * (part_s - known_s) / uncounted_s
        total = sum(found)
        return tuple(requests * one / total for one in found) if total else ()


def runs(
    intervals: Sequence[tuple[float, Parts]], before: Sequence[float] = ()
) -> list[TrafficStretch]:
    """Return the course of the requests in upcoming intervals.

    Args:
        intervals: for each its requests, and the parts of a similar one.
        before: requests of the intervals that have just passed.

    Neighbours that differ only by chance are taken as equal.

    A part in which a rise begins counts as full as the next one, a part in which it ends as the one
    before: somewhere in it the traffic is that high.
    """
    parts: list[float] = []
    settled = _settled([*before, *[requests for requests, _ in intervals]])[len(before) :]
    for requests, (_, shape) in zip(settled, intervals, strict=True):
        parts += _level(requests, shape)
    found: list[TrafficStretch] = []
    for index, share in enumerate(_sharpened(parts)):
        if found and math.isclose(found[-1].share, share, rel_tol=1e-9):
            found[-1] = found[-1]._replace(end=index + 1.0)
        else:
            found.append(TrafficStretch(float(index), index + 1.0, share))
    return found


def _settled(counts: Sequence[float]) -> list[float]:
    """Return each count averaged with neighbours that differ from it only by chance."""
    found = []
    for index, count in enumerate(counts):
        first = last = index
        while first > max(0, index - NEIGHBOURS) and _alike(counts[first - 1], count):
            first -= 1
        while last < min(len(counts) - 1, index + NEIGHBOURS) and _alike(counts[last + 1], count):
            last += 1
        found.append(sum(counts[first : last + 1]) / (last + 1 - first))
    return found


def _alike(one: float, other: float) -> bool:
    low, high = min(one, other), max(one, other)
    return not _apart(low, high)


def _level(requests: float, shape: Parts) -> list[float]:
    total = sum(shape)
    mean = total / PARTS
    freedom = PARTS - 1
    chance = freedom + _DEVIATIONS * math.sqrt(2 * freedom)
    if len(shape) != PARTS or not total or sum((one - mean) ** 2 for one in shape) <= chance * mean:
        return [requests / PARTS] * PARTS
    return [requests * one / total for one in shape]


def _sharpened(parts: Sequence[float]) -> list[float]:
    found = list(parts)
    for index in range(1, len(parts) - 1):
        before, here, after = parts[index - 1 : index + 2]
        low, high = min(before, after), max(before, after)
        if _apart(low, here) and here < high:
            found[index] = high
    return found


def _apart(low: float, high: float) -> bool:
    return high - low > _DEVIATIONS * math.sqrt(max(low, 1.0))
