"""The witness's rooms do what the plain ones do, also beside those that are traced."""

from __future__ import annotations

import random
from typing import Any

from select_service.core.instrumentation.marks import MarkRecorder, Marks
from select_service.core.instrumentation.recorder import Recorder
from select_service.core.pricing.cost import Pulls
from select_service.core.recording.items import ReservationStep
from select_service.core.recording.notes import BatchNote, BirthNote, DecisionNote, Note, SlotsNote
from select_service.errors import ServiceError
from select_service.types import CoreLimits, LeaseRequest, RouterConfig, Selection
from tests.select_service.core.batches.test_batch_selection import place, prompt
from tests.select_service.core.whole_fleet import Fleet


class Notes:
    """A Sink that keeps what it is given, or nothing."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.left_out = 0
        self.draws: list[float | int] = []
        self.taken: list[Note] = []
        self.is_full = is_full
        self.sizes: list[int] = []

    def put(self, note: Note, size: int) -> bool:
        assert size > 0
        self.sizes.append(size)
        if not self.is_full:
            self.taken.append(note)
        return not self.is_full

    def leave_out(self) -> None:
        self.left_out += 1

    def of(self, kind: type) -> list[Any]:
        return [note for note in self.taken if type(note) is kind]


def live(fleet: Fleet) -> list[object]:
    """Some life, and what was answered."""
    draw, said = random.Random(5), list[object]()
    for worker_id in (1, 2, 3):
        fleet.worker(worker_id, max_num_batched_tokens=64)
    for number in range(60):
        hashes = [draw.randrange(3)] * draw.randint(1, 6)
        try:
            answer = fleet.take(f"r{number}", *hashes)
        except ServiceError as error:
            said.append(error.code)
            continue
        said.append(str(answer) if isinstance(answer, Selection) else type(answer))
        if isinstance(answer, Selection) and draw.random() < 0.5:
            fleet.done(f"r{number}")
            fleet.free(f"r{number}")
        fleet.tick(0.1)
    return said


def test_what_is_answered_is_the_same_with_and_without() -> None:
    config = RouterConfig(queue_threshold=4.0)
    plain = Fleet(config)
    notes, recorder = Notes(), MarkRecorder()
    both = Fleet(config, decision_recorder=Recorder(notes), tracer=recorder)
    recorder.current = Marks(lambda: 0, {})
    answers = live(both)
    assert live(plain) == answers
    assert len(notes.of(DecisionNote)) >= 10
    assert {note.what for note in notes.of(ReservationStep)} >= {"prefill_complete", "freed"}
    assert {note.what for note in notes.of(BirthNote)} == {"booked"}
    assert recorder.current.placement is not None, "and it was traced"


def test_what_ranks_could_pull_takes_room_in_the_buffer() -> None:
    sizes = []
    for may_pull in (False, True):
        notes = Notes()
        fleet = Fleet(RouterConfig(kv_pull=may_pull), decision_recorder=Recorder(notes))
        fleet.worker(1)
        fleet.worker(2)
        fleet.hold(1, [1])
        fleet.select(1)
        assert type(notes.taken[-1]) is DecisionNote
        sizes.append(notes.sizes[-1])
    assert sizes[1] - sizes[0] >= 2 * len(Pulls._fields) * 8


def test_every_end_of_a_reservation_is_noted() -> None:
    notes = Notes()
    fleet = Fleet(decision_recorder=Recorder(notes), limits=CoreLimits(reservation_ttl_s=5.0))
    for worker_id in (1, 2):
        fleet.worker(worker_id)
    fleet.core.reservations.open_lease(LeaseRequest(lease_id="l", owner="o", ttl_s=2.0), fleet.now)
    for name, lease_id in (("freed", None), ("expired", None), ("lease_ended", "l")):
        fleet.take(name, 1, 2, allowed_worker_ids=[1], lease_id=lease_id)
    fleet.take("dropped", 1, 2, allowed_worker_ids=[2])
    fleet.free("freed")
    fleet.delete(2)
    fleet.tick(3.0)
    fleet.tick(3.0)
    ends = {one.reservation_id: one.what for one in notes.of(ReservationStep)}
    assert ends == {name: name for name in ("freed", "expired", "lease_ended", "dropped")}


def test_seats_are_noted_once_until_somebody_comes_or_goes() -> None:
    notes = Notes()
    fleet = Fleet(decision_recorder=Recorder(notes))
    fleet.worker(1)
    for _ in range(3):
        fleet.select(1, 2)
    assert [len(one.workers) for one in notes.of(SlotsNote)] == [1]
    fleet.worker(2)
    fleet.select(1)
    fleet.drain(2)
    fleet.select(1)
    fleet.delete(2)
    fleet.select(1)
    assert [len(one.workers) for one in notes.of(SlotsNote)] == [1, 2, 2, 1]
    assert [one.workers[-1][2] for one in notes.of(SlotsNote)] == [None, None, "", None]


def test_seats_that_found_no_room_are_noted_later() -> None:
    notes = Notes(is_full=True)
    fleet = Fleet(decision_recorder=Recorder(notes))
    fleet.worker(1)
    fleet.take("r", 1)
    assert notes.left_out == 2, "nor is who may sit there, whoever that is"
    notes.is_full = False
    fleet.select(1)
    assert [type(one) for one in notes.taken] == [SlotsNote, DecisionNote]


def test_decisions_are_noted_without_a_ring_of_them() -> None:
    notes = Notes()
    fleet = Fleet(decision_recorder=Recorder(notes), limits=CoreLimits(decision_ring=0))
    fleet.worker(1)
    fleet.select(1, selection_id="s")
    (note,) = notes.of(DecisionNote)
    assert note.request.selection_id == "s"
    assert not len(fleet.core.decisions)


def test_the_plan_of_a_batch_is_one_note() -> None:
    notes = Notes()
    fleet = Fleet(decision_recorder=Recorder(notes))
    for worker_id in (1, 2):
        fleet.worker(worker_id)
    place(fleet, prompt(1, 2, n=4), prompt(3, n=2), reserve=True)
    (batch,) = notes.of(BatchNote)
    attached = [number for step in batch.steps for number, _ in step.planned_ranks]
    assert sorted(attached) == list(range(6))
    assert sum(note.in_batch for note in notes.of(DecisionNote)) == 6
