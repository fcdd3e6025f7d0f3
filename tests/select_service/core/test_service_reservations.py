"""The verbs of the core for reservations, one promise a test; contract numbers in brackets."""

from __future__ import annotations

import contextlib
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.packing import pack_u64
from indexer.types import WorkerRank
from select_service.errors import (
    InvalidRequest,
    RankNotFound,
    ReservationConflict,
    ReservationNotFound,
    WorkerNotFound,
)
from select_service.types import CoreLimits, ReservationRequest, SelectAndReserveRequest
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of


def test_an_explicit_booking_is_checked_prompt_first(fleet: Fleet) -> None:
    # the order was asked of the reference
    with pytest.raises(InvalidRequest, match="sequence_hashes is required without token_ids"):
        fleet.core.reservations.reserve(ReservationRequest(reservation_id="x", worker_id=9), 0.0)
    with pytest.raises(
        InvalidRequest, match=re.escape("effective_prefill_tokens (65) must not exceed isl_tokens")
    ):
        fleet.book("x", 9, 1, 2, 3, 4, effective_prefill_tokens=65)
    with pytest.raises(WorkerNotFound, match="schedulable worker 9 not found for model=default"):
        fleet.book("x", 9, 1)
    with pytest.raises(RankNotFound, match="worker 1 has no dp_rank 3"):  # D12
        fleet.book("x", 1, 1, dp_rank=3)
    assert fleet.load(1) == (0, 0, 0)


def test_the_index_hears_of_prompts_that_fill_their_last_block(fleet: Fleet) -> None:
    # engines without full attention keep other blocks of them, and do not say so
    index = fleet.core.partitions[DEFAULT].index
    for name, number, isl, is_noted in [
        ("a", 1, 32, False),
        ("b", 3, 33, False),
        ("c", 5, 32, True),
    ]:
        fleet.take(name, number, number + 1, isl=isl)
        end = pack_u64([number, number + 1])
        assert index.groups.is_whole_prompt(end, WorkerRank(1, 0), 0) == is_noted
        index.groups.needs_whole_prompts = True  # from now on


def test_the_same_id_with_another_body_or_route_is_a_conflict(fleet: Fleet) -> None:
    worker_id = selection_of(fleet.take("a", 1, 2)).worker_id
    where = f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: 0 }}"
    text = f"failed to book scheduler state: Request a already exists (assigned to worker {where})"
    with pytest.raises(ReservationConflict, match=re.escape(text)):
        fleet.take("a", 1, 2, 3)
    with pytest.raises(ReservationConflict, match=r"^Request a already exists"):
        fleet.book("a", 1, 1, 2)
    unknown = SelectAndReserveRequest(
        reservation_id="a", block_hashes=[1, 2], sequence_hashes=[1, 2], isl_tokens=32
    )
    with pytest.raises(ReservationConflict):
        fleet.core.selection.select_and_reserve(unknown, fleet.now, unknown=b'{"x":1}')
    assert fleet.core.counters.reservations_conflicting == 3
    fleet.free("a")
    fleet.take("a", 1, 2, 3)  # a freed id may be booked anew


def test_an_id_is_unique_in_the_whole_process(fleet: Fleet) -> None:  # D16
    fleet.worker(3, model_name="m")
    fleet.book("a", 1, 1)
    with pytest.raises(ReservationConflict):
        fleet.book("a", 3, 1, model_name="m")
    fleet.free("a")
    fleet.book("a", 3, 1, model_name="m")
    fleet.free("a")
    assert fleet.load(3) == (0, 0, 0)


def test_freed_ids_are_remembered_ten_minutes_within_a_bound() -> None:
    fleet = Fleet(limits=CoreLimits(freed_ids_max=3))
    fleet.worker(1)
    for name in "abcd":
        fleet.book(name, 1, 1)
        fleet.free(name)
    with pytest.raises(ReservationNotFound):
        fleet.free("a")
    fleet.tick(599.0)
    fleet.free("d")
    fleet.tick(2.0)
    with pytest.raises(ReservationNotFound):
        fleet.free("d")


def test_a_selection_id_is_a_second_name_and_the_first_name_wins(fleet: Fleet) -> None:
    fleet.take("a", 1, selection_id="s", allowed_worker_ids=[1])
    fleet.take("s", 2, 3, allowed_worker_ids=[2])
    fleet.done("s")
    assert fleet.load(2) == (0, 2, 1)
    assert fleet.load(1) == (16, 1, 1)
    fleet.free("s")
    fleet.free("s")  # the second name of a, now that the first one is gone
    assert fleet.load(1) == (0, 0, 0)


def test_of_several_with_one_selection_id_the_youngest_is_meant(fleet: Fleet) -> None:
    for name in "abc":
        fleet.book(name, 1, 1, selection_id="s")
    fleet.free("b")
    for left in (1, 0):
        fleet.free("s")
        assert fleet.load(1) == (16 * left, left, left)
    fleet.free("s")  # recently freed
    for name in "ac":
        with pytest.raises(ReservationNotFound):
            fleet.done(name)


def test_namesakes_whose_rank_has_gone_are_passed_over() -> None:
    fleet = Fleet(limits=CoreLimits(dropped_per_turn_max=1))
    fleet.worker(1)
    fleet.worker(2)
    for name, worker_id in (("a", 2), ("b", 1), ("c", 1), ("d", 1)):
        fleet.book(name, worker_id, 1, selection_id="s")
    fleet.delete(1)
    fleet.free("s")
    assert fleet.load(2) == (0, 0, 0)
    fleet.free("s")
    fleet.tick(1.0)
    fleet.free("s")


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("xyzs"), st.booleans())))
def test_names_that_clash_are_never_live_and_freed_at_once(
    steps: list[tuple[str, str, bool]],
) -> None:
    fleet = Fleet(limits=CoreLimits(dropped_per_turn_max=1))
    for worker_id in (1, 2):
        fleet.worker(worker_id)
    for name, second, is_booking in steps:  # the fleet checks all promises after each
        with contextlib.suppress(ReservationConflict, ReservationNotFound):
            if is_booking:
                fleet.book(name, 1 + (second < "y"), 1, selection_id=second)
            elif second == "s":
                fleet.delete(1)
                fleet.worker(1)
            else:
                fleet.free(second)


def test_a_freed_id_takes_little_memory_however_long_it_is(fleet: Fleet) -> None:
    fleet.core.limits.id_length_max = 2 << 20
    long = "\N{SNOWMAN}" * (1 << 20)
    fleet.book(long + "a", 1, 1, selection_id=long + "s")
    fleet.free(long + "s")
    fleet.free(long + "a")
    with pytest.raises(ReservationNotFound):
        fleet.free(long + "b")
    remembered = fleet.core.lifecycle.bookings.freed.common
    assert len(remembered) == 2
    assert sum(sys.getsizeof(key) for key, _, _ in remembered.items()) < 250
    assert fleet.core.lifecycle.bookings.freed.nbytes < 1000


def test_a_call_for_what_has_expired_tells_that_it_was_alive(fleet: Fleet) -> None:
    for name in ("agent", "lost", "chat"):
        fleet.book(name, 1, 1)
    fleet.tick(301.0)
    counters = fleet.core.counters
    assert (counters.reservations_expired, counters.reservations_expired_early) == (3, 0)
    with pytest.raises(ReservationNotFound):
        fleet.core.reservations.output_block("agent", None, fleet.now)
    fleet.free("agent")  # the same one once more
    fleet.free("chat")
    assert counters.reservations_expired_early == 2
    fleet.book("ended", 1, 1)
    fleet.free("ended")
    fleet.free("ended")  # a repeat says nothing
    assert counters.reservations_expired_early == 2


def test_a_ttl_of_zero_never_expires() -> None:
    fleet = Fleet(limits=CoreLimits(reservation_ttl_s=0.0))
    fleet.worker(1)
    fleet.book("a", 1, 1)
    fleet.tick(1e9)
    assert fleet.load(1) == (16, 1, 1)


def test_a_fraction_outside_the_unit_is_refused_before_the_id(fleet: Fleet) -> None:
    for fraction in (-0.1, 1.5):
        with pytest.raises(InvalidRequest, match=r"between 0\.0 and 1\.0"):
            fleet.core.reservations.output_block("nope", fraction, 0.0)
    with pytest.raises(ReservationNotFound):
        fleet.core.reservations.output_block("nope", 0.5, 0.0)
