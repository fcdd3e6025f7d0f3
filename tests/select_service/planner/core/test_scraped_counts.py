"""The fast loop where arrivals are scraped: known every fifteen seconds, and late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from select_service.planner.core.fleet_plan import PlannedModel
from select_service.planner.types import IDLE, Load, Missing, Value
from tests.select_service.planner.core.planned_fleet import BUSY, DECODE, INTERVAL, Run, model

SCRAPE_S = 15.0


def scraped(requests: float, ago_s: float = 1.0) -> Load:
    arrived = Value(requests) if requests else IDLE
    return Load(arrived=arrived, seconds=SCRAPE_S, ago_s=ago_s)


def nothing_new(ago_s: float) -> Load:
    return Load(arrived=IDLE, seconds=0.0, ago_s=ago_s)


def test_a_burst_is_sized_by_the_seconds_in_which_it_came() -> None:
    """A lump of three looks was either not seen, or would be three times the rate it is."""
    direct, late = Run(), Run()
    for run in (direct, late):
        run.slow(BUSY)
    for _ in range(3):
        direct.fast(Load(arrived=Value(450.0), seconds=5.0))
    late.fast(nothing_new(6.0))
    late.fast(nothing_new(11.0))
    assert late.counts == (4, 6)
    late.fast(scraped(1350.0))
    assert late.counts == direct.counts


def test_between_two_scrapes_it_is_still_a_surge_and_nobody_is_idle() -> None:
    run = Run()
    run.slow(BUSY)
    decision = run.fast(scraped(1350.0))
    surge = run.counts
    assert any("1350 requests came in 15 s, 450 were planned" in one for one in decision.reasons)
    for ago_s in (6.0, 11.0):
        decision = run.fast(nothing_new(ago_s))
        assert any("1350 requests came" in one for one in decision.reasons)
        assert run.counts == surge


def test_a_queue_is_worked_off_at_the_rate_that_was_counted_last() -> None:
    """Between scrapes nobody seemed to come, or as many as all engines compute."""
    run = Run()
    run.slow(BUSY)
    queue = {"prefill_backlog_tokens": Value(600_000.0)}
    run.fast(replace(scraped(450.0), **queue))  # type: ignore[arg-type] # its values are readings
    before = run.counts
    for ago_s in (6.0, 11.0):
        run.fast(replace(nothing_new(ago_s), **queue))  # type: ignore[arg-type] # as above
    assert run.counts == before


def test_a_queue_that_was_scraped_once_does_not_grow_at_every_look() -> None:
    """It grew in one look by what it had grown in three, and engines were asked for by that."""
    run = Run()
    run.slow(BUSY)
    fleet: PlannedModel = run.fleet.models[0]
    for step in range(1, 9):
        for ago_s in (1.0, 6.0, 11.0):
            load = scraped(450.0) if ago_s == 1.0 else nothing_new(ago_s)
            run.fast(replace(load, prefill_backlog_tokens=Value(1e5 + 15e3 * step)))
    growth = fleet.pools[0].prefills.per_s
    one_s = fleet.surface.prefill.ttft_ms(3000.0) / 1e3
    assert growth == pytest.approx(1e3 / 3000.0 * one_s, rel=0.05)


def test_what_came_before_a_lower_plan_does_not_count_against_it() -> None:
    """Fifteen seconds of the interval before are reported when the next one has begun."""
    run = Run(model(stabilisation_s=0.0))
    run.slow(BUSY)
    run.slow(replace(BUSY, requests=Value(900.0)))
    lower = run.counts
    decision = run.fast(scraped(450.0, ago_s=7.0))
    assert run.counts == lower, decision.reasons
    run.fast(nothing_new(12.0))
    assert run.counts == lower
    run.fast(replace(scraped(450.0), ago_s=2.0))  # from 17 s to 2 s ago: 2 s of it are before
    run.now += 15.0
    run.fast(scraped(450.0))
    assert run.counts > lower, "now it is too much"


def test_where_an_interval_reports_all_up_to_its_end_the_next_look_follows_the_new_plan() -> None:
    """Looks and decisions are some milliseconds apart, now more and now less."""
    run = Run(model(stabilisation_s=0.0))
    run.slow(BUSY)
    less = replace(BUSY, requests=Value(900.0), arrived=Value(25.0), arrived_s=5.0)
    run.slow(less)
    lower = run.counts
    run.now -= 0.25  # it took less time than before to decide
    run.fast(Load(arrived=Value(140.0), seconds=5.0))
    assert run.counts > lower


def test_the_parts_of_an_interval_are_where_they_were_scraped() -> None:
    run = Run()
    run.slow(BUSY)
    demand = run.fleet.models[0].demand
    while run.now < 2 * INTERVAL - 15.0:
        run.now += 10.0  # and five in `fast`
        # 10 a second until half of the interval, 50 from then on; scraped fifteen seconds ago
        end = run.now + 5.0 - SCRAPE_S - INTERVAL
        rate = 10.0 if end <= INTERVAL / 2 else 50.0
        run.fast(scraped(rate * SCRAPE_S, ago_s=SCRAPE_S))
    run.slow(replace(BUSY, requests=Value(5400.0)), 2 * INTERVAL - run.now)
    assert demand.history[-1].parts == pytest.approx((300.0,) * 3 + (1500.0,) * 3)


def test_nothing_scraped_for_long_is_nothing_known() -> None:
    run = Run()
    run.slow(BUSY)
    run.fast(scraped(1350.0))
    surge = run.counts
    run.fast(Load(arrived=Missing("nothing has been scraped for 45 s")))
    decision = run.fast(nothing_new(6.0))
    assert not any("requests came" in one for one in decision.reasons)
    assert run.counts == surge, "it is not taken away on the spot"
    assert run.states[DECODE].desired == surge[1]
