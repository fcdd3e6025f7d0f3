"""The results of a run: times, hit rate against its ceiling, spread of load, SLOs, conservation.

Everything here follows from the outcomes and is the same for the same seed; the wall time of the
run is not included.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from select_service.simulator.core.observation import coefficient_of_variation, middle_of_bin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from select_service.simulator.core.cluster import Cluster
    from select_service.simulator.core.requests import ClientRequest, RequestOutcome

_POINTS: Final = (*range(0, 100, 2), 99, 100)
_WINDOWS: Final = 40
"""Parts of a run in charts over time."""

PARTS: Final = 20
"""Of a run, for intervals where there is one run: enough for a t, long enough to hardly depend on
each other."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of one kind of time, in seconds; zeros if there is none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    curve: list[tuple[float, float]] = []  # (seconds, share not above)


class SloRow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a class answered in time; refused and lost ones were not."""

    slo_class: str
    offered: int
    met: int
    share: float
    over_time: list[tuple[float, float]]  # (end of window, share of its arrivals)


class RunPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run: means of consecutive arrivals, in seconds, zeros where none was answered."""

    ttft_mean: float
    itl_mean: float
    e2e_mean: float
    good: float


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one policy."""

    policy: str
    seed: int
    workers: int  # at the end
    requests: int
    ok: int
    ends: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    good: float  # share of requests answered in time if there are SLOs, else answered
    goodput_per_s: float  # the same, per second
    ttft_s: Distribution
    itl_s: Distribution  # per request, its mean
    gap_s: Distribution  # between any two tokens
    e2e_s: Distribution
    hit_rate: float  # share of prompt tokens found in the cache
    hit_ceiling: float  # with one infinite shared cache; of answered requests, like the rate
    load_cov: float  # CoV over workers, of requests; mean over time, weighted by requests
    load_cov_tokens: float
    busy_cov: float  # of the computing time of the workers present at the end
    busy: float  # mean share of the run they computed
    preemptions: int
    evictions: int
    retried: int
    slo: list[SloRow]
    reasons: dict[str, int]
    load_over_time: list[tuple[float, float]]
    parts: list[RunPart]  # twentieths, in order of arrival; of fewer than 20, each request

    @property
    def hit_share(self) -> float:
        """The share of the ceiling that was reached."""
        return self.hit_rate / self.hit_ceiling if self.hit_ceiling else 1.0


def ceiling_of(requests: Iterable[ClientRequest], block_size: int) -> float:
    """Return the hit rate of one infinite cache that holds each prompt as soon as it arrives."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        total += request.isl
        known = 0
        for block in request.blocks[: (request.isl - 1) // block_size]:
            if block not in seen:
                break
            known += 1
        found += known
        seen.update(request.blocks[known:])
    return found * block_size / total if total else 0.0


def measure(cluster: Cluster, policy: str, seed: int) -> Measures:
    """Measure a finished run."""
    outcomes = cluster.outcomes
    answered = [one for one in outcomes if one.is_ok]
    by_arrival = sorted(outcomes, key=lambda one: (one.request.arrival, one.request.number))
    end = max((one.finished for one in outcomes), default=0.0)
    begin = min((one.request.arrival for one in outcomes), default=0.0)
    seconds = max(end - begin, 1e-9)
    prompted = sum(one.request.isl for one in answered)
    workers = list(cluster.workers.values())
    met = sum(_is_met(one) for one in outcomes)
    return Measures(
        policy=policy,
        seed=seed,
        workers=len(workers),
        requests=len(outcomes),
        ok=len(answered),
        ends=dict(sorted(Counter(one.end for one in outcomes).items())),
        duration_s=seconds,
        requests_per_s=len(answered) / seconds,
        output_tokens_per_s=sum(one.request.osl for one in answered) / seconds,
        good=met / len(outcomes) if outcomes else 0.0,
        goodput_per_s=met / seconds,
        ttft_s=_distribution([one.ttft_s for one in answered]),
        itl_s=_distribution([one.itl_s for one in answered if one.request.osl > 1]),
        gap_s=_distribution_of_bins(cluster.gaps),
        e2e_s=_distribution([one.e2e_s for one in answered]),
        hit_rate=sum(one.cached_tokens for one in answered) / prompted if prompted else 0.0,
        hit_ceiling=ceiling_of(
            (one.request for one in by_arrival if one.is_ok), cluster.settings.block_size
        ),
        load_cov=_weighted([(jobs, n) for _, jobs, _, n in cluster.spread]),
        load_cov_tokens=_weighted([(tokens, n) for _, _, tokens, n in cluster.spread]),
        busy_cov=coefficient_of_variation([worker.busy_s for worker in workers] or [0.0]),
        busy=_mean([worker.busy_s for worker in workers]) / seconds,
        preemptions=sum(one.preemptions for one in outcomes),
        evictions=cluster.evictions,
        retried=sum(one.attempts > 1 for one in outcomes),
        slo=_slo_rows(by_arrival, begin, end),
        reasons=dict(sorted(cluster.reasons.items())),
        load_over_time=_thinned([(at, tokens) for at, _, tokens, _ in cluster.spread]),
        parts=_parts(by_arrival),
    )


def _parts(by_arrival: Sequence[RequestOutcome]) -> list[RunPart]:
    number = len(by_arrival)
    count = min(PARTS, number)  # none without a request, whose zeros would count as times
    bounds = [number * at // count for at in range(count + 1)] if count else []
    parts = []
    for begin, end in pairwise(bounds):
        some = by_arrival[begin:end]
        answered = [one for one in some if one.is_ok]
        parts.append(
            RunPart(
                ttft_mean=_mean([one.ttft_s for one in answered]),
                itl_mean=_mean([one.itl_s for one in answered if one.request.osl > 1]),
                e2e_mean=_mean([one.e2e_s for one in answered]),
                good=_mean([float(_is_met(one)) for one in some]),
            )
        )
    return parts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _weighted(samples: Sequence[tuple[float, int]]) -> float:
    """Return the mean weighted by requests: a few on an idle fleet cannot be spread evenly."""
    total = sum(weight for _, weight in samples)
    return sum(value * weight for value, weight in samples) / total if total else 0.0


def _distribution(values: Sequence[float]) -> Distribution:
    if not values:
        return Distribution()
    column = np.asarray(values)
    p50, p90, p95, p99 = np.percentile(column, (50, 90, 95, 99)).tolist()
    points = np.percentile(column, _POINTS).tolist()
    curve = [(point, share / 100) for point, share in zip(points, _POINTS, strict=True)]
    mean = float(column.mean())
    return Distribution(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, curve=curve)


def _distribution_of_bins(bins: Counter[int]) -> Distribution:
    total = sum(bins.values())
    if not total:
        return Distribution()
    numbers = sorted(bins)
    middles = [middle_of_bin(number) for number in numbers]
    up_to = np.cumsum([bins[number] for number in numbers]) / total

    def at(share: float) -> float:
        return middles[min(int(np.searchsorted(up_to, share)), len(middles) - 1)]

    mean = sum(middle * bins[n] for middle, n in zip(middles, numbers, strict=True)) / total
    curve = [(at(share / 100), share / 100) for share in _POINTS]
    return Distribution(
        mean=mean, p50=at(0.5), p90=at(0.9), p95=at(0.95), p99=at(0.99), curve=curve
    )


def _is_met(one: RequestOutcome) -> bool:
    request = one.request
    if not one.is_ok:
        return False
    in_time = request.slo_ttft_s is None or one.ttft_s <= request.slo_ttft_s
    return in_time and (request.slo_itl_s is None or one.itl_s <= request.slo_itl_s)


def _slo_rows(by_arrival: Sequence[RequestOutcome], begin: float, end: float) -> list[SloRow]:
    with_slo = [
        one
        for one in by_arrival
        if one.request.slo_ttft_s is not None or one.request.slo_itl_s is not None
    ]
    width = (end - begin) / _WINDOWS or 1.0
    rows = []
    for name in sorted({one.request.slo_class for one in with_slo}):
        of_class = [one for one in with_slo if one.request.slo_class == name]
        offered: Counter[int] = Counter()
        met: Counter[int] = Counter()
        for one in of_class:
            window = int((one.request.arrival - begin) / width)
            offered[window] += 1
            met[window] += _is_met(one)
        over_time = [
            (begin + (window + 1) * width, met[window] / number)
            for window, number in sorted(offered.items())
        ]
        total = sum(met.values())
        rows.append(
            SloRow(
                slo_class=name or "(none)",
                offered=len(of_class),
                met=total,
                share=total / len(of_class),
                over_time=over_time,
            )
        )
    return rows


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most a few hundred points, as means of neighbours."""
    each = -(-len(points) // 200) or 1
    return [
        (points[at][0], _mean([value for _, value in points[at : at + each]]))
        for at in range(0, len(points), each)
    ]
