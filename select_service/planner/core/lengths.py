"""Prompt lengths as weighted points, from a histogram or a mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Lengths(NamedTuple):
    """(tokens, share) with shares that add up to 1; never empty."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def single(cls, tokens: float) -> Lengths:
        """Take every prompt to have the mean length."""
        return cls(((tokens, 1.0),))

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]], mean: float | None = None) -> Lengths | None:
        """Normalise points; scale them to a mean, if known better than from buckets.

        None: there are none, or nothing is known of their lengths.
        """
        kept = [(tokens, share) for tokens, share in points if tokens > 0 and share > 0]
        total = sum(share for _, share in kept)
        if not total:
            return None
        bucket_mean = sum(tokens * share for tokens, share in kept) / total
        factor = mean / bucket_mean if mean and bucket_mean else 1.0
        return cls(tuple((tokens * factor, share / total) for tokens, share in kept))

    @property
    def mean(self) -> float:
        """Expected length."""
        return sum(tokens * share for tokens, share in self.points)

    def scaled(self, factor: float) -> Lengths:
        """Return all lengths multiplied by the factor."""
        return Lengths(tuple((tokens * factor, share) for tokens, share in self.points))


def from_values(values: Iterable[float]) -> tuple[tuple[float, float], ...]:
    """Turn single lengths into at most a few dozen points: four per doubling, each at its mean."""
    bins: dict[int, list[float]] = {}
    for value in values:
        if value > 0:
            bins.setdefault(round(4 * math.log2(value)), []).append(value)
    return tuple((sum(one) / len(one), float(len(one))) for _, one in sorted(bins.items()))


def from_buckets(buckets: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Turn (upper bound, cumulated count) into (middle, count); the open bucket is 1.5 x the last.

    The middle of a bucket is geometric above 1.
    """
    points: list[tuple[float, float]] = []
    lower = before = 0.0
    for upper, cumulated in buckets:
        is_open = upper == float("inf")
        middle = 1.5 * lower if is_open else (max(lower, upper / 2) * upper) ** 0.5
        if cumulated > before:
            points.append((float(middle), float(cumulated - before)))
        before = max(before, cumulated)
        lower = lower if is_open else upper
    return tuple(points)
