"""Whose turn it is among the classes of a policy, and when a rank is busy."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.admission.class_queues import ClassQueues
from select_service.core.admission.drain_rate import DrainRate
from select_service.core.admission.queue import Ticket
from select_service.core.fleet.catalog import Worker
from select_service.core.fleet.slots import FleetSlots
from select_service.core.ledger.ledger import Ledger
from select_service.core.pricing.policy import Overtaking, PolicyClass, RoutingPolicy
from select_service.core.pricing.prompt import prompt_of
from select_service.errors import QueueFull
from select_service.types import SelectRequest, WorkerSpec
from tests.effort import examples


def ticket(isl: int = 100, priority_jump: float = 0.0) -> Ticket:
    request = SelectRequest(priority_jump=priority_jump)
    return Ticket(Mock(), request, prompt_of(b"", b"", isl), Mock(), None, b"")


def queues(*classes: PolicyClass, batched: tuple[int | None, ...] = (None,)) -> ClassQueues:
    """The queues of a scope with one rank for each capacity."""
    fleet_slots, ledger = FleetSlots(), Ledger()
    for slot, most in enumerate(batched):
        worker = Worker(WorkerSpec(worker_id=slot, max_num_batched_tokens=most))
        worker.slots[0] = slot
        fleet_slots.take(worker)
    ledger.ensure(len(batched))
    drainage = DrainRate(ledger.loads, prior_tokens_per_s=100.0)
    made = ClassQueues(RoutingPolicy(classes), fleet_slots, ledger.loads, drainage)
    for worker in fleet_slots.workers.values():
        made.attach(worker)
    return made


def test_short_ones_overtake_for_a_share_of_the_wait_where_lines_are_long() -> None:
    """2,000 tokens are overtaken within two seconds, or within a fifth of a longer wait."""
    line = queues(PolicyClass(overtaking=Overtaking(seconds=1.0, share=0.1)))

    def enters(isl: int, now: float, priority_jump: float = 0.0) -> float:
        one = ticket(isl, priority_jump)
        one.since = now
        line.enter(0, one, now, is_known=False)
        return one.key[1] - now

    assert enters(2_000, 0.0) == pytest.approx(2.0)  # nobody waited
    assert enters(2_000, 10.0) == pytest.approx(
        2.0
    )  # 8 s: what the first would have, were it short
    assert enters(2_000, 52.0) == pytest.approx(10.0)  # 50 s
    assert enters(1, 60.0, priority_jump=1e9) < -9e8
    assert enters(2_000, 61.0) == pytest.approx(2.0)  # who jumped waits for 1 s, not for 1e9
    assert enters(2_000, 161.0) == pytest.approx(20.2)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50_000), st.integers(0, 2)), max_size=30),
    st.sampled_from([0.0, 0.6]),
    st.sampled_from([0.0, 0.015, 0.2]),
)
def test_nobody_loses_more_than_its_tokens_are_worth(
    arrivals: list[tuple[int, int, int]], seconds: float, share: float
) -> None:
    """Against a list: who goes has the least of arrival and what its own tokens cost it."""
    line = queues(PolicyClass(overtaking=Overtaking(seconds, share)))
    waiting: list[tuple[float, float, Ticket]] = []  # its place, when it came
    now = 0.0
    for pause, isl, taken in arrivals:
        now += pause
        one = ticket(isl)
        one.since = now
        first = min(waiting, key=lambda other: other[0], default=None)
        waited = 0.0 if first is None else max(0.0, now - max(first[0], first[1]))
        line.enter(0, one, now, is_known=False)
        waiting.append((now + max(seconds, share * waited) * isl / 1_000, now, one))
        for _ in range(taken):
            gone = line.take_next(lambda _number, _head: True)
            if not waiting:
                assert gone is None
                continue
            expected = min(waiting, key=lambda other: other[0])
            assert gone is not None
            assert gone.key[1] == pytest.approx(expected[0])
            waiting.remove(next(other for other in waiting if other[2] is gone))
        line.check()


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=40),
)
def test_classes_take_turns_of_their_quantum_and_a_blocked_head_blocks_its_class_only(
    quanta: list[int], blocked: list[set[int]]
) -> None:
    line = queues(*(PolicyClass(name=str(at), quantum=one) for at, one in enumerate(quanta)))
    waiting = {at: [ticket() for _ in blocked] for at in range(len(quanta))}
    for at, those in waiting.items():
        for now, one in enumerate(those):
            line.enter(at, one, float(now), is_known=False)
    last, streak = -1, 0
    for closed in blocked:
        free = {at for at, those in waiting.items() if those and at not in closed}

        def may_go(number: int, head: Ticket, free: set[int] = free) -> bool:
            assert head is waiting[number][0]
            return number in free

        taken = line.take_next(may_go)
        line.check()
        if taken is None:
            assert not free
            continue
        (number,) = (at for at, those in waiting.items() if those and those[0] is taken)
        assert waiting[number].pop(0) is taken
        streak = streak + 1 if number == last and free != {number} else 1
        last = number
        assert number in free
        assert streak <= quanta[number], "others had their turn"
    assert line.pending == sum(map(len, waiting.values()))
    assert line.tickets() == [one for those in waiting.values() for one in those]


@pytest.mark.parametrize(
    ("one", "most", "busy_above"),
    [
        (PolicyClass(), 1000, None),
        (PolicyClass(prefill_busy_threshold=300.0), None, 300),
        (PolicyClass(prefill_busy_threshold_frac=0.5), 1000, 500),
        (PolicyClass(prefill_busy_threshold_frac=0.5), None, None),
        (PolicyClass(prefill_busy_threshold_frac=np.inf), 0, None),
        (PolicyClass(prefill_busy_threshold=300.0, prefill_busy_threshold_frac=0.5), 1000, 300),
    ],
)
def test_a_rank_is_busy_above_its_threshold(
    one: PolicyClass, most: int | None, busy_above: int | None
) -> None:
    line = queues(one, batched=(most, most))
    loads = line._loads
    for slot in range(2):
        loads.give_up(slot, 0 if busy_above is None else busy_above)
    assert not line.must_wait(0, slice(0, 2)), "at the threshold it is not"
    for slot in range(2):
        loads.give_up(slot, 10**9 if busy_above is None else busy_above + 1)
    assert line.must_wait(0, slice(0, 2)) == (busy_above is not None)
    loads.give_up(1, 0)
    assert not line.must_wait(0, slice(0, 2)), "one is free"
    assert not line.must_wait(0, np.array([1]))


def test_a_full_class_refuses_but_who_waited_before() -> None:
    line = queues(PolicyClass(request_queue_limit_per_worker=1), batched=(None, None))
    for _ in range(2):
        line.enter(0, ticket(), 0.0, is_known=False)
    with pytest.raises(QueueFull) as full:
        line.enter(0, ticket(), 0.0, is_known=False)
    assert full.value.retry_after_s == 0.5, "100 tokens at 100 a second on either rank"
    line.enter(0, ticket(), 0.0, is_known=True)
    assert (line.pending, line.pending_isl_tokens) == (3, 300)
