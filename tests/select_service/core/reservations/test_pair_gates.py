"""Pairs that wait, expire or lose a worker; pairs under thresholds and gates."""

from __future__ import annotations

import pytest

from select_service.core.admission.queue import Ticket
from select_service.errors import AdmissionRefused, NoWorkerForRole, ReservationNotFound
from select_service.types import CacheThreshold, PairSelection, Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.reservations.apart import PROMPT, apart, paired
from tests.select_service.core.whole_fleet import Fleet

# -- waiting, time, workers that go ----------------------------------------------------------------


def test_one_that_waits_can_be_withdrawn() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", max_num_batched_tokens=1)
    fleet.worker(2, role="decode")
    fleet.pair("first", *PROMPT)
    ticket = fleet.pair("p", 7, 8)
    assert isinstance(ticket, Ticket)
    assert fleet.core.waiting_requests.withdraw(ticket)
    fleet.free("first")
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)


def test_both_legs_expire() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT, ttl_s=10.0)
    fleet.tick(5.0)
    assert fleet.load(1) == (64, 0, 1)
    fleet.tick(6.0)
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)
    fleet.free("p")  # counts as recently freed


def test_a_leg_goes_with_its_worker_and_the_other_stays() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT)
    fleet.delete(1)
    assert fleet.load(2) == (0, 4, 1)
    fleet.done("p")
    fleet.free("p")
    assert fleet.load(2) == (0, 0, 0)


def test_a_pair_survives_that_its_workers_change_their_role() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT)
    fleet.patch(1, role="decode")
    fleet.patch(2, role="aggregated")
    fleet.free("p")
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)


# -- thresholds and gates --------------------------------------------------------------------------


def test_a_decode_worker_that_holds_enough_takes_a_whole_request() -> None:
    fleet = apart()
    fleet.hold(2, [1, 2, 3])
    answer = fleet.select(*PROMPT, cache_hit_threshold=0.75)
    assert isinstance(answer, Selection)
    assert answer.worker_id == 2
    assert answer.advice
    assert (answer.advice.mode, answer.advice.reason) == ("aggregated", "cached")
    with pytest.raises(NoWorkerForRole):
        fleet.select(*PROMPT)  # no threshold: nobody said that so much is enough


def test_a_threshold_that_nobody_reaches_names_the_prefill_candidate() -> None:
    fleet = apart()
    fleet.hold(2, [1, 2])
    answer = fleet.select(*PROMPT, cache_hit_threshold=0.75)
    assert isinstance(answer, CacheThreshold)
    assert answer.best_worker.worker_id == 2
    assert answer.advice
    assert (answer.advice.mode, answer.advice.reason) == ("disaggregated", "not_cached")
    assert answer.advice.prefill is not None
    assert answer.advice.prefill.worker_id == 1
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)


def test_a_pair_that_is_cached_on_a_decode_worker_needs_no_prefill_leg() -> None:
    fleet = apart()
    fleet.worker(3)
    fleet.hold(2, [1, 2, 3])
    answer = paired(fleet.pair("p", *PROMPT, cache_hit_threshold=0.75))
    assert (answer.mode, answer.reason, answer.prefill) == ("aggregated", "cached", None)
    assert answer.decode.worker_id == 2, "the whole worker holds nothing"
    assert answer.decode.effective_prefill_tokens == 16
    assert fleet.load(2) == (16, 4, 1)


def test_without_prefill_workers_a_decode_worker_serves_what_it_holds() -> None:
    fleet = Fleet()
    fleet.worker(2, role="decode")
    fleet.hold(2, [1, 2, 3])
    answer = paired(fleet.pair("p", *PROMPT, cache_hit_threshold=0.75))
    assert (answer.reason, answer.decode.worker_id) == ("cached", 2)
    with pytest.raises(NoWorkerForRole, match="no eligible prefill"):
        fleet.pair("q", *PROMPT, cache_hit_threshold=0.8)


def test_a_pair_that_nobody_holds_is_not_refused_for_it() -> None:
    fleet = apart()
    fleet.worker(3)
    answer = paired(fleet.pair("p", *PROMPT, cache_hit_threshold=0.75))
    assert (answer.mode, answer.reason) == ("disaggregated", "not_cached")
    fleet.delete(1)
    answer = paired(fleet.pair("q", *PROMPT, cache_hit_threshold=0.75))
    assert (answer.mode, answer.reason) == ("aggregated", "no_prefill_worker")
    assert answer.decode.worker_id == 3


def test_a_threshold_of_0_restricts_nothing() -> None:
    fleet = apart(admission=AdmissionSettings(cache_hit_threshold=0.9))
    assert paired(fleet.pair("p", *PROMPT)).reason == "not_cached"
    assert paired(fleet.pair("q", *PROMPT, cache_hit_threshold=0)).reason == "no_aggregated_worker"
    answer = fleet.select(*PROMPT, cache_hit_threshold=0)
    assert isinstance(answer, Selection)
    assert answer.worker_id == 2, "who says 0 wants it there, whatever it holds"


def test_a_fallback_goes_to_who_can_prefill_it() -> None:
    fleet = apart()
    fleet.worker(3)
    fleet.book("load", 3, *range(20, 60))
    answer = fleet.select(*PROMPT, cache_hit_threshold=0.9, on_cache_threshold="fallback")
    assert isinstance(answer, Selection)
    assert (answer.worker_id, answer.needs_prefill) == (3, True)
    assert answer.advice
    assert answer.advice.mode == "disaggregated"


def test_a_full_decode_worker_takes_no_leg_and_the_pair_waits() -> None:
    fleet = Fleet(admission=AdmissionSettings(policy="token-bucket"))
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode", max_inflight=1, max_queued=4)
    paired(fleet.pair("first", *PROMPT))
    ticket = fleet.pair("p", 7, 8)
    assert isinstance(ticket, Ticket)
    fleet.done("first")
    assert not fleet.effects.answered, "the decode leg is still there"
    fleet.free("first")
    assert fleet.effects.answered == [ticket]
    assert isinstance(ticket.answer, PairSelection)
    assert fleet.load(1) == (32, 0, 1)
    assert fleet.load(2) == (0, 2, 1)
    fleet.free("p")
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)


def test_a_full_prefill_worker_makes_a_pair_wait_until_it_is_done() -> None:
    fleet = Fleet(admission=AdmissionSettings(policy="token-bucket"))
    fleet.worker(1, role="prefill", max_inflight=1)
    fleet.worker(2, role="decode")
    paired(fleet.pair("first", *PROMPT))
    ticket = fleet.pair("p", 7, 8)
    assert isinstance(ticket, Ticket)
    fleet.done("first")
    assert isinstance(ticket.answer, PairSelection), "a prefill leg ends with its prefill"


def test_with_the_decode_workers_full_one_worker_does_all() -> None:
    fleet = Fleet(admission=AdmissionSettings(policy="token-bucket"))
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode", max_inflight=1)
    paired(fleet.pair("first", *PROMPT))
    fleet.worker(3)
    fleet.book("load", 3, *range(20, 60))
    answer = paired(fleet.pair("p", 7, 8))
    assert (answer.mode, answer.decode.worker_id) == ("aggregated", 3)


def test_the_full_are_not_chosen_however_cheap() -> None:
    fleet = Fleet(admission=AdmissionSettings(policy="token-bucket"))
    fleet.worker(1, max_inflight=1)
    fleet.worker(2)
    fleet.book("one", 1)  # full, and without load
    fleet.book("two", 2, *range(20, 40))
    assert paired(fleet.pair("p", *PROMPT)).decode.worker_id == 2
    fleet.free("p")
    for worker_id in (1, 2):
        fleet.patch(worker_id, role="prefill")
    fleet.worker(3, role="decode")
    answer = paired(fleet.pair("q", *PROMPT))
    assert answer.prefill is not None
    assert answer.prefill.worker_id == 2


def test_what_a_policy_refuses_is_booked_nowhere() -> None:
    fleet = apart(admission=AdmissionSettings(policy="reject-all"))
    with pytest.raises(AdmissionRefused):
        fleet.pair("p", *PROMPT)
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)
    with pytest.raises(ReservationNotFound):
        fleet.free("p")
