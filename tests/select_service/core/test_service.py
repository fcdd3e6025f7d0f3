"""The verbs of the core, one promise a test; contract numbers in brackets."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from indexer.core.packing import pack_u64
from indexer.types import Tier, WorkerRank
from select_service.core.replication.dynamo_events import ReplicaEnvelope
from select_service.core.replication.message_codec import encode_message
from select_service.errors import (
    InvalidField,
    InvalidRequest,
    NoEligibleWorker,
    ReservationNotFound,
)
from select_service.types import (
    CoreLimits,
    ReservationRequest,
    RouterConfigOverride,
    RoutingConstraints,
    SelectAndReserveRequest,
    SelectRequest,
)
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

# -- selection (2, 3) ----------------------------------------------------------------------------


def test_a_busy_worker_goes_at_once_and_its_books_are_cleared_in_slices() -> None:
    fleet = Fleet(limits=CoreLimits(dropped_per_turn_max=10))
    fleet.worker(1)
    for number in range(100):
        fleet.book(f"r{number}", 1, 1, 1000 + number, selection_id=f"s{number}")
    fleet.delete(1)
    assert fleet.core.counters.reservations_dropped == 100
    assert len(fleet.core.lifecycle.bookings) == 0
    fleet.worker(1)
    assert fleet.load(1) == (0, 0, 0)
    for name in ("r50", "s50"):  # whether cleared away or not: recently freed
        with pytest.raises(ReservationNotFound):
            fleet.done(name)
        with pytest.raises(ReservationNotFound):
            fleet.core.reservations.output_block(name, None, fleet.now)
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
        assert before - ledger.blocks.blocks <= 10 + 1, "own blocks, and at last the shared one"
        fleet.core.check()
        turns += 1
    assert turns == 9, "ten went with the worker, ten with each turn"
    assert ledger.blocks.blocks == 2
    assert fleet.load(1) == (32, 2, 1)
    fleet.free("r99")


def test_hashes_are_64_bits_signed_or_not(fleet: Fleet) -> None:  # D7
    fleet.book("a", 1, -1, isl=16)
    assert (
        selection_of(fleet.take("b", 2**64 - 1, allowed_worker_ids=[1])).potential_decode_blocks
        == 1
    )
    with pytest.raises(InvalidField, match="block_hashes"):
        fleet.select(2**64)


def test_booking_facts_are_those_before_the_booking(fleet: Fleet) -> None:
    fleet.book("a", 1, 1, 2)
    answer = selection_of(fleet.take("b", 1, 2, 3, isl=50, allowed_worker_ids=[1]))
    assert (answer.isl_tokens, answer.potential_decode_blocks) == (50, 3)
    assert answer.sequence_hashes == [1, 2, 3]
    assert answer.track_prefill_tokens is True
    untracked = selection_of(
        fleet.take(None, 7, router_config_override=RouterConfigOverride(track_prefill_tokens=False))
    )
    assert untracked.track_prefill_tokens is False
    assert isinstance(untracked.reservation_id, str)
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        untracked.reservation_id,
    )


# -- replicas (6.3) ------------------------------------------------------------------------------


def published(fleet: Fleet) -> list[Any]:
    return [msgspec.msgpack.decode(encode_message(one)[1]) for one in fleet.effects.published]


def test_what_replicas_are_told() -> None:
    fleet = Fleet(router_id=7)
    fleet.worker(1)
    fleet.take("a", -1, isl=20, expected_output_tokens=9, lora_name="l")
    (message,) = published(fleet)
    body = [message["select_service"].pop(name) for name in ("fingerprint", "answer")]
    assert all(body), "for its repeats at other replicas"
    assert message == {
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
    assert published(fleet) == []  # a repeat changes nothing and publishes nothing
    for verb, what in ((fleet.done, "MarkPrefillCompleted"), (fleet.free, "Free")):
        verb("a")
        (message,) = published(fleet)
        assert (message["event"]["data"], message["event"]["lora_name"]) == (what, "l")
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
    hint_sent = add["prefill_load_hint"]
    assert add["track_prefill_tokens"] is track
    assert (hint_sent and hint_sent["initial_effective_prefill_tokens"]) == hint


def test_expiry_is_told_and_worker_deletion_is_not() -> None:
    fleet = Fleet(router_id=7)
    fleet.worker(1)
    fleet.book("a", 1, 5)
    fleet.now += 301
    _, effects = fleet.core.tick(fleet.now)
    (message,) = effects.published
    assert isinstance(message, ReplicaEnvelope)
    assert message.event is not None
    assert (message.event.request_id, message.event.data) == ("a", "Free")
    fleet.book("b", 1, 5)
    fleet.delete(1)
    assert published(fleet) == []


# -- odd requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["block_hashes", "sequence_hashes"])
def test_hashes_that_are_not_needed_have_64_bits_too(fleet: Fleet, field: str) -> None:  # D7
    wide: dict[str, Any] = {field: [1, 1 << 64]}
    for request in (
        SelectRequest(token_ids=[1], **wide),
        SelectAndReserveRequest(token_ids=[1], reservation_id="a", **wide),
    ):
        with pytest.raises(InvalidField, match=field):
            fleet.core.selection.select(request, fleet.now)
    for form in ({"token_ids": [1]}, {"sequence_hashes": [], "isl_tokens": 1}):
        booking = ReservationRequest(reservation_id="a", worker_id=1, **(form | wide))
        with pytest.raises(InvalidField, match=field):
            fleet.core.reservations.reserve(booking, fleet.now)


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


@pytest.mark.parametrize("packed", [False, True], ids=["said in a list", "packed"])
def test_hits_given_away_are_counted(packed: bool) -> None:
    fleet = Fleet()
    for worker_id in (1, 2, 3):
        fleet.worker(worker_id)
    fleet.hold(1, [1, 2, 3])
    fleet.hold(2, [1])
    counters = fleet.core.counters

    def select(**wishes: Any) -> tuple[int, int, int]:
        hashes: Any = [1, 2, 3, 4]
        request = SelectRequest(
            block_hashes=pack_u64(hashes) if packed else hashes,
            sequence_hashes=pack_u64(hashes) if packed else hashes,
            isl_tokens=64,
            **wishes,
        )
        answer, _ = fleet.core.selection.select(request, fleet.now)
        chosen = selection_of(answer).worker_id
        return chosen, counters.selections_forgoing, counters.selected_forgone_tokens

    assert select() == (1, 0, 0)
    fleet.book("large", 1, *range(900, 990))
    assert select() == (2, 1, 32), "48 tokens are at worker 1, and 16 at worker 2"
    assert select(allowed_worker_ids=[2, 3]) == (2, 1, 32), "what may not be had is not given away"
    assert select(allowed_worker_ids=[1, 3]) == (3, 2, 80)
    fleet.drain(1)
    assert select() == (2, 2, 80)


def test_hits_given_away_on_lower_tiers_are_counted_as_what_they_are_worth() -> None:
    fleet = Fleet()
    fleet.worker(1)
    fleet.worker(2)
    fleet.hold(1, [1, 2])
    index = fleet.core.partitions[DEFAULT].index
    index.store(WorkerRank(1, 0), Tier.HOST_PINNED, 1002, [1003, 1004], pack_u64([3, 4]))
    fleet.book("large", 1, *range(900, 990))
    assert selection_of(fleet.select(1, 2, 3, 4)).worker_id == 2
    counters = fleet.core.counters
    assert counters.selections_forgoing == 1
    assert counters.selected_forgone_tokens == round((2 + 0.75 * 2) * 16)
