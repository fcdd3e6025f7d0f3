"""Pairs: both legs or none, reached under one id, and every load back to nothing in the end."""

from __future__ import annotations

import pytest

from select_service.core.ledger.reservation_ids import leg_ids
from select_service.errors import NoWorkerForRole, ReservationConflict, ReservationNotFound
from select_service.types import Selection
from tests.select_service.core.reservations.apart import PROMPT, apart, paired
from tests.select_service.core.whole_fleet import DEFAULT, Fleet


def test_an_id_is_found_when_none_is_given() -> None:
    fleet = apart()
    answer = paired(fleet.pair(None, *PROMPT))
    fleet.free(answer.reservation_id)
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)


def test_ranks_of_pairs_tell_how_fast_they_compute_and_do_not_seem_to_hang() -> None:
    fleet = apart()
    for number in range(100):
        fleet.pair(f"p{number}", number, isl=4000)
        fleet.pair(f"q{number}", number, isl=4000)
        fleet.now += 0.5
        fleet.done(f"p{number}")
        fleet.free(f"p{number}")
        fleet.now += 0.5
        fleet.done(f"q{number}")
        fleet.free(f"q{number}")
    ledger = fleet.core.partitions[DEFAULT].ledger
    work = ledger.loads.work
    assert (work.computed, work.untimed) == (800_000, 0)
    assert work.reported_seconds == pytest.approx(100.0)
    fleet.pair("next", 1, isl=4000)
    assert ledger.loads.silent(fleet.now + 1.0) == 0


def test_a_leg_can_be_ended_alone() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT)
    prefill, decode = leg_ids("p")
    fleet.free(decode)
    assert fleet.load(1) == (64, 0, 1)
    assert fleet.load(2) == (0, 0, 0)
    with pytest.raises(ReservationNotFound):
        fleet.core.reservations.output_block("p", None, fleet.now)
    fleet.done(prefill)
    assert fleet.load(1) == (0, 0, 1), "by its own id it is a reservation like any other"
    fleet.free("p")
    assert fleet.load(1) == (0, 0, 0)


def test_the_pairs_id_is_taken_while_a_leg_lives() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT)
    with pytest.raises(ReservationConflict):
        fleet.pair("p", 9)
    with pytest.raises(ReservationConflict):
        fleet.book("p", 1, 9)
    with pytest.raises(ReservationConflict):
        fleet.book(leg_ids("p")[1], 1, 9)
    fleet.free("p")
    fleet.book("p", 1, 9)
    assert fleet.load(1) == (16, 1, 1)


@pytest.mark.parametrize("taken", leg_ids("p"))
def test_when_an_id_of_a_leg_is_taken_nothing_is_booked(taken: str) -> None:
    fleet = apart()
    fleet.worker(3)
    fleet.book(taken, 3, 7)
    fleet.patch(3, role="prefill")
    before = [fleet.load(1), fleet.load(2), fleet.load(3)]
    with pytest.raises(ReservationConflict):
        fleet.pair("p", *PROMPT)
    assert [fleet.load(1), fleet.load(2), fleet.load(3)] == before
    with pytest.raises(ReservationNotFound):
        fleet.free("p")


def test_a_look_alike_is_no_leg() -> None:
    fleet = apart()
    fleet.book("q:decode", 2, 7)
    with pytest.raises(ReservationNotFound):
        fleet.free("q")
    assert fleet.load(2) == (16, 1, 1)


def test_a_whole_request_needs_somebody_for_the_whole() -> None:
    fleet = apart()
    with pytest.raises(NoWorkerForRole, match="select_pair"):
        fleet.select(*PROMPT)
    fleet.worker(3, role="aggregated")
    answer = fleet.select(*PROMPT)
    assert isinstance(answer, Selection)
    assert answer.worker_id == 3


def test_one_worker_is_enough_when_it_costs_less() -> None:
    fleet = apart()
    fleet.worker(3)
    answer = paired(fleet.pair("p", *PROMPT))
    assert (answer.mode, answer.reason, answer.prefill) == ("aggregated", "cheaper", None)
    assert answer.decode.reservation_id == "p"
    assert answer.decode.worker_id == 3
    assert answer.decode.effective_prefill_tokens == 64
    assert answer.transfer_blocks == 0
    # 4 blocks of prefill + 4 of decode; the pair moves 4 blocks besides, a tenth each
    assert answer.aggregated_cost == 8.0
    assert answer.disaggregated_cost == pytest.approx(8.4)
    assert fleet.load(3) == (64, 4, 1)
    assert fleet.pair("p", *PROMPT) == answer
    fleet.done("p")
    fleet.core.reservations.output_block("p", None, fleet.now)
    assert fleet.load(3) == (0, 5, 1)
    fleet.free("p")
    assert fleet.load(3) == (0, 0, 0)


def test_without_roles_one_worker_does_all() -> None:
    fleet = Fleet()
    fleet.worker(1)
    answer = paired(fleet.pair("p", *PROMPT))
    assert (answer.mode, answer.reason) == ("aggregated", "no_prefill_worker")
    assert answer.disaggregated_cost is None
    plain = fleet.select(*PROMPT)
    assert isinstance(plain, Selection)
    assert not plain.advice, "nobody was given a role: nothing is advised"


def test_blocks_that_are_there_need_not_move() -> None:
    fleet = apart()
    fleet.worker(4, role="decode")
    fleet.hold(4, [1, 2, 3])
    answer = paired(fleet.pair("p", *PROMPT))
    assert answer.decode.worker_id == 4
    assert answer.transfer_blocks == 1
    assert answer.decode.overlap.gpu == 48


def test_advice_names_the_prefill_candidate() -> None:
    fleet = apart()
    fleet.worker(3)
    fleet.book("other", 3, *range(20, 60))
    answer = fleet.select(*PROMPT)
    assert isinstance(answer, Selection)
    assert answer.worker_id == 3
    advice = answer.advice
    assert advice
    assert (advice.mode, advice.reason) == ("disaggregated", "cheaper")
    assert advice.prefill is not None
    assert (advice.prefill.worker_id, advice.prefill.dp_rank) == (1, 0)
    assert advice.prefill.endpoint == "http://w1"
    assert advice.prefill.effective_prefill_tokens == 64
    fleet.free("other")
    answer = fleet.select(*PROMPT)
    assert isinstance(answer, Selection)
    assert answer.advice
    assert (answer.advice.mode, answer.advice.prefill) == ("aggregated", None)
