"""Bursts that are over before engines start: a fleet that stays as it is, and when it does not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planner.shapes import SHAPES, code_completion
from select_service.planner.core.steady_fleet import KNOWN_S, SteadyFleet
from select_service.planner.types import ModelKey, PoolKey

POOL = PoolKey(ModelKey("m"), "prefill")
LOOK_S, START_S = 5.0, 65.0


def late(rate: float, engines: int) -> float:
    """An engine serves ten requests a second in time."""
    return max(0.0, 1.0 - 10.0 * engines / rate) if rate else 0.0


def observe(
    fleet: SteadyFleet, counts: Iterable[float], wanted: int, *, is_known: bool = False
) -> None:
    for number, count in enumerate(counts, start=1):
        fleet.observe(count, LOOK_S)
        fleet.follow({POOL: wanted}, {POOL: 3})
        if number % 12 == 0:
            fleet.plan(START_S, is_known=is_known, late_of={POOL: late})


def clumps(bursts: int, peak: float = 30.0) -> list[float]:
    """A burst of one look at `peak` requests/s every 55 seconds, and hardly any between them."""
    return [peak * LOOK_S if look % 11 == 5 else 1.0 for look in range(11 * bursts)]


def test_clumps_keep_the_engines_they_needed_and_others_follow() -> None:
    fleet = SteadyFleet(0.01)
    observe(fleet, clumps(40), wanted=1)
    assert fleet.engines(POOL) == 4, "at 33 requests/s within a look, where a tenth more may come"
    assert "over before engines start" in fleet.why
    observe(fleet, clumps(40), wanted=5)
    observe(fleet, clumps(40), wanted=5)
    assert fleet.engines(POOL) is None, "following has kept the promise for an hour"


def test_nothing_is_kept_where_traffic_is_known_nothing_is_promised_or_nobody_counts() -> None:
    for fleet, is_known in ((SteadyFleet(0.01), True), (SteadyFleet(None), False)):
        observe(fleet, clumps(20), wanted=1, is_known=is_known)
        assert fleet.engines(POOL) is None
    fleet = SteadyFleet(0.01)
    fleet.is_asked = False
    observe(fleet, clumps(20), wanted=1)
    assert fleet.engines(POOL) is None


def test_a_young_planner_takes_nobody_away_and_one_that_has_seen_enough_does() -> None:
    fleet = SteadyFleet(0.01)
    observe(fleet, clumps(10, peak=15.0), wanted=1)
    assert fleet.engines(POOL) == 3, "as many as there were: larger bursts may be usual"
    observe(fleet, clumps(int(KNOWN_S / 55), peak=15.0), wanted=1)
    assert fleet.engines(POOL) == 2


def test_more_for_longer_than_engines_start_is_no_clump() -> None:
    fleet = SteadyFleet(0.01)
    observe(fleet, clumps(40), wanted=1)
    observe(fleet, [100.0], wanted=1)
    assert fleet.engines(POOL) is not None
    observe(fleet, [100.0] * 9, wanted=1)
    assert fleet.engines(POOL) is None, "it is followed"


def test_what_nobody_counted_is_a_gap_and_an_hour_of_it_is_a_new_beginning() -> None:
    """Time that was not counted was left out: an hour could hold counts of the day before."""
    fleet = SteadyFleet(0.01)
    observe(fleet, clumps(40), wanted=1)
    fleet.skip(2400.0)
    assert fleet.engines(POOL) == 4, "20 minutes are still known"
    fleet.observe(40.0 * LOOK_S, LOOK_S)
    assert fleet.engines(POOL) == 4, "one look is not an engine's start time"
    observe(fleet, clumps(10), wanted=1)
    assert sum(one.seconds for one in fleet._counts) <= 1200.0, "of 2750 counted"
    fleet.skip(3600.0)
    assert fleet.engines(POOL) is None
    observe(fleet, clumps(10, peak=15.0), wanted=1)
    assert fleet.engines(POOL) == 3, "as many as there are now"


def test_looks_of_hundredths_of_a_second_are_remembered_as_seconds() -> None:
    """An hour of them was 360,000 counts, all of which every look went through."""
    fine, coarse = SteadyFleet(0.01), SteadyFleet(0.01)
    for number in range(1_000):
        for fleet, seconds in ((fine, 0.25), (coarse, 1.0)):
            if number % (4 * seconds) == 0:
                fleet.observe(seconds * (40.0 if number % 48 < 4 else 0.0), seconds)
    assert list(fine._counts) == list(coarse._counts)


def test_a_day_a_ramp_and_bursts_of_minutes_are_no_clumps_and_code_completion_is() -> None:
    def is_clumped(counts: list[float]) -> bool:
        fleet = SteadyFleet(0.01)
        observe(fleet, counts, wanted=1, is_known=True)
        return fleet.is_clumped

    rng = random.Random(3)
    for shape in SHAPES.values():
        means = [LOOK_S * shape(3)(LOOK_S * look) for look in range(720)]
        assert not is_clumped([max(0.0, rng.gauss(one, math.sqrt(one))) for one in means])
    counts = [0.0] * 720
    for one in code_completion(3):
        counts[int(one.at_s / LOOK_S)] += 1.0
    assert is_clumped(counts)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 200), st.sampled_from([1.0, 5.0, 30.0]), st.sampled_from([0, 0, 40])
        ),
        min_size=1,
        max_size=60,
    )
)
def test_the_course_and_what_surpasses_it_are_those_of_a_list(
    steps: list[tuple[int, float, int]],
) -> None:
    fleet, ended, clock = SteadyFleet(0.01), list[tuple[float, int, float]](), 0.0
    fleet.plan(START_S, is_known=True, late_of={})
    for requests, seconds, gap_s in steps:
        fleet.skip(gap_s)
        fleet.observe(requests, seconds)
        clock += gap_s + seconds
        ended.append((clock, requests, seconds))

    def rate_of(some: list[tuple[float, int, float]]) -> float:
        return sum(one[1] for one in some) / sum(one[2] for one in some)

    course = [
        rate_of([one for one in ended if abs(one[0] - end_s) <= START_S]) for end_s, _, _ in ended
    ]
    assert list(fleet._course(fleet._columns())) == pytest.approx(course)
    before = [rate for rate, one in zip(course, ended, strict=True) if one[0] <= clock - START_S]
    lately = ended[len(before) :]
    is_counted = sum(one[2] for one in lately) >= START_S / 2
    assert fleet._is_surpassed == (
        bool(before) and is_counted and rate_of(lately) > 1.5 * max(before)
    )
