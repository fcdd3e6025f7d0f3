from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.capacity import WorkerCaps
from select_service.core.admission.classes import SloClasses
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.slo_shed import SloShed
from select_service.core.admission.slo_shed_settings import SloShedSettings
from tests.select_service.core.admission.golden import SIMULATOR
from tests.select_service.core.admission.pools import FixedPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.core.admission.fair_queue import Waiting

CLASSES = SloClasses()
SHEDDABLE = ("batch", "sheddable", "background")


def policy_of(**settings: Any) -> SloShed[str]:
    return SloShed(CLASSES, SloShedSettings(**settings))


def next_of(policy: SloShed[str], pool: FixedPool) -> Waiting[str] | None:
    return next(policy.may_go(pool, 1), None)


def outcomes(policy: SloShed[str], pool: FixedPool, names: Iterable[str]) -> list[str]:
    return [policy.judge(AdmissionRequest(100, name), pool, 0.0).outcome for name in names]


QUEUES = {case["name"]: case for case in SIMULATOR["gateway_queue"]}


@pytest.mark.parametrize("name", [name for name, case in QUEUES.items() if not case["max_depth"]])
def test_the_recorded_queue_of_a_gateway(name: str) -> None:
    """Bands, their room and ceilings are the field's; of its tenants the oldest goes first: one."""
    case = QUEUES[name]
    assert (case["fairness"], case["queue_shedding"]) == ("global-strict", False)
    room = case["per_band_capacity"] or 100
    policy = policy_of(
        usage_limit=case["usage_limit_threshold"],
        hysteresis=0.0,
        targets_s={},
        quotas=dict.fromkeys(CLASSES.names, room),
    )
    for number, step in enumerate(case["log"]):
        if step["op"] == "enqueue":
            ask = AdmissionRequest(100, step["class"])
            verdict = policy.judge(ask, FixedPool(1.0), 0.0)
            assert verdict.outcome == ("wait" if step["outcome"] == "Enqueued" else "refuse"), step
            if verdict.outcome == "wait":
                policy.enqueue(ask, step["id"], number * 1e-6)
        else:
            one = next_of(policy, FixedPool(step["saturation"]))
            assert (one.item if one else "") == step["id"], step
            if one is not None:
                policy.serve(one, 0.0)
        policy.check()


def test_the_recorded_queue_that_all_share() -> None:
    """Ours has room of its own for each band; what all share are the places Q of the workers."""
    (case,) = (case for case in QUEUES.values() if case["max_depth"])
    caps = WorkerCaps()
    caps.attach(1, [0], 1, case["max_depth"])
    caps.note(1, 1)
    for step in case["log"]:
        taken = caps.take_place(slice(0, 1))
        assert (taken is not None) == (step["outcome"] == "Enqueued"), step


@pytest.mark.parametrize(
    ("saturation", "waits"),
    [(0.59, 0), (0.6, 1), (0.7, 2), (0.8, 3), (0.9, 4), (0.99, 4), (1.0, 5), (9.0, 5)],
)
def test_bands_close_from_below(saturation: float, waits: int) -> None:
    got = outcomes(policy_of(), FixedPool(saturation), CLASSES.names)
    assert got == ["admit"] * (5 - waits) + ["wait"] * waits


def test_a_band_without_room_to_wait_is_shed() -> None:
    policy = policy_of(quotas={"batch": 0})
    verdict = policy.judge(AdmissionRequest(100, "batch"), FixedPool(0.85), 0.0)
    assert (verdict.outcome, verdict.code) == ("refuse", "saturated")
    assert verdict.facts == {"saturation": 0.85, "limit": policy.ceilings[2]}


def test_critical_requests_without_room_to_wait_are_not_refused_for_saturation() -> None:
    """They never are; that they have no room is what somebody has set."""
    policy = policy_of(quotas={"critical": 0})
    assert policy.judge(AdmissionRequest(100, "critical"), FixedPool(0.99), 0.0).admitted
    verdict = policy.judge(AdmissionRequest(100, "critical"), FixedPool(1.0), 0.0)
    assert (verdict.outcome, verdict.code) == ("refuse", "band-full")
    assert verdict.facts == {"waiting": 0, "limit": 0, "saturation": 1.0}


def test_nobody_passes_who_waits_above_or_in_the_same_band() -> None:
    policy = policy_of()
    policy.enqueue(AdmissionRequest(100, "standard"), "s", 0.0)
    idle = FixedPool(0.0)
    assert outcomes(policy, idle, ["critical", "standard", "batch"]) == ["admit", "wait", "wait"]
    one = next_of(policy, idle)
    assert one is not None
    assert one.item == "s"
    policy.serve(one, 0.0)
    assert outcomes(policy, idle, ["batch"]) == ["admit"]


def test_a_tenant_with_its_share_is_told_that_and_alone_it_has_all_of_the_quota() -> None:
    policy = policy_of(quotas={"batch": 10})
    pool = FixedPool(2.0)
    for number in range(8):
        asked = AdmissionRequest(100, "batch", "most")
        assert policy.judge(asked, pool, 0.0).outcome == "wait", "nobody else waits"
        policy.enqueue(asked, str(number), 0.0)
    policy.enqueue(AdmissionRequest(100, "batch", "few"), "few", 0.0)
    verdict = policy.judge(AdmissionRequest(100, "batch", "most"), pool, 0.0)
    assert (verdict.outcome, verdict.code) == ("refuse", "band-full")
    assert verdict.facts == {"waiting": 8, "limit": 4, "saturation": 2.0}
    assert policy.judge(AdmissionRequest(100, "batch", "few"), pool, 0.0).outcome == "wait"


def test_hysteresis() -> None:
    policy = policy_of()
    pool = FixedPool(0.79)
    assert outcomes(policy, pool, ["batch"]) == ["admit"]
    pool.level = 0.8
    assert outcomes(policy, pool, ["batch"]) == ["wait"]
    pool.level = 0.76
    assert outcomes(policy, pool, ["batch"]) == ["wait"], "not open before 0.75"
    pool.level = 0.7499
    assert outcomes(policy, pool, ["batch"]) == ["admit"]
    pool.level = 0.79
    assert outcomes(policy, pool, ["batch"]) == ["admit"]
    assert policy.flaps == [0, 0, 1, 0, 0]


@given(st.lists(st.floats(0.7501, 0.7999), max_size=50), st.booleans())
def test_saturation_that_swings_inside_the_margin_closes_and_opens_nothing(
    levels: list[float], begins_open: bool
) -> None:
    policy = policy_of()
    pool = FixedPool(0.0 if begins_open else 0.9)
    outcomes(policy, pool, ["batch"])
    flaps = policy.flaps[2]
    for level in levels:
        pool.level = level
        assert outcomes(policy, pool, ["batch"]) == ["admit" if begins_open else "wait"]
    assert policy.flaps[2] == flaps


def test_the_hopeless_are_refused_early_but_not_the_critical() -> None:
    policy = policy_of()
    pool = FixedPool(0.0, backlog=6_500, rate=1_000)
    verdict = policy.judge(AdmissionRequest(100, "standard"), pool, 0.0)
    assert (verdict.outcome, verdict.code) == ("refuse", "infeasible-deadline")
    assert verdict.facts == {"predicted_ttft_s": 6.6, "limit": 6.0}
    assert verdict.retry_in_s == pytest.approx(0.6)
    assert outcomes(policy, pool, ["critical", "batch"]) == ["admit", "admit"]
    asks = policy.judge(AdmissionRequest(100, "batch", target_s=5.0), pool, 0.0)
    assert asks.code == "infeasible-deadline", "a request's own target goes first"
    strict = policy_of(feasibility_critical=True)
    assert outcomes(strict, pool, ["critical"]) == ["refuse"]
    assert outcomes(policy_of(feasibility_slack=0.0), pool, ["standard"]) == ["admit"]


def test_who_would_be_late_alone_is_told_that_time_does_not_help() -> None:
    policy, pool = policy_of(), FixedPool(0.0, backlog=6_500, rate=1_000)
    assert policy.judge(AdmissionRequest(6_000, "standard"), pool, 0.0).retry_in_s == pytest.approx(
        6.5
    )
    assert policy.judge(AdmissionRequest(6_001, "standard"), pool, 0.0).retry_in_s == math.inf


def test_an_idle_pool_takes_who_would_be_late_by_what_was_measured_last() -> None:
    """Were it refused nothing would ever be measured again, and it refused for ever."""
    policy, pool = policy_of(), FixedPool(0.0, rate=100)
    late = AdmissionRequest(1_000, "standard")
    assert policy.judge(late, pool, 0.0).outcome == "admit"
    pool.prefill_backlog = 1.0
    assert policy.judge(late, pool, 0.0).code == "infeasible-deadline", "one measures"
    pool.prefill_backlog, pool.level = 0.0, 2.0
    policy.enqueue(AdmissionRequest(1, "critical"), "c", 0.0)
    assert policy.judge(late, pool, 0.0).code == "infeasible-deadline", "others are first"


def test_only_equal_or_more_important_work_makes_hopeless() -> None:
    policy = policy_of()
    pool = FixedPool(2.0, backlog=0, rate=1_000)
    policy.enqueue(AdmissionRequest(50_000, "batch"), "b", 0.0)
    assert outcomes(policy, pool, ["standard", "batch"]) == ["wait", "refuse"]


def test_what_goes_on_coming_above_makes_hopeless_too() -> None:
    """10 000 tokens wait; at 1000 a second that is 10 s, if nobody more important came."""
    policy = policy_of()
    pool = FixedPool(0.0, rate=1_000)
    ask = AdmissionRequest(1, "batch", target_s=15.0)
    above = AdmissionRequest(750, "standard")
    for second in range(60):
        policy.charge(above, float(second))
    pool.level = 2.0
    policy.enqueue(AdmissionRequest(10_000, "batch"), "b", 60.0)
    verdict = policy.judge(ask, pool, 60.0)
    assert verdict.code == "infeasible-deadline"
    assert verdict.facts is not None
    assert verdict.facts["predicted_ttft_s"] == pytest.approx(10_000 / 250, rel=0.2)
    assert policy.judge(ask, pool, 300.0).outcome == "wait", "nobody has come for long"


def test_who_sends_little_is_not_refused_for_what_another_tenant_sends() -> None:
    policy = policy_of()
    pool = FixedPool(2.0, rate=1_000)
    for number in range(30):
        policy.enqueue(AdmissionRequest(1_000, "batch", "mallory"), str(number), 0.0)
    assert (
        policy.judge(AdmissionRequest(1_000, "batch", "mallory"), pool, 0.0).code
        == "infeasible-deadline"
    )
    assert policy.judge(AdmissionRequest(1_000, "batch", "carol"), pool, 0.0).outcome == "wait"
    carol = policy.enqueue(AdmissionRequest(1_000, "batch", "carol"), "c", 0.0)
    assert [one.item for one in policy.may_go(FixedPool(0.0), 40)].index("c") == 30
    first = next_of(policy, FixedPool(0.0))
    assert first is not None
    policy.serve(first, 0.0)
    assert next_of(policy, FixedPool(0.0)) is carol


def test_who_can_be_refused_early_does_not_wait_until_it_must_be_late() -> None:
    policy = policy_of()
    pool = FixedPool(2.0, backlog=2_000, rate=1_000)
    for name, waits_s in (("critical", 2.0), ("standard", 5.0 - 2.1), ("batch", 20.0 - 2.1)):
        ask = AdmissionRequest(100, name)
        policy.judge(ask, pool, 0.0)
        assert policy.enqueue(ask, name, 0.0).deadline == pytest.approx(waits_s)
    ask = AdmissionRequest(100, "batch", target_s=3.0)
    policy.judge(ask, pool, 0.0)
    assert policy.enqueue(ask, "", 0.0).deadline == 1.5, "half of it in any case"


def test_who_was_told_to_come_goes_before_newcomers_that_may_be_shed() -> None:
    policy = policy_of(quotas={"critical": 1})
    names = ("background", "batch", "standard", "critical")
    for name in names:
        policy.enqueue(AdmissionRequest(1, name), name, 0.0)
    for name in names:
        policy.enqueue(AdmissionRequest(1, name), f"{name}, promised", 0.0, is_promised=True)
    assert policy.judge(AdmissionRequest(1, "critical"), FixedPool(2.0), 0.0).code == "band-full"
    order = [one.item for one in policy.may_go(FixedPool(0.0), 9)]
    assert order == [
        "critical, promised",
        "critical",
        "standard, promised",
        "standard",
        "background, promised",  # who came first
        "batch, promised",
        "batch",
        "background",
    ]
    assert len(list(policy.may_go(FixedPool(0.85), 9))) == 6, "as open as the band above"
    assert policy.flaps == [1, 0, 1, 0, 0]
    assert policy.work_ahead(1) == 4
    assert policy.work_ahead(2) == 7
    policy.check()


def test_nobody_is_hopeless_while_the_rate_is_unknown() -> None:
    assert outcomes(policy_of(), FixedPool(0.0, backlog=10**9), ["batch"]) == ["admit"]


def test_over_budget_drops_a_band_instead_of_being_refused() -> None:
    policy = policy_of(budget_tokens=100, budget_tokens_per_s=10)
    pool = FixedPool(0.85)
    ask = AdmissionRequest(100, "standard", "a")
    assert policy.judge(ask, pool, 0.0).admitted
    policy.charge(ask, 0.0)
    assert policy.judge(ask, pool, 0.0).outcome == "wait", "judged as batch now"
    assert policy.judge(AdmissionRequest(100, "standard", "b"), pool, 0.0).admitted
    assert policy.judge(AdmissionRequest(100, "critical", "a"), pool, 0.0).admitted, (
        "a budget per class"
    )
    assert policy.judge(ask, pool, 10.0).admitted


def test_what_waits_in_vain_gets_its_budget_back() -> None:
    policy = policy_of(budget_tokens=100, budget_tokens_per_s=1e-9)
    pool = FixedPool(2.0)
    ask = AdmissionRequest(100, "standard", "a")
    left = policy.enqueue(ask, "left", 0.0)
    assert policy.judge(ask, FixedPool(0.85), 0.0).outcome == "wait"
    assert policy.withdraw(left, 0.0)
    assert not policy.withdraw(left, 0.0)
    late = policy.enqueue(ask, "late", 0.0)
    assert late.band == 1, "the budget is there again"
    assert [one.item for one in policy.expired(5.0, 9)] == ["late"]
    assert policy.enqueue(ask, "again", 5.0).band == 1
    assert policy.queue.counter(1, "a") == 0, "nothing was served, nothing is charged"
    assert next_of(policy, pool) is None


def test_waiting_ends_with_the_target() -> None:
    policy = policy_of()
    policy.enqueue(AdmissionRequest(1, "standard"), "s", 1.0)
    policy.enqueue(AdmissionRequest(1, "batch", target_s=0.5), "b", 1.0)
    assert policy.next_expiry() == 1.5
    assert [one.item for one in policy.expired(1.5, 9)] == ["b"]
    assert policy.next_expiry() == 6.0


def test_who_cannot_go_lets_others_try() -> None:
    policy = policy_of()
    for name, slo_class in (("b", "batch"), ("s1", "standard"), ("s2", "standard")):
        policy.enqueue(AdmissionRequest(10, slo_class, name), name, 0.0)
    assert [one.item for one in policy.may_go(FixedPool(0.0), 9)] == ["s1", "s2", "b"]
    assert [one.item for one in policy.may_go(FixedPool(0.0), 2)] == ["s1", "s2"]
    assert [one.item for one in policy.may_go(FixedPool(0.85), 9)] == ["s1", "s2"]
    assert [one.item for one in policy.may_go(FixedPool(0.95), 9)] == []


# -- what it promises, whatever comes --------------------------------------------------------------

arrivals = st.lists(
    st.tuples(
        st.sampled_from([*CLASSES.names, ""]),
        st.sampled_from("abc"),
        st.integers(0, 2000),
        st.floats(0.0, 0.08),
        st.sampled_from([0.0, 0.55, 0.65, 0.75, 0.85, 0.95, 1.0, 3.0]),
    ),
    max_size=120,
)
QUOTAS = dict.fromkeys(CLASSES.names, 4)


@given(arrivals)
def test_promises(steps: list[tuple[str, str, int, float, float]]) -> None:
    """Conservation, own room, no inversion, strict bands, and nothing for nothing."""
    policy = policy_of(quotas=QUOTAS, targets_s={"critical": 1.0, "standard": 0.3})
    pool = FixedPool()
    now = 0.0
    admitted = refused = 0
    sheddable_at = -1.0  # when one was let in last
    criticals: list[float] = []  # when they arrived
    served: dict[str, int] = {}

    def let_in(name: str, cost: int) -> None:
        nonlocal admitted, sheddable_at
        admitted += 1
        served[name] = served.get(name, 0) + cost
        lines = range(policy.line_of(CLASSES.band(name)))
        assert all(not policy.queue.size(line) for line in lines)
        if name in SHEDDABLE:
            sheddable_at = now

    for offered, (name, tenant, tokens, gap, level) in enumerate(steps, 1):
        now += gap
        pool.level = level
        refused += len(policy.expired(now, 99))
        while (one := next_of(policy, pool)) is not None:
            policy.serve(one, now)
            let_in(one.item, one.cost)
        ask = AdmissionRequest(tokens, name, tenant)
        band = CLASSES.band(name)
        if band == 0:
            criticals.append(now)
        line = policy.line_of(band)
        waiting = policy.queue.size(line)
        counters = {one: policy.queue.counter(line, one) for one in "abc"}
        verdict = policy.judge(ask, pool, now)
        assert {one: policy.queue.counter(line, one) for one in "abc"} == counters, "only looks"
        if verdict.outcome == "admit":
            policy.charge(ask, now)
            let_in(name, policy.cost(ask))
        elif verdict.outcome == "wait":
            policy.enqueue(ask, name, now)
        else:
            refused += 1
            assert verdict.code == "band-full"
            assert waiting == 4, "its room is its own"
            if band == 0:
                lately = sum(at >= now - 0.1 for at in criticals)
                assert sheddable_at < now - 0.1 or lately > 4, "an inversion"
        policy.check()
        assert offered == admitted + refused + len(policy.queue)


@given(arrivals)
def test_whoever_waits_is_served_once_load_is_gone(
    steps: list[tuple[str, str, int, float, float]],
) -> None:
    policy = policy_of(quotas=QUOTAS)
    waiting = 0
    for name, tenant, tokens, _, _ in steps:
        ask = AdmissionRequest(tokens, name, tenant)
        if policy.judge(ask, FixedPool(2.0), 0.0).outcome == "wait":
            policy.enqueue(ask, name, 0.0)
            waiting += 1
    served = []
    while (one := next_of(policy, FixedPool(0.0))) is not None:
        policy.serve(one, 0.0)
        served.append(one.band)
    assert len(served) == waiting
    assert served == sorted(served), "band by band"
