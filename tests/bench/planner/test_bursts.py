"""Bursts that rise, and what may be known of them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from bench.planner.__main__ import SETTINGS, Task
from bench.planner.__main__ import run as run_shape
from bench.planner.bursts import RISES_S, Lawful, run
from bench.planner.shapes import HOUR_S, Burst, Bursts
from select_service.planner.edge.trace_replay import DECODE, PREFILL


@pytest.mark.parametrize("rise_s", RISES_S)
def test_a_burst_rises_stays_and_falls(rise_s: float) -> None:
    bursts = Bursts(4, rise_s)
    one = next(one for one in bursts.drawn if one.begin_s > 0)
    assert bursts.rate(one.begin_s - 1.0) == bursts.LOW
    assert bursts.rate(one.begin_s + rise_s) == bursts.HIGH
    assert bursts.rate(one.begin_s + rise_s + one.stays_s - 1.0) == bursts.HIGH
    assert bursts.rate(bursts.end_s(one)) == bursts.LOW
    if rise_s:
        middle = (bursts.LOW + bursts.HIGH) / 2
        assert bursts.rate(one.begin_s + rise_s / 2) == pytest.approx(middle)
        assert bursts.rate(bursts.end_s(one) - rise_s / 2) == pytest.approx(middle)


@pytest.mark.parametrize("prepared", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rise_s", RISES_S)
def test_who_knows_the_law_knows_nothing_of_what_will_come(rise_s: float, prepared: float) -> None:
    """Another future with the same past is another hour, and no other decision."""
    for now in range(0, int(HOUR_S), 35):
        bursts = Bursts(5, rise_s)
        ends = [one for one in bursts.drawn if one.begin_s <= now]
        last = ends[-1]
        changed = copy.copy(bursts)
        changed.drawn = ends
        if now < last.begin_s + rise_s + last.stays_s:  # it has not begun to fall
            changed.drawn = [*ends[:-1], Burst(last.begin_s, last.stays_s + 500.0)]
        rates = [Lawful(one, prepared)._at(float(now)) for one in (bursts, changed)]
        assert rates[0] == rates[1]


def test_who_is_prepared_has_engines_before_a_burst_and_not_right_after_one() -> None:
    bursts = Bursts(5, 0.0)
    one, other = bursts.drawn[-3:-1]
    before, after = other.begin_s - 1.0, bursts.end_s(one) + 1.0
    ready, bare = Lawful(bursts, 1.0), Lawful(bursts, 0.0)
    assert ready._at(before)[PREFILL] > bare._at(before)[PREFILL]
    assert ready._at(before)[DECODE] > bare._at(before)[DECODE]
    assert ready._at(after) == bare._at(after)
    assert bare._at(other.begin_s + 1.0) == ready._at(before)


@pytest.mark.slow
def test_a_begun_rise_is_what_past_rises_were() -> None:
    """Without likeness this hour costs 5.15 GPU-hours; the oracle pays 3.49."""
    done = run(300.0, 2, "ours")
    assert done.attainment > 0.985
    assert done.gpu_hours < 4.4


@pytest.mark.slow
def test_a_ramp_goes_on_when_half_an_hour_of_it_is_learnt() -> None:
    """Likeness took every moment of it for the end of the rise: 97.2 % in time."""
    settings = replace(SETTINGS, interval_s=30.0, startup_s=25.0)
    done = run_shape(Task(shape="ramp", policy="slo", seed=11), settings)
    assert done.attainment > 0.99
    assert done.gpu_hours < 4.6
