"""Marks of requests: the right steps for the right one, and none for who is not looked at."""

from __future__ import annotations

import itertools
from typing import Any

from select_service.core.admission.queue import Ticket
from select_service.core.instrumentation.marks import MarkRecorder, Marks
from select_service.types import RouterConfig
from tests.select_service.core.whole_fleet import Fleet


class Watched:
    """A fleet, and marks by a clock that only counts."""

    def __init__(self) -> None:
        self.recorder = MarkRecorder()
        self.fleet = Fleet(RouterConfig(queue_threshold=0.5), tracer=self.recorder)
        self.fleet.worker(1, max_num_batched_tokens=64)
        self.clock = itertools.count()

    def __call__(self, verb: Any, *words: Any) -> tuple[Any, Marks]:
        marks = self.recorder.current = Marks(lambda: next(self.clock), {})
        try:
            return verb(*words), marks
        finally:
            self.recorder.current = None


def steps(marks: Marks) -> list[str]:
    times = [at for _, at in marks.steps]
    assert times == sorted(times)
    return [name for name, _ in marks.steps]


def test_who_waits_is_marked_when_others_let_it_in() -> None:
    watched = Watched()
    fleet, recorder = watched.fleet, watched.recorder
    fleet.take("busy", 1, 2, 3, 4)
    first, marks = watched(fleet.take, "first", 5, 6, 7, 8)
    second = fleet.take("second", 9, 10, 11, 12)  # nobody looks at it
    assert isinstance(first, Ticket)
    assert isinstance(second, Ticket)
    assert list(recorder.waiting) == [first]
    assert steps(marks) == ["admission", "wait"]
    _, freeing = watched(fleet.core.reservations.free, "busy", fleet.now)
    assert first.answer is not None
    assert steps(marks) == ["admission", "wait", "match", "pick", "book", ""]
    assert steps(freeing) == []
    assert marks.placement is not None
    _, freeing = watched(fleet.core.reservations.free, "first", fleet.now)
    assert second.answer is not None
    assert steps(freeing) == []  # what was booked meanwhile was not its own
    recorder.forget(marks)
    assert recorder.waiting == {}


def test_who_asks_the_same_shares_the_wait_but_not_the_marks() -> None:
    watched = Watched()
    fleet, recorder = watched.fleet, watched.recorder
    fleet.take("busy", 1, 2, 3, 4)
    ticket, marks = watched(fleet.take, "first", 5, 6, 7, 8)
    same, others = watched(fleet.take, "first", 5, 6, 7, 8)
    assert same is ticket
    assert steps(others) == ["wait"]
    recorder.forget(others)
    assert recorder.waiting == {ticket: marks}
