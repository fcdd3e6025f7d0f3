"""Every recorded decision of the field's simulator, exactly."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.classes import SloClasses
from select_service.core.admission.gaie_legacy import GaieLegacy, utilization
from select_service.core.admission.policies import KEYS, NAMES, Built, build
from select_service.core.admission.policy_api import AdmissionRequest, AdmissionVerdict
from select_service.core.admission.slo_shed import SloShed
from select_service.core.admission.tenant_budgets import TenantBudgets
from select_service.core.admission.tier_shed import TierShed
from select_service.core.admission.token_bucket import (
    HeldTokens,
    TenantBuckets,
    TokenBucket,
    TokenBucketPolicy,
)
from tests.select_service.core.admission.golden import SIMULATOR
from tests.select_service.core.admission.pools import FixedPool, pool_of

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import AdmissionPolicy

POOL = FixedPool()


def decided(policy: TokenBucketPolicy, tokens: int, t_us: int, **more: Any) -> AdmissionVerdict:
    ask = AdmissionRequest(tokens, **more)
    verdict = policy.judge(ask, POOL, t_us / 1e6)
    if verdict.admitted:
        policy.charge(ask, t_us / 1e6)
    return verdict


@pytest.mark.parametrize("case", SIMULATOR["token_bucket_ctor"])
def test_recorded_token_bucket_refuses_numbers(case: dict[str, Any]) -> None:
    if not case["error"]:
        TokenBucket(case["capacity"], case["refill"])
        return
    with pytest.raises(ValueError) as error:
        TokenBucket(case["capacity"], case["refill"])
    assert str(error.value) == case["error"]


@pytest.mark.parametrize(
    ("value", "printed"),
    [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (-1e21, "-1e+21"), (-2.5, "-2.5")],
)
def test_numbers_are_printed_as_genuine_messages_print_them(value: float, printed: str) -> None:
    with pytest.raises(ValueError, match=rf"a finite value > 0, got {re.escape(printed)}$"):
        TokenBucket(value, 1)


def test_time_that_goes_back_neither_refills_nor_moves() -> None:
    bucket = TokenBucket(10, 1)
    bucket.take(10)
    bucket.refill(5_000_000)
    bucket.refill(1_000_000)
    assert (bucket.tokens, bucket.last_us) == (5.0, 5_000_000)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 3000)), max_size=60))
def test_what_is_refused_costs_nothing(arrivals: list[tuple[int, int]]) -> None:
    policy = TokenBucketPolicy(2000, 500)
    twin = TokenBucketPolicy(2000, 500)
    for t_us, tokens in arrivals:
        if decided(policy, tokens, t_us).admitted:
            assert decided(twin, tokens, t_us).admitted
        else:
            twin.bucket_of("", t_us).refill(t_us)
        assert policy.bucket_of("", t_us).tokens == twin.bucket_of("", t_us).tokens >= 0


def test_tenants_have_their_own_allowance() -> None:
    policy = TokenBucketPolicy(1000, 1, per_tenant=True)
    assert decided(policy, 1000, 0, tenant_id="a").admitted
    assert not decided(policy, 1, 0, tenant_id="a").admitted
    assert decided(policy, 1000, 0, tenant_id="b").admitted


def test_invented_tenants_gain_nothing_and_cost_no_memory() -> None:
    buckets = TenantBuckets(10, 1, tenants_max=3)
    for number in range(100):
        bucket = buckets.of(f"t{number}", 0)
        if bucket.holds(10, 0):
            bucket.take(10)
    assert len(buckets) == 3
    assert buckets.of("t99", 0) is buckets.shared
    assert not buckets.shared.holds(1, 0)
    assert buckets.of("new", 11_000_000) is not buckets.shared, "a full bucket is forgotten"


def test_who_waits_keeps_a_bucket_and_does_not_stop_others_from_being_forgotten() -> None:
    buckets = TenantBuckets(10, 1, tenants_max=3)
    kept = buckets.of("waits", 0)
    held = HeldTokens(kept, 5)
    for number in range(5):
        assert buckets.of(f"t{number}", 0) is not buckets.shared, "the others are full"
    assert buckets.of("waits", 0) is kept
    held.release()
    assert len(buckets) == 3


SHEDS = {
    "tier_shed_thr0_min0": (0, 0),
    "tier_shed_thr0_min3": (0, 3),
    "tier_shed_thr20_min3": (20, 3),
    "tier_shed_thr200_min3": (200, 3),
}


@pytest.mark.parametrize("state", SIMULATOR["slo_aware"], ids=lambda state: state["state"])
def test_recorded_shedding(state: dict[str, Any]) -> None:
    classes = SloClasses()
    pool = pool_of(state["snapshots"])
    assert utilization(pool) == state["utilization_saturation_5_0.8"]
    room = 64 * pool.instances
    in_flight = float(pool.in_flight.sum()) / room if room else 1.0
    assert in_flight == state["concurrency_saturation_64"]
    policies: dict[str, AdmissionPolicy] = {"gaie_legacy_qd5_kv0.8": GaieLegacy(classes)}
    policies |= {name: TierShed(classes, *numbers) for name, numbers in SHEDS.items()}
    for row in state["rows"]:
        assert set(row) == {"class", *policies}
        for name, policy in policies.items():
            verdict = policy.judge(AdmissionRequest(100, row["class"]), pool, 0.0)
            got = {"admitted": verdict.admitted, "reason": verdict.reason}
            assert got == row[name], (name, row["class"])


def test_recorded_tenant_budgets() -> None:
    policy = TenantBudgets(
        SloClasses(),
        build("always-admit").policy,
        {"alice": 0.3, "zero": 0.0},
        seats_per_instance=10,
    )
    for step in SIMULATOR["tenant_budget_capacity10_alice0.3"]:
        count = step["alice_in_flight"]
        for tenant in ("alice", "bob", "zero"):
            assert policy.is_over(tenant, count, 1) == step[f"{tenant}_over"], (tenant, step)


def test_budgets_refuse_sheddable_work_only_and_before_the_inner_policy() -> None:
    pool = FixedPool()
    policy = build(
        "token-bucket", {"capacity": 100, "tenant_budgets": {"a": 0.5}, "max_num_seqs": 2}
    ).policy
    pool.in_flight_by_tenant["a"] = 2
    refused = policy.judge(AdmissionRequest(1000, "batch", "a"), pool, 0.0)
    assert refused.reason == "tenant-budget-shed"
    assert (
        policy.judge(AdmissionRequest(1000, "standard", "a"), pool, 0.0).reason
        == "insufficient tokens"
    )
    pool.in_flight_by_tenant["a"] = 1
    assert policy.judge(AdmissionRequest(100, "batch", "a"), pool, 0.0).admitted


def test_who_is_over_budget_returns_at_the_pace_of_the_tenant_s_share() -> None:
    pool = FixedPool(rate=1_000)
    ask = AdmissionRequest(100, "batch", "a")
    budgets = {"tenant_budgets": {"a": 0.5, "big": 3.0}}
    policy = build("always-admit", budgets).policy
    assert policy.refill(ask, pool) == ("tenant a", 500.0)
    assert policy.refill(AdmissionRequest(100, "batch", "big"), pool) == ("tenant big", 1_000.0)
    assert policy.refill(AdmissionRequest(100, "batch", "b"), pool) == ("", 0.0)
    assert build("gaie-legacy", budgets).policy.refill(ask, pool) == ("pool", 1_000.0)


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("nobody", {}, "unknown policy"),
        ("token-bucket", {"capacty": 1}, "unknown key capacty; known are capacity"),
        ("token-bucket", {"capacity": 0}, "NewTokenBucket: capacity must be a finite value > 0"),
        ("token-bucket", {"capacity": True}, "capacity: must be a finite number"),
        ("token-bucket", {"refill_rate": "1"}, "refill_rate: must be a finite number"),
        ("token-bucket", {"per_tenant": 1}, "per_tenant: must be true or false"),
        ("token-bucket", {"tenants_max": 0}, "tenants_max: must be at least 1"),
        ("tier-shed", {"min_priority": 0.5}, "min_priority: must be a whole number"),
        ("tier-shed", {"threshold": 1, "tier_shed_threshold": 2}, "two names"),
        ("gaie-legacy", {"queue_depth": 0}, "must be above 0"),
        ("always-admit", {"slo_priorities": {"batch": 200}}, "-100..100"),
        ("always-admit", {"slo_priorities": []}, "object of numbers"),
        ("always-admit", {"tenant_budgets": {"a": -1}}, "at least 0"),
        ("slo-shed", {"usage_limit": 0}, "usage_limit"),
        ("slo-shed", {"hysteresis": 0.7}, "hysteresis"),
        ("slo-shed", {"targets_ms": {"batch": 0}}, "target of batch"),
        ("slo-shed", {"quotas": {"batch": -1}}, "quota of batch"),
        ("slo-shed", {"quotas": {"critcal": 1}}, "quotas: no class 'critcal'; known are backgrou"),
        ("slo-shed", {"targets_ms": {"vip": 1}}, "targets_ms: no class 'vip'; known are"),
        ("slo-shed", {"budget_tokens": -1}, "capacity must be"),
    ],
)
def test_bad_configuration_is_refused(name: str, config: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build(name, config)


def test_a_class_that_is_added_may_have_a_quota_and_a_target() -> None:
    config = {"slo_priorities": {"vip": 9}, "quotas": {"vip": 3}, "targets_ms": {"vip": 500}}
    built: Built[object] = build("slo-shed", config)
    assert built.config == config
    assert isinstance(built.policy, SloShed)
    assert built.policy.queue.quota(0) == 3
    assert built.policy.target_s(AdmissionRequest(1, "vip")) == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_builds_from_nothing(name: str) -> None:
    built: Built[object] = build(name)
    assert built.policy.name == name
    assert (built.queue is None) == (name != "slo-shed")
    assert name in KEYS


def test_priorities_are_configured_for_every_policy() -> None:
    policy = build("tier-shed", {"slo_priorities": {"batch": 3}}).policy
    pool = pool_of([{"queue_depth": 10, "batch_size": 4, "in_flight": 14, "kv_utilization": 0.5}])
    outcomes = Counter(
        policy.judge(AdmissionRequest(1, name), pool, 0.0).outcome
        for name in ("batch", "background")
    )
    assert outcomes == {"admit": 1, "refuse": 1}
