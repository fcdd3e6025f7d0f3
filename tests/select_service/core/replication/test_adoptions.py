"""An orphan that a call reaches belongs to who was called; everybody learns of its heir."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from select_service.core.replication.messages import (
    ClaimGrowth,
    ClaimRecord,
    Ended,
    Grown,
    Heartbeat,
    RelayedClaim,
    Said,
    SnapshotEnd,
    SnapshotHead,
)
from tests.select_service.core.replication.replica import OURS, Replica, pulled, silent


def statement(of: Replica) -> Said:
    """The one statement that it makes now."""
    (said,) = (one for one in of.turn() if isinstance(one, Said))
    return said


def adopted(here: Replica, there: Replica, *others: Replica, **more: Any) -> Said:
    """Of what one replica has booked, what another says when it adopts that: the claim, the end."""
    there.book("a", 1, 1, **more)
    for one in (here, *others):
        one.hears(there.effects.published[0])
    silent(here)
    here.done("a")
    return statement(here)


@pytest.mark.parametrize("who", ["owner", "third"])
def test_who_hears_the_end_of_a_claim_before_its_adoption_knows_the_reservation(who: str) -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third, selection_id="selected")
    record, end = adoption.items
    told = {"owner": there, "third": third}[who]
    told.hears(Heartbeat(OURS, 1, adoption.seq - 1, 0, 0))  # it lives
    told.core.reservations.output_block("a", None, told.now)
    told.hears(Said(OURS if who == "owner" else 2000, 1, 9, [end]))
    assert told.load(1) == (16, 2, 1)
    told.done("selected")
    (done,) = told.effects.published
    here.hears(done)  # it is meant, under its new name
    assert told.load(1) == (0, 2, 1)
    told.hears(Said(OURS, 1, adoption.seq, [record]))
    here.hears(*told.turn(1.0))
    assert told.load(1) == here.load(1) == (0, 2, 1)
    theirs = told.core.lifecycle.announcer.claims.sets[OURS]
    assert theirs.digest == here.core.lifecycle.announcer.claims.own.digest
    told.free("a")
    here.hears(told.effects.published[0])
    assert here.load(1) == told.load(1) == (0, 0, 0)


def test_the_heir_of_a_claim_that_its_adopter_no_longer_has_is_forgotten() -> None:
    """Freed where it was adopted before anybody else had heard of it."""
    here, there = Replica(), Replica(2000)
    adoption = adopted(here, there)
    record, end = adoption.items
    here.free("a")
    (freed,) = here.effects.published
    there.hears(Said(OURS, 1, adoption.seq + 5, [end]))
    assert there.load(1) == (16, 1, 1)
    there.turn(1.0)
    there.hears(*here.turn(10.0))
    there.turn(1.0)
    pulled(there, here)
    assert there.load(1) == (0, 0, 0)
    there.hears(Said(OURS, 1, adoption.seq, [record]))
    there.hears(freed)
    assert there.load(1) == (0, 0, 0)


def test_an_end_after_which_the_heir_ended_too_names_nobody() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third)
    there.hears(adoption)
    here.free("a")
    there.hears(here.effects.published[0])
    said = statement(there)
    (end,) = said.items
    assert end == Ended("a", 2000, 1, freed=True)
    third.hears(said)
    assert third.load(1) == (0, 0, 0)


def test_of_adoptions_in_a_row_the_last_is_the_heir() -> None:
    first, second, third, last = Replica(), Replica(2000), Replica(3000), Replica(4000)
    adoption = adopted(second, first, third, last)
    third.now = last.now = second.now
    third.hears(adoption)
    silent(third)
    third.done("a")
    again = statement(third)
    _, first_end = adoption.items
    _, second_end = again.items
    last.hears(Said(2000, 1, 50, [second_end]))  # of a claim nobody has told it of
    last.hears(Said(2000, 1, 51, [first_end]))
    assert last.core.lifecycle.bookings.get("a").reservation.origin == 3000
    assert last.load(1) == (16, 1, 1)


def test_an_heir_is_known_on_the_terms_of_the_old_claim_until_its_owner_tells_others() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third, ttl_s=60.0)
    record, end = adoption.items
    third.hears(Said(2000, 1, 9, [end]))
    assert third.core.lifecycle.bookings.get("a").reservation.ttl_s == 60.0
    other = msgspec.structs.replace(record, ttl_s=90.0)
    third.hears(Said(OURS, 1, adoption.seq, [other]))
    assert third.core.lifecycle.bookings.get("a").reservation.ttl_s == 90.0
    assert third.load(1) == (16, 1, 1)


def test_two_adoptions_of_one_orphan_are_one_reservation() -> None:
    """What was said of either has happened to it, and it ends under every name it has had."""
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third)
    third.now = here.now
    silent(third)
    third.core.reservations.output_block("a", None, third.now)
    (other,) = (one for one in third.turn() if isinstance(one, Said) and len(one.items) == 2)
    third.hears(adoption)
    assert third.load(1) == (16, 2, 1), "the lower router's claim, with what we were told"
    here.hears(other)
    here.hears(*third.turn(1.0))
    third.hears(*here.turn(1.0))
    assert here.load(1) == third.load(1) == (0, 2, 1)
    there.free("a")
    for one in (here, third):
        one.hears(there.effects.published[0])  # it has heard of no adoption
        assert one.load(1) == (0, 0, 0)
        assert not one.core.lifecycle.announcer.claims.alive("a")


def taken_back(there: Replica, third: Replica) -> ClaimRecord:
    """What `third` knows as a reservation of `there`, under its number after another had it."""
    there.book("a", 1, 1)
    third.hears(there.effects.published[0])
    (claim,) = third.core.lifecycle.announcer.claims.alive("a")
    return claim.succeeded(claim.born + 8)


@pytest.mark.parametrize("end_first", [False, True])
def test_what_we_were_told_is_not_lost_when_its_owner_has_taken_a_claim_back(
    end_first: bool,
) -> None:
    there, third = Replica(2000), Replica(3000)
    record = taken_back(there, third)
    third.core.reservations.output_block("a", None, third.now)
    third.turn(1.0)  # nobody hears that
    if end_first:
        end = Ended("a", *record.adopts[-1], (2000, record.born))
        third.hears(Said(2000, 1, record.born + 1, [end]))
        assert third.load(1) == (16, 2, 1), "the heir is known by the end of the other one"
    hashes = third.core.lifecycle.elsewhere.chain_of(
        third.core.lifecycle.announcer.claims.alive("a")[0]
    )
    third.hears(Said(2000, 1, record.born, [msgspec.structs.replace(record, hashes=hashes)]))
    assert third.load(1) == (16, 2, 1)
    (claim,) = third.core.lifecycle.announcer.claims.alive("a")
    assert claim.born == record.born
    grown = Grown("a", 2000, record.born, ClaimGrowth(outputs={3000: 1}))
    assert [grown] == [one for said in third.turn() if isinstance(said, Said) for one in said.items]


def test_what_is_told_of_a_claim_by_hearsay_happened_to_what_took_it_over() -> None:
    there, third = Replica(2000), Replica(3000)
    record = taken_back(there, third)
    (claim,) = third.core.lifecycle.announcer.claims.alive("a")
    old = msgspec.structs.replace(claim.record, growth=ClaimGrowth(outputs={OURS: 1}))
    third.hears(Said(2000, 1, record.born, [record]))
    assert third.load(1) == (16, 0, 1)
    silent(third)
    third.hears(Heartbeat(OURS, 1, 1, 0, 0, http_port=8093))
    third.turn()
    (pull,) = third.pulls
    assert third.core.replica_operations.snapshot_begin(pull, SnapshotHead(OURS, 1, 1), third.now)
    third.core.replica_operations.snapshot_part(OURS, RelayedClaim(2000, old), third.now)
    assert third.load(1) == (16, 1, 1)


def test_what_has_lapsed_where_it_was_booked_lives_where_it_was_adopted() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third, ttl_s=60.0)
    there.tick(61.0)
    (lapsed,) = there.effects.published
    third.hears(lapsed)
    third.hears(adoption)
    here.hears(lapsed)
    assert here.load(1) == (0, 1, 1)
    assert third.load(1) == (16, 1, 1)  # it has not heard yet that the prompt is computed


def test_an_adoption_of_what_was_freed_meanwhile_is_over_where_that_was_heard() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third)
    there.free("a")
    third.hears(there.effects.published[0])
    third.hears(adoption)
    assert third.load(1) == (0, 0, 0)
    here.hears(*third.turn())
    assert here.load(1) == (0, 0, 0)


def test_what_somebody_who_died_said_is_repeated_to_those_who_come_back() -> None:
    """The owner was out of reach for all when somebody completed its prefill, and died."""
    owner, teller, third = Replica(), Replica(2000), Replica(3000)
    owner.book("a", 1, 1)
    told = owner.effects.published[0]
    teller.hears(told)
    third.hears(told)
    teller.done("a")
    third.hears(teller.effects.published[0])
    silent(third)  # of both
    third.turn()
    (beat,) = owner.turn()
    third.hears(beat)
    owner.hears(*third.turn())
    assert owner.load(1) == (0, 1, 1)


@pytest.mark.parametrize("name", ["a", "selected"])
def test_a_free_between_the_end_of_a_claim_and_its_adoption_ends_the_adopted_one(name: str) -> None:
    """Its owner has heard that its claim is over, and not yet who owns the reservation now."""
    here, there = Replica(), Replica(2000)
    adoption = adopted(here, there, selection_id="selected")
    record, end = adoption.items
    assert isinstance(end, Ended)
    end = msgspec.structs.replace(end, heir=None)  # from somebody who does not know it
    there.hears(Said(OURS, 1, adoption.seq + 1, [end]))  # repeated; it has overtaken
    assert there.load(1) == (0, 0, 0)
    there.free(name)  # acknowledged, as its caller knows that it lives
    there.hears(Said(OURS, 1, adoption.seq, [record]))
    assert there.load(1) == (0, 0, 0)
    here.hears(*there.turn())
    assert here.load(1) == (0, 0, 0)


def test_an_id_booked_anew_is_not_meant_by_an_earlier_free() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    there.book("a", 1, 1)
    there.free("a")
    there.free("a")  # again
    there.now += 1.0
    third.now = there.now
    third.book("a", 1, 1)
    told = third.effects.published[0]
    for one in (here, there):
        one.hears(told)
    silent(here)
    here.done("a")
    adoption = statement(here)
    record, end = adoption.items
    there.hears(Said(OURS, 1, adoption.seq + 1, [end]))
    there.hears(Said(OURS, 1, adoption.seq, [record]))
    assert there.load(1) == (16, 1, 1)


def test_who_was_put_back_to_before_an_end_is_reminded_of_it() -> None:
    """A state directory restored from a backup knows of no free since."""
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    (told,) = there.effects.published
    here.hears(told)
    there.free("a")
    here.hears(there.effects.published[0])
    again = Replica(2000)
    again.core.lifecycle.announcer.claims.outbox.epoch = 2
    again.book("a", 1, 1)  # under the number it had
    again.core.lifecycle.announcer.claims.outbox.seq = 1 << 40
    here.hears(*again.turn())
    here.turn(1.0)
    again.hears(*pulled(here, again))
    assert here.load(1) == again.load(1) == (0, 0, 0)


def test_what_a_snapshot_ends_is_booked_anew_at_the_time_of_that_turn() -> None:
    """Claims are looked through in later turns, and deadlines are in the order of time."""
    here, there, third = Replica(4000), Replica(2000), Replica(3000)
    for one in (there, here):
        one.book("a", 1, 1)
        third.hears(one.effects.published[0])
    third.hears(Heartbeat(2000, 1, 5, 0, 0, http_port=8093))
    third.turn()
    (pull,) = third.pulls
    assert third.core.replica_operations.snapshot_begin(pull, SnapshotHead(2000, 1, 5), third.now)
    third.core.replica_operations.snapshot_part(2000, SnapshotEnd(0), third.now)
    third.core.replica_operations.snapshot_end(2000, third.now, complete=True)
    third.turn(1.0)
    reservation = third.core.lifecycle.bookings.get("a").reservation
    assert reservation.origin == 4000
    assert reservation.touched == third.now
