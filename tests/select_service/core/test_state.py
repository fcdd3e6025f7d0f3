"""Any history of bookings, given to another core by its records alone, is the same state."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.changes import RESERVATION, WHOLE, Changes
from select_service.core.replication.messages import ClaimRecord
from select_service.errors import ServiceError
from tests.effort import examples
from tests.select_service.core.whole_fleet import Fleet

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "reserve",
                "complete",
                "output",
                "free",
                "delete",
                "worker",
                "wait",
                "drain",
                "undrain",
                "hold back",
                "ready",
            )
        ),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
    max_size=40,
)


class Disk:
    """Rows as the journal would write them, taken from the queue of changes."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.rows: dict[Any, bytes] = {}

    def write(self, fleet: Fleet, *, fails: bool = False) -> None:
        """Write all there is, a commit at a time; one that fails comes back into the queue."""
        while self.changes.marked:
            flying: dict[Any, int] = {}
            rest: list[Any] = []
            while (taken := self.changes.take(rest, flying)) is not None:
                flying[taken[0]] = taken[1]
                if not rest:
                    break
            records = {key: fleet.core.state.record(key) for key in flying if key[0] != WHOLE}
            if fails:
                for key, ordinal in sorted(flying.items(), key=lambda one: one[1], reverse=True):
                    if key not in self.changes.marked:
                        self.changes.marked[key] = ordinal
                        self.changes.marked.move_to_end(key, last=False)
                return
            for key, record in records.items():
                if record is None:
                    self.rows.pop(key, None)
                else:
                    self.rows[key] = record
            for key, ordinal in flying.items():
                self.changes.written(key, ordinal)


def restored(disk: Disk, now: float) -> Fleet:
    again = Fleet()
    again.now = now
    state = again.core.state
    for key in sorted(disk.rows, key=lambda one: state.turn(one[0], disk.rows[one])):
        again.core.state.restore(key, disk.rows[key], now)
    again.core.check()
    return again


def facts(fleet: Fleet) -> dict[str, Any]:
    bookings = fleet.core.lifecycle.bookings
    names = [f"r{number}" for number in range(6)]
    return {
        "workers": fleet.core.workers.workers(),
        "loads": [
            scope for scope in fleet.core.queries.loads() if scope.loads
        ],  # of workers there are
        "live": {name for name in names if bookings.live(name)},
        "known": {name for name in names if bookings.was_freed(name) or bookings.find(name)},
    }


def step(fleet: Fleet, verb: str, number: int, worker: int) -> None:
    name, core = f"r{number}", fleet.core
    if verb == "reserve":
        fleet.book(name, worker, *range(number), 50 + worker, selection_id=f"s{number}")
    elif verb == "complete":
        core.reservations.prefill_complete(name, fleet.now)
    elif verb == "output":
        core.reservations.output_block(name, None, fleet.now)
    elif verb == "free":
        core.reservations.free(name, fleet.now)
    elif verb == "delete":
        fleet.delete(worker)
        fleet.tick(0.0)
    elif verb == "worker":
        fleet.worker(worker)
    elif verb == "drain":
        fleet.drain(worker, f"for {number}" if number else None)
    elif verb == "undrain":
        fleet.undrain(worker)
    elif verb in {"hold back", "ready"}:
        fleet.hold_back(worker, "not ready" if verb == "hold back" else None)
    else:
        fleet.tick(200.0)


@settings(max_examples=examples(60))
@given(STEPS, st.data())
def test_records_are_the_whole_state(
    steps: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    fleet = Fleet()
    disk = Disk(fleet.core.keep_changes())
    for worker in (1, 2):
        fleet.worker(worker)
    for verb, number, worker in steps:
        with contextlib.suppress(ServiceError):
            step(fleet, verb, number, worker)
        if data.draw(st.booleans()):
            disk.write(fleet)
    disk.write(fleet)
    assert not disk.changes.fresh, "what is written is not fresh"
    again = restored(disk, 5000.0)
    assert facts(again) == facts(fleet)
    assert not any(again.core.state.dropped.values())
    for name in facts(fleet)["live"]:
        assert again.core.state.record((RESERVATION, name)) == disk.rows[RESERVATION, name]


def test_a_booking_is_fresh_until_it_is_written_as_it_was_booked() -> None:
    changes = Changes()
    changes.booked("a")
    key, ordinal = changes.marked.popitem(last=False)
    changes.mark(RESERVATION, "a")  # while it is with the writer
    changes.written(key, ordinal)
    assert not changes.fresh
    changes.booked("a")  # anew, under the mark that waits
    assert list(changes.fresh.values()) == list(changes.marked.values())
    changes.written(key, ordinal)
    assert changes.fresh


def test_what_is_booked_again_for_its_claim_was_acknowledged_long_ago() -> None:
    fleet = Fleet()
    fleet.worker(1)
    changes = fleet.core.keep_changes()
    partition = next(iter(fleet.core.partitions.values()))
    slot = partition.fleet_slots.workers[1].slots[0]
    record = ClaimRecord("a", 1, *partition.scope, 16, 1, 0)
    fleet.core.lifecycle.learn(partition, slot, record, b"", "local", fleet.now)
    assert (RESERVATION, "a") in changes.marked
    assert not changes.fresh, "a disk that refuses must not take it back"


def test_what_cannot_be_read_is_dropped_and_counted() -> None:
    fleet = Fleet()
    for kind in ("worker", "reservation", "lease"):
        assert fleet.core.state.restore((kind, "1"), b"\xc1 rubbish", 0.0) is None
    assert sum(fleet.core.state.dropped.values()) == 3
    fleet.core.check()


def test_prompts_computed_before_a_restart_do_not_tell_how_fast_ranks_compute() -> None:
    fleet = Fleet()
    disk = Disk(fleet.core.keep_changes())
    fleet.worker(1)
    for number in range(50):
        fleet.book(f"r{number}", 1, number, 8000)
        fleet.core.reservations.prefill_complete(f"r{number}", fleet.now)
    disk.write(fleet)
    again = restored(disk, 5000.0)
    (partition,) = again.core.partitions.values()
    assert partition.ledger.live == 50
    assert partition.ledger.loads.work.computed == 0


def test_prompts_begun_before_a_restart_do_not_tell_either() -> None:
    """So long after the restart they are computed: how long they took nobody knows."""
    fleet = Fleet()
    disk = Disk(fleet.core.keep_changes())
    fleet.worker(1)
    for number in range(20):
        fleet.book(f"r{number}", 1, number, isl=8000)
    disk.write(fleet)
    again = restored(disk, 5000.0)
    (partition,) = again.core.partitions.values()
    again.now = 5000.0
    for number in range(20):
        again.now += 0.01
        again.done(f"r{number}")
    work = partition.ledger.loads.work
    assert (work.computed, work.untimed, work.reported_seconds) == (160_000, 160_000, 0.0)
    again.book("new", 1, 99, isl=8000)
    again.now += 1.0
    again.done("new")
    assert (work.computed, work.untimed) == (168_000, 160_000)
    assert work.reported_seconds == pytest.approx(1.0)
