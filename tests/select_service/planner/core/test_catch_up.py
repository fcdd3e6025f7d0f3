"""What the fast loop catches of what the slow one did not forecast."""

from __future__ import annotations

import pytest

from select_service.planner.core.catch_up import caught, is_surge
from select_service.planner.core.demand import Demand, Interval, Predictors
from select_service.planner.core.prediction import Constant, Predictor

PART_S = 10.0
QUIET = (100.0,) * 6


def naive(forecast: float, before: list[float], parts: tuple[float, ...], lead_s: float) -> float:
    """Part by part: what was counted in the half minute that ended when its engines were due."""
    counts, total = before + list(parts), 0.0
    for part in range(6):
        due = (len(before) + part) * PART_S - lead_s  # the part begins then
        ended = [one for one in range(len(counts)) if (one + 1) * PART_S <= due]
        seen = [counts[one] for one in ended[-3:]]
        planned = forecast / 6
        if len(seen) == 3 and is_surge(sum(seen), 3 * planned):
            total += max(planned, sum(seen) / 3)
        else:
            total += planned
    return total


@pytest.mark.parametrize("lead_s", [0.0, 5.0, 10.0, 65.0])
@pytest.mark.parametrize("rise", [0.0, 3.0, 10.0, 40.0])
def test_a_part_counts_as_caught_when_its_engines_were_ordered_in_time(
    rise: float, lead_s: float
) -> None:
    before = [100.0 + rise * part for part in range(12)]
    parts = tuple(100.0 + rise * part for part in range(12, 18))
    found = caught(600.0, before, parts, lead_s, PART_S)
    assert found == pytest.approx(naive(600.0, before, parts, lead_s))
    assert 600.0 <= found <= max(600.0, sum(parts))
    if rise >= 10.0:
        assert found > 600.0


def test_a_jump_within_the_time_engines_take_to_start_is_not_caught() -> None:
    jumped = (100.0, 360.0, 360.0, 360.0, 360.0, 360.0)
    assert caught(600.0, list(QUIET * 2), jumped, 65.0, PART_S) == 600.0
    assert caught(600.0, list(QUIET * 2), jumped, 10.0, PART_S) > 1000.0
    assert caught(600.0, [], jumped, 10.0, PART_S) < caught(600.0, list(QUIET), jumped, 0.0, PART_S)


def forecast_errors(*, is_watched: bool) -> list[float]:
    demand = Demand(Predictors(*(Predictor(Constant()) for _ in range(3))))
    demand.is_watched = is_watched
    demand.look_ahead(2, 65.0, 60.0)
    counts = [100.0] * 60 + [100.0 + 8.0 * step for step in range(60)]
    demand.warm_up(
        Interval(sum(counts[at : at + 6]), 1000.0, 100.0, tuple(counts[at : at + 6]))
        for at in range(0, 120, 6)
    )
    return [difference for difference, _ in demand.forecast_errors._seen]


def test_a_rise_that_is_seen_in_time_is_less_of_a_surprise() -> None:
    alone, together = forecast_errors(is_watched=False), forecast_errors(is_watched=True)
    assert together[:8] == alone[:8] == [0.0] * 8
    assert max(together) < 0.85 * max(alone)
    assert all(0.0 <= two <= one for one, two in zip(alone, together, strict=True))
