"""The verbs of the core, one promise a test; contract numbers in brackets."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.types import WorkerRank
from select_service.core.admission.queue import Ticket
from select_service.core.pricing.policy import PolicyBook, PolicyClass, RoutingPolicy
from select_service.core.replicas.events import ReplicaEnvelope
from select_service.core.replicas.wire import encode_message
from select_service.errors import (
    InvalidField,
    InvalidRequest,
    NoEligibleWorker,
    NoSchedulableWorker,
    PinnedNotAllowed,
    QueueFull,
    RankNotFound,
    ReservationConflict,
    ReservationNotFound,
    ServiceError,
    WorkerNotFound,
)
from select_service.types import (
    Answer,
    CoreLimits,
    OverlapScoresRequest,
    PinnedWorker,
    ReservationRequest,
    RouterConfig,
    RouterConfigOverride,
    RoutingConstraints,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
)
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

_SEVERAL: dict[str, Any] = {
    "data_parallel_size": 3,
    "kv_events_endpoints": {str(rank): f"tcp://w2:{rank}" for rank in (2, 0, 1)},
}


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.worker(1)
    made.worker(2)
    return made


def chosen(answer: Answer | Ticket) -> Selection:
    assert isinstance(answer, Selection)
    return answer


def waiting(answer: Answer | Ticket) -> Ticket:
    assert isinstance(answer, Ticket)
    return answer


# -- workers (1) ---------------------------------------------------------------------------------


def test_a_listing_tells_which_ranks_are_in_doubt_as_a_record_does() -> None:
    fleet = Fleet()
    fleet.worker(3)
    fleet.worker(2, **_SEVERAL)
    fleet.worker(1)
    streams = {stream.rank: stream for stream in fleet.core.registry.streams()}
    for rank in ((2, 2), (2, 0), (1, 0)):
        streams[WorkerRank(*rank)].is_unproven = True
    listed = fleet.core.workers()
    told = [
        [] if one.kv_ranks is msgspec.UNSET else [rank.dp_rank for rank in one.kv_ranks]
        for one in listed
    ]
    assert told == [[0], [0, 2], []]
    assert [one.kv_state for one in listed] == ["uncertain", "uncertain", msgspec.UNSET]
    assert listed == [fleet.worker(1), fleet.worker(2, **_SEVERAL), fleet.worker(3)]


def test_a_worker_without_capacity_is_schedulable_and_never_busy() -> None:  # D1
    fleet = Fleet(RouterConfig(queue_threshold=0.0))
    assert fleet.worker(1).lifecycle == "schedulable"
    fleet.book("a", 1, 1, 2, 3)
    assert chosen(fleet.select(9)).worker_id == 1


def test_every_reason_is_named_in_order() -> None:
    fleet = Fleet()
    record = fleet.worker(1, endpoint="", block_size=0, kv_events_endpoint=None)
    assert record.not_schedulable_reasons == [
        "endpoint is required",
        "block_size must be greater than 0",
        "kv_events endpoint is required for dp_rank 0",
    ]


def test_the_first_schedulable_worker_pins_block_size_and_eagle_for_good(fleet: Fleet) -> None:
    other = fleet.worker(3, block_size=32)
    assert other.not_schedulable_reasons == [
        "reconciliation failed: block_size mismatch for model=default tenant=default: "
        "existing=16 requested=32"
    ]
    eagle = fleet.worker(4, is_eagle=True)
    assert eagle.not_schedulable_reasons == [
        "reconciliation failed: is_eagle mismatch for model=default tenant=default: "
        "existing=false requested=true"
    ]
    fleet.delete(1)
    fleet.delete(2)
    assert fleet.patch(3, block_size=16).lifecycle == "schedulable"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_events_endpoint": "x"}, "invalid kv_events endpoint for worker 8 dp_rank 0: "),
        ({"replay_endpoint": "http://h:1"}, "invalid replay endpoint for worker 8 dp_rank 0: "),
    ],
)
def test_a_bad_event_source_keeps_a_worker_out(change: dict[str, Any], why: str) -> None:
    record = Fleet().worker(8, **change)
    assert isinstance(record.not_schedulable_reasons, list)
    assert record.not_schedulable_reasons[0].startswith(f"reconciliation failed: {why}")


def test_too_many_ranks_are_refused_before_anything_is_built() -> None:
    with pytest.raises(InvalidRequest, match="at most 1024") as caught:
        Fleet().worker(1, data_parallel_size=4_000_000_000)
    assert caught.value.field == "data_parallel_size"


def test_a_rank_range_that_leaves_32_bits_ends_there() -> None:
    fleet = Fleet()
    top = 2**32 - 1
    fleet.worker(
        1,
        data_parallel_start_rank=top,
        data_parallel_size=2,
        kv_events_endpoints={str(top): "tcp://127.0.0.1:5000"},
    )
    assert fleet.load(1, top) == (0, 0, 0)


def test_a_label_change_costs_neither_load_nor_cache_nor_stream(fleet: Fleet) -> None:  # D3
    fleet.hold(1, [1, 2, 3])
    fleet.book("a", 1, 1, 2)
    for _ in range(2):
        fleet.worker(1, endpoint="http://new", taints=["t"])
        assert not fleet.effects.listen
        fleet.patch(1, stable_routing_id="s")
        assert not fleet.effects.unlisten
    assert fleet.load(1) == (32, 2, 1)
    selection = chosen(fleet.select(1, 2, 3, allowed_worker_ids=[1]))
    assert (selection.endpoint, selection.overlap.gpu) == ("http://new", 48)


def test_another_event_source_costs_the_cache_and_not_the_load(fleet: Fleet) -> None:
    fleet.hold(1, [1, 2])
    fleet.book("a", 1, 1, 2)
    fleet.patch(1, kv_events_endpoint="tcp://127.0.0.1:7777")
    assert [listen.endpoint for listen in fleet.effects.listen] == ["tcp://127.0.0.1:7777"]
    assert len(fleet.effects.unlisten) == 1
    assert fleet.effects.unlisten[0].closed
    assert fleet.load(1) == (32, 2, 1)
    assert chosen(fleet.select(1, 2, allowed_worker_ids=[1])).overlap.gpu == 0
    fleet.patch(1, kv_events_endpoint="tcp://127.0.0.1:5001")  # the old one again: from nothing
    assert chosen(fleet.select(1, 2, allowed_worker_ids=[1])).overlap.gpu == 0


def test_ranks_that_go_take_their_load_and_those_that_stay_keep_it() -> None:
    fleet = Fleet()
    endpoints = {str(rank): f"tcp://127.0.0.1:{6000 + rank}" for rank in range(3)}
    fleet.worker(1, data_parallel_size=3, kv_events_endpoints=endpoints)
    fleet.book("stays", 1, 1, 2, dp_rank=1)
    fleet.book("goes", 1, 1, 2, dp_rank=2)
    fleet.hold(1, [1, 2], dp_rank=1)
    fleet.patch(1, data_parallel_size=2)
    assert fleet.load(1, 1) == (32, 2, 1)
    assert fleet.load(1, 2) is None
    fleet.free("goes")  # counts as recently freed
    selection = chosen(fleet.select(1, 2))
    assert selection.overlap.dp == {"0": 0, "1": 32}
    fleet.patch(1, data_parallel_size=3)
    assert fleet.load(1, 2) == (0, 0, 0)


def test_a_rank_that_goes_and_comes_is_listened_to_anew() -> None:
    fleet = Fleet()
    endpoints = {str(rank): f"tcp://127.0.0.1:{6000 + rank}" for rank in range(2)}
    fleet.worker(1, data_parallel_size=2, kv_events_endpoints=endpoints)
    stays, goes = (listen.stream for listen in fleet.effects.listen)
    store = [0.0, [["BlockStored", [7], None, list(range(16)), 16]]]
    frames = [b"", bytes(8), msgspec.msgpack.encode(store)]
    goes.on_live(frames, fleet.now)
    tokens: dict[str, Any] = {"token_ids": list(range(16))}

    def blocks() -> list[int]:
        request = OverlapScoresRequest(**tokens)
        return [row.device_blocks for row in fleet.core.overlap_scores(request).workers]

    assert blocks() == [0, 1]
    fleet.patch(1, data_parallel_size=1)  # its endpoint is still named, so it is still heard
    assert fleet.effects.unlisten == [goes]
    assert goes.closed
    (listen,) = fleet.effects.listen
    assert (listen.stream.rank.dp_rank, listen.endpoint) == (1, endpoints["1"])
    listen.stream.on_live(frames, fleet.now)  # told again, by a replay or by a busy engine
    fleet.patch(1, data_parallel_size=2)
    assert not fleet.effects.listen
    assert not stays.closed
    assert blocks() == [0, 1]


def test_deleting_a_worker_removes_record_load_and_index(fleet: Fleet) -> None:  # D5
    fleet.hold(1, [1, 2])
    fleet.book("a", 1, 1, 2, selection_id="s")
    assert fleet.delete(1).lifecycle == "unschedulable"
    assert [record.worker_id for record in fleet.core.workers()] == [2]
    assert fleet.load(1) is None
    fleet.free("a")
    fleet.free("s")
    with pytest.raises(WorkerNotFound, match="worker 1 not found"):
        fleet.delete(1)
    with pytest.raises(WorkerNotFound):
        fleet.patch(1, endpoint="x")
    fleet.worker(1)
    assert chosen(fleet.select(1, 2, allowed_worker_ids=[1])).overlap.gpu == 0


def test_a_worker_that_moves_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.hold(1, [1, 2])
    fleet.book("a", 1, 1)
    fleet.worker(1, model_name="other")
    loads = {(s.model_name, len(s.loads)) for s in fleet.core.loads()}
    assert loads == {("default", 1), ("other", 1)}
    assert fleet.load(1) == (0, 0, 0)


def test_an_incomplete_worker_is_out_until_it_is_complete_again(fleet: Fleet) -> None:
    fleet.book("a", 1, 1)
    assert fleet.patch(1, endpoint="").lifecycle == "incomplete"
    assert fleet.load(1) is None
    with pytest.raises(WorkerNotFound, match="schedulable worker 1 not found"):
        fleet.book("b", 1, 1)
    fleet.patch(1, endpoint="h")
    assert fleet.load(1) == (0, 0, 0)


def test_removed_workers_leave_no_memory_behind(fleet: Fleet) -> None:
    index = fleet.core.partitions[DEFAULT].index
    fleet.hold(1, list(range(500)))
    fleet.hold(2, list(range(100, 300)))
    fleet.delete(1)
    fleet.delete(2)
    fleet.tick(1.0)
    assert index.stats.nodes == 0
    assert fleet.core.partitions[DEFAULT].ledger.live == 0


# -- selection (2, 3) ----------------------------------------------------------------------------


def test_a_busy_worker_goes_at_once_and_its_books_are_cleared_in_slices() -> None:
    fleet = Fleet(limits=CoreLimits(dropped_per_turn_max=10))
    fleet.worker(1)
    for number in range(100):
        fleet.book(f"r{number}", 1, 1, 1000 + number, selection_id=f"s{number}")
    fleet.delete(1)
    assert fleet.core.counters.reservations_dropped == 100
    assert len(fleet.core.desk.bookings) == 0
    fleet.worker(1)
    assert fleet.load(1) == (0, 0, 0)
    for name in ("r50", "s50"):  # whether cleared away or not: recently freed
        with pytest.raises(ReservationNotFound):
            fleet.done(name)
        with pytest.raises(ReservationNotFound):
            fleet.core.output_block(name, None, fleet.now)
        fleet.free(name)
    fleet.book("r51", 1, 1, 2, selection_id="again")
    assert fleet.load(1) == (32, 2, 1)
    with pytest.raises(ReservationNotFound):
        fleet.done("s51")
    ledger = fleet.core.partitions[DEFAULT].ledger
    turns, more = 0, True
    while more:
        before = ledger.blocks.blocks
        more, _ = fleet.core.tick(fleet.now)
        assert before - ledger.blocks.blocks <= 10
        fleet.core.check()
        turns += 1
    assert turns == 9, "ten went with the worker, ten with each turn"
    assert ledger.blocks.blocks == 2
    assert fleet.load(1) == (32, 2, 1)
    fleet.free("r99")


def test_no_worker_anywhere_and_none_in_the_scope_are_told_apart(fleet: Fleet) -> None:
    with pytest.raises(NoSchedulableWorker, match="no schedulable workers are available"):
        Fleet().select(1)
    with pytest.raises(
        NoSchedulableWorker, match="no schedulable workers for model=m tenant=default"
    ):
        fleet.select(1, model_name="m")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "block_hashes is required without token_ids"),
        ({"block_hashes": [1]}, "sequence_hashes is required without token_ids"),
        (
            {"block_hashes": [1], "sequence_hashes": [1]},
            "isl_tokens is required without token_ids",
        ),
        (
            {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 0},
            "isl_tokens must be greater than 0",
        ),
        (
            {"block_hashes": [1, 2], "sequence_hashes": [1], "isl_tokens": 1},
            "block_hashes length 2 must match sequence_hashes length 1",
        ),
        ({"token_ids": []}, "isl_tokens must be greater than 0"),
    ],
)
def test_prompts_are_refused_in_order(fleet: Fleet, body: dict[str, Any], text: str) -> None:
    for route in (fleet.core.select, fleet.core.select_and_reserve):
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            route(SelectAndReserveRequest(**body), 0.0)
    assert fleet.load(1) == (0, 0, 0)


def test_hashes_are_64_bits_signed_or_not(fleet: Fleet) -> None:  # D7
    fleet.book("a", 1, -1, isl=16)
    assert chosen(fleet.take("b", 2**64 - 1, allowed_worker_ids=[1])).potential_decode_blocks == 1
    with pytest.raises(InvalidField, match="block_hashes"):
        fleet.select(2**64)


def test_overlap_beats_load_until_it_does_not(fleet: Fleet) -> None:
    fleet.hold(1, [1, 2, 3, 4])
    assert chosen(fleet.select(1, 2, 3, 4)).worker_id == 1
    fleet.book("a", 1, *range(10, 20))
    answer = chosen(fleet.select(1, 2, 3, 4))
    assert (answer.worker_id, answer.overlap.longest_matched) == (2, 0)


def test_wishes_filter(fleet: Fleet) -> None:
    fleet.worker(3, taints=["gpu", "big"])
    required = RoutingConstraints(required_taints=["gpu"])
    assert chosen(fleet.select(1, routing_constraints=required)).worker_id == 3
    pinned = PinnedWorker(2, 0)
    assert chosen(fleet.select(1, pinned_worker=pinned)).worker_id == 2
    hopeless: list[dict[str, Any]] = [
        {"allowed_worker_ids": []},
        {"allowed_worker_ids": [9]},
        {"pinned_worker": PinnedWorker(2, 5)},
        {"pinned_worker": pinned, "routing_constraints": required},
    ]
    for wishes in hopeless:
        with pytest.raises(NoEligibleWorker, match="no endpoints available to route work"):
            fleet.select(1, **wishes)
    with pytest.raises(
        PinnedNotAllowed, match="pinned worker 2 is not in allowed worker set"
    ) as caught:
        fleet.select(1, pinned_worker=pinned, allowed_worker_ids=[1])
    assert caught.value.status == 400


def test_booking_facts_are_those_before_the_booking(fleet: Fleet) -> None:
    fleet.book("a", 1, 1, 2)
    answer = chosen(fleet.take("b", 1, 2, 3, isl=50, allowed_worker_ids=[1]))
    assert (answer.isl_tokens, answer.potential_decode_blocks) == (50, 3)
    assert answer.sequence_hashes == [1, 2, 3]
    assert answer.track_prefill_tokens is True
    untracked = chosen(
        fleet.take(None, 7, router_config_override=RouterConfigOverride(track_prefill_tokens=False))
    )
    assert untracked.track_prefill_tokens is False
    assert isinstance(untracked.reservation_id, str)
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        untracked.reservation_id,
    )


# -- reservations (4) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 64),  # D9
        ({"effective_prefill_tokens": 10}, 10),
        ({"effective_prefill_tokens": 0}, 0),
        ({"effective_prefill_tokens": 10, "track_prefill_tokens": False}, 10),
        ({"track_prefill_tokens": False}, 0),
        ({"track_prefill_tokens": True}, 64),
        ({"router_config_override": RouterConfigOverride(track_prefill_tokens=False)}, 0),
    ],
)
def test_what_an_explicit_booking_books(fleet: Fleet, more: dict[str, Any], expected: int) -> None:
    fleet.book("a", 1, 1, 2, 3, 4, **more)
    assert fleet.load(1) == (expected, 4, 1)
    fleet.done("a")
    fleet.done("a")
    assert fleet.load(1) == (0, 4, 1)
    fleet.free("a")
    assert fleet.load(1) == (0, 0, 0)


def test_an_explicit_booking_is_checked_prompt_first(fleet: Fleet) -> None:
    # the order was asked of the reference
    with pytest.raises(InvalidRequest, match="sequence_hashes is required without token_ids"):
        fleet.core.reserve(ReservationRequest(reservation_id="x", worker_id=9), 0.0)
    with pytest.raises(
        InvalidRequest, match=re.escape("effective_prefill_tokens (65) must not exceed isl_tokens")
    ):
        fleet.book("x", 9, 1, 2, 3, 4, effective_prefill_tokens=65)
    with pytest.raises(WorkerNotFound, match="schedulable worker 9 not found for model=default"):
        fleet.book("x", 9, 1)
    with pytest.raises(RankNotFound, match="worker 1 has no dp_rank 3"):  # D12
        fleet.book("x", 1, 1, dp_rank=3)
    assert fleet.load(1) == (0, 0, 0)


def test_the_same_request_again_gets_the_same_answer(fleet: Fleet) -> None:  # D14
    first = chosen(fleet.take("a", 1, 2, selection_id="s"))
    fleet.hold(1, [1, 2])
    fleet.hold(2, [1, 2])
    again = chosen(fleet.take("a", 1, 2, selection_id="s"))
    assert msgspec.json.encode(again) == msgspec.json.encode(first)
    fleet.book("b", 1, 5)
    fleet.book("b", 1, 5)
    assert sum(int(p.ledger.requests.sum()) for p in fleet.core.partitions.values()) == 2
    assert fleet.core.counters.reservations_repeated == 2


def test_the_same_id_with_another_body_or_route_is_a_conflict(fleet: Fleet) -> None:
    worker_id = chosen(fleet.take("a", 1, 2)).worker_id
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
        fleet.core.select_and_reserve(unknown, fleet.now, unknown=b'{"x":1}')
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


def test_freeing_is_safe_to_repeat_and_typing_errors_show(fleet: Fleet) -> None:  # D4
    fleet.book("a", 1, 1)
    fleet.free("a")
    fleet.free("a")
    for verb in (fleet.free, fleet.done):
        with pytest.raises(ReservationNotFound, match="reservation nope not found"):
            verb("nope")
    with pytest.raises(ReservationNotFound):
        fleet.done("a")


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
    remembered = fleet.core.desk.bookings._freed
    assert len(remembered) == 2
    assert sum(sys.getsizeof(key) for key, _, _ in remembered.items()) < 250
    assert fleet.core.desk.bookings.freed_bytes < 1000


def test_a_fraction_outside_the_unit_is_refused_before_the_id(fleet: Fleet) -> None:
    for fraction in (-0.1, 1.5):
        with pytest.raises(InvalidRequest, match=r"between 0\.0 and 1\.0"):
            fleet.core.output_block("nope", fraction, 0.0)
    with pytest.raises(ReservationNotFound):
        fleet.core.output_block("nope", 0.5, 0.0)


def test_silence_ends_a_reservation_and_signs_of_life_do_not(fleet: Fleet) -> None:  # D15
    fleet.book("silent", 1, 1)
    fleet.book("alive", 2, 2)
    for _ in range(8):
        fleet.tick(100.0)
        fleet.core.output_block("alive", None, fleet.now)
    assert fleet.load(1) == (0, 0, 0)
    assert fleet.load(2) == (16, 9, 1)
    assert fleet.core.counters.reservations_expired == 1
    fleet.free("silent")
    fleet.tick(301.0)
    assert fleet.load(2) == (0, 0, 0)


def test_a_ttl_of_zero_never_expires() -> None:
    fleet = Fleet(limits=CoreLimits(reservation_ttl_s=0.0))
    fleet.worker(1)
    fleet.book("a", 1, 1)
    fleet.tick(1e9)
    assert fleet.load(1) == (16, 1, 1)


# -- waiting (3.6) -------------------------------------------------------------------------------


@pytest.fixture
def busy() -> Fleet:
    """Two workers, both above their threshold of 100 prefill tokens."""
    made = Fleet(RouterConfig(queue_threshold=1.0))
    made.tick(0.0)
    for worker_id in (1, 2):
        made.worker(worker_id, max_num_batched_tokens=100)
        made.book(f"b{worker_id}", worker_id, isl=101)
    return made


def test_exactly_at_the_threshold_is_not_busy() -> None:
    fleet = Fleet(RouterConfig(queue_threshold=1.0))
    fleet.worker(1, max_num_batched_tokens=100)
    fleet.book("a", 1, isl=100)
    chosen(fleet.take("b", isl=1))
    waiting(fleet.take("c", isl=1))


def test_waiting_requests_are_admitted_one_by_one_each_booked_before_the_next(
    busy: Fleet,
) -> None:
    first, second = waiting(busy.take("q1", isl=150)), waiting(busy.take("q2", isl=150))
    assert [(s.pending_count, s.pending_isl_tokens) for s in busy.core.loads()] == [(2, 300)]
    busy.done("b1")
    assert busy.effects.answered == [first]
    assert isinstance(first.answer, Selection)
    assert first.answer.worker_id == 1
    assert busy.load(1) == (150, 0, 2)
    busy.free("b2")
    assert busy.effects.answered == [second]
    assert [s.pending_count for s in busy.core.loads()] == [0]


def test_nobody_overtakes_not_even_towards_a_refusal(busy: Fleet) -> None:
    busy.worker(3)  # never busy
    blocked = waiting(busy.select(1, allowed_worker_ids=[1]))
    behind = waiting(busy.select(1, allowed_worker_ids=[3]))
    hopeless = waiting(busy.select(1, allowed_worker_ids=[77]))
    busy.done("b2")
    assert busy.effects.answered == []  # head-of-line blocking is intentional
    busy.done("b1")
    assert busy.effects.answered == [blocked, behind, hopeless]
    assert isinstance(behind.answer, Selection)
    assert isinstance(hopeless.answer, NoEligibleWorker)
    with pytest.raises(NoEligibleWorker):
        busy.select(1, allowed_worker_ids=[77])


def test_a_waiting_request_can_leave_and_its_id_is_free_again(busy: Fleet) -> None:
    ticket = waiting(busy.take("q", isl=5))
    with pytest.raises(ReservationConflict, match="Request q already exists"):
        busy.take("q", isl=6)
    assert waiting(busy.take("q", isl=5)) is ticket  # the same request shares the place
    assert not busy.core.withdraw(ticket)
    assert busy.core.withdraw(ticket)
    busy.core.check()
    assert waiting(busy.take("q", isl=6)) is not ticket


def test_an_id_taken_while_it_waited_is_a_conflict_at_booking(busy: Fleet) -> None:
    ticket = waiting(busy.take("q", isl=5))
    busy.book("q", 1, 1)
    busy.free("b2")
    assert busy.effects.answered == [ticket]
    assert isinstance(ticket.answer, ReservationConflict)


def test_the_periodic_look_finds_what_nothing_triggered(busy: Fleet) -> None:
    ticket = waiting(busy.select(1))
    busy.delete(1)
    busy.delete(2)
    busy.tick(1.0)
    assert ticket.answer is None
    busy.tick(61.0)
    assert isinstance(ticket.answer, ServiceError)


def test_expiry_admits_as_a_free_does(busy: Fleet) -> None:
    ticket = waiting(busy.select(1))
    busy.now += 300.0
    _, effects = busy.core.tick(busy.now)
    assert effects.answered == [ticket]


def test_queue_limits_count_workers() -> None:
    one = PolicyClass(prefill_busy_threshold=0.0, request_queue_limit_per_worker=1)
    fleet = Fleet(policies=PolicyBook(RoutingPolicy((one,)), {}))
    fleet.worker(1)
    fleet.worker(2)
    fleet.book("a", 1, 1)
    fleet.book("b", 2, 1)
    waiting(fleet.select(5))
    waiting(fleet.select(5))
    with pytest.raises(QueueFull) as caught:
        fleet.select(5)
    assert str(caught.value) == (
        'router policy class "default" queue requests limit reached (current=2, limit=2)'
    )
    assert caught.value.details == {
        "policy_class": "default",
        "limit_kind": "requests",
        "current": 2,
        "limit": 2,
    }


@pytest.mark.parametrize("kind", ["raw_isl_token", "cached_token"])
def test_a_limit_is_named_as_programs_know_it(kind: str) -> None:
    limit: dict[str, Any] = {f"{kind}_queue_limit_per_worker": 0}
    one = PolicyClass(prefill_busy_threshold=0.0, **limit)
    fleet = Fleet(policies=PolicyBook(RoutingPolicy((one,)), {}))
    fleet.worker(1)
    fleet.book("a", 1, 1)
    with pytest.raises(QueueFull) as caught:
        fleet.select(5)
    assert str(caught.value) == (
        f'router policy class "default" queue {kind}s limit reached (current=0, limit=0)'
    )


@pytest.mark.parametrize("capacity", [0, 1])
def test_an_infinite_threshold_switches_queueing_off(capacity: int) -> None:
    fleet = Fleet(RouterConfig(queue_threshold=math.inf))
    fleet.worker(1, max_num_batched_tokens=capacity)
    for name in "abc":
        assert isinstance(fleet.take(name, 1, isl=10**9), Selection)


def test_classes_take_turns_by_quantum() -> None:
    small = PolicyClass("s", quantum=2, prefill_busy_threshold=0.0)
    big = PolicyClass("b", quantum=1, prefill_busy_threshold=0.0)
    policy = RoutingPolicy((small, big), ((100, 1), (0, 0)))
    fleet = Fleet(policies=PolicyBook(policy, {}))
    fleet.worker(1)
    fleet.book("a", 1, 1)
    names = {}
    for count in range(3):
        names[waiting(fleet.select(isl=10 + count))] = f"s{count}"
        names[waiting(fleet.select(isl=100 + count))] = f"b{count}"
    fleet.free("a")
    order = [names[ticket] for ticket in fleet.effects.answered]
    assert order == ["s0", "s1", "b0", "s2", "b1", "b2"]


# -- replicas (6.3) ------------------------------------------------------------------------------


def published(fleet: Fleet) -> list[Any]:
    return [msgspec.msgpack.decode(encode_message(one)[1]) for one in fleet.effects.published]


def test_what_replicas_are_told() -> None:
    fleet = Fleet(router_id=7)
    fleet.worker(1)
    fleet.take("a", -1, isl=20, expected_output_tokens=9, lora_name="l")
    (told,) = published(fleet)
    assert told == {
        "model_name": "default",
        "tenant_id": "default",
        "routing_group": "default",
        "block_size": 16,
        "event": {
            "request_id": "a",
            "worker": {"worker_id": 1, "dp_rank": 0},
            "data": {
                "AddRequest": {
                    "token_sequence": [2**64 - 1],
                    "track_prefill_tokens": True,
                    "expected_output_tokens": 9,
                    "prefill_load_hint": {
                        "initial_effective_prefill_tokens": 20,
                        "expected_prefill_duration": None,
                    },
                }
            },
            "router_id": 7,
            "lora_name": "l",
        },
        "select_service": {"epoch": 1, "seq": 1, "isl_tokens": 20},  # readers of before skip it
    }
    fleet.take("a", -1, isl=20, expected_output_tokens=9, lora_name="l")
    assert published(fleet) == []  # a repeat changes nothing and tells nothing
    for verb, what in ((fleet.done, "MarkPrefillCompleted"), (fleet.free, "Free")):
        verb("a")
        (told,) = published(fleet)
        assert (told["event"]["data"], told["event"]["lora_name"]) == (what, "l")
    fleet.free("a")
    assert published(fleet) == []


@pytest.mark.parametrize(
    ("more", "track", "hint"),
    [
        ({}, True, 16),
        ({"track_prefill_tokens": False}, False, None),
        ({"track_prefill_tokens": False, "effective_prefill_tokens": 3}, True, 3),
        ({"effective_prefill_tokens": 0}, True, 0),
    ],
)
def test_the_hint_is_what_was_booked(more: dict[str, Any], track: bool, hint: int | None) -> None:
    fleet = Fleet(router_id=7)
    fleet.worker(1)
    fleet.book("a", 1, 5, **more)
    add = published(fleet)[0]["event"]["data"]["AddRequest"]
    told = add["prefill_load_hint"]
    assert add["track_prefill_tokens"] is track
    assert (told and told["initial_effective_prefill_tokens"]) == hint


def test_expiry_is_told_and_worker_deletion_is_not() -> None:
    fleet = Fleet(router_id=7)
    fleet.worker(1)
    fleet.book("a", 1, 5)
    fleet.now += 301
    _, effects = fleet.core.tick(fleet.now)
    (told,) = effects.published
    assert isinstance(told, ReplicaEnvelope)
    assert told.event is not None
    assert (told.event.request_id, told.event.data) == ("a", "Free")
    fleet.book("b", 1, 5)
    fleet.delete(1)
    assert published(fleet) == []


def test_decisions_are_reported_when_asked_for() -> None:
    fleet = Fleet(trace_decisions=True)
    fleet.worker(1)
    fleet.hold(1, [1, 2, 3])
    fleet.select(1, 2, 3, 4)
    ((placement, _),) = fleet.effects.decided
    assert (placement.cost, placement.device_blocks) == (5.0, 3.0)
    request = SelectRequest(token_ids=list(range(40)))
    answer, _ = fleet.core.select(request, fleet.now)
    assert chosen(answer).effective_prefill_tokens == 40


# -- odd requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["block_hashes", "sequence_hashes"])
def test_hashes_that_are_not_needed_have_64_bits_too(fleet: Fleet, field: str) -> None:  # D7
    wide: dict[str, Any] = {field: [1, 1 << 64]}
    for request in (
        SelectRequest(token_ids=[1], **wide),
        SelectAndReserveRequest(token_ids=[1], reservation_id="a", **wide),
    ):
        with pytest.raises(InvalidField, match=field):
            fleet.core.select(request, fleet.now)
    for form in ({"token_ids": [1]}, {"sequence_hashes": [], "isl_tokens": 1}):
        booking = ReservationRequest(reservation_id="a", worker_id=1, **(form | wide))
        with pytest.raises(InvalidField, match=field):
            fleet.core.reserve(booking, fleet.now)


def test_a_repeat_may_name_members_in_another_order(fleet: Fleet) -> None:  # D14
    for wanted in ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}):
        fleet.take("r", 1, routing_constraints=RoutingConstraints(preferred_taints=wanted))
    assert fleet.core.counters.reservations_repeated == 1


def test_refused_selections_are_counted_by_code(fleet: Fleet) -> None:
    with pytest.raises(NoEligibleWorker):
        fleet.select(1, allowed_worker_ids=[])
    with pytest.raises(InvalidRequest):
        fleet.take("r", 1, isl=0)
    assert fleet.core.counters.selections_failed == {"no_eligible_worker": 1, "invalid_request": 1}
