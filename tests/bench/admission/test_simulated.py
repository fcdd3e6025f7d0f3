"""The play under a fake clock: what it says of the policies, and that nobody gets lost in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.admission.capacity import Capacity
from bench.admission.contender import Contender
from bench.admission.measures import Result
from bench.admission.play import Script
from bench.admission.policies import contenders
from bench.admission.simulated import Simulated, simulate
from bench.admission.workload import read_workload

SCRIPT = Script(read_workload("four-class"), rate=0.0, seconds=20.0)
CAPACITY = Capacity(57.0, 57.0 * SCRIPT.workload.mean_tokens, 161)
NAMES = [one.name for one in contenders(SCRIPT, CAPACITY)]


def play(name: str, load: float, seconds: float = 20.0) -> Result:
    script = replace(SCRIPT, rate=load * CAPACITY.rate, seconds=seconds)
    one = next(one for one in contenders(SCRIPT, CAPACITY) if one.name == name)
    return simulate(script, one)


@pytest.mark.parametrize("name", NAMES)
def test_outcomes_add_up(name: str) -> None:
    result = play(name, 1.6, seconds=8.0)
    assert sum(result.outcomes.values()) == result.offered > 500
    assert sum(one.offered for one in result.tenants.values()) == result.offered
    in_time = sum(one.in_time for one in result.classes.values())
    assert in_time == sum(
        count for outcome, count in result.outcomes.items() if outcome.startswith("in-time")
    )
    assert "failed" not in result.outcomes


def test_nobody_is_refused_by_slo_shed_below_capacity() -> None:
    result = play("slo-shed", 0.8)
    assert result.reasons == {}
    assert result.attained == 1.0


@pytest.mark.parametrize("load", [1.2, 1.6])
def test_slo_shed_keeps_what_it_promises_where_letting_everybody_in_fails(load: float) -> None:
    ours, everybody, field = (
        play(one, load) for one in ("slo-shed", "always-admit", "gaie-legacy")
    )
    assert everybody.classes["critical"].attained < 0.5
    assert ours.classes["critical"].attained >= 0.99
    assert ours.classes["standard"].attained >= 0.99
    assert ours.goodput >= 0.95 * field.goodput
    assert ours.inversions == 0
    assert ours.first_retry is None or ours.first_retry >= 0.9


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "rate"), [("decode-bound", 77.0), ("prefill-bound", 24.5)])
def test_slo_shed_keeps_narrow_targets_with_its_defaults(name: str, rate: float) -> None:
    """At 1.6 times what the pool can compute; the whole table: `bench.admission.overload`."""
    script = Script(read_workload(name), rate=1.6 * rate, seconds=20.0, warm_up_s=20.0, tail_s=5.0)
    result = simulate(script, Contender("slo-shed", "slo-shed", {}))
    assert result.classes["critical"].attained >= 0.99
    assert result.classes["standard"].attained >= 0.95
    assert result.inversions == 0
    assert result.first_retry is None or result.first_retry >= 0.9


def test_who_comes_back_after_minutes_of_overload_finds_a_place() -> None:
    """What cannot be promised soon is promised late, and not given a time when it is refused."""
    script = Script(
        read_workload("prefill-bound"), rate=1.6 * 24.5, seconds=240.0, warm_up_s=0.0, tail_s=60.0
    )
    result = simulate(script, Contender("slo-shed", "slo-shed", {}))
    assert result.told_later > 1000
    assert result.first_retries >= 10
    assert result.first_retry is not None
    assert result.first_retry >= 0.9


def test_reject_all_is_what_it_says() -> None:
    result = play("reject-all", 0.8, seconds=5.0)
    assert result.attained == 0.0
    assert result.first_retry == 0.0
    assert set(result.outcomes) == {"refused:reject-all"}


def test_who_never_fits_does_not_come_again() -> None:
    config = {"capacity": 1.0, "refill_rate": 1.0}
    result = Simulated(replace(SCRIPT, rate=10.0, seconds=2.0), "token-bucket", config).run()
    assert set(result.outcomes) == {"refused:exceeds-capacity"}
    assert result.first_retries == 0
