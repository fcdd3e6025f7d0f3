"""What the fast loop does with queues, live requests and arrivals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from select_service.planner.types import IDLE, Load, Missing, PoolState, Reading, Value, Window
from tests.select_service.planner.core.planned_fleet import (
    BUSY,
    DECODE,
    INTERVAL,
    PREFILL,
    Run,
    model,
)


def test_the_fast_loop_adds_at_once_and_does_not_pile_up() -> None:
    run = Run()
    run.slow(BUSY)
    run.fast(Load(prefill_backlog_tokens=Value(5_000.0)))
    assert run.counts[0] == 4  # a short queue is chance
    burst = Load(prefill_backlog_tokens=Value(400_000.0))
    decision = run.fast(burst)
    added = run.counts[0]
    assert 5 < added < 20
    assert any("400000 tokens wait" in one for one in decision.reasons)
    for tokens in (410_000.0, 420_000.0, 425_000.0, 425_000.0):  # the rest is starting
        run.states[PREFILL] = PoolState(added, 4)
        run.fast(Load(prefill_backlog_tokens=Value(tokens)))
        assert run.states[PREFILL].desired == added
    run.states[PREFILL] = PoolState(added, added)


def test_a_queue_that_grows_fast_asks_for_as_many_as_its_work_arrives() -> None:
    slow, fast = Run(), Run()
    for run, step in ((slow, 10_000.0), (fast, 200_000.0)):
        run.slow(BUSY)
        for turn in range(1, 5):
            run.states[PREFILL] = PoolState(run.counts[0], 4)
            run.fast(Load(prefill_backlog_tokens=Value(100_000.0 + step * turn)))
    assert fast.counts[0] > slow.counts[0]


@pytest.mark.parametrize("arrived", [Value(1.0), IDLE])
def test_a_queue_to_which_nobody_comes_is_worked_off_by_those_who_are_there(
    arrived: Reading,
) -> None:
    """That nobody came was taken for not knowing it, and more engines were asked for."""
    run = Run()
    run.slow(BUSY)
    before = run.counts
    for step in range(3):
        tokens = Value(3e6 - 1e5 * step)
        run.fast(Load(prefill_backlog_tokens=tokens, arrived=arrived, seconds=5.0))
    assert run.counts == before


def test_live_requests_beyond_the_target_are_more_decode_engines() -> None:
    run = Run()
    run.slow(BUSY)
    run.fast(Load(concurrency=Value(500.0), context_tokens=Value(3150.0)))
    # as fast as those that there is room for end, as many come: eight serve them in time. Fifteen
    # would hold all that are live, but those stay where they are
    assert run.counts == (4, 8)


def test_a_queue_on_a_decode_engine_is_not_taken_for_traffic() -> None:
    """Live requests pile up for a minute, until engines have started: that is no load of 16."""
    run = Run()
    run.slow(BUSY)
    for turn in range(12):
        run.states[DECODE] = PoolState(run.counts[1], 6)
        run.fast(Load(concurrency=Value(200.0 + 60.0 * turn), context_tokens=Value(3150.0)))
    assert run.counts[1] <= 11


def test_arrivals_that_were_counted_are_sized_at_once_and_held_until_the_next_interval() -> None:
    run = Run()
    run.slow(BUSY)
    calm = Load(arrived=Value(160.0), seconds=5.0)
    run.fast(calm)
    assert run.counts == (4, 6), "160 instead of 150 are chance"
    decision = run.fast(Load(arrived=Value(450.0), seconds=5.0))
    assert any("450 requests came in 5 s, 150 were planned" in one for one in decision.reasons)
    surge = run.counts
    assert surge[0] >= 9
    assert surge[1] >= 15
    for _ in range(20):
        run.fast(calm)
    assert run.counts == surge, "what was there a moment ago is not taken away on the spot"


def test_a_burst_after_hours_of_nothing_is_seen_within_a_look() -> None:
    run = Run(model(stabilisation_s=0.0))
    run.slow(BUSY)
    for _ in range(40):
        run.slow(Window(seconds=INTERVAL, requests=IDLE))
    assert run.counts == (1, 1)
    run.fast(Load(arrived=Value(150.0), seconds=5.0))
    assert run.counts == (4, 6)


def test_blind_planners_size_what_they_can_count() -> None:
    run = Run(model(stabilisation_s=60.0))
    run.slow(BUSY)
    for _ in range(4):
        run.slow(Window(seconds=INTERVAL, requests=Missing("no Prometheus")))
    for _ in range(30):
        run.fast(Load(arrived=Value(75.0), seconds=5.0))
    assert run.counts == (2, 3)


@pytest.mark.parametrize("live", [Value(80 * 300 * 0.0155), Missing("no series")])
def test_a_short_queue_is_no_reason_to_take_busy_engines_away(live: Reading) -> None:
    """One of two selectors was away for ten minutes: of nine prefill engines two were left."""
    run = Run()
    for _ in range(4):
        run.slow(replace(BUSY, requests=Value(80 * INTERVAL)))
    before = run.counts
    gone = Missing("http://b: refused")
    prompts = 80 * 0.0922 * 1.5  # that are computed, or about to be
    load = Load(
        prefill_backlog_tokens=Value(1500.0 * prompts), concurrency=live, arrived=gone, seconds=5.0
    )
    for _ in range(8):
        run.slow(Window(seconds=INTERVAL, requests=gone))
        for _ in range(35):
            run.fast(load)
    assert run.fleet.models[0].demand.missed == 8
    prefill, decode = run.counts
    assert before[0] - 1 <= prefill <= before[0] + 1
    assert before[1] - 1 <= decode <= before[1] + 1
    run.fast(replace(load, prefill_backlog_tokens=Value(2e6)))
    assert run.counts[0] > before[0] + 1, "a long one is a reason for more"
