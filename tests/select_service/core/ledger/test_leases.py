"""Leases: what keeps them, what ends them, and what becomes of the reservations under them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from select_service.core.changes import Changes
from select_service.core.ledger.leases import LISTED_MAX, Leases
from select_service.errors import (
    InvalidField,
    LeaseClosed,
    LeaseExpired,
    LeaseNotFound,
    LeaseReopened,
    ServiceError,
    TooManyLeases,
)
from select_service.types import (
    BatchFree,
    BatchOutputBlock,
    BatchPrefillComplete,
    BatchRequest,
    CoreLimits,
    LeaseRecord,
    LeaseRenewal,
    LeaseRequest,
)
from tests.select_service.core.whole_fleet import Fleet


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(router_id=7)
    made.worker(1)
    made.worker(2)
    return made


def opened(fleet: Fleet, lease_id: str = "l", ttl_s: float = 10.0, owner: str = "o") -> LeaseRecord:
    request = LeaseRequest(owner=owner, ttl_s=ttl_s, lease_id=lease_id)
    record, _ = fleet.core.reservations.open_lease(request, fleet.now)
    fleet.core.check()
    return record


def renew(fleet: Fleet, lease_id: str = "l", ttl_s: float | None = None) -> LeaseRecord:
    return fleet.core.reservations.renew_lease(lease_id, LeaseRenewal(ttl_s=ttl_s), fleet.now)[0]


def listed(fleet: Fleet, owner: str | None = None, limit: int = 100) -> list[tuple[str, int]]:
    found = fleet.core.reservations.leases(fleet.now, owner, limit)
    return [(lease.lease_id, lease.reservations) for lease in found.leases]


def close(fleet: Fleet, lease_id: str = "l") -> None:
    lease, effects = fleet.core.reservations.close_lease(lease_id, fleet.now)
    fleet.effects = effects
    while lease is not None and lease.reservations:
        fleet.core.check()
        fleet.effects.published += fleet.core.reservations.clear_lease(lease, fleet.now).published
    fleet.core.check()


# -- the promise ---------------------------------------------------------------------------------


def test_a_missed_lease_frees_all_and_tells_the_replicas(fleet: Fleet) -> None:
    opened(fleet)
    for number in range(300):
        fleet.book(f"r{number}", 1 + number % 2, number, lease_id="l")
    fleet.book("other", 1, 1000)
    fleet.now += 10.0
    frees, turns, more = 0, 0, True
    while more:
        more, effects = fleet.core.tick(fleet.now)
        frees += len(effects.published)
        assert len(effects.published) <= fleet.core.limits.expired_per_turn_max
        fleet.core.check()
        turns += 1
    assert frees == 300
    assert turns > 4, "in slices"
    assert (fleet.load(1), fleet.load(2)) == ((16, 1, 1), (0, 0, 0))
    assert fleet.core.counters.reservations_lease_ended == 300
    fleet.free("r0")  # it counts as freed lately
    with pytest.raises(LeaseExpired) as caught:
        renew(fleet)
    assert (caught.value.status, caught.value.code) == (404, "lease_expired")
    assert caught.value.field == "lease_id"


def test_closing_frees_all_at_once_and_again_is_no_error(fleet: Fleet) -> None:
    opened(fleet)
    for number in range(100):
        fleet.book(f"r{number}", 1, number, lease_id="l")
    fleet.take("t", 1, lease_id="l")
    close(fleet)
    assert len(fleet.effects.published) == 101
    assert (fleet.load(1), fleet.load(2)) == ((0, 0, 0), (0, 0, 0))
    close(fleet)
    with pytest.raises(LeaseClosed):
        renew(fleet)
    with pytest.raises(LeaseClosed):
        fleet.book("x", 1, lease_id="l")
    with pytest.raises(LeaseNotFound):
        close(fleet, "never")
    fleet.now += 30.0
    opened(fleet)
    assert listed(fleet) == [("l", 0)], "the id may be had anew"


def test_what_housekeeping_finds_of_a_closed_lease_it_finishes(fleet: Fleet) -> None:
    opened(fleet)
    for number in range(100):
        fleet.book(f"r{number}", 1, number, lease_id="l")
    fleet.core.reservations.close_lease("l", fleet.now)  # and the client goes
    assert fleet.load(1) != (0, 0, 0)
    fleet.core.reservations.prefill_complete("r99", fleet.now)  # lives, and renews nothing
    fleet.tick(0.0)
    assert fleet.load(1) == (0, 0, 0)


def test_a_lease_counts_what_is_live_at_once(fleet: Fleet) -> None:
    opened(fleet)
    for number in range(100):
        fleet.book(f"r{number}", 1 + number % 2, number, lease_id="l")
    assert listed(fleet) == [("l", 100)]
    fleet.delete(1)  # which clears nothing away yet
    assert listed(fleet) == [("l", 50)]
    assert renew(fleet).reservations == opened(fleet).reservations == 50
    fleet.worker(1)
    fleet.book("r0", 1, lease_id="l")
    fleet.free("r1")
    assert listed(fleet) == [("l", 50)]
    fleet.tick(0.0)
    assert listed(fleet) == [("l", 50)]


# -- without a lease -----------------------------------------------------------------------------


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 86401.0, float("inf"), float("nan")])
def test_times_out_of_bounds(fleet: Fleet, ttl_s: float) -> None:
    with pytest.raises(InvalidField) as caught:
        fleet.book("x", 1, ttl_s=ttl_s)
    assert caught.value.field == "ttl_s"
    with pytest.raises(InvalidField):
        opened(fleet, ttl_s=ttl_s)
    opened(fleet)
    with pytest.raises(InvalidField):
        renew(fleet, ttl_s=ttl_s)
    with pytest.raises(InvalidField):
        fleet.book("x", 1, ttl_s=5.0, lease_id="l")
    assert fleet.load(1) == (0, 0, 0)


# -- the book ------------------------------------------------------------------------------------


def test_a_closed_lease_is_not_opened_by_a_request_that_comes_late(fleet: Fleet) -> None:
    opened(fleet)
    close(fleet)
    fleet.now += 29.9
    with pytest.raises(LeaseReopened, match=r"closed just now.* in 0\.1 s") as caught:
        opened(fleet)
    assert (caught.value.status, caught.value.field) == (409, "lease_id")
    assert listed(fleet) == []
    leases = fleet.core.lifecycle.leases
    assert (leases.opened, leases.reopening) == (1, 1)
    fleet.now += 0.1
    opened(fleet)
    fleet.tick(10.0)
    opened(fleet)  # it was missed, not closed: its owner is alive after all
    assert (leases.opened, leases.expired) == (3, 1)


def test_a_closed_lease_may_be_opened_at_once_where_that_is_wanted() -> None:
    fleet = Fleet(limits=CoreLimits(lease_reopen_s=0.0))
    opened(fleet)
    close(fleet)
    opened(fleet)


def test_limits() -> None:
    fleet = Fleet(limits=CoreLimits(leases_max=2, ended_leases_max=1, lease_name_length_max=3))
    opened(fleet, "a")
    opened(fleet, "b")
    opened(fleet, "a")
    with pytest.raises(TooManyLeases) as caught:
        opened(fleet, "c")
    assert (caught.value.status, fleet.core.lifecycle.leases.refused) == (503, 1)
    ends_s = fleet.core.lifecycle.leases.next_expiry() - fleet.now
    assert caught.value.retry_after_s == ends_s > 1.0, "then the first ends, if nobody renews it"
    for name, owner in (("", "o"), ("abcd", "o"), ("a", ""), ("a", "abcd")):
        with pytest.raises(InvalidField) as wrong:
            opened(fleet, name, owner=owner)
        assert wrong.value.field == ("owner" if name == "a" else "lease_id")
    close(fleet, "a")
    close(fleet, "b")
    with pytest.raises(LeaseNotFound) as forgotten:
        renew(fleet, "a")
    assert not isinstance(forgotten.value, LeaseClosed), "no more ended ones than may be"
    with pytest.raises(LeaseClosed):
        renew(fleet, "b")
    fleet.tick(600.0)
    with pytest.raises(LeaseNotFound) as forgotten:
        renew(fleet, "b")
    assert not isinstance(forgotten.value, LeaseClosed), "for ten minutes"
    leases = Leases(CoreLimits(leases_max=100))
    for number in range(100):  # each with a time to live of its own
        leases.open(str(number), "o", 10.0 + number, 0.0)
    with pytest.raises(TooManyLeases) as many:
        leases.open("100", "o", 9.0, 0.0)
    assert many.value.retry_after_s == 10.0
    leases = Leases(CoreLimits(leases_max=LISTED_MAX + 1))
    for number in range(LISTED_MAX + 1):
        leases.open(str(number), "o", 9.0, 0.0)
    assert len(leases.listed(None, 10**9, 0.0).leases) == LISTED_MAX


def test_a_renewal_costs_the_same_whatever_it_holds(fleet: Fleet) -> None:
    opened(fleet)
    for number in range(50):
        fleet.book(f"r{number}", 1, number, lease_id="l")
    ledger = next(iter(fleet.core.partitions.values())).ledger
    assert ledger.next_expiry() == float("inf"), "none of them waits in a queue of its own"


def test_leases_and_who_is_under_them_survive_the_process(fleet: Fleet) -> None:
    changes = fleet.core.keep_changes()
    opened(fleet, "kept")
    opened(fleet, "closed")
    fleet.book("r", 1, 5, lease_id="kept")
    fleet.take("s", 6, lease_id="closed")
    rows = {key: fleet.core.state.record(key) for key in changes.marked}
    changes.marked.clear()
    renew(fleet, "kept")
    assert not changes.marked, "a renewal writes nothing"
    close(fleet, "closed")
    rows[("lease", "closed")] = fleet.core.state.record(("lease", "closed"))
    opened(fleet, "missed", ttl_s=5.0)
    fleet.tick(5.0)
    rows[("lease", "missed")] = fleet.core.state.record(("lease", "missed"))
    other = Fleet()
    other.worker(1)
    other.worker(2)
    for kind in other.core.state.kinds:
        for key, record in rows.items():
            if key[0] == kind and record is not None:
                other.core.state.restore(key, record, other.now)
    other.core.check()
    assert listed(other) == [("kept", 1)]
    for name, error in (("closed", LeaseClosed), ("missed", LeaseExpired), ("no", LeaseNotFound)):
        with pytest.raises(LeaseNotFound) as caught:
            renew(other, name)
        assert caught.type is error, "as it was answered before"
    other.core.reservations.free("s", other.now)  # its lease is gone: it counts as freed
    assert other.load(1) == (16, 1, 1)
    other.tick(10.0)
    assert (other.load(1), other.load(2)) == ((0, 0, 0), (0, 0, 0))


def test_ends_on_disk_are_bounded_and_go_with_their_memory() -> None:
    limits = CoreLimits(ended_leases_max=2)
    leases = Leases(limits)
    leases.changes = Changes()
    for number in range(3):
        lease = leases.open(str(number), "o", 10.0, 0.0)
        leases.end(lease, "closed", 0.0)
    assert [leases.ending(str(number)) for number in range(3)] == [None, "closed", "closed"]
    leases.changes.marked.clear()
    assert leases.purge_ended(600.0, 10) == 2
    assert set(leases.changes.marked) == {("lease", "1"), ("lease", "2")}, "their rows go"
    again = Leases(limits)
    assert [again.recall_ended(str(number), "expired", 0.0) for number in range(3)] == [
        *(True, True, False)
    ], "what does not fit is dropped, and its row with it"


def test_long_prompts_make_short_turns() -> None:
    fleet = Fleet()
    fleet.worker(1)
    opened(fleet)
    rng = random.Random(1)
    for number in range(8):
        fleet.book(f"r{number}", 1, *(rng.getrandbits(60) for _ in range(4096)), lease_id="l")
        fleet.book(f"s{number}", 1, *(rng.getrandbits(60) for _ in range(4096)), ttl_s=10.0)
    fleet.now += 10.0
    before = 16
    more = True
    while more:
        more, _ = fleet.core.tick(fleet.now)
        left = len(fleet.core.lifecycle.bookings)
        assert before - left <= 2, "4096 blocks of its own are worth a turn"
        before = left
    assert before == 0


# -- batches -------------------------------------------------------------------------------------


def test_ranks_that_go_take_their_reservations_out_of_the_lease(fleet: Fleet) -> None:
    opened(fleet)
    for number in range(100):
        fleet.book(f"r{number}", 1, number, lease_id="l")
    fleet.delete(1)
    fleet.worker(1)
    fleet.book("r5", 1, lease_id="l")  # anew, while the old one is still being cleared away
    close(fleet)
    fleet.tick(0.0)
    assert fleet.load(1) == (0, 0, 0)
    assert fleet.core.counters.reservations_lease_ended == 1


def test_a_batch_does_what_the_single_calls_do(fleet: Fleet) -> None:
    for name in ("a", "b"):
        fleet.book(name, 1, 1, 2)
    operations: list[Any] = [
        BatchPrefillComplete(reservation_id="a"),
        BatchOutputBlock(reservation_id="a", count=3),
        BatchOutputBlock(reservation_id="b", decay_fraction=0.5, count=2),
        BatchOutputBlock(reservation_id="b", decay_fraction=1.5),
        BatchFree(reservation_id="a"),
        BatchFree(reservation_id="a"),
        BatchPrefillComplete(reservation_id="a"),
        BatchFree(reservation_id="nobody's"),
    ]
    results = [fleet.core.reservations.operate(one, fleet.now)[0] for one in operations]
    assert [one.status for one in results] == [200, 200, 200, 400, 200, 200, 404, 404]
    assert results[3].code == "invalid_request"
    assert results[3].field == "decay_fraction"
    assert results[7].error == "reservation nobody's not found"
    assert fleet.load(1) == (32, 3, 1)


def test_a_batch_has_a_limit() -> None:
    fleet = Fleet(limits=CoreLimits(batch_operations_max=1))
    one: Any = BatchFree(reservation_id="a")
    fleet.core.reservations.check_batch(BatchRequest(operations=[one]))
    with pytest.raises(ServiceError) as caught:
        fleet.core.reservations.check_batch(BatchRequest(operations=[one, one]))
    assert (caught.value.status, caught.value.field) == (422, "operations")
