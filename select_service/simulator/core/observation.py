"""A planner's view of a simulated cluster: one interval at a time, by pool and in total.

Averages are over requests that ended (or got their first token) in the interval; `None` means there
were none, which is not 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.simulator.core.requests import RequestOutcome

ISL_EDGES: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper edges, inclusive, of the histogram of prompt lengths; longer ones have one more bin."""


class ObservedPool(msgspec.Struct, frozen=True, kw_only=True):
    """One pool at the end of an interval; `busy` and `concurrency` are means over it."""

    ready: int  # workers that may be chosen
    starting: int
    draining: int
    concurrency: float  # requests on its workers
    busy: float  # share of the workers' time spent on steps
    waiting: int  # requests waiting on its workers
    prefill_backlog_tokens: int
    kv_usage: float  # share of its workers' blocks in use
    worker_seconds: float  # to be paid: starting, ready and draining


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One interval."""

    start: float
    end: float
    num_req: int  # arrivals, including refused ones
    refused: int
    lost: int
    finished: int
    isl: float | None  # mean of arrivals
    osl: float | None  # mean of those finished
    isl_histogram: tuple[int, ...]  # arrivals by `ISL_EDGES`
    ttft_s: float | None  # of first tokens in the interval
    itl_s: float | None  # of those finished: mean over tokens
    request_duration_s: float | None  # of those finished
    prompt_tokens: int  # of first tokens in the interval
    hit_rate: float | None  # share of them found in the cache
    concurrency: float  # requests that arrived and have not ended, mean over the interval
    pools: dict[str, ObservedPool]

    @property
    def interval_s(self) -> float:
        """Its length."""
        return self.end - self.start


class Tally:
    """Sums over one interval; the cluster adds to them, and `Observation` is derived."""

    __slots__ = (
        "arrivals",
        "cached",
        "durations",
        "finished",
        "firsts",
        "gap_s",
        "gaps",
        "histogram",
        "isl",
        "lost",
        "osl",
        "prompted",
        "refused",
        "ttft",
    )

    def __init__(self) -> None:
        self.arrivals = self.refused = self.lost = self.finished = self.firsts = 0
        self.isl = self.osl = self.gaps = self.cached = self.prompted = 0
        self.ttft = self.gap_s = self.durations = 0.0
        self.histogram = [0] * (len(ISL_EDGES) + 1)

    def arrived(self, isl: int) -> None:
        """Count an arrival."""
        self.arrivals += 1
        self.isl += isl
        self.histogram[bisect_left(ISL_EDGES, isl)] += 1

    def first_token(self, ttft_s: float, isl: int, cached_tokens: int) -> None:
        """Count a first token."""
        self.firsts += 1
        self.ttft += ttft_s
        self.prompted += isl
        self.cached += cached_tokens

    def ended(self, outcome: RequestOutcome) -> None:
        """Count an end of any kind."""
        if outcome.is_ok:
            self.finished += 1
            self.osl += outcome.request.osl
            self.gaps += outcome.request.osl - 1
            self.gap_s += outcome.finished - outcome.first_token
            self.durations += outcome.e2e_s
        elif outcome.end.startswith("refused"):
            self.refused += 1
        else:
            self.lost += 1

    def observe(
        self, start: float, end: float, concurrency: float, pools: dict[str, ObservedPool]
    ) -> Observation:
        """Return the interval's observation."""
        return Observation(
            start=start,
            end=end,
            num_req=self.arrivals,
            refused=self.refused,
            lost=self.lost,
            finished=self.finished,
            isl=_mean(self.isl, self.arrivals),
            osl=_mean(self.osl, self.finished),
            isl_histogram=tuple(self.histogram),
            ttft_s=_mean(self.ttft, self.firsts),
            itl_s=_mean(self.gap_s, self.gaps),
            request_duration_s=_mean(self.durations, self.finished),
            prompt_tokens=self.prompted,
            hit_rate=_mean(self.cached, self.prompted),
            concurrency=concurrency,
            pools=pools,
        )


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return standard deviation over mean; 0 where all is 0."""
    mean = sum(values) / len(values)
    if not mean:
        return 0.0
    spread: float = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return spread / mean


_BIN: Final = 1 / math.log(1.02)


def bin_of(seconds: float) -> int:
    """Return the number of a bin 2 % wide."""
    return round(math.log(max(seconds, 1e-9)) * _BIN)


def middle_of_bin(number: int) -> float:
    """Return the seconds in the middle of a bin of `Cluster.gaps`."""
    return math.exp(number / _BIN)
