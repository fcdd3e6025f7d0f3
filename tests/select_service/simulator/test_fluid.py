"""What the gate promises, seen over whole runs before a pool that computes."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from select_service.simulator.trial_pool import TrialPoolSettings
from tests.select_service.simulator.fluid import MEAN_TOKENS, Fluid

TARGETS = {"critical": 2.0, "standard": 5.0, "batch": 20.0, "background": 60.0}
SMALL = {"quotas": {"critical": 64, "standard": 64, "batch": 32, "background": 16}}
CAPACITY = TrialPoolSettings().ranks * TrialPoolSettings().prefill_tokens_per_s
BUCKET = {"capacity": 4e4, "refill_rate": 0.95 * CAPACITY}
POLICIES = [
    ("slo-shed", SMALL),
    ("gaie-legacy", {}),
    ("tier-shed", {"threshold": 20}),
    ("token-bucket", BUCKET),
    ("token-bucket", BUCKET | {"per_tenant": True}),
]


@pytest.mark.parametrize("load", [1.2, 1.6])
@pytest.mark.parametrize(("policy", "config"), POLICIES, ids=lambda one: str(one)[:24])
def test_who_honours_retry_after_is_let_in(
    policy: str, config: dict[str, object], load: float
) -> None:
    run = Fluid(policy, config, load=load).run()
    again, in_then = run.first_retries()
    assert again > 100 or config.get("per_tenant"), "an overload that refuses nobody tests nothing"
    assert in_then >= 0.9 * again
    assert run.gate.tallies.total().offered == len(run.clients) + again


def test_returns_do_not_come_all_at_once() -> None:
    """In no second do so many return that they alone are more than the pool computes."""
    run = Fluid("gaie-legacy", load=1.6).run()
    by_second: dict[int, int] = {}
    for client in run.clients:
        if client.admitted_try == 2 and client.admitted_at is not None:
            second = int(client.admitted_at)
            by_second[second] = by_second.get(second, 0) + client.ask.tokens
    assert max(by_second.values()) < CAPACITY


@pytest.mark.parametrize("policy", ["slo-shed", "gaie-legacy"])
def test_nobody_is_refused_at_moderate_load(policy: str) -> None:
    run = Fluid(policy, load=0.7, retries=0).run()
    assert not run.refused
    assert min(run.attained(TARGETS).values()) == 1.0


@pytest.mark.parametrize("load", [1.2, 1.6, 2.5])
def test_important_classes_do_not_feel_the_overload(load: float) -> None:
    """Critical and standard alone fit until 3.6 times the load; so they are in time."""
    share = (0.25 * 512 + 0.25 * 512) / MEAN_TOKENS
    assert share * load < 1.0
    run = Fluid("slo-shed", SMALL, load=load, retries=0).run()
    attained = run.attained(TARGETS)
    assert attained["critical"] >= 0.99
    assert attained["standard"] >= 0.99
    assert {name for _, name, _, _ in run.refused} <= {"batch", "background"}


TIGHT = {"critical": 0.5, "standard": 1.0, "batch": 30.0, "background": 60.0}


@pytest.mark.parametrize("are_own", [False, True], ids=["of-classes", "of-requests"])
def test_tight_targets_are_kept_without_a_flag(are_own: bool) -> None:
    """What saturates a rank follows the targets, be they the classes' or the requests' own."""
    config = SMALL | ({} if are_own else {"targets_ms": {k: s * 1e3 for k, s in TIGHT.items()}})
    own = TIGHT if are_own else {}
    run = Fluid("slo-shed", config, load=1.6, retries=0, own_targets_s=own).run()
    attained = run.attained(TIGHT)
    assert attained["critical"] >= 0.99
    assert attained["standard"] >= 0.95
    assert attained["batch"] > 0.3


def test_one_who_claims_an_impossible_target_does_not_close_the_pool() -> None:
    own = dict.fromkeys(TARGETS, 1e-6)
    run = Fluid("slo-shed", SMALL, load=0.7, retries=0, own_targets_s=own).run()
    assert run.gate.queue is not None
    assert run.gate.queue.target_ttft_s == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", [1.6, 4.0])
def test_no_critical_is_refused_beside_an_admitted_sheddable(load: float, seed: int) -> None:
    run = Fluid("slo-shed", SMALL, load=load, seed=seed, retries=1, seconds=15).run()
    sheddable = [when for when, name in run.admitted if name in {"batch", "background"}]
    assert sheddable == sorted(sheddable) != []
    for when, name, _, _ in run.refused:
        if name == "critical":
            later = sheddable[bisect_left(sheddable, when - 0.1) :]
            assert not later or later[0] > when


@pytest.mark.parametrize("seed", range(3))
def test_no_class_starves_while_there_is_room_for_it(seed: int) -> None:
    run = Fluid("slo-shed", SMALL, load=1.2, seed=seed, retries=0).run()
    for name, tally in run.gate.tallies.of.items():
        assert tally.admitted >= 0.3 * tally.offered, name


def test_the_measured_rate_is_the_real_one() -> None:
    run = Fluid("slo-shed", load=1.6).run()
    assert run.pool.prefill_rate == pytest.approx(run.settings.prefill_tokens_per_s, rel=0.05)
