"""Replicas and restarted services know which prompts pull blocks, and what they cannot time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from select_service.core.changes import RESERVATION
from select_service.core.replication.dynamo_events import ReplicaEnvelope, Stamp
from select_service.core.state import ReservationRecord
from select_service.types import PulledBlocks, RouterConfig
from tests.select_service.core.replication.replica import Replica, acquainted, pulled, tell
from tests.select_service.core.test_state import Disk
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import LedgerReservation

PROMPT = tuple(range(1, 9))
CONFIG = RouterConfig(kv_pull=True, kv_transfer_cost_per_block=0.1)


def books(fleet: Fleet, name: str = "r") -> PulledBlocks:
    """Book a prompt on the rank that has to pull it; return what it pulls."""
    fleet.hold(1, list(PROMPT))
    for number in range(2):
        fleet.book(f"busy{number}", 1, *range(100 + 20 * number, 120 + 20 * number))
    answer = selection_of(fleet.take(name, *PROMPT, 9))
    assert answer.kv_source
    assert (answer.worker_id, answer.kv_source.worker_id) == (2, 1)
    return PulledBlocks(1, answer.kv_source.blocks)


def booked(fleet: Fleet, name: str = "r") -> LedgerReservation:
    booking = fleet.core.lifecycle.bookings.find(name)
    assert booking is not None
    return booking.reservation


def samples(fleet: Fleet) -> int:
    """How many first tokens the second rank has taught."""
    (slot,) = fleet.core.partitions[DEFAULT].fleet_slots.workers[2].slots.values()
    rank = fleet.core.partitions[DEFAULT].ledger.loads.speeds.by_slot.get(slot)
    return 0 if rank is None else rank.ttft.samples


def goes_on(fleet: Fleet, name: str) -> None:
    """Something came after its first token: only then that counts."""
    fleet.now += 1.0
    fleet.core.reservations.output_block(name, None, fleet.now)
    fleet.free(name)


@pytest.mark.parametrize("pulls", [True, False])
def test_a_prompt_that_pulls_teaches_no_replica_how_fast_ranks_compute(*, pulls: bool) -> None:
    here, there = Replica(config=CONFIG), Replica(2000)
    if pulls:
        books(here)
    else:
        here.book("r", 2, *PROMPT)
    tell(here, there)
    here.now = there.now = here.now + 0.5
    here.done("r")
    tell(here, there)
    for one in (here, there):
        goes_on(one, "r")
        assert samples(one) == (0 if pulls else 1)


def test_what_is_pulled_is_told_in_snapshots_and_after_a_restart() -> None:
    here = Replica(config=CONFIG)
    disk = Disk(here.core.keep_changes())
    expected = books(here)
    disk.write(here)
    again = Replica(config=CONFIG)
    for key, record in disk.rows.items():
        if key[0] == RESERVATION:
            assert again.core.state.restore(key, record, again.now) is not None
    assert booked(again).pulled == expected
    late = Replica(2000)
    late.hears(*again.turn())
    late.turn()
    pulled(late, again)
    assert booked(late).pulled == expected


def test_a_reservation_of_unknown_age_teaches_nothing() -> None:
    """A snapshot tells that it exists, not for how long: its prompt may be computed at once."""
    here, there = Replica(), Replica(2000)
    there.book("r", 2, *PROMPT)
    here.hears(*there.turn())
    here.turn()
    pulled(here, there)
    here.now += 0.001
    there.now = here.now
    there.done("r")
    tell(there, here)
    goes_on(here, "r")
    assert samples(here) == 0


def test_versions_that_know_nothing_of_it_understand_the_others() -> None:
    here, there = acquainted()
    message = envelope_of(there)
    stamp = message.select_service
    assert isinstance(stamp, Stamp)
    told = msgspec.structs.replace(stamp, pulled=PulledBlocks(1, 8, tier="of a newer version"))
    raw = msgspec.to_builtins(told) | {"of a newer version": 1}
    raw["pulled"]["of a newer version"] = 1
    assert msgspec.convert(raw, Stamp) == told
    assert msgspec.msgpack.encode(stamp) == msgspec.msgpack.encode(
        msgspec.structs.replace(told, pulled=None)
    ), "what does not pull is told as ever"
    here.hears(msgspec.structs.replace(message, select_service=stamp))
    assert booked(here).pulled is None


def envelope_of(there: Replica) -> ReplicaEnvelope:
    there.book("r", 2, *PROMPT)
    (message,) = there.effects.published
    assert isinstance(message, ReplicaEnvelope)
    return message


def test_what_an_older_version_kept_to_itself_is_learnt_from_the_owner() -> None:
    """It passes on claims of others without the fields that it does not know."""
    here, there = acquainted()
    tell(there, here, [envelope_of(there)])
    claim = booked(here).claim
    assert claim is not None
    owned = booked(there)
    owned.pulled = PulledBlocks(1, 8)
    assert owned.claim is not None
    owned.claim.record = msgspec.structs.replace(owned.claim.record, pulled=owned.pulled)
    here.core.lifecycle.announcer.claims.learn_again(claim, owned.claim.record, here.now)
    assert claim.record.pulled == booked(here).pulled == PulledBlocks(1, 8)
    chain = here.core.partitions[DEFAULT].ledger.chain_of(booked(here))
    assert claim.agrees(msgspec.structs.replace(claim.record, hashes=chain, pulled=None))


def test_records_of_before_have_no_such_field() -> None:
    here = Replica(config=CONFIG)
    disk = Disk(here.core.keep_changes())
    books(here)
    disk.write(here)
    (record,) = [row for key, row in disk.rows.items() if key == (RESERVATION, "r")]
    assert record is not None
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(record)[:-2])
    assert msgspec.msgpack.decode(old, type=ReservationRecord).pulled is None
