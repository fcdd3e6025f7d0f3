"""N + Q inside the service: who is in, who waits, and who is promised a place."""

from __future__ import annotations

from select_service.core.admission.controller import DEADLINE_S
from select_service.core.admission.tallies import ClassTally
from select_service.errors import AdmissionRefused
from select_service.types import RouterConfig, Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.admission.gated import change, fleet, keeper_of, refused, tally
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of


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
    assert some.core.waiting_requests.withdraw(ticket_of(some.take("b", 2)))
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
