"""What is booked, put out and freed at one replica is so at the others."""

from __future__ import annotations

from select_service.core.changes import RESERVATION
from tests.select_service.core.replication.replica import Replica, pulled
from tests.select_service.core.test_state import Disk
from tests.select_service.core.whole_fleet import DEFAULT


def test_a_claim_that_has_ended_waits_for_its_worker_no_longer() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    for name in "abc":
        there.book(name, 3, 1)
        here.hears(there.effects.published[0])
        there.free(name)
        here.hears(there.effects.published[0])
    assert not here.core.lifecycle.announcer.claims.waiting.at((DEFAULT, 3))


def test_output_blocks_are_counted_once_after_a_restart() -> None:
    """Who was told of how many is kept: what others had told came back as its own, and again."""
    here, there = Replica(), Replica(2000)
    disk = Disk(here.core.keep_changes())
    here.book("a", 1, 1, 2)
    there.hears(here.effects.published[0])
    for _ in range(3):
        there.core.reservations.output_block("a", None, there.now)
    here.core.reservations.output_block("a", None, here.now)
    here.hears(*there.turn())
    here.turn()
    assert here.load(1) == (32, 6, 1)
    disk.write(here)
    again = Replica()
    for key, record in disk.rows.items():
        if key[0] == RESERVATION:
            assert again.core.state.restore(key, record, again.now) is not None
    assert again.load(1) == (32, 6, 1)
    again.hears(*there.turn(there.core.limits.replica_heartbeat_s))
    again.turn()
    pulled(again, there)
    assert again.load(1) == (32, 6, 1)
