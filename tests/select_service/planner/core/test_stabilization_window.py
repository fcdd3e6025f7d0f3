"""When a count may fall, and how long replicas take to start."""

from __future__ import annotations

import pytest

from select_service.planner.core.stabilization_window import (
    PoolSettings,
    StabilizationWindow,
    StartTime,
)
from select_service.planner.types import PoolState


def test_down_only_after_the_window_and_first_what_has_not_started() -> None:
    steady = StabilizationWindow(PoolSettings(stabilisation_s=300.0, step_down=1, step_up=4))
    assert steady.next(9, 3, 0, now=0.0)[0] == 7  # at most four more
    assert steady.next(2, 7, 0, now=100.0) == (7, "7 were wanted within 300 s")
    assert steady.next(2, 7, 2, now=200.0) == (7, "7 were wanted within 300 s")
    reason = "2 of 2 that have not started are given up: 5 are ready, and 2 do"
    assert steady.next(2, 7, 2, now=301.0) == (5, reason), "nobody who serves goes with them"
    assert steady.next(2, 5, 0, now=303.0)[0] == 4
    assert steady.next(0, 2, 0, now=700.0) == (1, "kept within 1 and 1000")


def test_down_at_once_where_the_forecasts_are_sure() -> None:
    steady = StabilizationWindow(PoolSettings(stabilisation_s=300.0, step_down=9))
    assert steady.next(9, 9, 0, now=0.0) == (9, "")
    assert steady.next(4, 9, 0, now=60.0, sure=6)[0] == 6
    assert steady.next(4, 6, 0, now=120.0, sure=3) == (4, "")
    assert steady.next(2, 4, 1, now=180.0, sure=2)[0] == 3, "whose start matters no more"


def test_what_starts_is_kept_while_it_may_still_be_wanted() -> None:
    """It is missing from what suffices for sure, and was wanted a moment ago."""
    steady = StabilizationWindow(PoolSettings(stabilisation_s=300.0))
    assert steady.next(9, 9, 4, now=0.0)[0] == 9
    reason = "4 are starting: nothing is taken away meanwhile"
    assert steady.next(7, 9, 4, now=60.0, sure=7) == (9, reason)
    reason = "2 of 4 that have not started are given up: 5 are ready, and 7 do"
    assert steady.next(7, 9, 4, now=361.0, sure=7) == (7, reason), "the newer decision has lasted"
    assert steady.next(9, 7, 2, now=362.0) == (9, "")


def test_replicas_that_come_one_after_the_other_are_waited_for() -> None:
    time = StartTime(prior_s=100.0, give_up_s=1800.0)

    def overdue(ready: int, wanted: int, now: float) -> int:
        time.follow(PoolState(wanted, ready), now)
        return time.overdue

    assert not any(overdue(now // 600, 20, float(now)) for now in range(0, 7200, 600))
    assert overdue(11, 25, 8000.0) == 0  # five more were asked for
    assert overdue(11, 25, 9700.0) == 0
    assert overdue(11, 25, 9800.0) == 14
    assert overdue(12, 25, 9900.0) == 0


def test_starts_are_timed() -> None:
    time = StartTime(prior_s=100.0)
    seen = ((0.0, 1, 1), (10.0, 3, 1), (50.0, 3, 2), (70.0, 3, 3), (90.0, 3, 3))
    for now, desired, ready in seen:
        time.follow(PoolState(desired, ready), now)
    assert time.seconds == pytest.approx(100.0 + 0.3 * (60.0 - 100.0))


def test_who_is_not_ready_for_a_moment_has_not_started() -> None:
    """Ten readiness probes that failed once made starts of two minutes ones of eight seconds."""
    time = StartTime(prior_s=120.0)
    for blip in range(10):
        for at, ready in ((0.0, 6), (60.0, 5), (65.0, 6)):
            time.follow(PoolState(6, ready), 100.0 * blip + at)
    assert time.seconds == 120.0
    time.follow(PoolState(6, 5), 1000.0)  # one is lost, and two are asked for meanwhile
    time.follow(PoolState(8, 5), 1030.0)
    time.follow(PoolState(8, 8), 1130.0)
    assert time.seconds == pytest.approx(120.0 + 0.3 * (100.0 - 120.0))


def test_a_start_whose_begin_nobody_saw_is_no_measure() -> None:
    """A planner that is started again while engines start would take the rest for the whole."""
    time = StartTime(prior_s=120.0)
    for now, ready in ((0.0, 2), (5.0, 4)):
        time.follow(PoolState(4, ready), now)
    assert time.seconds == 120.0
