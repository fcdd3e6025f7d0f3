"""Queues of deadlines: who is next, and that nobody stays behind."""

from __future__ import annotations

import random
from math import inf

import pytest

from select_service.core.ledger.active_blocks import ChainNode
from select_service.core.ledger.deadlines import Deadlines, deadline_of, rounded_up
from select_service.core.ledger.reservation import LedgerReservation, SlotGeneration


def reservation(name: str) -> LedgerReservation:
    return LedgerReservation(name, 0, SlotGeneration(0), ChainNode(None, b""), 0, 0.0)


def test_many_times_to_live_in_any_order() -> None:
    rng = random.Random(3)
    deadlines: Deadlines[LedgerReservation] = Deadlines()
    waiting: dict[LedgerReservation, float] = {}
    now = 0.0
    for step in range(4000):
        now += rng.choice([0.0, 0.1, 1.0])
        draw = rng.random()
        if draw < 0.5 or not waiting:
            one = reservation(str(step))
            one.touched = now
            deadlines.add(one, rng.choice([2.0, 7.0, rng.randint(1, 90) / 2]))
        else:
            one = rng.choice(list(waiting))
            if draw < 0.6:
                deadlines.remove(one)
                del waiting[one]
                continue
            one.touched = now
            deadlines.touch(one)
        waiting[one] = deadline_of(one)
        while deadlines.next() <= now:
            due = deadlines.due(now, 3)
            assert len(due) <= 3
            for late in due:
                assert waiting.pop(late) <= now
                deadlines.remove(late)
        assert min(waiting.values(), default=inf) > now, "nobody is overlooked"
    deadlines.check(waiting)


def test_emptied_queues_do_not_stay() -> None:
    deadlines: Deadlines[LedgerReservation] = Deadlines()
    for number in range(500):
        one = reservation(str(number))
        deadlines.add(one, 1.0 + number)
        deadlines.remove(one)
    for _ in range(10):
        deadlines.next()
    assert deadlines.next() == inf
    deadlines.check([])


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        *((300.0, 300.0), (0.3, 0.3), (7200.0, 7200.0), (1.0, 1.0), (86400.0, 86400.0)),
        *((300.1, 301.0), (99.95, 100.0), (99.99, 100.0), (12345.0, 12400.0), (1e-9, 1e-9)),
        *((999.1, 1000.0), (1.001, 1.01)),
    ],
)
def test_times_to_live_have_three_digits(asked: float, given: float) -> None:
    assert rounded_up(asked) == given
    assert rounded_up(given) == given
