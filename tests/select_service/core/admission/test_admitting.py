"""The gate inside the service: judged and booked in one step, and everybody is accounted for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.core.admission.admitting import DEADLINE_S
from select_service.core.admission.asks import Ask, Pool, Verdict
from select_service.core.admission.gatekeeping import Gatekeeper
from select_service.core.admission.queue import Ticket
from select_service.core.admission.tallies import ClassTally
from select_service.core.pricing.policy import PolicyBook, PolicyClass, RoutingPolicy
from select_service.errors import (
    AdmissionControlOff,
    AdmissionRefused,
    InvalidField,
    InvalidRequest,
    ModelNotFound,
    NoEligibleWorker,
    QueueFull,
    ServiceError,
    retry_after,
)
from select_service.types import (
    Answer,
    CacheThreshold,
    PinnedWorker,
    RouterConfig,
    Selection,
)
from select_service.types.admission import (
    AdmissionChange,
    AdmissionSettings,
    BusyThresholdChange,
    RankMetrics,
    WorkerMetrics,
)
from tests.select_service.core.admission.golden import BUSY, CASES
from tests.select_service.core.whole_fleet import DEFAULT, Fleet


def fleet(workers: int = 1, record: dict[str, Any] | None = None, **settings: Any) -> Fleet:
    """Some workers behind a gate."""
    made = Fleet(admission=AdmissionSettings(**settings))
    for worker_id in range(1, workers + 1):
        made.worker(worker_id, **(record or {}))
    return made


def keeper_of(some: Fleet) -> Gatekeeper:
    keeper = some.core.partitions[DEFAULT].admission
    assert keeper is not None
    return keeper


def tally(some: Fleet, name: str = "standard") -> ClassTally:
    return keeper_of(some).gate.tallies.of[name]


def refused(some: Fleet, *hashes: int, **fields: Any) -> AdmissionRefused:
    """Ask for a booking that is refused; nothing may be booked by that."""
    before = some.core.desk.bookings.freed_count, len(some.core.desk.bookings)
    with pytest.raises(AdmissionRefused) as caught:
        some.take(None, *hashes, **fields)
    assert before == (some.core.desk.bookings.freed_count, len(some.core.desk.bookings))
    some.core.check()
    return caught.value


def ticket_of(answer: Answer | Ticket) -> Ticket:
    assert isinstance(answer, Ticket)
    return answer


def selection_of(answer: object) -> Selection:
    assert isinstance(answer, Selection)
    return answer


# -- nothing to judge ------------------------------------------------------------------------------


def test_without_anything_to_judge_there_is_no_gate() -> None:
    some = fleet()
    some.take("a", 1, 2)
    assert some.core.partitions[DEFAULT].admission is None
    assert some.core.partitions[DEFAULT].ledger.changes is None


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "reject-all"},
        {"policy": "always-admit", "policy_config": {"tenant_budgets": {"a": 0.5}}},
        {"max_inflight": 1},
        {"mode": "token-capacity", "active_prefill_tokens_threshold": 1},
    ],
)
def test_anything_to_judge_opens_the_gate(settings: dict[str, Any]) -> None:
    keeper_of(fleet(**settings))


def test_a_worker_with_a_cap_opens_the_gate_of_its_scope() -> None:
    some = fleet(1)
    some.take("a", 1)
    some.worker(2, max_inflight=1)
    keeper = keeper_of(some)
    some.core.check()
    assert keeper.pool.instances == 2
    assert keeper.pool.prefill_backlog == 16


def test_a_request_is_asked_for_with_every_fact_in_its_place() -> None:
    some = fleet(policy="tier-shed")
    keeper, seen = keeper_of(some), list[Ask]()
    judge = keeper.gate.policy.judge

    def spy(ask: Ask, pool: Pool, now: float) -> Verdict:
        seen.append(ask)
        return judge(ask, pool, now)

    keeper.gate.policy.judge = spy  # type: ignore[method-assign]
    some.take("a", 1, slo_class="batch", fairness_id="t", slo_ttft_ms=500.0)
    (ask,) = seen
    assert ask == Ask(
        tokens=16, slo_class="batch", tenant_id="t", target_s=0.5, key=ask.key, is_unique=True
    )


# -- busy thresholds -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BUSY["cases"], ids=lambda case: str(case["name"]))
def test_busy_as_recorded_by_what_is_booked(case: dict[str, Any]) -> None:
    """Every rank of one worker carries the load of the case; then a request asks."""
    some = Fleet(admission=AdmissionSettings(mode="token-capacity", **case["thresholds"]))
    ranks = case["ranks"]
    record: dict[str, Any] = {
        "data_parallel_size": len(ranks),
        "kv_events_endpoint": None,
        "kv_events_endpoints": {
            str(rank): f"tcp://127.0.0.1:{6000 + rank}" for rank in range(len(ranks))
        },
        "total_kv_blocks": ranks[0].get("kv_total_blocks"),
        "max_num_batched_tokens": ranks[0].get("max_num_batched_tokens"),
    }
    some.worker(1, **record)
    for number, rank in enumerate(ranks):
        tokens = rank.get("active_prefill_tokens", 0)
        blocks = rank.get("active_decode_blocks", 0)
        some.book(
            f"load-{number}",
            1,
            *range(1000 * number, 1000 * number + blocks),
            isl=max(tokens, blocks * 16, 1),
            effective_prefill_tokens=tokens,
            dp_rank=number,
        )
    if case["worker_busy"]:
        refusal = refused(some, 1)
        assert (refusal.gate, refusal.code) == ("busy", "all-workers-busy")
        assert refusal.body()["knob"] in case["thresholds"]
    else:
        selection_of(some.take("x", 1))


def test_the_body_of_a_busy_refusal_is_the_references_and_more() -> None:
    some = fleet(mode="token-capacity", active_prefill_tokens_threshold=10)
    some.take("a", 1)
    refusal = refused(some, 2)
    body = refusal.body()
    assert {name: body[name] for name in ("message", "type", "code")} == {
        "message": "Service temporarily unavailable: All workers are busy, please retry later",
        "type": "service_unavailable",
        "code": 503,
    }
    assert (body["reason"], body["gate"]) == ("all-workers-busy", "busy")
    assert (body["knob"], body["value"], body["limit"]) == (
        "active_prefill_tokens_threshold",
        16,
        10,
    )
    assert retry_after(refusal) is not None
    assert keeper_of(some).rejections == {"select_and_reserve": 1}


def test_a_busy_worker_is_passed_over_while_another_is_free() -> None:
    some = fleet(2, mode="token-capacity", active_prefill_tokens_threshold=10)
    some.hold(1, [1, 2, 3])
    first = selection_of(some.take("a", 1, 2, 3, 4))
    assert first.worker_id == 1
    assert selection_of(some.take("b", 1, 2, 3, 5)).worker_id == 2, "it holds less, and is free"
    assert refused(some, 1, 2, 3, 6).gate == "busy"
    some.done("b")
    assert selection_of(some.take("c", 1, 2, 3, 7)).worker_id == 2


def test_nobody_there_is_not_overloaded() -> None:
    some = fleet(mode="token-capacity", active_prefill_tokens_threshold=0)
    some.delete(1)
    with pytest.raises(ServiceError) as caught:
        some.take("a", 1)
    assert caught.value.code == "no_schedulable_worker"
    assert retry_after(caught.value) is not None


def threshold(**fields: Any) -> BusyThresholdChange:
    return BusyThresholdChange(**({"model": "default"} | fields))


def test_a_threshold_set_over_http_holds_at_once_and_merges() -> None:
    some = fleet(mode="token-capacity")
    some.take("a", 1)
    change, now = some.core.change_threshold, some.now
    answer, _ = change(threshold(active_prefill_tokens_threshold=10), now)
    assert answer.active_prefill_tokens_threshold == 10
    assert refused(some, 2).gate == "busy"
    answer, _ = change(threshold(active_decode_blocks_threshold=0.5), now)
    assert answer.active_prefill_tokens_threshold == 10, "merged, not replaced"
    answer, _ = change(threshold(clear=["active_prefill_tokens_threshold"]), now)
    assert answer.active_prefill_tokens_threshold is None
    assert answer.active_decode_blocks_threshold == 0.5
    selection_of(some.take("b", 2))
    answer, _ = some.core.forget_threshold("default", None, now)
    assert answer.active_decode_blocks_threshold is None
    assert [one.model for one in some.core.busy_thresholds().thresholds] == ["default"]


def test_a_tenants_threshold_is_its_own() -> None:
    some = fleet(mode="token-capacity")
    some.worker(2, tenant_id="other", kv_events_endpoint="tcp://127.0.0.1:5099")
    change = threshold(tenant_id="other", active_prefill_tokens_threshold=0)
    some.core.change_threshold(change, some.now)
    selection_of(some.take("a", 1))
    selection_of(some.take("b", 2))
    selection_of(some.take("c", 3, tenant_id="other"))
    assert refused(some, 4, tenant_id="other").gate == "busy"


def test_what_cannot_be_a_threshold_is_refused_and_changes_nothing() -> None:
    some = fleet(mode="token-capacity")
    for wrong in (
        {"active_decode_blocks_threshold": 1.5},
        {"active_prefill_tokens_threshold": -1},
        {"active_prefill_tokens_threshold_frac": math.nan},
        {"clear": ["nonsense"]},
    ):
        with pytest.raises(InvalidRequest):
            some.core.change_threshold(threshold(**wrong), some.now)
    change = threshold(model="nobody", active_prefill_tokens_threshold=1)
    with pytest.raises(ModelNotFound):
        some.core.change_threshold(change, some.now)
    answer, _ = some.core.change_threshold(threshold(model="nobody"), some.now)
    assert answer.active_decode_blocks_threshold is None, "reading an unknown one is no error"
    assert some.core.partitions[DEFAULT].admission is None


def test_with_admission_control_off_nothing_is_set_silently() -> None:
    some = fleet(active_prefill_tokens_threshold=0)
    selection_of(some.take("a", 1))
    selection_of(some.take("b", 2))
    with pytest.raises(AdmissionControlOff):
        some.core.change_threshold(threshold(active_prefill_tokens_threshold=1), some.now)


def report(some: Fleet, worker_id: int = 1, **told: Any) -> None:
    metrics = WorkerMetrics(ranks=[RankMetrics(**told)])
    _, effects = some.core.report(worker_id, metrics, some.now)
    some._did(effects)


def test_what_an_engine_tells_is_joined_with_the_ledger() -> None:
    some = fleet(
        record={"total_kv_blocks": 100},
        mode="token-capacity",
        active_decode_blocks_threshold=0.85,
    )
    report(some, kv_used_blocks=85)
    selection_of(some.take("a", 1))
    report(some, kv_used_blocks=87)
    assert refused(some, 2).body()["value"] == 87
    report(some, kv_used_blocks=80)
    selection_of(some.take("b", 2))


def test_a_rank_nobody_declared_is_dropped_and_a_silent_one_is_not_believed_for_ever() -> None:
    some = fleet(
        record={"total_kv_blocks": 100},
        mode="token-capacity",
        active_decode_blocks_threshold=0.85,
        load_report_stale_s=5.0,
    )
    metrics = WorkerMetrics(
        ranks=[RankMetrics(kv_used_blocks=99), RankMetrics(dp_rank=7, kv_used_blocks=1)]
    )
    answer, _ = some.core.report(1, metrics, some.now)
    assert (answer.accepted, answer.dropped) == ([0], [7])
    assert some.core.admitting.reports.dropped == 1
    assert refused(some, 1).gate == "busy"
    some.tick(6.0)
    assert keeper_of(some).pool.saturation == 1.0, "what it says is too old: it counts as full"
    selection_of(some.take("a", 1))
    some.worker(1, endpoint="http://other", total_kv_blocks=100)
    some.delete(1)
    assert some.core.admitting.reports.by_worker == {}


# -- N + Q -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES["worker_admission"], ids=lambda c: f"N{c['N']}Q{c['Q']}")
def test_the_cap_as_recorded(case: dict[str, Any]) -> None:
    some = fleet(record={"max_inflight": case["N"], "max_queued": case["Q"]})
    running: list[str] = []
    queued: list[str] = []
    rejected = 0
    log = case["log_event_outcome_engine_queue_rejected"]
    for number, (event, outcome, in_engine, waiting, refusals) in enumerate(log):
        if event == "+" and outcome == "rejected":
            refusal = refused(some, number)
            assert (refusal.gate, refusal.code) == ("capacity", "workers-at-capacity")
            assert refusal.body()["limit"] == case["N"]
            rejected += 1
        elif event == "+":
            answer = some.take(f"r{number}", number)
            assert isinstance(answer, Selection if outcome == "engine" else Ticket)
            (running if outcome == "engine" else queued).append(f"r{number}")
        else:
            some.free(running.pop(0))
            answered = [one.reservation_id for one in some.effects.answered]
            assert answered == queued[: len(answered)], "first come, first served"
            running += queued[: len(answered)]
            del queued[: len(answered)]
        assert (len(running), len(queued), rejected) == (in_engine, waiting, refusals)
        assert some.load(1) is not None
        assert keeper_of(some).caps[1].queued == waiting
        assert tally(some).waiting == waiting


def test_the_same_request_again_is_not_judged_again() -> None:
    some = fleet(record={"max_inflight": 1, "max_queued": 1}, policy="token-bucket")
    first = selection_of(some.take("a", 1))
    again = selection_of(some.take("a", 1))
    assert again.worker_id == first.worker_id
    waits = ticket_of(some.take("b", 2))
    assert some.take("b", 2) is waits, "it shares the ticket"
    assert (tally(some).offered, tally(some).admitted, tally(some).waiting) == (2, 1, 1)
    bucket = keeper_of(some).gate.policy.bucket_of("", 0)  # type: ignore[attr-defined]
    assert bucket.tokens == 10_000 - 16, "who waits has not paid"
    some.free("a")
    assert bucket.tokens == 10_000 - 32


def test_a_worker_that_has_room_is_used_while_others_are_waited_for() -> None:
    some = fleet(2, record={"max_inflight": 1})
    only: dict[str, Any] = {"pinned_worker": PinnedWorker(1, 0)}
    selection_of(some.take("a", 1, **only))
    ticket_of(some.take("b", 2, **only))
    assert selection_of(some.take("c", 3)).worker_id == 2, "nobody stands in its way"
    some.free("c")
    assert some.effects.answered == []
    some.free("a")
    assert [one.reservation_id for one in some.effects.answered] == ["b"]


def test_explicit_bookings_are_held_to_n_and_not_to_policies() -> None:
    some = fleet(record={"max_inflight": 1}, policy="reject-all")
    some.book("a", 1, 1)
    with pytest.raises(AdmissionRefused) as caught:
        some.book("b", 1, 2)
    assert caught.value.gate == "capacity"
    some.book("a", 1, 1)
    assert keeper_of(some).rejections == {"reservations": 1}
    assert some.load(1) == (16, 1, 1)


def test_who_waits_is_let_in_by_a_worker_that_comes_and_by_a_larger_cap() -> None:
    some = fleet(record={"max_inflight": 1, "max_queued": 8})
    some.take("a", 1)
    first, second = ticket_of(some.take("b", 2)), ticket_of(some.take("c", 3))
    some.worker(2, max_inflight=1)
    assert selection_of(first.answer).worker_id == 2
    some.patch(1, max_inflight=2)
    assert selection_of(second.answer).worker_id == 1


def test_a_worker_that_goes_takes_nobody_along() -> None:
    some = fleet(2, record={"max_inflight": 1, "max_queued": 1})
    some.take("a", 1)
    some.take("b", 2)
    tickets = [ticket_of(some.take(name, 3)) for name in "cd"]
    some.delete(1)
    assert some.core.partitions[DEFAULT].pending_count == 2
    some.free("b")
    assert sum(one.answer is not None for one in tickets) == 1
    some.delete(2)
    assert [type(one.answer) for one in tickets if not isinstance(one.answer, Selection)] == [
        NoEligibleWorker
    ]
    counts = tally(some)
    assert (counts.offered, counts.admitted, counts.refused, counts.waiting) == (4, 3, 1, 0)


def test_a_client_that_leaves_gives_its_place_back() -> None:
    some = fleet(record={"max_inflight": 1, "max_queued": 1})
    some.take("a", 1)
    ticket = ticket_of(some.take("b", 2))
    assert refused(some, 3).gate == "capacity"
    assert some.core.withdraw(ticket)
    assert not some.core.withdraw(ticket)
    some.core.check()
    ticket_of(some.take("c", 3))
    assert (tally(some).withdrawn, tally(some).waiting) == (1, 1)


def test_who_waits_too_long_is_told_so_and_charged_nothing() -> None:
    some = fleet(record={"max_inflight": 1})
    some.take("a", 1)
    ticket = ticket_of(some.take("b", 2))
    assert some.core.next_deadline() == some.now + DEADLINE_S
    some.now += DEADLINE_S
    some._did(some.core.refuse_late(some.now))
    assert isinstance(ticket.answer, AdmissionRefused)
    assert (ticket.answer.code, ticket.answer.gate) == ("expired-waiting", "waiting")
    assert retry_after(ticket.answer) is not None
    assert some.core.next_deadline() == math.inf
    assert tally(some) == ClassTally(2, 1, 1, 0, 0, 1)
    some.free("a")
    assert some.effects.answered == []


def test_a_deadline_given_holds_for_the_policy_files_queue_too() -> None:
    some = Fleet(RouterConfig(queue_threshold=1.0), admission=AdmissionSettings(queue_deadline_s=5))
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    ticket = ticket_of(some.take("b", 2))
    some.tick(6.0)
    assert isinstance(ticket.answer, AdmissionRefused)
    assert some.core.partitions[DEFAULT].pending_count == 0


def test_the_policy_files_queue_waits_behind_the_gate() -> None:
    some = Fleet(RouterConfig(queue_threshold=1.0), admission=AdmissionSettings(max_inflight=2))
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    first, second = ticket_of(some.take("b", 2)), ticket_of(some.take("c", 3))
    assert tally(some).waiting == 2
    some.done("a")
    assert isinstance(first.answer, Selection)
    some.done("b")
    assert not some.effects.answered, "two are on it"
    some.free("a")
    assert isinstance(second.answer, Selection)
    assert tally(some) == ClassTally(3, 3, 0, 0, 0, 2)


# -- policies --------------------------------------------------------------------------------------


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
    assert some.core.admitting.clamped == 1
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
    assert some.core.loads()[0].pending_count == 2
    assert some.core.loads()[0].pending_isl_tokens == 32
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


def test_slo_shed_expires_at_the_target() -> None:
    some = saturated()
    ticket = ticket_of(some.take("c", 2, slo_class="critical", slo_ttft_ms=500))
    assert some.core.next_deadline() == some.now + 0.5
    some.now += 0.5
    some._did(some.core.refuse_late(some.now))
    assert isinstance(ticket.answer, AdmissionRefused)
    assert some.core.partitions[DEFAULT].pending_count == 0


def change(some: Fleet, policy: str, **config: Any) -> None:
    _, effects = some.core.change_admission(AdmissionChange(policy=policy, config=config), some.now)
    some._did(effects)


def test_another_policy_judges_who_waits_again() -> None:
    some = saturated()
    tickets = [ticket_of(some.take(f"r{n}", n, slo_class="batch")) for n in range(40)]
    change(some, "reject-all")
    assert all(one is not None for one in (tickets[0].answer, tickets[15].answer))
    assert tickets[-1].answer is None, "a turn is bounded"
    assert some.core.withdraw(tickets.pop())
    some.tick(0.0)
    assert {type(one.answer) for one in tickets} == {AdmissionRefused}
    counts = tally(some, "batch")
    assert (counts.offered, counts.refused, counts.withdrawn, counts.waiting) == (40, 39, 1, 0)
    assert len(some.core.desk.bookings) == 1


def test_a_policy_that_admits_places_who_waits() -> None:
    some = saturated()
    tickets = [ticket_of(some.take(f"r{n}", n, slo_class="batch")) for n in range(3)]
    change(some, "always-admit")
    assert {type(one.answer) for one in tickets} == {Selection}
    assert some.core.admission().policy == "always-admit"


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
            policy_config={"capacity": 40, "refill_rate": 1},
        ),
    )
    some.worker(1, max_num_batched_tokens=8)
    some.take("a", 1)
    tickets = [ticket_of(some.take(name, 2)) for name in "bc"]
    some.patch(1, taints=["t"])
    some.core.change_threshold(threshold(active_decode_blocks_threshold=0.9), some.now)
    assert [one.answer for one in tickets] == [None, None]
    some.done("a")
    assert isinstance(tickets[0].answer, Selection)
    some.done("b")
    assert isinstance(tickets[1].answer, Selection), "it was let in when it came"


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
    assert some.core.admission().policy == "token-bucket"
    some.take("a", 1)
    assert some.core.admission().counters["standard"].admitted == 1
    assert some.core.admission().scopes[0].model_name == "default"


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


# -- cache hits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES["cache_hit"], ids=lambda case: str(case["name"]))
def test_the_cache_hit_threshold_as_recorded(case: dict[str, Any]) -> None:
    size = math.gcd(16, case["prompt_tokens"] or 16, case["local_cached"], case["external_cached"])
    some = fleet(record={"block_size": size}, cache_hit_threshold=case["global_threshold"])
    tokens = case["prompt_tokens"]
    cached = (case["local_cached"] + case["external_cached"]) // size
    blocks = list(range(1, tokens // size + 1))
    if cached:
        some.hold(1, blocks[:cached])
    if not tokens:  # the contract refuses it before anybody judges what is cached
        with pytest.raises(InvalidRequest, match="isl_tokens must be greater than 0"):
            some.take("a", isl=0, cache_hit_threshold=case["request_threshold"])
        assert not case["reject"]
        assert sum(some.core.partitions[DEFAULT].hit_tally.rates) == 0, "nothing was measured"
        return
    answer = some.take("a", *blocks, isl=tokens, cache_hit_threshold=case["request_threshold"])
    if not case["reject"]:
        selection_of(answer)
        assert len(some.core.desk.bookings) == 1
        return
    assert isinstance(answer, CacheThreshold)
    assert answer.finish_reason == "cache_threshold"
    assert answer.best_hit_rate == pytest.approx(case["hit_rate"])
    assert answer.threshold == case["effective_threshold"]
    assert answer.threshold_source == ("global" if case["request_threshold"] is None else "request")
    assert answer.best_worker.worker_id == 1
    assert len(some.core.desk.bookings) == 0
    assert some.load(1) == (0, 0, 0)


def test_only_those_that_hold_enough_are_candidates() -> None:
    some = fleet(3)
    some.hold(2, [1, 2])
    some.hold(3, [1])
    some.book("load", 2, *range(50, 90))
    answer = selection_of(some.take("a", 1, 2, cache_hit_threshold=0.9))
    assert answer.worker_id == 2, "although it carries more than anybody"
    assert answer.cache_hit is not None
    some.book("less", 3, 9)
    answer = selection_of(some.take("b", 1, 2, cache_hit_threshold=0.5))
    assert answer.worker_id == 3


def test_a_fallback_goes_to_the_best_and_says_what_it_needs() -> None:
    some = fleet(2)
    some.hold(2, [1])
    wishes: dict[str, Any] = {"cache_hit_threshold": 0.9, "on_cache_threshold": "fallback"}
    answer = selection_of(some.take("a", 1, 2, 3, 4, **wishes))
    assert (answer.worker_id, answer.needs_prefill) == (2, True)
    assert len(some.core.desk.bookings) == 1
    again = selection_of(some.take("a", 1, 2, 3, 4, **wishes))
    assert again.needs_prefill is True


def test_a_request_that_was_refused_often_enough_is_placed() -> None:
    some = fleet(cache_hit_attempts_max=2)
    assert isinstance(some.take("a", 1, cache_hit_threshold=0.5, attempt=1), CacheThreshold)
    selection_of(some.take("a", 1, cache_hit_threshold=0.5, attempt=2))
    assert some.core.partitions[DEFAULT].hit_tally.guarded == 1


def test_a_cache_refusal_is_charged_nothing_and_counted_as_refused() -> None:
    some = fleet(policy="token-bucket")
    assert isinstance(some.take("a", 1, cache_hit_threshold=0.5), CacheThreshold)
    bucket = keeper_of(some).gate.policy.bucket_of("", 0)  # type: ignore[attr-defined]
    assert bucket.tokens == 10_000
    assert (tally(some).offered, tally(some).refused) == (1, 1)
    assert keeper_of(some).rejections == {}, "not for load"


def test_who_waited_is_held_to_its_threshold_when_its_turn_comes() -> None:
    some = fleet(record={"max_inflight": 1})
    some.take("a", 9)
    first = ticket_of(some.take("b", 1, cache_hit_threshold=0.5))
    second = ticket_of(some.take("c", 2, cache_hit_threshold=0.5))
    some.hold(1, [2])
    some.free("a")
    assert isinstance(first.answer, CacheThreshold)
    assert isinstance(second.answer, Selection)
    assert tally(some) == ClassTally(3, 2, 1, 0, 0, 2)


# -- found by breaking it ----------------------------------------------------------------------


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
    told = refused(some, 2, isl=90, fairness_id="x")
    assert told.promised
    some.now += told.retry_after_s
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
    told = refused(some, 2, isl=90)
    some.now += told.retry_after_s
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
    some.core.change_admission(change, some.now)
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
    some.core.change_admission(AdmissionChange(policy="slo-shed", config=config), some.now)
    some.book("load", 1, *range(10), isl=16_000)
    hopeless = [refused(some, i, slo_ttft_ms=10) for i in (1, 2)]
    assert [one.promised for one in hopeless] == [True, False]


def test_promises_of_one_allowance_for_all_end_with_it() -> None:
    some = fleet(policy="token-bucket")
    some.worker(2, tenant_id="other")
    some.core.change_admission(AdmissionChange(policy="slo-shed"), some.now)
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
        fleet().core.change_admission(AdmissionChange(policy=policy, config=config), 1.0)


def test_a_threshold_too_large_to_count_with_is_out_of_range() -> None:
    change = BusyThresholdChange(model="default", active_prefill_tokens_threshold=10**400)
    with pytest.raises(InvalidRequest):
        fleet(mode="token-capacity").core.change_threshold(change, 1.0)


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
    assert some.core.partitions[DEFAULT].ledger.requests.sum() == 2


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
