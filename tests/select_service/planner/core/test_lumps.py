"""Requests that come together: distinguished from chance and jumps, and sized by what they really
wait."""

from __future__ import annotations

import heapq
import math
import random
import statistics

import pytest

from bench.planner.shapes import SHAPES, code_completion
from select_service.planner.core.catch_up import is_surge
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.lumps import Lumps
from select_service.planner.core.prefill_sizing import PrefillQueue
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.profile_files import read_profile
from tests.select_service.planner.golden import PROFILE

CURVE = surface_of(read_profile(PROFILE)).prefill
LOOK_S, EVERY_S, RATE = 5.0, 3.0, 10 / 3
QUEUE = PrefillQueue(CURVE, Lengths.single(8_000.0))
WORK = RATE * QUEUE.mean_s
MOST_S = 5.0


def arrivals(seconds: float, seed: int = 1) -> list[float]:
    """Ten requests at once every three seconds, more or less."""
    rng = random.Random(seed)
    return [
        at * EVERY_S
        for at in range(int(seconds / EVERY_S))
        for _ in range(max(0, round(rng.gauss(RATE * EVERY_S, 4.0))))
    ]


def first_tokens_s(engines: int) -> list[float]:
    free, found = [0.0] * engines, []
    for at in arrivals(3_600.0):
        end = max(at, heapq.heappop(free)) + QUEUE.mean_s
        heapq.heappush(free, end)
        found.append(end - at)
    return found


def observed(counts: list[float]) -> Lumps:
    lumps = Lumps()
    for count in counts:
        lumps.observe(count, LOOK_S)
    lumps.judge()
    return lumps


def counted(times: list[float]) -> list[float]:
    counts = [0.0] * (1 + int(times[-1] / LOOK_S))
    for at in times:
        counts[int(at / LOOK_S)] += 1.0
    return counts


def test_lumps_are_distinguished_from_days_ramps_and_bursts() -> None:
    rng = random.Random(3)
    for shape in SHAPES.values():
        means = [LOOK_S * shape(3)(LOOK_S * look) for look in range(720)]
        lumps = observed([max(0.0, rng.gauss(one, math.sqrt(one))) for one in means])
        assert lumps.dispersion == 1.0
    clumps = counted([one.at_s for one in code_completion(2)])
    assert observed(clumps).dispersion == 1.0, "they come without a pattern, and rarely"
    assert observed([0.0] * 100).dispersion == observed([1.0, 0.0] * 100).dispersion == 1.0
    assert observed(counted(arrivals(600.0))).dispersion > 2.0


@pytest.mark.parametrize("engines", [3, 4, 5, 6])
def test_the_engines_that_lumps_need_are_the_same_from_wherever_they_are_measured(
    engines: int,
) -> None:
    """By the mean load two did, and 9 % of requests were late on Mooncake's trace."""
    target_s = 1.5
    fewest = next(
        count
        for count in range(1, 9)
        if sum(one > target_s for one in first_tokens_s(count)) <= 0.01 * len(first_tokens_s(1))
    )
    lumps = observed(counted(arrivals(600.0)))
    lumps.learn(QUEUE.lump_s(statistics.mean(first_tokens_s(engines)), WORK / engines), MOST_S)
    sized = PrefillQueue(CURVE, Lengths.single(8_000.0), lumps_s=lumps.seconds)
    assert fewest > QUEUE.need(RATE, target_s, 0.99, pooled=True).engines
    assert fewest <= sized.need(RATE, target_s, 0.99, pooled=True).engines <= fewest + 1
    on_average = sized.need(RATE, statistics.mean(first_tokens_s(3)), None, pooled=True)
    assert on_average.engines == pytest.approx(3, abs=1)
    assert sized.late_on(RATE, target_s, fewest - 1, pooled=True) > 0.01


@pytest.mark.parametrize("slowness", [1.0, 1.8])
def test_a_wait_that_more_engines_do_not_end_is_none_of_lumps(slowness: float) -> None:
    """A quarter of a second of network, or slower engines, took all engines there were."""
    lumps, target_s, engines, found = observed(counted(arrivals(600.0))), 1.5, 5.0, []
    for _ in range(60):
        ttft_ms = 1e3 * slowness * QUEUE.mean_s + 250.0
        lumps.learn(QUEUE.lump_s(ttft_ms / 1e3, WORK / engines), lumps.most_s(RATE, 1.0))
        sized = PrefillQueue(CURVE, Lengths.single(8_000.0), lumps_s=lumps.seconds)
        engines = sized.need(RATE, target_s, 0.99, pooled=True).engines
        found.append(engines)
    assert max(found) <= 12.0
    assert lumps.seconds <= lumps.most_s(RATE, 1.0)


def test_lumps_do_not_come_and_go_with_each_interval() -> None:
    lumps, lumpy = Lumps(), []
    for more in (4.5, 5.4, 4.5, 3.6):  # 1.8, 2.5, 1.8 and 1.2 times as much as chance
        for count in 400 * [10.0 + more, 10.0]:
            lumps.observe(count, LOOK_S)
        lumps.judge()
        lumpy.append(lumps.dispersion > 1.0)
    assert lumpy == [False, True, True, False]


def test_lumps_end_and_are_no_surge() -> None:
    lumps = observed(counted(arrivals(600.0)))
    lumps.learn(QUEUE.lump_s(0.8, WORK / 3), MOST_S)
    assert lumps.seconds > 0
    rng = random.Random(1)
    for _ in range(800):
        lumps.observe(max(0.0, rng.gauss(20.0, math.sqrt(20.0))), LOOK_S)
    lumps.judge()
    assert lumps.seconds == lumps.most_s(RATE, 1.0) == 0.0
    assert is_surge(80.0, 50.0)
    assert not is_surge(80.0, 50.0, 4.0), "two deviations of counts that vary twice as much"
