"""Promises, allowances and turns, as they were found by breaking them."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.admission.queue import Ticket
from select_service.errors import AdmissionRefused, InvalidField, InvalidRequest
from select_service.types import RouterConfig, Selection
from select_service.types.admission import AdmissionChange, AdmissionSettings, BusyThresholdChange
from tests.select_service.core.admission.gated import fleet, keeper_of, refused, tally
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of
from tests.sliced import put_in_force


@pytest.mark.parametrize("slo_class", ["standard", "batch"])
def test_n_and_q_are_exact_where_the_policy_has_a_queue_too(slo_class: str) -> None:
    some = fleet(1, {"max_inflight": 2, "max_queued": 2}, policy="slo-shed")
    answers = [some.take(f"r{i}", i + 1, slo_class=slo_class) for i in range(4)]
    assert [isinstance(one, Ticket) for one in answers] == [False, False, True, True]
    assert refused(some, 9, slo_class=slo_class).code == "workers-at-capacity"
    some.free("r0")
    assert [ticket_of(one).answer is None for one in answers[2:]] == [False, True]
    ticket_of(some.take("next", 10, slo_class=slo_class))
    assert refused(some, 11, slo_class=slo_class).code == "workers-at-capacity"


def test_who_was_told_to_come_waits_for_a_full_worker_and_is_one_of_q() -> None:
    some = fleet(
        1,
        {"max_inflight": 1, "max_queued": 1},
        policy="token-bucket",
        policy_config={"capacity": 100, "refill_rate": 10},
    )
    some.take("first", 1, isl=90)
    some.free("first")
    refusal = refused(some, 2, isl=90, fairness_id="x")
    assert refusal.promised
    some.now += refusal.retry_after_s
    selection_of(some.take("between", 3, isl=80))  # takes the worker and what the bucket had
    back = ticket_of(some.take(None, 2, isl=90, fairness_id="x"))
    assert refused(some, 4, isl=1).code == "workers-at-capacity"
    some.free("between")
    assert selection_of(back.answer).isl_tokens == 90


def test_promises_do_not_go_beyond_n_and_q() -> None:
    some = fleet(
        1,
        {"max_inflight": 1, "max_queued": 0},
        policy="token-bucket",
        policy_config={"capacity": 100, "refill_rate": 10},
    )
    some.take("first", 1, isl=90)
    some.free("first")
    refusal = refused(some, 2, isl=90)
    some.now += refusal.retry_after_s
    some.take("between", 3, isl=80)
    assert refused(some, 2, isl=90).code == "workers-at-capacity"


@pytest.mark.parametrize("before", [True, False])
def test_a_class_that_comes_or_goes_takes_nobody_who_waits_with_it(*, before: bool) -> None:
    """What was offered as one class does not end as another."""
    gold: dict[str, Any] = {"slo_priorities": {"gold": 7}}
    some = fleet(1, {"max_inflight": 1}, policy_config=gold if before else {})
    some.take("first", 1)
    waits = [ticket_of(some.take("early", 2, slo_class="gold"))]
    change = AdmissionChange(policy="always-admit", config={} if before else gold)
    put_in_force(some.core, change, some.now)
    waits.append(ticket_of(some.take("late", 3, slo_class="gold")))
    for one in ("first", "early", "late"):
        keeper_of(some).check()
        some.free(one)
    keeper_of(some).check()
    assert all(isinstance(one.answer, Selection) for one in waits)
    assert tally(some, "gold").admitted == 1


def test_limits_of_promises_outlive_a_change_of_classes() -> None:
    some = fleet(policy="slo-shed", return_slots_max=1)
    config = {"slo_priorities": {"gold": 7}}
    put_in_force(some.core, AdmissionChange(policy="slo-shed", config=config), some.now)
    some.book("load", 1, *range(10), isl=16_000)
    hopeless = [refused(some, i, slo_ttft_ms=10) for i in (1, 2)]
    assert [one.promised for one in hopeless] == [True, False]


def test_promises_of_one_allowance_for_all_end_with_it() -> None:
    some = fleet(policy="token-bucket")
    some.worker(2, tenant_id="other")
    put_in_force(some.core, AdmissionChange(policy="slo-shed"), some.now)
    keepers = [one.admission for one in some.core.partitions.values()]
    assert len({id(one.gate.returns) for one in keepers if one is not None}) == 2


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("token-bucket", {"capacity": 10**400}),
        ("tier-shed", {"threshold": 10**400}),
        ("slo-shed", {"quotas": {"batch": 10**400}}),
        ("slo-shed", {"output_weight": 1e300}),
        ("always-admit", {"tenant_budgets": {"a": 10**400}}),
    ],
)
def test_numbers_too_large_to_count_with_are_refused_by_name(
    policy: str, config: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField):
        put_in_force(fleet().core, AdmissionChange(policy=policy, config=config), 1.0)


def test_a_threshold_too_large_to_count_with_is_out_of_range() -> None:
    change = BusyThresholdChange(model="default", active_prefill_tokens_threshold=10**400)
    with pytest.raises(InvalidRequest):
        fleet(mode="token-capacity").core.admission.change_threshold(change, 1.0)


def test_a_crowd_is_let_in_a_bounded_number_at_a_time() -> None:
    some = fleet(1, {"max_inflight": 1, "max_queued": 100})
    some.take("first", 1)
    crowd = [ticket_of(some.select(i)) for i in range(2, 42)]
    some.free("first")
    at_once = sum(one.answer is not None for one in crowd)
    assert at_once == some.core.limits.let_in_per_turn_max
    assert some.effects.more
    some.tick(0.0)
    assert all(isinstance(one.answer, Selection) for one in crowd)


def test_n_holds_for_those_who_waited_for_prefill() -> None:
    some = Fleet(RouterConfig(queue_threshold=1.0), admission=AdmissionSettings())
    some.worker(1, max_inflight=2, max_num_batched_tokens=16)
    some.take("first", 1, 2, 3)
    waits = [ticket_of(some.take(f"r{i}", 10 + i)) for i in range(3)]
    some.done("first")
    assert [one.answer is None for one in waits] == [False, True, True]
    assert some.load(1) is not None
    assert some.core.partitions[DEFAULT].ledger.loads.requests.sum() == 2


def test_the_sheddable_give_up_their_places_to_wait_to_who_is_more_important() -> None:
    """N + Q is exact, and yet nobody below is let in while somebody above is refused."""
    some = fleet(1, {"max_inflight": 1, "max_queued": 2}, policy="slo-shed")
    some.take("first", 1)
    first = ticket_of(some.take("b1", 2, slo_class="batch"))
    second = ticket_of(some.take("b2", 3, slo_class="background"))
    assert refused(some, 4, slo_class="background").code == "workers-at-capacity"
    ticket_of(some.take("c1", 5, slo_class="critical"))
    assert some.effects.answered == [second]
    assert isinstance(second.answer, AdmissionRefused)
    assert (second.answer.code, second.answer.status) == ("outranked", 503)
    ticket_of(some.take("s1", 6, slo_class="standard"))
    assert isinstance(first.answer, AdmissionRefused)
    for slo_class in ("critical", "standard", "batch"):  # who is not sheddable does not give way
        assert refused(some, 7, slo_class=slo_class).code == "workers-at-capacity"
    keeper_of(some).check()
    assert tally(some, "batch").refused == 2


def test_nobody_gives_way_for_a_worker_it_does_not_wait_for() -> None:
    some = fleet(2, {"max_inflight": 1, "max_queued": 1}, policy="slo-shed")
    for worker_id in (1, 2):
        some.take(f"first{worker_id}", worker_id, allowed_worker_ids=[worker_id])
    waits = ticket_of(some.take("b", 3, slo_class="batch", allowed_worker_ids=[1]))
    ticket_of(some.take("s", 4, allowed_worker_ids=[2]))
    code = refused(some, 5, slo_class="critical", allowed_worker_ids=[2]).code
    assert code == "workers-at-capacity"
    assert waits.answer is None


def test_nobody_gives_way_to_a_request_that_is_refused_all_the_same() -> None:
    some = fleet(
        1,
        {"max_inflight": 1, "max_queued": 1},
        policy="slo-shed",
        policy_config={"feasibility_critical": True},
    )
    some.take("first", 1)
    waits = ticket_of(some.take("b", 2, slo_class="batch"))
    hopeless = refused(some, 3, isl=1_000_000, slo_class="critical")
    assert (hopeless.code, waits.answer) == ("workers-at-capacity", None)
