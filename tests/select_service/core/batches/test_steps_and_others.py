"""What others do with the ids of a batch that is under way, with a disk and without.

A disk that may be looked at after any step: whoever was answered something finds it there, and of a
batch that is all or none nothing is there before all of it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from select_service.core.batches.batch_selection import RunningBatch
from select_service.errors import ReservationUnderWay, ServiceError
from select_service.types import SelectAndReserveRequest
from select_service.types.batches import SelectBatchAnswer, SelectBatchRequest
from select_service.types.workers import DrainRequest
from tests.select_service.core.batches.test_batch_selection import booked, prompt
from tests.select_service.core.test_state import Disk, restored
from tests.select_service.core.whole_fleet import Fleet

SAMPLES = 6
STAYING, GOING = 1, 2


class Underway:
    """A batch, a step at a time."""

    def __init__(self, fleet: Fleet, *, fails: bool = False, atomic: bool = True, name: str = "w"):
        self.fleet = fleet
        self.fails = fails
        here = [STAYING]
        items = [prompt(1, 2, 3, n=SAMPLES, reservation_id=name, allowed_worker_ids=here)]
        if fails:
            items.append(prompt(4, allowed_worker_ids=[GOING]))
        request = SelectBatchRequest(requests=[], reserve=True, atomic=atomic)
        self.batch: RunningBatch = fleet.core.batch_selection.begin(
            request, [(one, b"") for one in items]
        )
        self.steps: Generator[Any, float, Any] = self.batch.steps(fleet.now)
        self.answer: SelectBatchAnswer | None = None
        self.is_over = False
        self._begun = False

    def step(self) -> None:
        if self.is_over:
            return
        if self.fails and booked(self.fleet):  # the last sample has nowhere to go any more
            self.fails = False
            self.fleet.delete(GOING)
        try:
            if self._begun:
                self.steps.send(self.fleet.now)
            else:
                self._begun = True
                next(self.steps)
        except StopIteration as done:
            self.answer, self.is_over = done.value, True
        except ServiceError:
            self.is_over = True
        self.fleet.core.check()

    def until_booked(self, count: int) -> None:
        while booked(self.fleet) < count:
            assert not self.is_over
            self.step()

    def end(self) -> None:
        while not self.is_over:
            self.step()

    def give_up(self) -> None:
        self.steps.close()
        undoing = self.batch.undo(self.fleet.now)
        with contextlib.suppress(StopIteration):
            next(undoing)
            while True:
                undoing.send(self.fleet.now)
        self.is_over = True
        self.fleet.core.check()


def alone(name: str = "w.0", block: int = 9) -> SelectAndReserveRequest:
    return SelectAndReserveRequest(
        block_hashes=[block],
        sequence_hashes=[block],
        isl_tokens=16,
        reservation_id=name,
        allowed_worker_ids=[STAYING],
    )


def repeat(name: str) -> SelectAndReserveRequest:
    """What a client sends that asks for one sample of the batch alone."""
    one = prompt(1, 2, 3, allowed_worker_ids=[STAYING])
    fields = {field: getattr(one, field) for field in SelectAndReserveRequest.__struct_fields__}
    return SelectAndReserveRequest(**(fields | {"reservation_id": name}))


def house() -> tuple[Fleet, Disk]:
    fleet = Fleet()
    disk = Disk(fleet.core.keep_changes())
    for worker in (STAYING, GOING):
        fleet.worker(worker)
    disk.write(fleet)
    return fleet, disk


def live(fleet: Fleet) -> set[str]:
    return {one.reservation.reservation_id for one in fleet.core.lifecycle.bookings.newest(1_000)}


def on_disk(disk: Disk) -> set[str]:
    return live(restored(disk, 5_000.0))


def test_an_id_booked_again_by_somebody_else_is_durable_by_itself() -> None:
    fleet, disk = house()
    batch = Underway(fleet)
    batch.until_booked(3)
    fleet.core.reservations.free("w.0", fleet.now)
    fleet.core.selection.select_and_reserve(alone("w.0"), fleet.now)
    disk.write(fleet)  # it is answered now
    assert on_disk(disk) == {"w.0"}, "what was answered is there, and nothing of the batch"
    batch.end()
    disk.write(fleet)
    assert on_disk(disk) == live(fleet) == {f"w.{n}" for n in range(SAMPLES)}


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_id_booked_again_is_not_ended_with_the_batch_it_once_was_of(*, is_cut: bool) -> None:
    fleet, disk = house()
    batch = Underway(fleet, fails=True)
    batch.until_booked(3)
    fleet.core.reservations.free("w.0", fleet.now)
    fleet.core.selection.select_and_reserve(alone("w.0"), fleet.now)
    if is_cut:
        batch.give_up()
    else:
        batch.end()
    disk.write(fleet)
    assert on_disk(disk) == live(fleet) == {"w.0"}


def test_an_id_that_was_freed_lately_is_not_written_before_its_batch() -> None:
    fleet, disk = house()
    fleet.core.selection.select_and_reserve(alone("w.1"), fleet.now)
    disk.write(fleet)
    fleet.core.reservations.free("w.1", fleet.now)
    batch = Underway(fleet)
    batch.until_booked(SAMPLES - 1)
    disk.write(fleet)
    assert on_disk(disk) == set(), "of the batch nothing, and the old booking is over"
    again = restored(disk, 5_000.0)
    again.core.reservations.free("w.1", again.now)  # it is remembered: 200, and not 404
    batch.end()
    disk.write(fleet)
    assert on_disk(disk) == {f"w.{n}" for n in range(SAMPLES)}


@pytest.mark.parametrize("atomic", [True, False])
def test_nobody_is_told_of_a_booking_that_may_yet_be_taken_back(*, atomic: bool) -> None:
    """A client that retries while its first call is taken back would get what is going."""
    fleet, _ = house()
    batch = Underway(fleet, atomic=atomic)
    batch.until_booked(3)
    with pytest.raises(ReservationUnderWay) as refused:
        fleet.core.selection.select_and_reserve(repeat("w.0"), fleet.now)
    assert (refused.value.status, refused.value.field) == (503, "reservation_id")
    other = Underway(fleet, atomic=False)
    other.end()
    assert other.answer is not None
    codes = [one.code for one in other.answer.results]
    assert codes[:3] == ["reservation_under_way"] * 3
    batch.give_up()
    third = Underway(fleet, atomic=False)
    third.end()
    assert third.answer is not None
    assert third.answer.placed == SAMPLES
    assert live(fleet) >= {f"w.{n}" for n in range(3)}
    fleet.core.selection.select_and_reserve(repeat("w.0"), fleet.now)  # and now it is answered


@pytest.mark.parametrize("atomic", [True, False])
def test_a_repeat_whose_worker_drains_and_whose_first_batch_is_taken_back(*, atomic: bool) -> None:
    """Its samples were neither refused, as they were known, nor placed: the answer failed."""
    fleet, _ = house()
    first = Underway(fleet)
    first.until_booked(SAMPLES)
    fleet.core.drains.drain(STAYING, DrainRequest(), fleet.now)
    again = Underway(fleet, atomic=atomic)
    again.step()
    first.give_up()
    again.end()
    assert live(fleet) == set()
    if again.answer is not None:
        assert {one.status for one in again.answer.results} == {503}
        assert not atomic


def test_what_a_refusing_disk_takes_back_is_the_whole_batch_and_what_others_booked() -> None:
    fleet, disk = house()
    batch = Underway(fleet)
    batch.end()
    fleet.core.selection.select_and_reserve(alone("x"), fleet.now)
    assert set(disk.changes.take_fresh()) == live(fleet)
    assert not set(disk.changes.take_fresh())
    batch = Underway(fleet, name="v")
    batch.end()
    disk.write(fleet)
    assert not set(disk.changes.take_fresh()), "it is written"


def test_to_let_a_batch_go_takes_one_mark() -> None:
    """A thousand in one turn took a millisecond."""
    fleet, disk = house()
    batch = Underway(fleet)
    batch.until_booked(SAMPLES)
    before = disk.changes.marks
    batch.end()
    assert disk.changes.marks == before + 1


ACTS = st.lists(
    st.tuples(
        st.sampled_from(("step", "step", "step", "free", "book", "output", "write", "fail")),
        st.integers(0, SAMPLES - 1),
    ),
    max_size=40,
)


class Scene:
    """A batch, others who use its ids, and a disk that may fail."""

    def __init__(self, *, fails: bool) -> None:
        self.fleet, self.disk = house()
        self.batch = Underway(self.fleet, fails=fails)
        self.others: set[str] = set()  # ids that others have booked, and were answered
        self.ended: set[str] = set()  # samples of the batch that others have ended
        self.is_failing = False

    def act(self, verb: str, name: str) -> None:
        with contextlib.suppress(ServiceError):
            if verb == "step":
                self.batch.step()
            elif verb == "free":
                self.free(name)
            elif verb == "book":
                self.fleet.core.selection.select_and_reserve(alone(name), self.fleet.now)
                self.others.add(name)
            elif verb == "output":
                self.fleet.core.reservations.output_block(name, None, self.fleet.now)
            elif verb == "write":
                self.write()
            else:
                self.is_failing = True

    def free(self, name: str) -> None:
        if name in self.others:
            self.others.discard(name)
        elif name in live(self.fleet):
            self.ended.add(name)
        self.fleet.core.reservations.free(name, self.fleet.now)

    def write(self) -> None:
        fails, self.is_failing = self.is_failing, False
        self.disk.write(self.fleet, fails=fails)
        if not fails:
            self.look()

    def look(self) -> None:
        there = on_disk(self.disk)
        assert self.others <= there, "what was answered stands"
        ours = {f"w.{n}" for n in range(SAMPLES)} - self.ended - self.others
        stands = self.batch.answer is not None
        assert there - self.others == (ours if stands else set()), "all or none"


@settings(max_examples=25, deadline=None)
@given(ACTS, st.booleans(), st.booleans())
@example([("book", 0), ("free", 0)], False, False)  # and then a batch takes the id
def test_all_or_none_and_what_others_were_told(
    acts: list[tuple[str, int]], fails: bool, is_cut: bool
) -> None:
    scene = Scene(fails=fails)
    for verb, number in acts:
        scene.act(verb, f"w.{number}")
    if is_cut and not scene.batch.is_over:
        scene.batch.give_up()
    scene.batch.end()
    scene.is_failing = False
    scene.write()
    assert live(scene.fleet) == on_disk(scene.disk)
    assert not scene.disk.changes.marked
    assert not set(scene.disk.changes.take_fresh())


@given(turns=st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=12))
@example(turns=[(True, 6), (False, 9), (True, 9)])
def test_of_two_equal_batches_one_is_placed_however_they_take_turns(
    turns: list[tuple[bool, int]],
) -> None:
    """A client gave up waiting and asks again, while its first batch goes on."""
    fleet, _ = house()
    first, again = Underway(fleet), Underway(fleet)
    for is_first, steps in turns:
        for _ in range(steps):
            (first if is_first else again).step()
    first.end()
    again.end()
    placed = [one.answer.placed for one in (first, again) if one.answer is not None]
    assert placed in ([SAMPLES], [SAMPLES] * 2), "the second one may be answered with the first"
    assert live(fleet) == {f"w.{number}" for number in range(SAMPLES)}
