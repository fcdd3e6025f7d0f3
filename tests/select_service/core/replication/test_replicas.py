"""What is booked, put out and freed at one replica is so at the others."""

from __future__ import annotations

from select_service.core.changes import RESERVATION
from tests.select_service.core.replication.replica import Replica, pulled
from tests.select_service.core.test_state import Disk
from tests.select_service.core.whole_fleet import DEFAULT


def test_a_booking_there_is_a_booking_here_and_ends_from_either_side() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1, 2)
    (told,) = there.effects.published
    here.hears(told)
    assert here.load(1) == there.load(1) == (32, 2, 1)
    here.hears(told)  # again
    assert here.load(1) == (32, 2, 1)
    here.free("a")
    (freed,) = here.effects.published
    there.hears(freed)
    assert there.load(1) == (0, 0, 0)


def test_a_free_that_overtakes_its_admission() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    (told,) = there.effects.published
    there.free("a")
    (freed,) = there.effects.published
    here.hears(freed)
    here.hears(told)
    assert here.load(1) == (0, 0, 0)


def test_output_blocks_are_shared() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1, 2)
    here.hears(there.effects.published[0])
    here.core.reservations.output_block("a", None, here.now)
    there.core.reservations.output_block("a", 0.5, there.now)
    for said in here.turn():
        there.hears(said)
    for said in there.turn():
        here.hears(said)
    assert here.load(1) == there.load(1)
    assert there.core.desk.bookings.get("a").reservation.output_blocks == 2


def test_the_lower_router_wins_an_id_booked_twice() -> None:
    here, there = Replica(1000), Replica(2000)
    here.book("a", 1, 1)
    there.book("a", 2, 2, 3)
    (ours,), (theirs,) = here.effects.published, there.effects.published
    here.hears(theirs)
    there.hears(ours)
    assert here.load(1) == there.load(1) == (16, 1, 1)
    assert here.load(2) == there.load(2) == (0, 0, 0)
    there.free("a")  # both
    here.hears(there.effects.published[0])
    assert here.load(1) == here.load(2) == (0, 0, 0)


def test_a_claim_waits_for_its_worker() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    there.book("a", 3, 1)
    here.hears(there.effects.published[0])
    assert here.load(3) is None
    here.worker(3)
    here.turn()
    assert here.load(3) == (16, 1, 1)
    here.delete(3)
    here.worker(3)
    here.tick(0.0)
    here.turn()
    assert here.load(3) == (16, 1, 1)


def test_a_claim_that_has_ended_waits_for_its_worker_no_longer() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    for name in "abc":
        there.book(name, 3, 1)
        here.hears(there.effects.published[0])
        there.free(name)
        here.hears(there.effects.published[0])
    assert not here.core.desk.announcer.claims.waiting.came(DEFAULT, 3)


def test_a_claim_without_its_worker_can_be_freed() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    there.book("a", 3, 1)
    here.hears(there.effects.published[0])
    here.free("a")
    there.hears(here.effects.published[0])
    assert there.load(3) == (0, 0, 0)


def test_output_blocks_are_counted_once_after_a_restart() -> None:
    """Who was told of how many is kept: what others had told came back as its own, and again."""
    here, there = Replica(), Replica(2000)
    disk = Disk(here.core.keep_changes())
    here.book("a", 1, 1, 2)
    there.hears(here.effects.published[0])
    for _ in range(3):
        there.core.reservations.output_block("a", None, there.now)
    here.core.reservations.output_block("a", None, here.now)
    for said in there.turn():
        here.hears(said)
    here.turn()
    assert here.load(1) == (32, 6, 1)
    disk.write(here)
    again = Replica()
    for key, record in disk.rows.items():
        if key[0] == RESERVATION:
            assert again.core.state.restore(key, record, again.now) is not None
    assert again.load(1) == (32, 6, 1)
    for said in there.turn(there.core.limits.replica_heartbeat_s):
        again.hears(said)
    again.turn()
    pulled(again, there)
    assert again.load(1) == (32, 6, 1)
