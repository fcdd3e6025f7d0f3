"""Outcomes of cache-hit thresholds in one partition: `cache_hits.py` counts, the edge reads."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

RATE_BOUNDS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class HitTally:
    """Counters of thresholds in one partition."""

    def __init__(self) -> None:
        self.rejections: dict[str, int] = {}  # by source of the threshold
        self.fallbacks = 0
        self.guarded = 0  # thresholds that a loop guard set to 0
        self.rates = [0] * (len(RATE_BOUNDS) + 1)  # best hit rates, by bucket
        self.rate_sum = 0.0

    def measure(self, rate: float) -> None:
        """Record the best hit rate of one request."""
        if rate:
            self.rates[bisect_left(RATE_BOUNDS, rate)] += 1
            self.rate_sum += rate
        else:
            self.rates[0] += 1
