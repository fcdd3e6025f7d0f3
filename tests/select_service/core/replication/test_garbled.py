"""What a flipped bit did to a statement lasts no longer than until the next snapshot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.core.packing import pack_u64
from select_service.core.replication.dynamo_events import AddRequestData, Hashes, ReplicaEnvelope
from select_service.core.replication.messages import Ended, Heartbeat, Said
from tests.select_service.core.replication.replica import Replica, acquainted, pulled

GHOST = "a" * 15 + "s"
NAME = "a" * 15 + "3"
"""One bit apart, as in the storm that left the first of them behind."""

ALIKE = msgspec.structs.replace


def told(there: Replica) -> ReplicaEnvelope:
    """The one admission it has just published."""
    (admission,) = there.effects.published
    assert isinstance(admission, ReplicaEnvelope)
    return admission


def with_event(envelope: ReplicaEnvelope, **changes: Any) -> ReplicaEnvelope:
    assert envelope.event is not None
    return ALIKE(envelope, event=ALIKE(envelope.event, **changes))


def beats(here: Replica, there: Replica, seconds: float = 1.0) -> None:
    """Time passes at both, and what the other says meanwhile is heard."""
    there.now += seconds
    here.hears(*there.turn())
    here.turn(seconds)


SNAPSHOTS_MAX = 3
"""Of which the last is that which every publisher is asked for once, some time after it came."""


def healed(here: Replica, there: Replica) -> None:
    """After some snapshots both know the same, and no more is fetched."""
    for _ in range(SNAPSHOTS_MAX + 1):
        beats(here, there, here.core.limits.replica_pull_retry_s)
        if not here.pulls:
            break
        pulled(here, there)
    assert here.pulls == [], "it asks for ever"
    (status,) = (
        one
        for one in here.core.replica_operations.status(here.now)
        if one.router_id == there.router_id
    )
    assert status.state == "synced"
    ours = here.core.lifecycle.announcer.claims.sets[there.router_id]
    theirs = there.core.lifecycle.announcer.claims.own
    assert {name: one.born for name, one in ours.by_id.items()} == {
        name: one.born for name, one in theirs.by_id.items()
    }
    assert ours.digest == theirs.digest
    for worker in (1, 2):
        assert here.load(worker) == there.load(worker)
    here.core.check()


def claims_corrected(here: Replica) -> int:
    return here.core.replicas.counters.claims_corrected


# -- what a claim says -----------------------------------------------------------------------------


def test_a_claim_under_a_garbled_id_goes_when_its_owner_names_the_right_one() -> None:
    here, there = acquainted()
    there.book(NAME, 1, 5)
    here.hears(with_event(told(there), request_id=GHOST))
    assert here.core.lifecycle.bookings.live(GHOST) is not None
    healed(here, there)
    assert here.core.lifecycle.bookings.live(GHOST) is None
    assert claims_corrected(here) == 1
    there.free(NAME)
    here.hears(there.effects.published[0])
    assert here.load(1) == (0, 0, 0)


def fewer_tokens(envelope: ReplicaEnvelope) -> ReplicaEnvelope:
    assert envelope.event is not None
    assert isinstance(envelope.event.data, AddRequestData)
    add = envelope.event.data.AddRequest
    hint = add.prefill_load_hint
    assert hint is not None
    hint = ALIKE(hint, initial_effective_prefill_tokens=7)
    return with_event(envelope, data=AddRequestData(ALIKE(add, prefill_load_hint=hint)))


def other_hashes(envelope: ReplicaEnvelope) -> ReplicaEnvelope:
    assert envelope.event is not None
    assert isinstance(envelope.event.data, AddRequestData)
    add = ALIKE(envelope.event.data.AddRequest, token_sequence=Hashes(pack_u64([77, 78])))
    return with_event(envelope, data=AddRequestData(add))


def other_worker(envelope: ReplicaEnvelope, worker_id: int = 2) -> ReplicaEnvelope:
    assert envelope.event is not None
    return with_event(envelope, worker=ALIKE(envelope.event.worker, worker_id=worker_id))


@pytest.mark.parametrize(
    "garble",
    [
        fewer_tokens,
        other_hashes,
        other_worker,
        lambda one: other_worker(one, 4711),
        lambda one: ALIKE(one, model_name="defaulu"),
        lambda one: ALIKE(one, tenant_id="defaulu", routing_group="defaulu"),
    ],
    ids=["tokens", "hashes", "worker", "no worker", "model", "tenant"],
)
def test_what_a_claim_says_is_put_right_with_all_that_became_of_it(garble: Any) -> None:
    here, there = acquainted()
    there.book(NAME, 1, 5)
    here.hears(garble(told(there)))
    assert here.load(1) != there.load(1)
    there.done(NAME)
    here.hears(there.effects.published[0])
    there.core.reservations.output_block(NAME, None, there.now)
    healed(here, there)
    assert here.load(1) == (0, 2, 1)
    assert claims_corrected(here) == 1


def test_what_the_digest_leaves_out_is_put_right_with_the_next_snapshot() -> None:
    here, there = acquainted()
    there.book(NAME, 1, 5)
    admission = told(there)
    assert admission.select_service is not msgspec.UNSET
    stamp = ALIKE(admission.select_service, isl_tokens=1, pair="nobody's")
    here.hears(ALIKE(admission, select_service=stamp))
    there.book("b", 1, 6)  # lost
    healed(here, there)
    (claim,) = (one for one in here.core.lifecycle.announcer.claims.alive(NAME))
    (theirs,) = (one for one in there.core.lifecycle.announcer.claims.alive(NAME))
    assert claim.record == ALIKE(theirs.record, hashes=b"")
    assert claims_corrected(here) == 1


def test_a_snapshot_that_says_what_was_heard_corrects_nothing() -> None:
    here, there = acquainted()
    there.book(NAME, 1, 5)
    here.hears(told(there))
    there.book("b", 1, 6)  # lost
    healed(here, there)
    assert claims_corrected(here) == 0


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freed", [False, True])
def test_an_end_of_another_id_under_the_name_of_a_claim_is_not_its_end(freed: bool) -> None:
    """Neither is the right claim refused, nor its owner told that it has ended."""
    here, there = acquainted()
    there.book(NAME, 1, 5)
    admission = told(there)
    stamp = admission.select_service
    assert stamp is not msgspec.UNSET
    wrong = Ended(GHOST, there.router_id, stamp.seq, freed=freed)
    here.hears(Said(there.router_id, 1, stamp.seq + 1, [wrong]))  # for another statement
    there.core.lifecycle.announcer.claims.outbox.seq += 1
    here.hears(admission)  # overtaken
    assert here.load(1) == (16, 1, 1)
    for _ in range(2):
        healed(here, there)
        there.hears(*here.turn(1.0))
        assert there.load(1) == (16, 1, 1)
        there.book("lost", 2, 6)  # so that there is another snapshot
        there.free("lost")


# -- numbers ---------------------------------------------------------------------------------------

FAR = 1 << 33


def test_a_jump_of_a_statement_is_undone_by_the_next_snapshot() -> None:
    here, there = acquainted()
    there.book(NAME, 1, 5)
    admission = told(there)
    stamp = admission.select_service
    assert stamp is not msgspec.UNSET
    here.hears(ALIKE(admission, select_service=ALIKE(stamp, seq=stamp.seq + FAR)))
    there.book("b", 2, 6)
    here.hears(told(there))
    healed(here, there)
    there.book("c", 2, 7)
    here.hears(told(there))
    assert here.load(2) == there.load(2) == (32, 2, 2)


def test_a_jump_of_a_heartbeat_is_undone_by_the_next_snapshot() -> None:
    here, there = acquainted()
    (beat,) = there.turn(1.0)
    assert isinstance(beat, Heartbeat)
    here.hears(ALIKE(beat, seq=beat.seq + FAR))
    healed(here, there)
    before = here.core.replicas.publishers.views[there.router_id].heard_at
    beats(here, there)
    assert here.core.replicas.publishers.views[there.router_id].heard_at > before


def test_a_small_jump_hides_nothing_that_is_said_under_those_numbers() -> None:
    here, there = acquainted()
    (beat,) = there.turn(1.0)
    assert isinstance(beat, Heartbeat)
    here.hears(ALIKE(beat, seq=beat.seq + 3))
    for name in "abcd":
        there.book(name, 1, 5)
        here.hears(told(there))
    assert here.load(1) == there.load(1)
    healed(here, there)


def test_what_is_said_while_a_snapshot_is_fetched_is_no_jump() -> None:
    here, there = acquainted()
    there.book("a", 1, 5)  # lost
    beats(here, there)
    (pull,) = here.pulls
    head, *parts = there.core.replica_operations.snapshot(there.now)
    there.book("b", 1, 6)
    here.hears(told(there))  # before the head, which does not know it
    assert here.core.replica_operations.snapshot_begin(pull, head, here.now)  # type: ignore[arg-type]
    for part in parts:
        here.core.replica_operations.snapshot_part(pull.router_id, part, here.now)
    here.core.replica_operations.snapshot_end(pull.router_id, here.now, complete=True)
    here.turn()
    assert here.load(1) == there.load(1) == (32, 2, 2)
    assert here.core.replica_operations.status(here.now)[0].state == "synced"
    assert claims_corrected(here) == 0


@pytest.mark.parametrize("epoch", [2, 3, 1 << 20])
def test_a_number_of_another_life_than_the_one_named_is_garbled(epoch: int) -> None:
    here, there = acquainted()
    (beat,) = there.turn(1.0)
    assert isinstance(beat, Heartbeat)
    status = here.core.replica_operations.status(here.now)
    here.hears(ALIKE(beat, epoch=epoch))
    here.hears(ALIKE(beat, seq=beat.seq + (epoch << 40)))
    here.hears(Said(there.router_id, epoch, beat.seq + 1, []))
    assert here.core.replica_operations.status(here.now) == status
    assert here.core.replicas.counters.garbled == 3


# -- checksums -------------------------------------------------------------------------------------


def checked(here: Replica, message: Any) -> None:
    here._did(here.core.replica_operations.receive("tcp://peer:1", message, here.now, checked=True))


def test_who_was_heard_with_checksums_is_not_believed_without() -> None:
    here, there = acquainted()
    (beat,) = there.turn(1.0)
    checked(here, beat)
    there.book("a", 1, 5)
    here.hears(told(there))
    assert here.load(1) == (0, 0, 0)
    assert here.core.replicas.counters.garbled == 1
    checked(here, told(there))
    assert here.load(1) == there.load(1)


def test_who_comes_back_without_checksums_is_believed_once_it_counts_as_gone() -> None:
    """An upgrade that was undone: the old version says nothing of a checksum."""
    here, there = acquainted()
    (beat,) = there.turn(1.0)
    checked(here, beat)
    beats(here, there)
    assert here.core.replicas.counters.garbled == 1
    here.turn(here.core.limits.replica_timeout_s)
    there.book("a", 1, 5)
    healed(here, there)
    assert here.load(1) == (16, 1, 1)


def test_an_admission_of_ours_that_has_lost_its_stamp_is_garbled() -> None:
    here, there = acquainted()
    there.book("a", 1, 5)
    here.hears(ALIKE(told(there), select_service=msgspec.UNSET))
    assert here.load(1) == (0, 0, 0)
    assert here.core.replicas.counters.garbled == 1
    assert [row.state for row in here.core.replica_operations.status(here.now)] == ["synced"]


# -- one id after another --------------------------------------------------------------------------


def test_a_claim_under_the_id_of_another_ends_neither() -> None:
    """Ids that differ in one bit are common: req-1041, req-1045."""
    here, there = acquainted()
    there.book("req-1041", 1, 5)
    here.hears(told(there))
    there.book("req-1043", 2, 6)
    here.hears(with_event(told(there), request_id="req-1041"))
    healed(here, there)
    there.hears(*here.turn(1.0))
    assert there.load(1) == here.load(1) == (16, 1, 1)
    assert there.load(2) == here.load(2) == (16, 1, 1)


def test_what_a_later_claim_on_its_id_has_taken_over_is_not_left_booked() -> None:
    """The later one was freed by somebody else, of whom that was heard before its admission."""
    here, there = acquainted()
    third = Replica(3000)
    there.book("a", 1, 5)
    here.hears(told(there))
    there.free("a")  # lost
    there.book("a", 1, 6)
    admission = told(there)
    third.hears(admission)
    third.free("a")
    here.hears(third.effects.published[0], peer="tcp://third:1")
    here.hears(admission)
    assert here.load(1) == (0, 0, 0)
    there.hears(third.effects.published[0], peer="tcp://third:1")
    healed(here, there)
