"""Policies inside the service: charged with the booking, changed while others wait."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.core.admission.queue import Ticket
from select_service.core.admission.tallies import ClassTally
from select_service.core.pricing.policy import PolicyBook, PolicyClass, RoutingPolicy
from select_service.errors import (
    AdmissionRefused,
    InvalidField,
    NoEligibleWorker,
    QueueFull,
    retry_after,
)
from select_service.types import RouterConfig, Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.admission.gated import (
    change,
    fleet,
    keeper_of,
    refused,
    tally,
    threshold,
)
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of
from tests.sliced import answer_of


def test_a_bucket_is_charged_with_the_booking_and_by_nothing_else() -> None:
    some = fleet(policy="token-bucket", policy_config={"capacity": 100, "refill_rate": 10})
    bucket = keeper_of(some).gate.policy.bucket_of("", 0)  # type: ignore[attr-defined]
    for name in "abcdef":
        some.take(name, 1)
    refusal = refused(some, 1)
    assert (str(refusal), refusal.code, refusal.gate) == (
        "insufficient tokens",
        "insufficient-tokens",
        "policy",
    )
    assert bucket.tokens == 4
    with pytest.raises(NoEligibleWorker):
        some.take("g", 1, allowed_worker_ids=[9])
    assert bucket.tokens == 4
    assert (tally(some).admitted, tally(some).refused) == (6, 2)
    some.now += 1.3
    selection_of(some.take("h", 1))


def test_one_bucket_is_for_all_scopes() -> None:
    some = fleet(policy="token-bucket", policy_config={"capacity": 20, "refill_rate": 1})
    some.worker(2, model_name="m", kv_events_endpoint="tcp://127.0.0.1:5099")
    some.take("a", 1)
    assert refused(some, 1, model_name="m").code == "insufficient-tokens"


def test_tenant_budgets_follow_who_is_on_the_workers() -> None:
    config = {"tenant_budgets": {"abuser": 0.5}, "seats_per_instance": 2}
    some = fleet(policy_config=config)
    wishes: dict[str, Any] = {"slo_class": "sheddable", "fairness_id": "abuser"}
    some.take("a", 1, **wishes)
    some.take("b", 2, **wishes)
    assert refused(some, 3, **wishes).code == "tenant-budget-shed"
    selection_of(some.take("c", 3, slo_class="sheddable", fairness_id="good"))
    some.free("a")
    selection_of(some.take("d", 4, **wishes))
    keeper_of(some).refresh(some.now)
    some.delete(1)
    some.tick(1.0)
    keeper_of(some).refresh(some.now)
    assert keeper_of(some).pool.tenant_in_flight("abuser") == 0


def test_priority_is_another_name_of_the_class() -> None:
    some = fleet(policy="tier-shed")
    some.take("a", 1)
    assert refused(some, 2, priority=-1).body()["knob"] == "threshold"
    selection_of(some.take("b", 2, priority=4))
    assert tally(some, "critical").admitted == 1
    assert tally(some, "batch").refused == 1
    selection_of(some.take("c", 3, priority=99, slo_class="critical"))
    for plain in (some, fleet()):
        with pytest.raises(InvalidField) as caught:
            plain.take("d", 3, priority=4, slo_class="batch")
        assert caught.value.field == "priority"


def test_nobody_claims_more_than_is_allowed() -> None:
    some = fleet(policy="tier-shed", slo_class_max="batch")
    some.take("a", 1, slo_class="background")
    refused(some, 2, slo_class="critical")
    assert tally(some, "batch").refused == 1
    assert some.core.admission_controller.clamped == 1
    with pytest.raises(ValueError, match="no class 'nonsense'"):
        fleet(slo_class_max="nonsense")


def saturated(**settings: Any) -> Fleet:
    """A worker with so much to compute that all bands are closed."""
    some = fleet(policy="slo-shed", prefill_tokens_per_s=1000.0, **settings)
    some.book("load", 1, *range(100), isl=1600)
    return some


def test_slo_shed_lets_wait_in_its_own_queue() -> None:
    some = saturated()
    batch = ticket_of(some.take("b", 1, slo_class="batch"))
    critical = ticket_of(some.take("c", 2, slo_class="critical"))
    assert batch.waiting is not None
    assert some.core.queries.loads()[0].pending_count == 2
    assert some.core.queries.loads()[0].pending_isl_tokens == 32
    some.now += 0.5
    some.free("load")
    answered = [one.reservation_id for one in some.effects.answered]
    assert answered == ["c", "b"], "the more important goes first"
    assert isinstance(critical.answer, Selection)
    assert tally(some, "batch").admitted == 1


def test_slo_shed_tells_at_once_who_waits_for_a_worker_that_is_gone() -> None:
    some = saturated()
    tickets = [ticket_of(some.take(f"r{n}", n + 1, slo_class="batch")) for n in range(3)]
    some.delete(1)
    assert some.effects.answered == tickets
    assert {type(one.answer) for one in tickets} == {NoEligibleWorker}
    counts = tally(some, "batch")
    assert (counts.refused, counts.waiting) == (3, 0)
    assert some.core.partitions[DEFAULT].pending_count == 0


def test_who_cannot_be_in_time_is_promised_no_place() -> None:
    some = saturated()
    late = refused(some, 1, isl=1000, slo_class="batch", slo_ttft_ms=1500)
    assert (late.code, late.promised) == ("infeasible-deadline", True), "once the load has gone"
    never = refused(some, 2, isl=1000, slo_class="batch", slo_ttft_ms=500)
    assert (never.code, never.promised) == ("infeasible-deadline", False), "not even alone"
    assert keeper_of(some).gate.returns.size == 1
    assert retry_after(never) is not None


def test_slo_shed_finds_out_that_engines_are_quick_again() -> None:
    some = fleet(policy="slo-shed", prefill_tokens_per_s=1000.0)

    def life(name: str, seconds: float) -> None:
        some.take(name, 1, isl=1000, slo_ttft_ms=2000)
        some.now += seconds
        some.done(name)
        some.free(name)

    life("slow", 10.0)
    for number in range(60):  # it was one bad moment; nobody else asks
        life(f"quick-{number}", 0.5)
    some.take("a", 1, isl=1000, slo_ttft_ms=2000)
    selection_of(some.take("b", 1, isl=1000, slo_ttft_ms=2000))


def test_slo_shed_lets_in_who_waits_for_long_answers_as_they_end() -> None:
    """No prompt is computed or booked meanwhile: ends alone show that there is room."""
    some = fleet(policy="slo-shed", record={"max_num_seqs": 4})
    for name in "abcd":
        some.take(name, 1)
        some.now += 0.1
        some.done(name)
    some.now += 0.1
    waits = ticket_of(some.take("e", 2, slo_class="critical"))
    assert waits.answer is None
    some.free("a")
    assert isinstance(waits.answer, Selection)


def test_whose_time_is_up_is_known_without_a_look_at_every_scope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 1,000 gates each turn of housekeeping asked all of them, and so did each timer."""
    some = saturated()
    ticket = ticket_of(some.take("c", 2, slo_class="critical", slo_ttft_ms=500))
    with monkeypatch.context() as blind:
        blind.delattr(some.core, "partitions")
        assert some.core.next_deadline() == some.now + 0.5
        some.now += 0.5
        effects = some.core.refuse_late(some.now)
        assert some.core.next_deadline() == math.inf
    some._did(effects)
    assert isinstance(ticket.answer, AdmissionRefused)


def test_another_policy_has_other_deadlines() -> None:
    some = saturated()
    soon = ticket_of(some.take("soon", 2, slo_class="critical", slo_ttft_ms=500))
    gone = ticket_of(some.take("gone", 3, slo_class="critical", slo_ttft_ms=400))
    change(some, "slo-shed", hysteresis=0.5)
    some.core.check()
    assert some.core.next_deadline() <= some.now + 0.4
    assert some.core.waiting_requests.withdraw(gone)
    some.core.check()
    assert some.core.next_deadline() == some.now + 0.5
    change(some, "always-admit")
    some.core.check()
    some.now += 1.0
    some._did(some.core.refuse_late(some.now))
    assert not isinstance(soon.answer, AdmissionRefused), "nothing is late under this policy"
    some.core.check()


def test_another_policy_judges_who_waits_again() -> None:
    some = saturated()
    tickets = [ticket_of(some.take(f"r{n}", n, slo_class="batch")) for n in range(40)]
    change(some, "reject-all")
    assert all(one is not None for one in (tickets[0].answer, tickets[15].answer))
    assert tickets[-1].answer is None, "a turn is bounded"
    assert some.core.waiting_requests.withdraw(tickets.pop())
    some.tick(0.0)
    assert {type(one.answer) for one in tickets} == {AdmissionRefused}
    counts = tally(some, "batch")
    assert (counts.offered, counts.refused, counts.withdrawn, counts.waiting) == (40, 39, 1, 0)
    assert len(some.core.lifecycle.bookings) == 1


def test_a_gate_that_opens_takes_in_who_waits_already() -> None:
    some = Fleet(RouterConfig(queue_threshold=1.0))
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    first, second = ticket_of(some.take("b", 2)), ticket_of(some.take("c", 3))
    change(some, "slo-shed")
    some.core.check()
    assert isinstance(first.answer, Selection), "the policy file's queue is not asked any more"
    assert isinstance(second.answer, Selection)
    assert tally(some) == ClassTally(2, 2, 0, 0, 0, 2)


def test_a_worker_or_threshold_that_changes_refuses_nobody_who_waits() -> None:
    some = Fleet(
        RouterConfig(queue_threshold=1.0),
        admission=AdmissionSettings(
            mode="token-capacity",
            policy="token-bucket",
            policy_config={"capacity": 48, "refill_rate": 1},
        ),
    )
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    tickets = [ticket_of(some.take(name, 2)) for name in "bc"]
    some.patch(1, taints=["t"])
    some.core.admission.change_threshold(threshold(active_decode_blocks_threshold=0.9), some.now)
    assert [one.answer for one in tickets] == [None, None]
    some.done("a")
    assert isinstance(tickets[0].answer, Selection)
    some.done("b")
    assert isinstance(tickets[1].answer, Selection), "it was let in when it came"


def test_those_who_wait_for_prefill_do_not_share_one_allowance() -> None:
    allowance: dict[str, Any] = {"capacity": 40, "refill_rate": 1e-9}
    settings = AdmissionSettings(policy="token-bucket", policy_config=allowance)
    some = Fleet(RouterConfig(queue_threshold=1.0), admission=settings)
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    waits = ticket_of(some.take("b", 2))
    assert refused(some, 3).code == "insufficient-tokens"
    change(some, "token-bucket", capacity=31, refill_rate=1e-9)
    assert refused(some, 3).code == "insufficient-tokens", "it is kept for who is judged again"
    some.done("a")
    assert isinstance(waits.answer, Selection)
    assert refused(some, 3).code == "insufficient-tokens"


def test_who_is_to_be_judged_again_keeps_its_place() -> None:
    some = fleet(record={"max_inflight": 1, "max_queued": 20})
    some.take("a", 1)
    tickets = [ticket_of(some.take(f"r{n}", n)) for n in range(20)]
    change(some, "tier-shed", threshold=1000)
    assert keeper_of(some).displaced, "a turn is bounded"
    assert refused(some, 99).gate == "capacity"
    some.tick(0.0)
    assert not keeper_of(some).displaced
    assert {one.answer for one in tickets} == {None}


def test_a_policy_that_makes_no_sense_changes_nothing() -> None:
    some = fleet(policy="token-bucket")
    for policy, config, field in (
        ("nonsense", {}, "policy"),
        ("token-bucket", {"capacity": -1}, "config"),
        ("token-bucket", {"nonsense": 1}, "config"),
    ):
        with pytest.raises(InvalidField) as caught:
            change(some, policy, **config)
        assert caught.value.field == field
    assert answer_of(some.core.admission.status()).policy == "token-bucket"
    some.take("a", 1)
    assert answer_of(some.core.admission.status()).counters["standard"].admitted == 1
    assert answer_of(some.core.admission.status()).scopes[0].model_name == "default"


def test_a_full_queue_is_a_refusal_like_others() -> None:
    one = PolicyClass(prefill_busy_threshold=8.0, request_queue_limit_per_worker=1)
    policies = PolicyBook(RoutingPolicy((one,)), {})
    some = Fleet(policies=policies, admission=AdmissionSettings(max_inflight=9))
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    ticket_of(some.take("b", 2))
    with pytest.raises(QueueFull) as caught:
        some.take("c", 3)
    assert retry_after(caught.value) is not None
    assert tally(some).refused == 1


def test_one_prompt_that_is_never_computed_does_not_close_the_pool() -> None:
    """Its caller is lost, or its engine hangs; the other computes 10,000 tokens a second."""
    some = fleet(2, policy="slo-shed")
    some.take("hung", 1, isl=4000)
    came: list[bool] = []
    for second in range(90):
        name = f"r{second}"
        try:
            answer = some.take(name, isl=1000, slo_ttft_ms=1500)
        except AdmissionRefused:
            answer = None
        came.append(isinstance(answer, Selection))
        some.now += 0.1
        if isinstance(answer, Ticket):
            some.core.waiting_requests.withdraw(answer)
        elif answer is not None:
            some.done(name)
            some.free(name)
        some.tick(0.9)
    assert all(came), "nobody is thought to be slow for it"
    keeper = keeper_of(some)
    keeper.refresh(some.now)
    assert keeper.pool.prefill_rate == pytest.approx(10_000, rel=0.1)
