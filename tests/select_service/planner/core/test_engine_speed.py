"""Planning with the speed that selectors measured: as profiled, learnt, or neither is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.planner.core.engine_speed import (
    MEASUREMENTS_LEAST,
    EngineSpeed,
    SpeedSettings,
)
from select_service.planner.core.surface import Surface
from select_service.planner.types import IDLE, Load, Missing, Moments, Reading, Value, Window
from tests.select_service.planner.core.planned_fleet import (
    BUSY,
    DECODE,
    INTERVAL,
    SURFACE,
    Run,
    model,
)


def measured(base_s: float, s_per_token: float, loads: tuple[float, ...], times: int) -> Moments:
    """Return what a rank reports that takes exactly this, so often at each load."""
    pairs = [(load, base_s + s_per_token * load) for load in loads] * times
    return Moments(
        len(pairs),
        sum(x for x, _ in pairs),
        sum(y for _, y in pairs),
        sum(x * x for x, _ in pairs),
        sum(x * y for x, y in pairs),
    )


PREFILLS = measured(0.012, 28e-6, (500.0, 3000.0, 12_000.0), 100)
ITLS = measured(0.006, 0.12e-6, (20_000.0, 40_000.0, 60_000.0), 100)


def window(**changed: Any) -> Window:
    known = {name: getattr(BUSY, name) for name in ("requests", "isl", "osl")}
    moments = {"prefill_moments": PREFILLS, "itl_moments": ITLS}
    return Window(seconds=INTERVAL, **(known | moments | changed))


def known(speed: EngineSpeed) -> Surface:
    assert speed.surface is not None
    return speed.surface


def test_what_ranks_took_is_what_their_engines_are_planned_with() -> None:
    speed = EngineSpeed(None, gpus=2)
    assert speed.surface is None
    assert speed.learn(window(), 1.0) == []
    found = known(speed)
    assert speed.by_measurement == {"prefill", "decode"}
    for tokens in (500.0, 3000.0, 100_000.0):
        assert found.prefill.ttft_ms(tokens) == pytest.approx(12.0 + 28e-3 * tokens, rel=0.05)
    for live, context in ((1.0, 3000.0), (20.0, 3000.0), (5.0, 12_000.0)):
        itl_ms = 6.0 + 0.12e-3 * live * context
        assert found.decode.itl_ms(live, context) == pytest.approx(itl_ms, rel=0.01)
    best = found.decode.best(12.0, 3000.0)
    assert best is not None
    assert best.concurrency == pytest.approx(50_000.0 / 3000.0, rel=0.02)
    assert best.thpt_per_gpu == pytest.approx(best.concurrency / 0.012 / 2, rel=0.02)


def test_an_engine_is_not_planned_for_loads_far_from_those_that_were_measured() -> None:
    for factor in (2.0, 4.0):
        speed = EngineSpeed(None, settings=SpeedSettings(load_factor=factor))
        speed.learn(window(itl_moments=measured(0.006, 0.0, (10_000.0,), 100)), 1.0)
        best = known(speed).decode.best(1e3, 1000.0)
        assert best is not None
        assert best.concurrency == pytest.approx(10.0 * factor, rel=0.01)
        speed.learn(window(rank_kv_tokens=Value(15_000.0)), 1.0)
        best = known(speed).decode.best(1e3, 1000.0)
        assert best is not None
        assert best.concurrency == pytest.approx(15.0, rel=0.01)  # it has room for no more


def test_without_a_profile_and_measurements_replicas_are_held_and_it_is_said_why() -> None:
    one = model()
    one.speed = EngineSpeed(None)
    run = Run(one, prefill=3, decode=6)
    few = MEASUREMENTS_LEAST // 2
    decision = run.slow(
        window(
            prefill_moments=measured(0.012, 28e-6, (500.0,), few),
            itl_moments=Missing("no selector reports measured_itl_moments_total"),
        )
    )
    assert run.counts == (3, 6)
    reasons = "\n".join(decision.reasons)
    assert f"prefill: {few} of {MEASUREMENTS_LEAST} measurements" in reasons
    assert "no selector reports measured_itl_moments_total" in reasons
    assert "how fast its engines are is not known: replicas are held" in reasons
    run.slow(window())
    assert run.counts != (3, 6), "now it is known"


def test_a_fleet_at_zero_starts_one_engine_each_to_learn_its_speed() -> None:
    one = model(least=0)
    one.speed = EngineSpeed(None)
    run = Run(one, prefill=0, decode=0)
    decision = run.slow(window(prefill_moments=Missing("none"), itl_moments=Missing("none")))
    assert run.counts == (1, 1)
    assert any("one replica each, to learn it" in text for text in decision.reasons)


def test_it_chooses_what_the_true_profile_chooses() -> None:
    """Measurements that are drawn from the profile, at the loads of the fleet that it wants."""
    counts = []
    for profile in (SURFACE, None):
        one = model()
        one.speed = EngineSpeed(profile)
        run = Run(one, prefill=6, decode=9)
        for _ in range(20):
            prefills = [(x, SURFACE.prefill.ttft_ms(x) / 1e3) for x in (1000.0, 3000.0, 6000.0)]
            live = 180.0 / run.states[DECODE].desired
            decodes = [
                (share * live * 3150.0, SURFACE.decode.itl_ms(share * live, 3150.0) / 1e3)
                for share in (0.8, 1.0, 1.2)
            ]
            sums = [
                Moments(300.0, *(100.0 * sum(column) for column in zip(*rows, strict=True)))
                for rows in (
                    [(x, y, x * x, x * y) for x, y in found] for found in (prefills, decodes)
                )
            ]
            run.slow(window(prefill_moments=sums[0], itl_moments=sums[1]))
        counts.append(run.counts)
    with_profile, without = counts
    assert abs(with_profile[0] - without[0]) <= 1, counts
    assert abs(with_profile[1] - without[1]) <= 1, counts


@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_a_profile_that_is_wrong_is_replaced_and_believed_again(times: float) -> None:
    slow = measured(times * 0.012, times * 28e-6, (500.0, 3000.0, 12_000.0), 100_000)
    one = model()
    run = Run(one, prefill=3, decode=6)
    right = run.slow(window())
    assert one.speed.by_measurement == frozenset(), "it is right"
    assert not any("as measured" in text for text in right.reasons)
    decision = run.slow(window(prefill_moments=slow))
    assert one.speed.by_measurement == {"prefill"}
    assert known(one.speed).decode is SURFACE.decode
    ratio = known(one.speed).prefill.ttft_ms(3000.0) / SURFACE.prefill.ttft_ms(3000.0)
    assert ratio == pytest.approx(times, rel=0.15)
    assert any(
        "times as long as profiled: it is planned as measured" in t for t in decision.reasons
    )
    assert one.p_correction.factor == 1.0
    many = PREFILLS._replace(**{name: 1e6 * one for name, one in PREFILLS._asdict().items()})
    run.slow(window(prefill_moments=many))
    assert one.speed.by_measurement == frozenset()
    assert one.speed.surface is SURFACE


@pytest.mark.parametrize(
    "quiet",
    [
        Window(seconds=INTERVAL, requests=IDLE, isl=IDLE, osl=IDLE),
        Window(seconds=INTERVAL, requests=Missing("no answer")),
    ],
)
def test_a_profile_that_is_wrong_is_not_believed_while_nothing_is_measured(quiet: Window) -> None:
    speed = EngineSpeed(SURFACE)
    speed.learn(window(prefill_moments=measured(0.036, 84e-6, (500.0, 3000.0), 100)), 1.0)
    assert speed.by_measurement == {"prefill"}
    remarks = speed.learn(quiet, 1.0)
    assert speed.by_measurement == {"prefill"}
    assert any("as measured" in one for one in remarks)
    assert known(speed).prefill is not SURFACE.prefill


def test_a_speed_that_becomes_too_old_while_nothing_is_reported_holds_replicas() -> None:
    one = model()
    one.speed = EngineSpeed(None, settings=SpeedSettings(age_most_s=2.5 * INTERVAL))
    run = Run(one, prefill=3, decode=6)
    for _ in range(3):
        run.slow(window())
    before = run.counts
    for lost in range(1, 8):
        # as of a source whose next window covers what was lost
        run.slow(Window(seconds=lost * INTERVAL, requests=Missing("no answer")))
        assert (one.speed.surface is None) == (lost > 2), "the age is the time that has passed"
        run.fast(Load(prefill_backlog_tokens=Value(0.0), concurrency=Value(180.0)))
    assert run.counts == before


@pytest.mark.parametrize("kv_tokens", [Value(200_000.0), Missing("no worker reported")])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_engines_that_are_full_are_not_taken_for_slow_ones(
    spread: float, kv_tokens: Reading
) -> None:
    """Of a load that hardly varies, and of one that waits, times between tokens are level."""
    one = model()
    one.speed = EngineSpeed(None)
    run = Run(one, prefill=3, decode=2)
    for _ in range(12):
        live = 180.0 / run.states[DECODE].desired
        loads = [live * 3150.0 * (1.0 + spread * part) for part in (-1.0, 0.0, 1.0)] * 100
        pairs = [(load, SURFACE.decode.itl_ms(load / 3150.0, 3150.0) / 1e3) for load in loads]
        rows = [(1.0, x, y, x * x, x * y) for x, y in pairs]
        sums = Moments(*(sum(column) for column in zip(*rows, strict=True)))
        decision = run.slow(window(itl_moments=sums, rank_kv_tokens=kv_tokens))
        assert not decision.infeasible
    with_profile = Run(prefill=3, decode=2)
    with_profile.slow(window())
    assert abs(run.counts[1] - with_profile.counts[1]) <= 1


def test_gauges_that_are_none_bound_no_engine() -> None:
    speed = EngineSpeed(None)
    speed.learn(window(), 1.0)
    best = known(speed).decode.best(1e3, 1000.0)
    speed.learn(window(rank_kv_tokens=Value(0.0)), 1.0)
    assert known(speed).decode.best(1e3, 1000.0) == pytest.approx(best)


def test_one_who_believes_the_profile_alone_learns_nothing() -> None:
    speed = EngineSpeed(SURFACE, settings=SpeedSettings("profile"))
    assert speed.learn(window(prefill_moments=measured(1.0, 1e-3, (500.0,), 1000)), 1.0) == []
    assert speed.surface is SURFACE
    assert not speed.learnt["prefill"].sums.samples
    speed = EngineSpeed(SURFACE, settings=SpeedSettings("learnt"))
    assert speed.surface is None, "nothing has been measured"


def test_what_was_measured_long_ago_counts_no_more() -> None:
    speed = EngineSpeed(None, settings=SpeedSettings(age_most_s=3 * INTERVAL))
    speed.learn(window(), 1.0)
    quiet = window(prefill_moments=Moments(), itl_moments=Moments())
    for _ in range(3):
        assert speed.learn(quiet, 1.0) == []
    assert "prefill: measured 720 s ago, which counts for 540 s" in speed.learn(quiet, 1.0)
    assert speed.surface is None
    assert speed.learn(window(), 1.0) == []
    assert speed.surface is not None


def test_a_worker_of_several_ranks_is_as_many_engines() -> None:
    """Each rank has a queue and a batch of its own, and was measured by itself."""
    counts = []
    for ranks in (1.0, 4.0):
        one = model()
        one.speed = EngineSpeed(None)
        run = Run(one, prefill=int(12 / ranks), decode=int(16 / ranks), correct=True)
        ranks_per_worker = {
            "prefill_worker_ranks": Value(ranks),
            "decode_worker_ranks": Value(ranks),
        }
        live, itl_ms = 16 * 40_000.0 / 3150.0, 6.0 + 0.12e-3 * 40_000.0
        many = Value(4 * 5400.0)
        for _ in range(4):
            run.slow(
                window(
                    requests=many,
                    concurrency=Value(live),
                    itl_ms=Value(itl_ms),
                    ttft_ms=Value(110.0),
                    **ranks_per_worker,
                )
            )
        assert one.d_correction.factor == pytest.approx(1.0, rel=0.1), "it is as measured"
        counts.append(run.counts)
        run.fast(Load(prefill_backlog_tokens=Value(60_000.0), concurrency=Value(live)))
        counts.append(run.counts)
    slow, fast, slow_of_four, fast_of_four = counts
    assert slow_of_four == tuple(math.ceil(one / 4) for one in slow)
    assert fast_of_four == tuple(math.ceil(one / 4) for one in fast)


def test_ranks_are_those_of_the_workers_of_each_phase() -> None:
    speed = EngineSpeed(None)
    speed.learn(window(prefill_worker_ranks=Value(8.0), decode_worker_ranks=Value(1.0)), 1.0)
    assert (speed.servers("prefill"), speed.servers("decode")) == (8.0, 1.0)
    speed.learn(window(prefill_worker_ranks=Missing("no answer")), 1.0)
    assert speed.servers("prefill") == 8.0
    profiled = EngineSpeed(SURFACE)
    profiled.learn(window(prefill_worker_ranks=Value(8.0)), 1.0)
    assert profiled.by_measurement == frozenset()
    assert profiled.servers("prefill") == 1.0, "a profile is of an engine"


@pytest.mark.parametrize("ranks", [1.0, 4.0])
def test_a_profile_of_an_engine_is_compared_with_all_of_its_ranks(ranks: float) -> None:
    load = 40_000.0 / ranks
    itl_s = SURFACE.decode.itl_ms(40_000.0 / 3150.0, 3150.0) / 1e3
    speed = EngineSpeed(SURFACE)
    speed.learn(
        window(itl_moments=measured(itl_s, 0.0, (load,), 300), decode_worker_ranks=Value(ranks)),
        1.0,
    )
    assert speed.by_measurement == frozenset()
    assert not speed.known.wrong


@pytest.mark.parametrize(
    ("field", "number", "named"),
    [
        ("y", 0.0, "moment seconds of prefill is 0"),
        ("x", -1.0, "moment tokens of prefill is -1"),
        ("xy", float("nan"), "moment token_seconds of prefill is nan"),
        ("xx", float("inf"), "moment tokens_squared of prefill is inf"),
        ("xx", 1.0, "moment tokens_squared of prefill is 1: less than tokens allow"),
    ],
)
def test_sums_that_are_none_are_refused_by_their_moment(
    field: str, number: float, named: str
) -> None:
    speed = EngineSpeed(None)
    remarks = speed.learn(window(prefill_moments=PREFILLS._replace(**{field: number})), 1.0)
    assert any(named in one for one in remarks), remarks
    assert not speed.learnt["prefill"].sums.samples
