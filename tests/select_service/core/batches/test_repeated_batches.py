"""A batch that is repeated gets its first answer, whoever is asked."""

from __future__ import annotations

import pytest

from tests.select_service.core.batches.test_batch_selection import place, prompt
from tests.select_service.core.replication.replica import Replica, acquainted, pulled, silent, tell
from tests.select_service.core.test_state import Disk
from tests.select_service.core.whole_fleet import Fleet

ITEMS = (
    prompt(1, 2, 3, n=3, reservation_id="a", selection_id="s"),
    prompt(1, 2, 4, reservation_id="b"),
    prompt(7, 8, reservation_id="c"),
    prompt(9, n=2, reservation_id="d"),
)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_repeated_batch_gets_its_first_answer(atomic: bool) -> None:
    fleet = Fleet()
    fleet.worker(1)
    fleet.worker(2)
    first = place(fleet, *ITEMS, reserve=True, atomic=atomic)
    assert first.groups == 3
    assert first.prefixes_computed < len(first.results) == first.placed
    assert any(one.shared_tokens for one in first.results)
    before = fleet.core.queries.loads()
    assert place(fleet, *ITEMS, reserve=True, atomic=atomic) == first
    assert fleet.core.queries.loads() == before
    assert fleet.core.counters.reservations_booked == len(first.results)


@pytest.mark.parametrize("has_workers", [False, True])
def test_at_another_replica_too(has_workers: bool) -> None:
    here, there = acquainted()
    if not has_workers:
        here.delete(1)
        here.delete(2)
    first = place(there, *ITEMS, reserve=True)
    tell(there, here)
    assert place(here, *ITEMS, reserve=True) == first
    assert not here.effects.published
    silent(here)
    for name in ("a.0", "b", "c"):
        here.core.reservations.output_block(
            name, None, here.now
        )  # which adopts it, where its worker is
    assert here.core.lifecycle.announcer.claims.adopted == 3 * has_workers
    assert place(here, *ITEMS, reserve=True) == first


def test_after_a_snapshot_and_after_a_restart_from_state() -> None:
    _, there = acquainted()
    disk = Disk(there.core.keep_changes())
    first = place(there, *ITEMS, reserve=True)
    disk.write(there)
    again = Replica(there.router_id)
    again.now = there.now
    for key, record in disk.rows.items():
        again.core.state.restore(key, record, again.now)
    assert place(again, *ITEMS, reserve=True) == first
    third = Replica(3000)
    tell(again, third, again.turn())
    third.turn()
    pulled(third, again)
    assert place(third, *ITEMS, reserve=True) == first


def test_what_is_new_in_a_repeat_is_placed_and_then_repeated() -> None:
    fleet = Fleet()
    fleet.worker(1)
    fleet.worker(2)
    fleet.take("single", 5, 6)
    first = place(fleet, *ITEMS[:2], prompt(5, 6, reservation_id="single"), reserve=True)
    assert (first.groups, first.placed) == (2, 5)
    more = place(fleet, *ITEMS, prompt(5, 6, reservation_id="single"), reserve=True)
    assert more.results[:4] == first.results[:4]
    assert (more.groups, more.placed) == (4, 8)
    assert place(fleet, *ITEMS, prompt(5, 6, reservation_id="single"), reserve=True) == more


def test_a_batch_whose_request_waits_alone_does_not_wait_with_it() -> None:
    fleet = Fleet()
    fleet.worker(1, max_num_batched_tokens=1)
    fleet.book("load", 1, isl=1000)
    ticket = fleet.take("a", 1, 2)
    answer = place(fleet, prompt(1, 2, reservation_id="a"), reserve=True)
    assert [(one.status, one.code) for one in answer.results] == [(503, "would_wait")]
    fleet.free("load")
    assert fleet.effects.answered == [ticket]
