from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.busy import BusyRanks
from select_service.core.admission.capacity import WorkerCaps
from select_service.core.admission.fair_queue import Waiting
from select_service.core.admission.gate import RETURN_SHARE, Gate, GateName
from select_service.core.admission.policies import Built, build
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.tallies import OTHER, TenantTally
from select_service.core.admission.thresholds import Thresholds
from select_service.core.admission.token_bucket import TokenBucketPolicy
from select_service.simulator.trial_pool import RecordedPool, RecordedRankLoad

RANKS = slice(0, 2)


def gate_of(policy: str = "always-admit", ranks: int = 2, **config: Any) -> Gate[str]:
    built: Built[str] = build(policy, config)
    pool = RecordedPool(prior_tokens_per_s=1000)
    busy, caps = BusyRanks(), WorkerCaps()
    busy.set_thresholds(Thresholds(active_prefill_tokens_threshold=5000))
    for slot in range(ranks):
        pool.attach(slot, 100)
        busy.attach(slot, None, 100)
        caps.attach(slot, [slot], 2, 1)
    return Gate(built.classes, built.policy, pool, queue=built.queue, busy=busy, caps=caps)


def carry(gate: Gate[str], slot: int, tokens: int = 0, inflight: int = 0, now: float = 0.0) -> None:
    assert gate.busy is not None
    assert gate.caps is not None
    assert isinstance(gate.pool, RecordedPool)
    gate.pool.note(slot, RecordedRankLoad(tokens, 0, inflight, inflight), now)
    gate.busy.note(slot, tokens, 0)
    gate.caps.note(slot, inflight)


def ask_of(slo_class: str = "standard", tokens: int = 100, key: bytes = b"") -> AdmissionRequest:
    return AdmissionRequest(tokens, slo_class, "t", key=key)


def test_the_order_is_fixed_and_the_first_refusal_is_named() -> None:
    gate = gate_of("reject-all")
    gates = []
    for tokens, inflight in ((9000, 3), (0, 3), (0, 0)):
        for slot in (0, 1):
            carry(gate, slot, tokens, inflight)
            assert gate.caps is not None
            while gate.caps[slot].room:
                gate.caps.take_place(np.array([slot]))
        gates.append(gate.judge(ask_of(), RANKS, 0.0).gate)
    assert gates == ["busy", "capacity", "policy"]
    for slot in (0, 1):
        gate.pool.detach(slot)
    decision = gate.judge(ask_of(), RANKS, 0.0)
    assert (decision.gate, decision.code) == ("unavailable", "unavailable")


def test_places_are_promised_no_faster_than_answers_end() -> None:
    """Where long answers fill the pool, prompts are computed long before there is room."""
    times = []
    for ends in (0, 10):
        gate = gate_of("gaie-legacy")
        assert isinstance(gate.pool, RecordedPool)
        carry(gate, 0, 100, 1)
        for _ in range(ends):
            gate.pool.ended("t")
        carry(gate, 0, 100, 1, now=10.0)
        promises = [
            gate.refusal(ask_of("batch", 100, key), "policy", "full", "full", 10.0)
            for key in (b"1", b"2")
        ]
        times.append(promises[1].retry_after_s - promises[0].retry_after_s)
    assert times[0] == pytest.approx(100 / (2 * 1000 * RETURN_SHARE))
    assert times[1] == pytest.approx(1 / (1.0 * RETURN_SHARE), rel=0.01)


@pytest.mark.parametrize("by", ["policy", "capacity"])
@pytest.mark.parametrize("policy", ["gaie-legacy", "slo-shed"])
def test_what_more_important_requests_leave_of_the_places_is_counted_in_requests(
    policy: str, by: GateName
) -> None:
    """Short prompts with long answers take few tokens, and the places of others all the same."""
    gate = gate_of(policy)
    end_ten_a_second(gate, while_per_s=8)
    assert apart_s(gate, by) == pytest.approx(1 / ((10.0 - 8.0) * RETURN_SHARE), rel=0.1)


@pytest.mark.parametrize("policy", ["gaie-legacy", "slo-shed"])
def test_a_burst_of_more_important_requests_is_no_rate_that_goes_on(policy: str) -> None:
    """What it takes is booked: for ten seconds more, others were promised next to nothing."""
    gate = gate_of(policy)
    end_ten_a_second(gate, while_per_s=2)
    before_s = apart_s(gate)
    assert before_s == pytest.approx(1 / ((10.0 - 2.0) * RETURN_SHARE), rel=0.1)
    for number in range(100):
        gate.admit(ask_of("critical", 1, b"burst %d" % number), 60.0)
    assert apart_s(gate) < 3.0 * before_s


def end_ten_a_second(gate: Gate[str], *, while_per_s: int) -> None:
    """Let ten requests end per second for a minute, while so many critical ones are let in."""
    assert isinstance(gate.pool, RecordedPool)
    carry(gate, 0, 100, 1)
    for number in range(60 * while_per_s):
        gate.admit(ask_of("critical", 1, b"c%d" % number), number / while_per_s)
    for _ in range(600):
        gate.pool.ended("t")
    carry(gate, 0, 100, 1, now=60.0)


def apart_s(gate: Gate[str], by: GateName = "policy") -> float:
    """Return how far apart two sheddable requests are to return."""
    keys = (b"%d" % gate.returns.size, b"and %d" % gate.returns.size)
    first, second = (
        gate.refusal(ask_of("batch", 100, key), by, "full", "full", 60.0) for key in keys
    )
    return second.retry_after_s - first.retry_after_s


@pytest.mark.parametrize("work", [0, 1, 100])
def test_a_prompt_that_is_cached_has_to_wait_for_answers_to_end_as_others_do(work: int) -> None:
    gate = gate_of("gaie-legacy")
    assert isinstance(gate.pool, RecordedPool)
    carry(gate, 0, 100, 1)
    for _ in range(10):
        gate.pool.ended("t")
    carry(gate, 0, 100, 1, now=10.0)
    asks = [
        AdmissionRequest(100, "batch", "t", key=key, prefill_tokens=work) for key in (b"1", b"2")
    ]
    times = [gate.refusal(ask, "policy", "full", "full", 10.0).retry_after_s for ask in asks]
    assert times[1] - times[0] == pytest.approx(1 / (1.0 * RETURN_SHARE), rel=0.01)


def test_the_policy_speaks_before_anybody_waits_for_a_worker() -> None:
    gate = gate_of("reject-all")
    for slot in (0, 1):
        carry(gate, slot, 0, 2)
    assert gate.judge(ask_of(), RANKS, 0.0).gate == "policy"


def test_retry_after_is_when_the_backlog_has_drained() -> None:
    gate = gate_of("gaie-legacy")
    for slot in (0, 1):
        carry(gate, slot, 4000, 30)
    assert gate.caps is not None
    gate.caps = None
    decision = gate.judge(ask_of("batch", key=b"1"), RANKS, 0.0)
    assert decision.code == "gaie-saturated"
    assert decision.retry_after_s == pytest.approx(8000 / (2 * 1000))
    assert decision.promised
    second = gate.judge(ask_of("batch", key=b"2"), RANKS, 0.0)
    assert second.retry_after_s == pytest.approx(4.0 + 100 / (RETURN_SHARE * 2 * 1000))


def test_retry_after_of_a_bucket_is_exact() -> None:
    gate = gate_of("token-bucket", capacity=100, refill_rate=10)
    gate.settle(gate.judge(ask_of(), RANKS, 0.0), ask_of(), 0.0)
    assert gate.judge(ask_of(tokens=50), RANKS, 0.0).retry_after_s == 5.0
    never = gate.judge(ask_of(tokens=500), RANKS, 0.0)
    assert (never.code, never.retry_after_s) == ("exceeds-capacity", math.inf)
    assert not never.promised


def test_a_promise_is_kept_once_even_when_the_bucket_is_empty() -> None:
    gate = gate_of("token-bucket", capacity=100, refill_rate=10)
    gate.settle(gate.judge(ask_of(), RANKS, 0.0), ask_of(), 0.0)
    promised = ask_of(key=b"p")
    judged = gate.judge(promised, RANKS, 0.0)
    gate.settle(judged, promised, 0.0)
    assert judged.retry_after_s == 10.0
    early = gate.judge(promised, RANKS, 5.0)
    assert (early.outcome, early.retry_after_s) == ("refuse", 5.0)
    stolen = gate.judge(ask_of(), RANKS, 10.0)
    assert stolen.admitted, "newcomers go by the bucket alone"
    gate.settle(stolen, ask_of(), 10.0)
    back = gate.judge(promised, RANKS, 10.5)
    assert back.admitted
    gate.settle(back, promised, 10.5)
    assert isinstance(gate.policy, TokenBucketPolicy)
    assert gate.policy.bucket_of("", 0).tokens == -95, "what was promised is paid by who comes next"
    assert not gate.judge(promised, RANKS, 10.6).admitted
    assert (gate.returns.counts.kept, gate.returns.size) == (1, 1)
    gate.check()


def test_who_was_told_to_come_waits_in_front_of_newcomers_of_any_sheddable_class() -> None:
    gate = gate_of("slo-shed", quotas={"background": 0})
    for slot in (0, 1):
        carry(gate, slot, 4000, 1)
    promised = ask_of("background", key=b"p")
    judged = gate.judge(promised, RANKS, 0.0)
    gate.settle(judged, promised, 0.0)
    assert (judged.code, judged.promised) == ("saturated", True)
    due = judged.retry_after_s
    for name in ("batch", "standard"):
        ask = ask_of(name, key=name.encode())
        gate.settle(gate.judge(ask, RANKS, due), ask, due)
        gate.enqueue(ask, name, due)
    back = gate.judge(promised, RANKS, due)
    assert (back.outcome, back.code) == ("wait", "promised")
    gate.settle(back, promised, due)
    gate.enqueue(promised, "promised", due)
    carry(gate, 0, 0)
    carry(gate, 1, 0)
    order = []
    while (one := gate.next_waiting()) is not None:
        gate.serve(one, due)
        order.append(one.item)
    assert order == ["standard", "promised", "batch"]
    assert gate.returns.counts.kept == 1
    gate.check()


def test_who_was_told_to_come_and_would_have_to_wait_anyway_waits_as_promised() -> None:
    """Its quota has room again when it returns; it still must not wait behind newcomers."""
    gate = gate_of("slo-shed", quotas={"batch": 1})
    for slot in (0, 1):
        carry(gate, slot, 4000, 1)
    first, promised = ask_of("batch", key=b"1"), ask_of("batch", key=b"p")
    gate.settle(gate.judge(first, RANKS, 0.0), first, 0.0)
    one = gate.enqueue(first, "first", 0.0)
    judged = gate.judge(promised, RANKS, 0.0)
    gate.settle(judged, promised, 0.0)
    assert judged.code == "band-full"
    gate.withdraw(one, 1.0)
    assert gate.judge(ask_of("batch", key=b"new"), RANKS, judged.retry_after_s).code == "waits"
    assert gate.judge(promised, RANKS, judged.retry_after_s).code == "promised"


def test_details_of_a_refusal_are_facts() -> None:
    gate = gate_of("tier-shed")
    carry(gate, 0, 100, 1)
    decision = gate.judge(ask_of("batch"), RANKS, 0.0)
    assert decision.reason == "tier-shed: class=batch priority=-1 < min=3 load=2"
    assert decision.details == {"load": 2, "limit": 0}


def test_who_names_no_class_leaves_the_queue_as_who_he_entered_it() -> None:
    config: dict[str, Any] = {"slo_priorities": {"standard": 5}}
    changed = gate_of("slo-shed")
    changed.change(build("slo-shed", config), 0.0)
    for gate in (gate_of("slo-shed", **config), changed):
        carry(gate, 0, 4000, 1)
        carry(gate, 1, 4000, 1)
        for name in ("", "nobody-knows-it"):
            ask = ask_of(name)
            decision = gate.judge(ask, RANKS, 0.0)
            assert decision.outcome == "wait"
            gate.settle(decision, ask, 0.0)
            gate.enqueue(ask, "one", 0.0)
            gate.turn_away(ask, "unschedulable")
        unnamed = gate.tallies.of["unnamed"]
        assert (unnamed.offered, unnamed.refused, unnamed.waiting) == (2, 2, 0)
        gate.tallies.check()


steps = st.lists(
    st.tuples(
        st.sampled_from(["critical", "standard", "batch", "background", ""]),
        st.integers(0, 3000),
        st.floats(0, 2),
        st.integers(0, 20),
    ),
    max_size=60,
)


@given(
    steps,
    st.sampled_from(
        [
            ("always-admit", {}),
            ("reject-all", {}),
            ("token-bucket", {"capacity": 4000, "refill_rate": 500}),
            ("gaie-legacy", {}),
            ("tier-shed", {"threshold": 3}),
            ("slo-shed", {"quotas": dict.fromkeys(("critical", "standard", "batch"), 2)}),
        ]
    ),
)
def test_everybody_is_accounted_for(
    some: list[tuple[str, int, float, int]], policy: tuple[str, dict[str, Any]]
) -> None:
    """Offered = admitted + refused + withdrawn + waiting, per class, after every step."""
    gate = gate_of(policy[0], **policy[1])
    now = 0.0
    waiting: list[Waiting[str]] = []
    for slo_class, tokens, gap, what in some:
        now += gap
        carry(gate, what % 2, tokens * (what % 5), what % 4, now)
        for late, decision in gate.expired(now, 10):
            waiting.remove(late)
            assert decision.outcome == "refuse"
        while (one := gate.next_waiting()) is not None and what % 3:
            gate.serve(one, now)
            waiting.remove(one)
        ask = AdmissionRequest(tokens, slo_class, f"t{what % 3}", key=bytes([what % 7]))
        decision = gate.judge(ask, RANKS, now)
        gate.settle(decision, ask, now)
        if decision.outcome == "wait":
            if gate.queue is None or decision.gate == "capacity":
                gate.gone(ask)
            else:
                waiting.append(gate.enqueue(ask, slo_class, now))
        if decision.outcome == "refuse":
            assert decision.code
            assert decision.retry_after_s >= 0.0
        if waiting and what == 5:
            assert gate.withdraw(waiting.pop(), now)
        gate.check()
        assert gate.tallies.total().waiting == len(waiting)


def test_tenant_labels_are_few_and_follow_the_busiest() -> None:
    tally = TenantTally(labels_max=3)
    total = 0
    for number in range(3):
        tally.add(f"old{number}")
        total += 1
    for number in range(500):
        tally.add(f"crowd{number}")
        total += 1
    for _ in range(500):
        tally.add("big")
        total += 1
    assert len(tally.counts) <= 4
    assert sum(tally.counts.values()) == total
    assert tally.counts["big"] > 100
    assert OTHER in tally.counts
    tally.add(OTHER)
    assert sum(tally.counts.values()) == total + 1
