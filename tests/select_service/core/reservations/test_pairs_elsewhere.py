"""What other replicas and the disk know of a pair."""

from __future__ import annotations

import pytest

from indexer.core.packing import pack_u64
from select_service.core.replication.dynamo_events import Hashes, ReplicaEnvelope
from select_service.core.replication.message_codec import decode_message, encode_message
from select_service.errors import ReservationConflict, ReservationNotFound
from select_service.types import LeaseRequest
from tests.select_service.core.replication.replica import Replica, endings, tell
from tests.select_service.core.reservations.apart import PROMPT, apart
from tests.select_service.core.test_state import Disk, restored
from tests.select_service.core.whole_fleet import DEFAULT, Fleet


def two() -> tuple[Replica, Replica]:
    here, there = Replica(1000), Replica(2000)
    for replica in (here, there):
        replica.patch(1, role="prefill")
        replica.patch(2, role="decode")
    return here, there


def test_a_replica_knows_the_pair_and_its_id() -> None:
    here, there = two()
    booked = here.pair("p", *PROMPT)
    first, second = here.effects.published
    assert isinstance(first, ReplicaEnvelope)
    assert isinstance(second, ReplicaEnvelope)
    tell(here, there)
    assert there.load(1) == (64, 0, 1)
    assert there.load(2) == (0, 4, 1)
    with pytest.raises(ReservationConflict):
        there.pair("p", *PROMPT, isl=65)
    assert there.pair("p", *PROMPT) == booked
    there.core.reservations.output_block("p", None, there.now)
    assert there.load(2) == (0, 5, 1)
    there.done("p")
    tell(there, here)
    assert here.load(1) == there.load(1) == (0, 0, 0)
    there.free("p")
    tell(there, here)
    assert here.load(2) == there.load(2) == (0, 0, 0)
    here.free("p")  # recently freed, here as there


def test_a_replica_learns_of_a_pairs_prompt_that_it_was_computed_and_not_given_up() -> None:
    here, there = two()
    here.pair("p", *PROMPT)
    tell(here, there)
    here.done("p")
    tell(here, there)
    for replica in (here, there):
        assert replica.core.partitions[DEFAULT].ledger.loads.work.computed == 64
        assert replica.load(1) == (0, 0, 0)


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
    fleet.core.reservations.open_lease(LeaseRequest(owner="o", ttl_s=10.0, lease_id="L"), fleet.now)
    fleet.pair("p", *PROMPT, lease_id="L")
    fleet.tick(6.0)
    fleet.core.reservations.output_block("p", None, fleet.now)  # a sign of life for all of it
    fleet.tick(6.0)
    assert fleet.load(1) == (64, 0, 1)
    fleet.core.reservations.close_lease("L", fleet.now)
    fleet.tick(0.0)
    assert fleet.load(1) == fleet.load(2) == (0, 0, 0)
