"""Engines per role: queues in front of prefill, mixes of contexts on decode."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from select_service.planner.core.decode_sizing import NEAR, size_decode
from select_service.planner.core.demand import Forecast
from select_service.planner.core.lengths import Lengths, from_buckets
from select_service.planner.core.prefill_sizing import PrefillQueue, size_prefill
from select_service.planner.core.sizing import Goals, Need
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.profile_files import read_profile
from tests.select_service.planner.golden import PROFILE

SURFACE = surface_of(read_profile(PROFILE))
MIXED = Lengths(((500.0, 0.6), (3000.0, 0.3), (9000.0, 0.1)))


def waits(queue: PrefillQueue, rate: float, engines: int, seed: int) -> list[float]:
    """First tokens of a simulated pool that gives work to whoever is free first."""
    rng = random.Random(seed)
    free = [0.0] * engines
    now, ttfts_s = 0.0, []
    shares = [share for _, share in queue._times]
    for _ in range(40_000):
        now += rng.expovariate(rate)
        (service,) = rng.choices([seconds for seconds, _ in queue._times], shares)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + service)
        ttfts_s.append(start + service - now)
    return ttfts_s


@pytest.mark.parametrize("attainment", [None, 0.99])
@pytest.mark.parametrize("rate", [3.0, 30.0, 150.0])
def test_pooled_engines_are_enough_and_one_fewer_is_not(
    rate: float, attainment: float | None
) -> None:
    """The formulas against a simulated queue; what the formula promises is kept there."""
    queue = PrefillQueue(SURFACE.prefill, MIXED)
    target_s = 0.6
    need = queue.need(rate, target_s, attainment, pooled=True)
    engines = int(need.engines)
    assert engines <= math.ceil(queue.need(rate, target_s, attainment, pooled=False).engines)

    def kept(count: int) -> float:
        ttfts_s = waits(queue, rate, count, seed=4)
        if attainment is None:
            return target_s - sum(ttfts_s) / len(ttfts_s)
        return sum(one <= target_s for one in ttfts_s) / len(ttfts_s) - attainment

    assert kept(engines) >= -0.002
    if engines > 1 and attainment is not None:
        assert kept(engines - 1) < 0.0


def test_what_is_cached_is_not_computed() -> None:
    goals = Goals(ttft_ms=500.0, itl_ms=20.0)
    whole = Forecast(30.0, Lengths.single(3000), 300.0, 1.0)
    half = whole._replace(computed=0.5)
    assert (
        size_prefill(SURFACE, half, goals, 1.0).engines
        < size_prefill(SURFACE, whole, goals, 1.0).engines
    )
    # cached tokens take room in decode engines all the same
    assert size_decode(SURFACE, half, goals, 1.0, gpus=1) == size_decode(
        SURFACE, whole, goals, 1.0, gpus=1
    )


def test_targets_nobody_can_meet_are_reported_and_the_pool_keeps_up() -> None:
    """Fault 12: 59 engines for an ITL of 1 ms, in silence."""
    forecast = Forecast(30.0, Lengths.single(3000), 300.0, 1.0)
    itl = size_decode(SURFACE, forecast, Goals(itl_ms=1.0), 1.0, gpus=1)
    assert itl.infeasible == (
        "the ITL target is 1.0 ms, and a single request of 3150 tokens takes 6.5 ms on an engine "
        "of its own: raise the target (--itl) to 7.5 ms, or use faster engines; until then there "
        "are as many as keep up with what comes"
    )
    twice = size_decode(SURFACE, forecast, Goals(itl_ms=10.0), 2.0, gpus=1)
    assert "target is 10.0 ms, and a single request of 3150 tokens takes 13.0" in twice.infeasible
    assert itl.engines < 7
    ttft = size_prefill(SURFACE, forecast, Goals(ttft_ms=50.0), 1.0)
    assert ttft.infeasible == (
        "the TTFT target is 50 ms, and one prompt alone takes 92 ms on an idle engine: raise the "
        "target (--ttft) beyond that, or use faster engines; until then there are as many as keep "
        "up with what comes"
    )
    assert ttft.engines == pytest.approx(30 * 0.0923 / 0.85, rel=0.01)
    long = Forecast(5.0, Lengths(((500.0, 0.9), (16_000.0, 0.1))), 300.0, 1.0)
    some = size_prefill(SURFACE, long, Goals(ttft_ms=500.0, attainment=0.99), 1.0)
    assert "10.0 % of prompts take longer" in some.infeasible
    assert some.engines < 5


@pytest.mark.parametrize("isl", [3_000.0, 20_000.0, 60_000.0, 10e6])
@pytest.mark.parametrize("itl_ms", [6.4, 6.6, 7.0, 8.0, 10.0, 20.0])
def test_an_itl_that_a_single_request_does_not_keep_is_reported(isl: float, itl_ms: float) -> None:
    """914 engines for 59 requests at a time, since a thirtieth of one would have been in time."""
    forecast = Forecast(30.0, Lengths.single(isl), 300.0, 1.0)
    need = size_decode(SURFACE, forecast, Goals(itl_ms=itl_ms), 1.0, gpus=1)
    kept_up = size_decode(SURFACE, forecast, Goals(itl_ms=1.0), 1.0, gpus=1)
    alone = SURFACE.decode.itl_ms(1.0, isl + 150.0)
    assert bool(need.infeasible) or alone <= itl_ms
    if need.infeasible:
        assert itl_ms < NEAR * alone
        assert need.engines == kept_up.engines
    assert need.engines <= max(need.terms["concurrency"], kept_up.engines)


def test_a_few_requests_that_no_engine_is_fast_enough_for_change_nothing_for_the_others() -> None:
    """One long prompt in a hundred, and nobody's target was planned for any more."""
    some = Lengths(((3_000.0, 0.995), (60_000.0, 0.005)))
    goals = Goals(itl_ms=10.0, attainment=0.99)

    def need(lengths: Lengths, rate: float) -> Need:
        return size_decode(SURFACE, Forecast(rate, lengths, 300.0, 1.0), goals, 1.0, gpus=1)

    all_short = need(Lengths.single(3_000.0), 0.995 * 30.0)
    assert not need(some, 30.0).infeasible
    assert all_short.engines < need(some, 30.0).engines < 1.1 * all_short.engines
    many = need(Lengths(((3_000.0, 0.9), (60_000.0, 0.1))), 30.0)
    reason = "a single request of 60150 tokens, as long as 10.0 % are, takes 12.8 ms"
    assert reason in many.infeasible
    assert many.engines > 0.9 * all_short.engines


def test_decode_is_sized_by_the_mix_of_contexts() -> None:
    def engines(lengths: Lengths, attainment: float | None = None) -> float:
        goals = Goals(itl_ms=20.0, attainment=attainment)
        return size_decode(SURFACE, Forecast(30.0, lengths, 300.0, 1.0), goals, 1.0, gpus=1).engines

    by_parts = sum(share * engines(Lengths.single(tokens)) for tokens, share in MIXED.points)
    assert engines(MIXED) == pytest.approx(by_parts)
    assert engines(MIXED, attainment=0.99) > engines(MIXED)


def test_more_decode_engines_for_what_comes_together() -> None:
    alone = Forecast(30.0, Lengths.single(3000), 300.0, 1.0)
    goals = Goals(itl_ms=20.0, attainment=0.99)
    one, more = (
        size_decode(SURFACE, forecast, goals, 1.0, gpus=1).engines
        for forecast in (alone, alone._replace(lumps_s=1.0))
    )
    assert one < more < 1.15 * one


def test_engines_of_several_gpus_are_fewer() -> None:
    """Fault 11: GPUs per engine count everywhere, in what is safe, too."""
    forecast = Forecast(30.0, Lengths.single(3000), 300.0, 1.0)
    goals = Goals(itl_ms=20.0)
    one, four = (size_decode(SURFACE, forecast, goals, 1.0, gpus=gpus) for gpus in (1, 4))
    assert one.engines == pytest.approx(4 * four.engines)


def test_buckets_become_lengths() -> None:
    points = from_buckets([(100.0, 10.0), (1000.0, 30.0), (math.inf, 40.0)])
    assert [count for _, count in points] == [10.0, 20.0, 10.0]
    assert points[0][0] < 100 < points[1][0] < 1000 < points[2][0]
    lengths = Lengths.of(points, mean=600.0)
    assert lengths is not None
    assert lengths.mean == pytest.approx(600.0)
    assert Lengths.of(()) is None
    assert Lengths.of(from_buckets([(math.inf, 40.0)]), mean=600.0) is None, "all in one bucket"
