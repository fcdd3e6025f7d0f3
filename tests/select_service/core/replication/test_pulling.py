"""What is missed of another replica is found out, and fetched from it whole."""

from __future__ import annotations

import msgspec

from select_service.core.effects import Pull
from select_service.core.replication.messages import SnapshotHead
from tests.select_service.core.replication.replica import Replica, acquainted, pulled, silent
from tests.select_service.core.whole_fleet import DEFAULT


def test_prompts_that_a_snapshot_tells_as_computed_tell_nothing_of_the_pace() -> None:
    here, there = Replica(), Replica(2000)
    for name in "ab":
        there.book(name, 1, 1, 2)
        there.done(name)
    here.hears(there.turn(1.0)[-1])
    here.turn()
    pulled(here, there)
    assert here.load(1) == (0, 2, 2)
    assert here.core.partitions[DEFAULT].ledger.loads.work.computed == 0
    there.book("c", 1, 1, 2)
    here.hears(there.effects.published[0])
    there.done("c")
    here.hears(there.effects.published[0])
    assert here.core.partitions[DEFAULT].ledger.loads.work.computed == 32, (
        "but what is heard at once"
    )


def test_a_gap_is_pulled_after_a_moment() -> None:
    here, there = acquainted()
    there.book("a", 1, 1)  # lost
    there.book("b", 1, 2)
    here.hears(there.effects.published[0])
    here.hears(*there.turn())
    here.turn()
    assert here.pulls == []
    here.turn(1.0)
    assert here.pulls == [Pull("tcp://peer:1", 2000, 8092, None)]
    pulled(here, there)
    assert here.load(1) == (32, 2, 2)
    assert here.core.replica_operations.status(here.now)[0].state == "synced"


def test_another_digest_is_pulled_at_once() -> None:
    here, there = acquainted()
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    (beat,) = there.turn()
    here.hears(beat)
    here.turn()
    assert here.pulls == []
    here.hears(msgspec.structs.replace(beat, digest=1, number=beat.number + 1))
    here.turn()
    assert here.core.replicas.counters.digests_differed == 1
    pulled(here, there)
    assert here.load(1) == (16, 1, 1)


def test_a_pull_that_fails_is_tried_again() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(*there.turn())
    here.turn(1.0)
    here.core.replica_operations.snapshot_end(2000, here.now, complete=False)
    here.turn()
    assert here.pulls == []
    here.turn(here.core.limits.replica_pull_retry_s)
    pulled(here, there)
    (row,) = here.core.replica_operations.status(here.now)
    assert (row.pulls, row.pulls_failed, row.state) == (2, 1, "synced")


def test_a_snapshot_that_was_cut_short_does_not_end_anything() -> None:
    here, there = Replica(), Replica(2000)
    for name in "ab":
        there.book(name, 1, 1)
        here.hears(there.effects.published[0])
    (beat,) = there.turn()
    here.hears(msgspec.structs.replace(beat, digest=1, number=beat.number + 1))
    here.turn()
    (pull,) = here.pulls
    parts = there.core.replica_operations.snapshot(there.now)
    head = next(parts)
    assert isinstance(head, SnapshotHead)
    here.core.replica_operations.snapshot_begin(pull, head, here.now)
    here.core.replica_operations.snapshot_part(2000, next(parts), here.now)
    here.core.replica_operations.snapshot_end(2000, here.now, complete=True)
    here.turn()
    assert here.load(1) == (32, 1, 2)
    assert here.core.replica_operations.status(here.now)[0].pulls_failed == 1


def test_a_snapshot_tells_the_hashes_of_what_is_not_swept_yet() -> None:
    here, there, third = Replica(dropped_per_turn_max=1), Replica(2000), Replica(3000)
    for name, hashes in (("a", [1, 2]), ("b", [3])):
        there.book(name, 1, *hashes)
        here.hears(there.effects.published[0])
    silent(here)
    here.delete(1)  # one of them is swept at once, and one is not
    third.hears(*here.turn(1.0))
    third.turn()
    pulled(third, here)
    assert third.load(1) == (48, 3, 2)
