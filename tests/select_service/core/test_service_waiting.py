"""Requests that wait in the core, one promise a test; contract numbers in brackets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.core.pricing.policy import PolicyBook, PolicyClass, RoutingPolicy
from select_service.errors import QueueFull, ReservationConflict
from select_service.types import CoreLimits, LeaseRequest, RouterConfig, Selection
from tests.select_service.core.whole_fleet import Fleet, selection_of, ticket_of


@pytest.fixture
def busy() -> Fleet:
    """Two workers, both above their threshold of 100 prefill tokens."""
    made = Fleet(RouterConfig(queue_threshold=1.0))
    made.tick(0.0)
    for worker_id in (1, 2):
        made.worker(worker_id, max_num_batched_tokens=100)
        made.book(f"b{worker_id}", worker_id, isl=101)
    return made


def test_a_waiting_request_can_leave_and_its_id_is_free_again(busy: Fleet) -> None:
    ticket = ticket_of(busy.take("q", isl=5))
    with pytest.raises(ReservationConflict, match="Request q already exists"):
        busy.take("q", isl=6)
    assert ticket_of(busy.take("q", isl=5)) is ticket  # the same request shares the place
    assert not busy.core.waiting_requests.withdraw(ticket)
    assert busy.core.waiting_requests.withdraw(ticket)
    busy.core.check()
    assert ticket_of(busy.take("q", isl=6)) is not ticket


def test_an_id_taken_while_it_waited_is_a_conflict_at_booking(busy: Fleet) -> None:
    ticket = ticket_of(busy.take("q", isl=5))
    busy.book("q", 1, 1)
    busy.free("b2")
    assert busy.effects.answered == [ticket]
    assert isinstance(ticket.answer, ReservationConflict)


def test_queue_limits_count_workers() -> None:
    one = PolicyClass(prefill_busy_threshold=0.0, request_queue_limit_per_worker=1)
    fleet = Fleet(policies=PolicyBook(RoutingPolicy((one,)), {}))
    fleet.worker(1)
    fleet.worker(2)
    fleet.book("a", 1, 1)
    fleet.book("b", 2, 1)
    ticket_of(fleet.select(5))
    ticket_of(fleet.select(5))
    with pytest.raises(QueueFull) as caught:
        fleet.select(5)
    assert str(caught.value) == (
        'router policy class "default" queue requests limit reached (current=2, limit=2)'
    )
    assert caught.value.details == {
        "policy_class": "default",
        "limit_kind": "requests",
        "current": 2,
        "limit": 2,
    }


@pytest.mark.parametrize("kind", ["raw_isl_token", "cached_token"])
def test_a_limit_is_named_as_programs_know_it(kind: str) -> None:
    limit: dict[str, Any] = {f"{kind}_queue_limit_per_worker": 0}
    one = PolicyClass(prefill_busy_threshold=0.0, **limit)
    fleet = Fleet(policies=PolicyBook(RoutingPolicy((one,)), {}))
    fleet.worker(1)
    fleet.book("a", 1, 1)
    with pytest.raises(QueueFull) as caught:
        fleet.select(5)
    assert str(caught.value) == (
        f'router policy class "default" queue {kind}s limit reached (current=0, limit=0)'
    )


@pytest.mark.parametrize("capacity", [0, 1])
def test_an_infinite_threshold_switches_queueing_off(capacity: int) -> None:
    fleet = Fleet(RouterConfig(queue_threshold=math.inf))
    fleet.worker(1, max_num_batched_tokens=capacity)
    for name in "abc":
        assert isinstance(fleet.take(name, 1, isl=10**9), Selection)


def test_classes_take_turns_by_quantum() -> None:
    small = PolicyClass("s", quantum=2, prefill_busy_threshold=0.0)
    big = PolicyClass("b", quantum=1, prefill_busy_threshold=0.0)
    policy = RoutingPolicy((small, big), ((100, 1), (0, 0)))
    fleet = Fleet(policies=PolicyBook(policy, {}))
    fleet.worker(1)
    fleet.book("a", 1, 1)
    names = {}
    for count in range(3):
        names[ticket_of(fleet.select(isl=10 + count))] = f"s{count}"
        names[ticket_of(fleet.select(isl=100 + count))] = f"b{count}"
    fleet.free("a")
    order = [names[ticket] for ticket in fleet.effects.answered]
    assert order == ["s0", "s1", "b0", "s2", "b1", "b2"]


def test_who_waited_is_placed_when_all_that_is_due_has_expired(busy: Fleet) -> None:
    """A lease and a time to live end in one turn: the request is not priced with either's load."""
    lease = LeaseRequest(lease_id="l", owner="engine", ttl_s=50.0)
    busy.core.reservations.open_lease(lease, busy.now)
    busy.book("leased", 2, isl=101, lease_id="l")
    busy.book("other", 2, isl=40)
    busy.book("brief", 1, isl=101, ttl_s=50.0)
    busy.free("b1")
    busy.free("b2")
    ticket = ticket_of(busy.take("q", isl=5))
    busy.tick(60.0)
    assert selection_of(ticket.answer).worker_id == 1  # it is empty, 2 has the other one


def test_a_scope_that_closes_before_its_turn_is_no_more_work() -> None:
    """Some of its requests were let in, the others left, then its place was needed."""
    fleet = Fleet(
        RouterConfig(queue_threshold=1.0), limits=CoreLimits(let_in_per_turn_max=1, scopes_max=1)
    )
    fleet.worker(1, max_num_batched_tokens=100)
    fleet.book("b", 1, isl=101)
    first, second = (ticket_of(fleet.take(one, isl=5)) for one in ("q1", "q2"))
    fleet.free("b")
    assert isinstance(first.answer, Selection)
    assert fleet.core.waiting_requests.withdraw(second)
    fleet.free("q1")
    fleet.delete(1)
    fleet.core.registry.sweep(1000)
    fleet.worker(2, model_name="another")
    assert len(fleet.core.partitions) == 1
    more, _ = fleet.core.tick(fleet.now)
    assert not more
