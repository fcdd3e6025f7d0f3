"""What a receiver does with what it hears of the reference's selectors."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.ledger.loads import worked_off
from select_service.core.replication.messages import Ended, Heartbeat, Said
from select_service.errors import ReservationConflict, ReservationNotFound
from tests.select_service.core.replication.replica import DYNAMO, OURS, Replica, add, endings
from tests.select_service.core.whole_fleet import DEFAULT


def test_an_admission_of_a_dynamo_is_a_full_reservation() -> None:
    here = Replica()
    here.dynamo(add(1, 2, 2**64 - 1))
    assert here.load(1) == (40, 3, 1)
    with pytest.raises(ReservationConflict):
        here.book("x", 1, 5)
    here.done("x")
    assert here.load(1) == (0, 3, 1)
    assert endings(here.effects.published) == ["MarkPrefillCompleted"]
    here.core.reservations.output_block("x", None, here.now)
    assert here.load(1) == (0, 4, 1)
    here.free("x")
    assert endings(here.effects.published) == ["Free"]
    assert here.load(1) == (0, 0, 0)


@pytest.mark.parametrize(
    ("data", "load"),
    [
        (add(1, tokens=None), (0, 1, 1)),
        (add(1, track_prefill_tokens=False), (0, 1, 1)),
        (add(1, tokens=0), (0, 1, 1)),
        ({"AddRequest": {}}, (0, 0, 1)),
    ],
)
def test_tokens_count_only_when_tracked(data: Any, load: tuple[int, int, int]) -> None:
    here = Replica()
    here.dynamo(data)
    assert here.load(1) == load


@pytest.mark.parametrize(
    "where",
    [
        {"worker_id": 9},
        {"dp_rank": 1},
        {"model_name": "other"},
        {"tenant_id": "other"},
        {"block_size": 32},
    ],
)
def test_what_is_not_here_is_dropped(where: dict[str, Any]) -> None:
    here = Replica()
    here.dynamo(add(1), **where)
    assert here.load(1) == here.load(2) == (0, 0, 0)
    assert here.core.replicas.counters.dropped == 1


def test_our_own_echo_is_ignored() -> None:
    here = Replica()
    here.dynamo(add(1), router_id=OURS)
    assert here.load(1) == (0, 0, 0)
    assert here.core.replica_operations.status(here.now) == []


@pytest.mark.parametrize("worker_id", [1, 2])
def test_an_admission_for_a_live_id_is_ignored(worker_id: int) -> None:
    here = Replica()
    here.book("x", 1, 5)
    here.dynamo(add(1, 2), worker_id=worker_id)
    here.dynamo(add(7), request_id="y")
    here.dynamo(add(7, 8), request_id="y", worker_id=worker_id)
    assert here.load(1) == (16 + 40, 2, 2)
    assert here.load(2) == (0, 0, 0)


def test_endings_go_by_the_id_and_unknown_ones_are_ignored() -> None:
    here = Replica()
    here.book("x", 1, 5)
    here.dynamo("MarkPrefillCompleted", worker_id=2, dp_rank=9)
    assert here.load(1) == (0, 1, 1)
    here.dynamo("Free", request_id="nobody")
    here.dynamo("MarkPrefillCompleted", request_id="nobody")
    here.dynamo("Free", worker_id=2)  # of one booked here, too
    assert here.load(1) == (0, 0, 0)
    here.free("x")  # no error: freed lately
    with pytest.raises(ReservationNotFound):
        here.free("nobody")


def test_an_end_that_overtakes_its_admission_leaves_nothing_booked() -> None:
    """1.3.1 publishes each event in a task of its own, so a busy machine swaps two of them."""
    here = Replica()
    here.dynamo("Free")
    here.dynamo(add(1, 2))
    assert here.load(1) == (0, 0, 0)
    assert here.core.replicas.counters.ignored == 1
    here.dynamo(add(1, 2))  # the id is used again: an end is that of one admission
    assert here.load(1) == (40, 2, 1)
    here.dynamo("Free")
    here.dynamo(add(3))
    assert here.load(1) == (40, 1, 1)


def test_a_completion_that_overtakes_its_admission_is_kept_for_it() -> None:
    here = Replica()
    here.dynamo("MarkPrefillCompleted")
    here.dynamo(add(1, 2))
    assert here.load(1) == (0, 2, 1)
    for name, said in (("y", ("MarkPrefillCompleted", "Free")), ("z", ("Free",))):
        for one in (*said, "MarkPrefillCompleted"):
            here.dynamo(one, request_id=name)
        here.dynamo(add(3), request_id=name)
    assert here.load(1) == (0, 2, 1), "what is freed is not begun by a completion after it"


def test_an_early_end_is_of_the_selector_that_stated_it() -> None:
    here = Replica()
    here.dynamo("Free")
    here.dynamo(add(1), router_id=DYNAMO + 1)
    assert here.load(1) == (40, 1, 1)


def test_an_admission_that_comes_while_the_id_is_live_uses_its_early_end_up() -> None:
    here = Replica()
    here.dynamo("Free")
    here.book("x", 1, 5)
    here.dynamo(add(1))
    here.free("x")
    here.dynamo(add(1))
    assert here.load(1) == (40, 1, 1)


def test_early_ends_are_forgotten_after_a_while_and_beyond_a_limit() -> None:
    here = Replica(replica_ended_max=2, replica_ended_s=10.0)
    early = here.core.replicas.message_applier.dynamo_peers.early
    for name in ("a" * 10_000, "y", "z"):
        here.dynamo("Free", request_id=name)
    assert early.lost == 1
    assert 0 < early.nbytes < 1_000
    here.dynamo(add(1), request_id="a" * 10_000)  # forgotten for the others
    here.dynamo(add(2), request_id="y")
    assert here.load(1) == (40, 1, 1)
    here.turn(10.0)
    here.dynamo(add(3), request_id="z")
    assert here.load(1) == (80, 2, 2)
    assert early.nbytes == 0


def test_what_a_dynamo_freed_is_told_to_ours_but_not_on_its_topic() -> None:
    here = Replica()
    here.book("x", 1, 5)
    here.dynamo("Free")
    (said, beat) = here.turn()
    assert isinstance(said, Said)
    assert [item.reservation_id for item in said.items if isinstance(item, Ended)] == ["x"]
    assert isinstance(beat, Heartbeat)
    assert beat.live == 0


def test_what_a_dynamo_freed_is_over_with_every_replica_that_took_it_over() -> None:
    """Two had adopted it, of which one was known here when the Dynamo told of its end."""
    there, third = Replica(2000), Replica(3000)
    there.book("x", 1, 1)
    third.hears(there.effects.published[0])
    (claim,) = third.core.lifecycle.announcer.claims.alive("x")
    heirs = [claim.succeeded(7), claim.succeeded(8)]
    third.hears(Said(OURS, 1, 7, [heirs[0], Ended("x", *claim.key, (OURS, 7))]))
    third.dynamo("Free")
    assert third.load(1) == (0, 0, 0)
    third.hears(Said(4000, 1, 8, [heirs[1]]))
    assert third.load(1) == (0, 0, 0)


def test_a_dynamo_is_listed() -> None:
    here = Replica()
    here.dynamo(add(1))
    (row,) = here.core.replica_operations.status(here.now + 3)
    assert (row.router_id, row.state, row.peer, row.heard_s_ago) == (
        DYNAMO,
        "foreign",
        "tcp://peer:1",
        3.0,
    )


def test_the_oldest_prefill_of_a_rank_fades_over_its_duration() -> None:
    here = Replica()
    for name in "xy":
        hint = {
            "initial_effective_prefill_tokens": 100,
            "expected_prefill_duration": {"secs": 1, "nanos": 0},
        }
        here.dynamo({"AddRequest": {"prefill_load_hint": hint}}, request_id=name)
    here.turn()
    for left in (175, 150, 125, 100, 100):
        here.turn(0.25)
        assert here.load(1) == (left, 0, 2)
    here.free("x")
    here.turn()  # now y is the oldest
    here.turn(0.5)
    assert here.load(1) == (50, 0, 1)
    here.done("y")
    here.turn(1.0)
    assert here.load(1) == (0, 0, 1)


def test_what_fades_does_not_count_as_worked_off_once_more() -> None:
    here = Replica()
    ledger = here.core.partitions[DEFAULT].ledger
    ledger.follow_queues(True)
    hint = {
        "initial_effective_prefill_tokens": 10_000,
        "expected_prefill_duration": {"secs": 4, "nanos": 0},
    }
    for name in "xy":
        here.dynamo({"AddRequest": {"prefill_load_hint": hint}}, request_id=name)
    here.turn()
    for left in (17_500, 15_000, 12_500, 10_000, 10_000):
        here.turn(1.0)
        worked = worked_off(ledger.loads.queue_updated_at, ledger.loads.ahead, 8000.0, here.now)
        assert (ledger.loads.prefill - worked).max() == left
    here.core.check()
