"""N + Q inside the service: who is in, who waits, and who is promised a place."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.core.admission.controller import DEADLINE_S
from select_service.core.admission.queue import Ticket
from select_service.core.admission.tallies import ClassTally
from select_service.errors import AdmissionRefused, NoEligibleWorker, retry_after
from select_service.types import PinnedWorker, RouterConfig, Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.admission.gated import change, fleet, keeper_of, refused, tally
from tests.select_service.core.admission.golden import CASES
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of


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
    assert some.core.room.withdraw(ticket)
    assert not some.core.room.withdraw(ticket)
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


ALLOWANCE = {"capacity": 40, "refill_rate": 1e-9}


def test_those_who_wait_for_a_worker_do_not_share_one_allowance() -> None:
    """What one needs is held for it, and charged when it goes: else 24 tokens would let in all."""
    some = fleet(record={"max_inflight": 1}, policy="token-bucket", policy_config=ALLOWANCE)
    some.take("a", 1)
    waits = ticket_of(some.take("b", 2))
    assert refused(some, 3).code == "insufficient-tokens"
    bucket = keeper_of(some).gate.policy.bucket_of("", 0)  # type: ignore[attr-defined]
    assert (bucket.tokens, bucket.held) == (24, 16)
    some.free("a")
    selection_of(waits.answer)
    assert (bucket.tokens, bucket.held) == (8, 0)


def test_what_is_held_for_one_who_waits_in_vain_is_there_again() -> None:
    allowance = ALLOWANCE | {"capacity": 32}
    some = fleet(record={"max_inflight": 1}, policy="token-bucket", policy_config=allowance)
    some.take("a", 1)
    assert some.core.room.withdraw(ticket_of(some.take("b", 2)))
    late = ticket_of(some.take("c", 3))
    some.now += DEADLINE_S
    some._did(some.core.refuse_late(some.now))
    assert isinstance(late.answer, AdmissionRefused)
    ticket_of(some.take("d", 4))
    change(some, "token-bucket", capacity=16, refill_rate=1e-9)
    assert refused(some, 5).code == "insufficient-tokens", "the new one holds it for who waits"
    some.delete(1)
    some.worker(1)
    selection_of(some.take("e", 5))
