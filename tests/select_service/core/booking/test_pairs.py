"""Pairs: both legs or none, reached under one id, and every load back to nothing in the end."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.packing import pack_u64
from select_service.core.admission.queue import Ticket
from select_service.core.books.bookings import leg_ids
from select_service.core.replicas.events import Hashes, ReplicaEnvelope
from select_service.core.replicas.wire import decode_message, encode_message
from select_service.errors import (
    AdmissionRefused,
    NoTransfer,
    NoWorkerForRole,
    ReservationConflict,
    ReservationNotFound,
    ServiceError,
)
from select_service.types import (
    CacheThreshold,
    LeaseRequest,
    PairSelection,
    PinnedWorker,
    Selection,
    WorkerPatch,
)
from select_service.types.admission import AdmissionSettings
from tests.effort import examples
from tests.select_service.core.replicas.test_replicas import Replica, endings
from tests.select_service.core.test_state import Disk, restored
from tests.select_service.core.whole_fleet import Fleet

PROMPT = (1, 2, 3, 4)


def apart(**more: Any) -> Fleet:
    """Worker 1 prefills, worker 2 decodes."""
    fleet = Fleet(**more)
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode")
    return fleet


def paired(answer: PairSelection | Ticket) -> PairSelection:
    assert isinstance(answer, PairSelection)
    return answer


def test_both_legs_are_booked_the_prompt_on_one_and_the_blocks_on_the_other() -> None:
    fleet = apart()
    answer = paired(fleet.pair("p", *PROMPT))
    assert answer.mode == "disaggregated"
    assert answer.reason == "no_aggregated_worker"
    assert answer.reservation_id == "p"
    assert answer.prefill is not None
    assert (answer.prefill.worker_id, answer.prefill.endpoint) == (1, "http://w1")
    assert (answer.decode.worker_id, answer.decode.endpoint) == (2, "http://w2")
    assert (answer.prefill.reservation_id, answer.decode.reservation_id) == leg_ids("p")
    assert answer.prefill.effective_prefill_tokens == 64
    assert answer.decode.effective_prefill_tokens == 0
    assert answer.decode.potential_decode_blocks == 4
    assert answer.transfer_blocks == 4
    assert fleet.load(1) == (64, 0, 1)
    assert fleet.load(2) == (0, 4, 1)


def test_an_id_is_found_when_none_is_given() -> None:
    fleet = apart()
    answer = paired(fleet.pair(None, *PROMPT))
    fleet.free(answer.reservation_id)
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)


def test_calls_under_the_pairs_id_reach_the_leg_they_mean() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT)
    fleet.core.output_block("p", None, fleet.now)
    assert fleet.load(2) == (0, 5, 1)
    fleet.done("p")
    assert fleet.load(1) == (0, 0, 0), "its prompt is computed and moved: nothing is left there"
    assert fleet.load(2) == (0, 5, 1)
    fleet.done("p")  # repeatable
    fleet.free("p")
    assert fleet.load(2) == (0, 0, 0)
    fleet.free("p")  # recently freed
    for name in leg_ids("p"):
        fleet.free(name)
    with pytest.raises(ReservationNotFound):
        fleet.done("p")


def test_a_leg_can_be_ended_alone() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT)
    prefill, decode = leg_ids("p")
    fleet.free(decode)
    assert fleet.load(1) == (64, 0, 1)
    assert fleet.load(2) == (0, 0, 0)
    with pytest.raises(ReservationNotFound):
        fleet.core.output_block("p", None, fleet.now)
    fleet.done(prefill)
    assert fleet.load(1) == (0, 0, 1), "by its own id it is a reservation like any other"
    fleet.free("p")
    assert fleet.load(1) == (0, 0, 0)


def test_a_selection_id_means_the_pair() -> None:
    fleet = apart()
    fleet.pair("p", *PROMPT, selection_id="s")
    fleet.done("s")
    assert fleet.load(1) == (0, 0, 0)
    fleet.free("s")
    assert fleet.load(2) == (0, 0, 0)


def test_a_repeat_gets_the_first_answer_and_books_nothing() -> None:
    fleet = apart()
    first = fleet.pair("p", *PROMPT)
    assert fleet.pair("p", *PROMPT) == first
    fleet.done("p")
    assert fleet.pair("p", *PROMPT) == first
    assert fleet.load(2) == (0, 4, 1)


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


@pytest.mark.parametrize(("role", "lacks"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_refusal_names_the_role_that_nobody_has(role: str, lacks: str) -> None:
    fleet = Fleet()
    fleet.worker(1, role=role)
    with pytest.raises(NoWorkerForRole, match=f"no eligible {lacks} worker") as refused:
        fleet.pair("p", *PROMPT)
    assert refused.value.details == {"role": lacks}
    assert (refused.value.status, refused.value.code) == (503, "no_worker_for_role")


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
    fleet.core.output_block("p", None, fleet.now)
    assert fleet.load(3) == (0, 5, 1)
    fleet.free("p")
    assert fleet.load(3) == (0, 0, 0)


def test_a_pair_is_better_while_the_whole_workers_compute() -> None:
    fleet = apart()
    fleet.worker(3)
    fleet.book("other", 3, 9)
    answer = paired(fleet.pair("p", *PROMPT))
    assert (answer.mode, answer.reason) == ("disaggregated", "cheaper")
    assert answer.aggregated_cost == 10.0
    assert fleet.load(3) == (16, 1, 1)


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


def test_a_decode_worker_that_holds_everything_needs_no_prefill_leg() -> None:
    fleet = apart()
    fleet.hold(2, [*PROMPT])
    answer = paired(fleet.pair("p", *PROMPT))
    assert (answer.mode, answer.decode.worker_id) == ("aggregated", 2)
    assert fleet.load(2) == (0, 4, 1)


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


# -- where blocks may move -------------------------------------------------------------------------


def zone(name: str, enforcement: str | None = "required", **more: Any) -> dict[str, Any]:
    return {
        "topology_domains": {"zone": name},
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": enforcement,
        **more,
    }


def test_a_required_transfer_domain_is_shared_by_both_legs() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", **zone("a"))
    fleet.worker(2, role="decode", topology_domains={"zone": "b"})
    with pytest.raises(NoTransfer):
        fleet.pair("p", *PROMPT)
    fleet.worker(3, role="decode", topology_domains={"zone": "a"})
    fleet.book("load", 3, *range(50, 80))
    assert paired(fleet.pair("p", *PROMPT)).decode.worker_id == 3
    fleet.worker(4, role="decode")  # nobody knows where it is
    assert paired(fleet.pair("q", *PROMPT)).decode.worker_id == 3


def test_a_decode_workers_demand_counts_as_well() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", topology_domains={"zone": "b"})
    fleet.worker(2, role="decode", **zone("a"))
    with pytest.raises(NoTransfer):
        fleet.pair("p", *PROMPT)
    fleet.worker(3, role="prefill", topology_domains={"zone": "a"})
    answer = paired(fleet.pair("p", *PROMPT))
    assert answer.prefill is not None
    assert answer.prefill.worker_id == 3


def test_where_blocks_cannot_move_one_worker_does_all() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", **zone("a"))
    fleet.worker(2, role="decode", **zone("b"))
    fleet.worker(3)
    answer = paired(fleet.pair("p", *PROMPT))
    assert (answer.mode, answer.reason) == ("aggregated", "no_kv_transfer")


def test_a_preferred_transfer_domain_makes_a_decode_worker_cheaper() -> None:
    fleet = Fleet()
    near = zone("a", "preferred", kv_transfer_preferred_weight=2.0)
    fleet.worker(1, role="prefill", **near)
    fleet.worker(2, role="decode", topology_domains={"zone": "b"})
    fleet.worker(3, role="decode", topology_domains={"zone": "a"})
    fleet.book("load", 3, 90, 91, 92, 93)
    assert paired(fleet.pair("p", *PROMPT)).decode.worker_id == 3
    fleet.free("p")
    fleet.patch(1, kv_transfer_preferred_weight=0.0)
    assert paired(fleet.pair("p", *PROMPT)).decode.worker_id == 2


def test_every_zone_is_looked_at() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", **zone("a"))
    fleet.worker(2, role="prefill", **zone("b"))
    fleet.worker(3, role="decode", **zone("a"))
    fleet.worker(4, role="decode", **zone("b"))
    fleet.book("load", 3, *range(20, 60))  # cheap prefill beside it, and still the dearer zone
    fleet.book("more", 2, 90)
    answer = paired(fleet.pair("p", *PROMPT))
    assert answer.prefill is not None
    assert (answer.prefill.worker_id, answer.decode.worker_id) == (2, 4)


# -- wishes ----------------------------------------------------------------------------------------


def test_a_pinned_rank_is_one_leg_and_leaves_the_other_free() -> None:
    fleet = apart()
    fleet.worker(3, role="prefill")
    fleet.book("load", 3, *range(20, 60))
    answer = paired(fleet.pair("p", *PROMPT, pinned_worker=PinnedWorker(3, 0)))
    assert answer.prefill is not None
    assert (answer.prefill.worker_id, answer.decode.worker_id) == (3, 2)


def test_only_allowed_workers_make_a_pair() -> None:
    fleet = apart()
    fleet.worker(3, role="prefill")
    answer = paired(fleet.pair("p", *PROMPT, allowed_worker_ids=[2, 3]))
    assert answer.prefill is not None
    assert answer.prefill.worker_id == 3
    with pytest.raises(NoWorkerForRole, match="no eligible prefill"):
        fleet.pair("q", *PROMPT, allowed_worker_ids=[2])


# -- waiting, time, workers that go ----------------------------------------------------------------


def test_a_pair_waits_while_everybody_computes() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", max_num_batched_tokens=1)
    fleet.worker(2, role="decode", max_num_batched_tokens=1)
    fleet.pair("first", *PROMPT)
    ticket = fleet.pair("p", 7, 8)
    assert isinstance(ticket, Ticket)
    assert fleet.load(2) == (0, 4, 1), "nothing of it is booked"
    fleet.done("first")
    assert isinstance(ticket.answer, PairSelection)
    assert fleet.effects.answered == [ticket]
    assert fleet.load(1) == (32, 0, 1)
    assert fleet.load(2) == (0, 6, 2)


def test_one_that_waits_can_be_withdrawn() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", max_num_batched_tokens=1)
    fleet.worker(2, role="decode")
    fleet.pair("first", *PROMPT)
    ticket = fleet.pair("p", 7, 8)
    assert isinstance(ticket, Ticket)
    assert fleet.core.withdraw(ticket)
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


def test_the_role_is_shown_and_stays_when_a_patch_does_not_say() -> None:
    fleet = Fleet()
    assert not fleet.worker(1).role
    assert fleet.worker(2, role="decode").role == "decode"
    assert fleet.patch(2, taints=["x"]).role == "decode"
    assert fleet.patch(2, role="prefill").role == "prefill"
    fleet.core.patch_worker(2, WorkerPatch(role=None), fleet.now)
    assert fleet.core.worker(2).role == "prefill"


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


# -- any history -----------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("pair", "take", "book", "done", "output", "free", "leg", "delete", "worker", "wait")
        ),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=40,
)
ROLES = {1: "prefill", 2: "prefill", 3: "decode", 4: "decode", 5: "aggregated"}


def step(fleet: Fleet, verb: str, number: int, worker: int) -> None:
    name = f"r{number}"
    if verb == "pair":
        fleet.pair(name, *range(number * 3 + worker))
    elif verb == "take":
        fleet.take(name, *range(number + 1))
    elif verb == "book":
        fleet.book(leg_ids(name)[worker % 2], worker, *range(number + 1))
    elif verb == "done":
        fleet.done(name)
    elif verb == "output":
        fleet.core.output_block(name, None, fleet.now)
    elif verb == "free":
        fleet.free(name)
    elif verb == "leg":
        fleet.free(leg_ids(name)[worker % 2])
    elif verb == "delete":
        fleet.delete(worker)
    elif verb == "worker":
        fleet.worker(worker, role=ROLES[worker], max_num_batched_tokens=16)
    else:
        fleet.tick(120.0)


@settings(deadline=None, max_examples=examples(150))
@given(STEPS)
def test_there_are_both_legs_or_none_and_all_load_ends(
    steps: list[tuple[str, int, int]],
) -> None:
    fleet = Fleet()
    for worker in ROLES:
        step(fleet, "worker", 0, worker)
    live = fleet.core.desk.bookings
    for one in steps:
        before = {name for n in range(4) for name in leg_ids(f"r{n}") if live.live(name)}
        pairs = {leg.reservation.pair for n in range(4) for leg in live.legs(f"r{n}")}
        with contextlib.suppress(ServiceError):
            step(fleet, *one)
        for number in range(4):
            legs = live.legs(f"r{number}")
            if legs and f"r{number}" not in pairs:
                assert len(legs) == 2, "a pair that is new has both legs"
                assert not before & set(leg_ids(f"r{number}"))
    end_all(fleet)
    rows = [row for scope in fleet.core.loads() for row in scope.loads]
    assert not any(row.potential_prefill_tokens for row in rows)
    assert not any(row.potential_decode_blocks for row in rows)
    assert not any(row.active_requests for row in rows)


def end_all(fleet: Fleet) -> None:
    """End what is booked, and what is let in by that, until nobody waits."""
    pending = True
    while pending:
        for number in range(4):
            for name in (f"r{number}", *leg_ids(f"r{number}")):
                with contextlib.suppress(ServiceError):
                    fleet.free(name)
        fleet.tick(1e6)
        pending = any(scope.pending_count for scope in fleet.core.loads())
    fleet.tick(1e6)


# -- what others and the disk know of it -----------------------------------------------------------


def two() -> tuple[Replica, Replica]:
    here, there = Replica(1000), Replica(2000)
    for replica in (here, there):
        replica.patch(1, role="prefill")
        replica.patch(2, role="decode")
    return here, there


def tell(source: Replica, target: Replica, said: list[Any] | None = None) -> None:
    """Deliver what the last verb published, or something else, over the wire."""
    for message in source.effects.published if said is None else said:
        target.hears(decode_message(*encode_message(message)))


def test_a_replica_knows_the_pair_and_its_id() -> None:
    here, there = two()
    here.pair("p", *PROMPT)
    first, second = here.effects.published
    assert isinstance(first, ReplicaEnvelope)
    assert isinstance(second, ReplicaEnvelope)
    tell(here, there)
    assert there.load(1) == (64, 0, 1)
    assert there.load(2) == (0, 4, 1)
    with pytest.raises(ReservationConflict):
        there.pair("p", *PROMPT)
    there.core.output_block("p", None, there.now)
    assert there.load(2) == (0, 5, 1)
    there.done("p")
    tell(there, here)
    assert here.load(1) == there.load(1) == (0, 0, 0)
    there.free("p")
    tell(there, here)
    assert here.load(2) == there.load(2) == (0, 0, 0)
    here.free("p")  # recently freed, here as there


def test_to_a_dynamo_the_legs_are_two_ordinary_admissions() -> None:
    here, _ = two()
    here.pair("p", *PROMPT)
    events = [
        (one.event.request_id, one.event.worker.worker_id, one.event.data.AddRequest)
        for one in here.effects.published
        if isinstance(one, ReplicaEnvelope)
        and one.event is not None
        and not isinstance(one.event.data, str)
    ]
    (name, worker, prompt), (other, decoder, blocks) = events
    assert (name, worker) == ("p:prefill", 1)
    assert (prompt.token_sequence, prompt.track_prefill_tokens) == (Hashes(b""), True)
    assert prompt.prefill_load_hint is not None
    assert prompt.prefill_load_hint.initial_effective_prefill_tokens == 64
    assert (other, decoder) == ("p:decode", 2)
    assert (blocks.token_sequence, blocks.track_prefill_tokens) == (Hashes(pack_u64(PROMPT)), False)
    assert blocks.prefill_load_hint is None
    here.free("p")
    assert endings(here.effects.published) == ["Free", "Free"]


def test_a_pair_is_freed_also_where_one_of_its_workers_is_not_known() -> None:
    here, there = two()
    there.delete(1)
    here.pair("p", *PROMPT)
    tell(here, there)
    assert there.load(2) == (0, 4, 1)
    there.free("p")
    tell(there, here)
    assert here.load(1) == here.load(2) == (0, 0, 0)
    there.delete(2)
    here.pair("q", *PROMPT)
    tell(here, there)
    there.done("q")
    tell(there, here)
    assert here.load(1) == (0, 0, 0)
    there.free("q")
    tell(there, here)
    assert here.load(2) == (0, 0, 0)


@pytest.mark.parametrize("heard", [0, 1])
def test_a_pair_ends_also_where_only_one_leg_was_heard_of(heard: int) -> None:
    here, there = two()
    here.pair("p", *PROMPT)
    messages = list(here.effects.published)
    there.hears(decode_message(*encode_message(messages[heard])))
    there.free("p")
    said = [*there.effects.published, *there.turn(1.0)]
    there.hears(decode_message(*encode_message(messages[1 - heard])))  # late
    assert there.load(1) == there.load(2) == (0, 0, 0)
    tell(there, here, said)
    here.turn()
    assert here.load(1) == here.load(2) == (0, 0, 0)


def test_a_prefill_can_be_completed_before_the_decode_leg_was_heard_of() -> None:
    here, there = two()
    here.pair("p", *PROMPT)
    first, second = here.effects.published
    there.hears(decode_message(*encode_message(first)))
    there.done("p")
    tell(there, here)
    assert here.load(1) == (0, 0, 1), "completed; ended with the pair"
    there.hears(decode_message(*encode_message(second)))
    there.free("p")
    tell(there, here)
    for replica in (here, there):
        assert replica.load(1) == replica.load(2) == (0, 0, 0)


def test_a_prefill_that_was_not_heard_of_ends_when_it_is_complete() -> None:
    here, there = two()
    here.pair("p", *PROMPT)
    first, second = here.effects.published
    there.hears(decode_message(*encode_message(second)))
    there.done("p")
    said = [*there.effects.published, *there.turn(1.0)]
    there.hears(decode_message(*encode_message(first)))
    tell(there, here, said)
    here.turn()
    for replica in (here, there):
        assert replica.load(1) == (0, 0, 0)
        assert replica.load(2) == (0, 4, 1)


def test_who_heard_only_that_a_leg_has_ended_does_not_know_the_pair() -> None:
    here, there = two()
    here.pair("p", *PROMPT)
    first, second = here.effects.published
    there.hears(decode_message(*encode_message(first)))
    here.done("p")
    tell(here, there)
    with pytest.raises(ReservationNotFound):
        there.free("p")  # and not 200, while the decode leg lives
    there.hears(decode_message(*encode_message(second)))
    there.free("p")
    tell(there, here)
    assert here.load(2) == (0, 0, 0)


def test_a_pair_comes_back_from_disk_as_a_pair() -> None:
    fleet = apart()
    disk = Disk(fleet.core.keep_changes())
    for worker, role in ((1, "prefill"), (2, "decode")):
        fleet.worker(worker, role=role)
    first = fleet.pair("p", *PROMPT, selection_id="s")
    fleet.core.output_block("p", None, fleet.now)
    disk.write(fleet)
    again = restored(disk, 5000.0)
    assert [one.role for one in again.core.workers()] == ["prefill", "decode"]
    assert (again.load(1), again.load(2)) == ((64, 0, 1), (0, 5, 1))
    assert again.pair("p", *PROMPT, selection_id="s") == first
    again.done("p")
    assert again.load(1) == (0, 0, 0)
    again.free("s")
    assert again.load(2) == (0, 0, 0)


def test_a_freed_pair_is_remembered_on_disk() -> None:
    fleet = apart()
    disk = Disk(fleet.core.keep_changes())
    for worker, role in ((1, "prefill"), (2, "decode")):
        fleet.worker(worker, role=role)
    fleet.pair("p", *PROMPT)
    disk.write(fleet)
    fleet.free("p")
    disk.write(fleet)
    restored(disk, 5000.0).free("p")


def test_one_leg_comes_back_when_the_other_has_lost_its_worker() -> None:
    fleet = apart()
    disk = Disk(fleet.core.keep_changes())
    fleet.worker(2, role="decode")
    fleet.pair("p", *PROMPT)
    disk.write(fleet)  # worker 1 was registered before anything was written down
    again = restored(disk, 5000.0)
    assert again.load(2) == (0, 4, 1)
    again.done("p")
    again.free("p")
    assert again.load(2) == (0, 0, 0)


def test_an_answer_to_one_worker_comes_back_from_disk() -> None:
    fleet = Fleet()
    disk = Disk(fleet.core.keep_changes())
    fleet.worker(1)
    first = fleet.pair("p", *PROMPT)
    disk.write(fleet)
    again = restored(disk, 5000.0)
    assert again.pair("p", *PROMPT) == first
    assert again.load(1) == (64, 4, 1)


def test_both_legs_live_and_end_with_their_lease() -> None:
    fleet = apart()
    fleet.core.open_lease(LeaseRequest(owner="o", ttl_s=10.0, lease_id="L"), fleet.now)
    fleet.pair("p", *PROMPT, lease_id="L")
    fleet.tick(6.0)
    fleet.core.output_block("p", None, fleet.now)  # a sign of life for all of it
    fleet.tick(6.0)
    assert fleet.load(1) == (64, 0, 1)
    fleet.core.close_lease("L", fleet.now)
    fleet.tick(0.0)
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)
