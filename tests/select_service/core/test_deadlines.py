"""Queues of deadlines: who is next, and that nobody stays behind."""

from __future__ import annotations

from math import inf

from select_service.core.active_blocks import ChainNode
from select_service.core.deadlines import Deadlines
from select_service.core.reservation import Lane, Reservation


def reservation(name: str) -> Reservation:
    return Reservation(name, 0, Lane(0), ChainNode(None, b""), 0, 0.0)


def test_the_next_is_the_one_longest_untouched_whatever_its_time_to_live() -> None:
    deadlines = Deadlines()
    assert deadlines.next() == inf
    first, second, short = (reservation(name) for name in "abc")
    deadlines.add(first, 10.0, 0.0)
    deadlines.add(second, 10.0, 1.0)
    deadlines.add(short, 2.0, 3.0)
    assert deadlines.next() == 5.0
    assert deadlines.due(5.0, 9) == [short]
    deadlines.touch(first, 4.0)
    assert deadlines.due(100.0, 9) == [short, second, first]
    assert deadlines.due(100.0, 2) == [short, second]
    for one in (second, short, first):
        deadlines.remove(one)
        deadlines.remove(one)
    assert len(deadlines) == 0
    assert deadlines.next() == inf
    deadlines.check([])


def test_who_never_expires_is_in_no_queue() -> None:
    deadlines = Deadlines()
    one = reservation("a")
    deadlines.touch(one, 5.0)
    assert list(deadlines) == []
