"""Fleets without a profile that are overloaded, and whose workers report no `total_kv_blocks`."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest

from select_service.planner.core.engine_speed import EngineSpeed, SpeedSettings
from select_service.planner.types import Load, Missing, Moments, PoolState, Value, Window
from tests.select_service.planner.core.planned_fleet import DECODE, INTERVAL, Run, model
from tests.select_service.planner.core.test_engine_speed import PREFILLS

CONTEXT, OSL = 3150.0, 300.0


class Engine(NamedTuple):
    """How an engine decodes in truth, and the tokens for which it has room."""

    base_s: float
    s_per_token: float
    room: float

    def load(self, rate: float) -> float:
        """Return the tokens in its batch at so many requests a second; at most its room."""
        each = rate * OSL * CONTEXT  # live requests: rate times output tokens times ITL
        rest = 1.0 - each * self.s_per_token
        return min(self.room, each * self.base_s / rest) if rest > 0 else self.room

    def itl_s(self, load: float) -> float:
        return self.base_s + self.s_per_token * load

    def serves(self, engines: int, rate: float) -> bool:
        return self.load(rate / engines) < self.room


def measured_on(engine: Engine, engines: int, rate: float, noise: float = 0.15) -> Window:
    """Return what a fleet of such engines reports of an interval."""
    load = engine.load(rate / engines)
    loads = [min(engine.room, load * (1.0 + noise * part)) for part in (-1.0, 0.0, 1.0)] * 100
    rows = [(1.0, x, engine.itl_s(x), x * x, x * engine.itl_s(x)) for x in loads]
    waits = 1.0 if engine.serves(engines, rate) else 4.0
    return Window(
        seconds=INTERVAL,
        requests=Value(rate * INTERVAL),
        isl=Value(CONTEXT - OSL / 2),
        osl=Value(OSL),
        itl_ms=Value(1e3 * waits * engine.itl_s(load)),
        concurrency=Value(waits * engines * load / CONTEXT),
        prefill_moments=PREFILLS,
        itl_moments=Moments(*(sum(column) for column in zip(*rows, strict=True))),
        rank_kv_tokens=Missing("no worker reported"),
    )


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Engine(0.006, 0.12e-6, 60_000.0), id="full within the target"),
        pytest.param(Engine(0.006, 0.25e-6, 80_000.0), id="full beyond the target"),
        pytest.param(Engine(0.006, 0.12e-6, 300_000.0), id="slow before it is full"),
    ],
)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_overloaded_fleet_grows_until_it_serves(engine: Engine, start: int) -> None:
    one = model()
    one.speed = EngineSpeed(None)
    run = Run(one, prefill=3, decode=start, correct=True)
    counts, rate = [], 30.0
    for _ in range(16):
        run.slow(measured_on(engine, run.counts[1], rate))
        counts.append(run.counts[1])
        run.fast(Load(concurrency=Value(rate)))
    assert engine.serves(counts[-1], rate), counts
    assert engine.itl_s(engine.load(rate / counts[-1])) <= 0.020 * 1.04, counts
    enough = next(
        n
        for n in range(1, 99)
        if engine.serves(n, rate) and engine.itl_s(engine.load(rate / n)) <= 0.02
    )
    assert counts[-1] <= enough + 2, counts
    assert all(
        before <= after or engine.serves(after, rate)
        for before, after in pairwise([start, *counts])
    ), counts


def test_engines_that_were_full_bear_no_more_until_they_are_seen_to() -> None:
    engine, speed = Engine(0.006, 0.12e-6, 60_000.0), EngineSpeed(None)

    def most() -> float:
        assert speed.surface is not None
        best = speed.surface.decode.best(1e3, CONTEXT)
        assert best is not None
        return best.concurrency * CONTEXT

    speed.learn(measured_on(engine, 7, 30.0), 1.0, itl_ms=20.0)
    assert speed.known.room is None
    assert most() > 2 * engine.room, "as nothing else was reported"
    speed.learn(measured_on(engine, 1, 30.0), 1.0, itl_ms=20.0)
    assert most() == pytest.approx(engine.room, rel=0.06)
    larger = engine._replace(room=90_000.0)
    speed.learn(measured_on(larger, 1, larger_rate(larger)), 1.0, itl_ms=20.0)
    assert 75_000.0 < most() < 90_000.0, "it was seen to bear more"
    smaller = engine._replace(room=40_000.0)
    for _ in range(6):
        speed.learn(measured_on(smaller, 1, 30.0), 1.0, itl_ms=8.0)
    assert most() == pytest.approx(smaller.room, rel=0.06), "engines were replaced"


def larger_rate(engine: Engine) -> float:
    """Return a rate at which one has nearly no room left."""
    load = 0.9 * engine.room
    return load / CONTEXT / OSL / engine.itl_s(load)


def test_a_room_that_nobody_filled_for_long_is_forgotten() -> None:
    engine = Engine(0.006, 0.12e-6, 60_000.0)
    speed = EngineSpeed(None, settings=SpeedSettings(age_most_s=3 * INTERVAL))
    speed.learn(measured_on(engine, 1, 30.0), 1.0, itl_ms=20.0)
    assert speed.known.room is not None
    for _ in range(4):
        speed.learn(measured_on(engine, 9, 30.0), 1.0, itl_ms=20.0)
    assert speed.known.room is None


def test_slow_ends_of_requests_in_time_are_no_full_engines() -> None:
    """Short outputs, and clients that end requests late: tokens seem to take long."""
    speed = EngineSpeed(None)
    engine = Engine(0.006, 0.12e-6, 60_000.0)
    window = replace(measured_on(engine, 9, 30.0), itl_ms=Value(19.0))
    speed.learn(window, 1.0, itl_ms=20.0)
    assert speed.known.room is None


@pytest.mark.parametrize("attainment", [None, 0.99])
def test_short_answers_that_begin_or_end_late_are_no_full_engines(attainment: float | None) -> None:
    """Caches that move to decode workers take a moment: a fleet grew to its budget for it."""
    engine, one, osl = Engine(0.006, 0.12e-6, 300_000.0), model(), 20.0
    one.speed = EngineSpeed(None)
    one.goals = replace(one.goals, attainment=attainment)
    run, rate = Run(one, prefill=3, decode=4, correct=True), 30.0 * OSL / osl
    for _ in range(12):
        window = measured_on(engine, run.counts[1], 30.0)
        late_ms = 40.0  # more than half a second of a request
        run.slow(
            replace(window, requests=Value(rate * INTERVAL), osl=Value(osl), itl_ms=Value(late_ms))
        )
    assert one.speed.known.room is None
    assert run.counts[1] <= 14, "its correction is bounded"


def test_what_waits_for_a_place_does_not_correct_the_speed() -> None:
    """It is no slowness of engines: more of them end it."""
    engine, one = Engine(0.006, 0.12e-6, 60_000.0), model()
    one.speed = EngineSpeed(None)
    run = Run(one, prefill=3, decode=2, correct=True)
    for _ in range(2):
        run.states[DECODE] = PoolState(2, 2)
        run.slow(measured_on(engine, 2, 30.0))
    assert math.isclose(one.d_correction.factor, 1.0)
