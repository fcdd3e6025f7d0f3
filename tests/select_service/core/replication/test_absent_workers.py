"""Of reservations on workers that a replica lacks the ids are taken, and calls reach owners."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.replication.dynamo_events import ReplicaEnvelope
from select_service.errors import ReservationConflict, ReservationNotFound
from select_service.types import (
    BatchOutputBlock,
    LeaseRequest,
    ReservationRequest,
    SelectAndReserveRequest,
)
from tests.select_service.core.replication.replica import (
    Replica,
    acquainted,
    endings,
    silent,
    tell,
)
from tests.select_service.core.replication.test_retries import in_batch
from tests.select_service.core.whole_fleet import Fleet

PROMPT = (1, 2, 3)


def chosen(fleet: Fleet, name: str = "z", isl: int = 48) -> Any:
    request = ReservationRequest(
        reservation_id=name, worker_id=9, sequence_hashes=list(PROMPT), isl_tokens=isl
    )
    answer, effects = fleet.core.reservations.reserve(request, fleet.now)
    fleet.effects = effects
    return answer


def taken(fleet: Fleet, name: str = "z", isl: int = 48) -> Any:
    return fleet.take(name, *PROMPT, isl=isl, selection_id="s", allowed_worker_ids=[9])


def in_a_batch(fleet: Any, name: str = "z", isl: int = 48) -> Any:
    return in_batch(fleet, name, isl=isl, allowed_worker_ids=[9])


def paired(fleet: Fleet, name: str = "z", isl: int = 48) -> Any:
    return fleet.pair(name, *PROMPT, isl=isl, selection_id="s")


ASKS = (chosen, taken, in_a_batch, paired)


def two(ask: Any, *, bare: bool) -> tuple[Replica, Replica, Any]:
    """The second has booked on workers that the first lacks, which may have none at all."""
    here, there = acquainted()
    if bare:
        here.delete(1)
        here.delete(2)
    if ask is paired:
        there.delete(1)
        there.delete(2)
        there.worker(8, role="prefill")
        there.worker(9, role="decode")
    else:
        there.worker(9, data_parallel_size=1)
    first = ask(there)
    tell(there, here)
    return here, there, first


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("ask", ASKS)
def test_a_known_id_is_never_booked_anew(ask: Any, bare: bool) -> None:
    here, there, first = two(ask, bare=bare)
    assert ask(here) == first
    assert not here.effects.published
    with pytest.raises(ReservationConflict):
        ask(here, isl=49)
    assert len(here.core.lifecycle.bookings) == 0
    if not bare:  # by whatever route it would be booked on another worker
        with pytest.raises(ReservationConflict):
            here.book("z", 1, *PROMPT)
        with pytest.raises(ReservationConflict):
            here.take("z", *PROMPT)
        with pytest.raises(ReservationConflict):
            in_batch(here, "z")
        with pytest.raises(ReservationConflict):
            here.pair("z", *PROMPT)
    if ask is paired:
        with pytest.raises(ReservationConflict):
            chosen(here, "z:decode")
    here.turn()
    assert there.load(9) is not None
    assert there.load(9) != (0, 0, 0)
    assert here.core.counters.reservations_repeated == 1


@pytest.mark.parametrize("name", ["z", "s"])
@pytest.mark.parametrize("ask", [taken, paired])
def test_progress_and_ends_reach_the_owner(ask: Any, name: str) -> None:
    here, there, _ = two(ask, bare=False)
    before = there.load(9)
    assert before is not None
    here.core.reservations.output_block(name, None, here.now, 2)
    here.core.reservations.operate(BatchOutputBlock(reservation_id=name, total=3), here.now)
    tell(here, there, here.turn(1.0))
    assert there.load(9) == (before[0], before[1] + 3, 1)
    for _ in range(2):
        here.done(name)
        tell(here, there)
    assert there.load(9) == (0, before[1] + 3, 1)
    left = there.core.lifecycle.bookings.get("z:decode" if ask is paired else "z")
    assert left.reservation.prefill_done
    here.free(name)
    tell(here, there)
    assert there.load(9) == (0, 0, 0)
    here.free(name)  # lately freed
    with pytest.raises(ReservationNotFound):
        here.done(name)
    assert ask(there) is not None, "it may be booked anew"


def test_dynamos_selectors_hear_of_them_too() -> None:
    here, _, _ = two(taken, bare=False)
    here.done("z")
    (done,) = here.effects.published
    here.free("z")
    (freed,) = here.effects.published
    for told, data in ((done, "MarkPrefillCompleted"), (freed, "Free")):
        assert isinstance(told, ReplicaEnvelope)
        assert told.event is not None
        assert (told.event.request_id, told.event.data) == ("z", data)
        assert told.event.worker.worker_id == 9


def test_what_is_told_while_the_worker_is_away_holds_when_it_comes() -> None:
    here, _, first = two(taken, bare=False)
    here.done("z")
    here.core.reservations.output_block("z", None, here.now)
    here.worker(9, data_parallel_size=1)
    here.turn()
    assert here.load(9) == (0, 4, 1)
    assert taken(here) == first
    here.delete(9)
    assert taken(here) == first  # its load has left, and is not swept yet
    here.tick(0.0)
    here.turn()
    assert taken(here) == first
    assert here.core.counters.reservations_repeated == 3


def test_a_lease_is_renewed_by_calls() -> None:
    here, there = acquainted()
    there.worker(9)
    opened = LeaseRequest(owner="o", ttl_s=10.0, lease_id="lease")
    there.core.reservations.open_lease(opened, there.now)
    request = SelectAndReserveRequest(
        reservation_id="z",
        lease_id="lease",
        sequence_hashes=[1],
        block_hashes=[1],
        isl_tokens=16,
        allowed_worker_ids=[9],
    )
    _, there.effects = there.core.selection.select_and_reserve(request, there.now)
    tell(there, here)
    for _ in range(4):
        here.now += 5.0
        there.now = here.now
        here.core.reservations.output_block("z", None, here.now)
        tell(here, there, here.turn())
        tell(there, here, there.turn())
        there.tick(0.0)
    assert there.load(9) == (16, 5, 1)


def test_what_a_dead_owner_left_on_an_absent_worker_ages_as_elsewhere() -> None:
    here, _, first = two(taken, bare=False)
    silent(here)
    half_s = here.core.limits.replica_orphan_ttl_s / 2 + 1.0
    here.turn(half_s)
    assert taken(here) == first
    here.done("z")  # a sign of life
    here.turn(half_s)
    assert taken(here) == first
    here.turn(half_s)
    here.turn(1.0)
    assert here.core.lifecycle.announcer.claims.counters.orphans_expired == 1
    with pytest.raises(ReservationNotFound):
        here.done("z")
    here.book("z", 1, *PROMPT)
    assert here.load(1) == (48, 3, 1)


def test_a_pair_that_has_aged_ends_with_its_prefill_and_the_others_are_told() -> None:
    here, _, _ = two(paired, bare=False)
    silent(here)
    here.turn(here.core.limits.replica_orphan_ttl_s)
    here.turn(1.0)
    assert here.core.lifecycle.announcer.claims.counters.orphans_expired == 2
    here.done("z")
    assert endings(here.effects.published) == ["Free"]


def test_our_own_on_a_worker_that_left_is_over() -> None:
    """Only its owner decides of it: its rank has ended, and with it the reservation."""
    here, there = acquainted()
    there.book("z", 1, *PROMPT)
    there.delete(1)
    there.book("z", 2, *PROMPT)
    tell(there, here)
    assert here.load(2) == there.load(2) == (48, 3, 1)
