"""The time to live that a lease was given last counts, at whichever replica, whatever restarts."""

from __future__ import annotations

import random

import msgspec
import pytest

from select_service.errors import LeaseClosed, LeaseNotFound
from select_service.types import LeaseRenewal, LeaseRequest
from tests.models.replica_net import LIMITS, Net, Node
from tests.select_service.core.replication.leased import (
    COUNT,
    book,
    close,
    made,
    open_here,
    opened,
    renew,
    sizes,
)
from tests.select_service.core.replication.test_kept import (
    GONE_S,
    SOON_S,
    Fall,
    both_falls,
    crash,
    cut_all,
    free,
    kept,
    killed,
    meet,
    output,
    stopped,
)


def ttls(net: Net) -> list[float]:
    """The time to live of the lease at each replica that has it open or knows it."""
    found = []
    for node in net.nodes:
        leases = node.core.reservations.leases(net.now, None, 100).leases
        found += [one.ttl_s for one in leases]
    return found


def kept_ttl(node: Node, ttl_s: float) -> None:
    assert renew(node, ttl_s).ttl_s == ttl_s
    node.flush()


@both_falls
def test_a_time_to_live_that_its_owner_missed_is_told_by_the_next_life(falls: Fall) -> None:
    net = kept(2)
    cut_all(net)
    kept_ttl(net.nodes[1], 60.0)
    falls(net.nodes[1])
    net.nodes[1].reboot()
    net.nodes[1].reboot()  # what was restored is kept
    net.run(1.0)
    meet(net)
    assert open_here(net.nodes[0]) == [("l", "o", 60.0, COUNT)]
    net.run(40.0)
    assert sizes(net) == [COUNT] * 2
    net.run(25.0)
    assert sizes(net) == [0, 0], "nobody has renewed it since"


def test_a_time_to_live_is_told_however_long_its_owner_was_away() -> None:
    """It came back with what it knew, and third replicas know what it does not."""
    net = kept(3)
    one, two, _ = net.nodes
    one.is_down = True
    kept_ttl(two, 90.0)
    net.run(1.0)
    crash(two)
    net.run(GONE_S)
    one.reboot()
    net.run(SOON_S)
    assert ttls(net) == [90.0] * 3
    kept_ttl(one, 30.0)
    net.run(1.0)
    crash(two)
    net.run(SOON_S)
    assert ttls(net) == [30.0] * 3, "what was said later counts"


def test_a_renewal_after_a_new_time_to_live_does_not_take_its_place() -> None:
    net = kept(2)
    renew(net.nodes[1], 60.0)
    renew(net.nodes[1])
    output(net.nodes[1], "r1")
    net.run(1.0)
    assert ttls(net) == [60.0] * 2


def test_a_booking_under_the_old_time_to_live_does_not_bring_it_back() -> None:
    net = kept(2)
    one, two = net.nodes
    net.cut = {frozenset((0, 1))}
    renew(two, 60.0)
    net.run(0.2)
    book(one, "more", lease_id="l")
    net.run(0.2)
    meet(net)
    assert ttls(net) == [60.0] * 2


def test_a_lease_opened_anew_has_its_own_time_to_live() -> None:
    net = kept(2)
    one, two = net.nodes
    kept_ttl(two, 60.0)
    cut_all(net)
    two.is_down = True
    close(one)
    one.flush()
    net.run(LIMITS.lease_reopen_s)
    opened(one)
    book(one, "again", lease_id="l")
    one.flush()
    two.reboot()
    meet(net)
    assert ttls(net) == [20.0] * 2


@pytest.mark.parametrize("seed", range(10))
def test_the_last_time_to_live_counts_whatever_restarts(seed: int) -> None:
    net = kept(3)
    rng = random.Random(seed)
    for number in range(8):
        node = rng.choice(net.nodes)
        if rng.random() < 0.7:
            net.cut = {frozenset((node.number, one.number)) for one in net.nodes if one is not node}
        ttl_s = float(rng.randint(30, 50))
        kept_ttl(node, ttl_s)
        for _ in range(rng.randint(0, 2)):
            other = rng.choice(net.nodes)
            if rng.random() < 0.5:
                renew(other)
            else:
                output(other, "r1")
            other.flush()
        if rng.random() < 0.3:
            book(net.nodes[0], f"more{number}", lease_id="l")
            net.nodes[0].flush()
        net.run(rng.choice([0.0, 0.2]))
        fallen = [one for one in (node, net.nodes[0]) if rng.random() < 0.6]
        for one in fallen:
            rng.choice([killed, stopped])(one)
        net.run(rng.choice([0.0, 1.0]))
        for one in fallen:
            if one.is_down:
                one.reboot()
        net.cut.clear()
        net.run(SOON_S)
        assert ttls(net) == [ttl_s] * 3


@pytest.mark.parametrize("falls", [False, True])
def test_a_time_to_live_is_told_after_the_last_reservation_has_ended(*, falls: bool) -> None:
    """Its owner has the lease open, and more may be booked under it."""
    net = kept(2)
    one, two = net.nodes
    cut_all(net)
    kept_ttl(two, 60.0)
    for number in range(COUNT):
        free(two, f"r{number}")
    if falls:
        crash(two)
    net.run(1.0)
    meet(net)
    assert open_here(one) == [("l", "o", 60.0, 0)]
    book(one, "more", lease_id="l")
    net.run(1.0)
    assert ttls(net) == [60.0] * 2


@pytest.mark.parametrize("fallen", [None, 1, 2])
def test_what_a_closed_lease_was_given_is_not_the_time_to_live_of_the_next(
    fallen: int | None,
) -> None:
    """Opened anew at a replica whose numbers are lower, by one that has not heard of either."""
    net = kept(3, lease=False)
    one, two, three = net.nodes
    crash(one)
    crash(one)
    net.run(GONE_S)
    opened(one)
    book(one, "old", lease_id="l")
    one.flush()
    net.run(1.0)
    net.cut = {frozenset((1, 0)), frozenset((1, 2))}
    kept_ttl(two, 60.0)
    close(one)
    one.flush()
    net.run(1.0)
    if fallen is not None:
        crash(net.nodes[fallen])
    net.run(LIMITS.lease_reopen_s)
    opened(three)
    book(three, "new", lease_id="l")
    net.run(1.0)
    meet(net)
    assert ttls(net) == [20.0] * 3
    assert sizes(net) == [1] * 3


def reopened(node: Node, name: str, ttl_s: float = 20.0) -> None:
    node.net.run(LIMITS.lease_reopen_s)
    opened(node, ttl_s)
    book(node, name, lease_id="l")
    node.flush()
    node.net.run(0.5)


def test_a_close_that_is_heard_late_does_not_close_the_lease_that_was_opened_anew() -> None:
    net = kept(3)
    one, two, three = net.nodes
    net.cut = {frozenset((2, 0)), frozenset((2, 1))}
    close(two)
    two.flush()
    net.run(1.0)
    reopened(one, "new")
    crash(three)
    meet(net)
    assert [renew(node).reservations for node in net.nodes] == [1] * 3


def test_who_opens_a_lease_that_was_opened_often_need_not_remember_it() -> None:
    """What was closed tells how high its revisions were, which are far above all other numbers."""
    net = kept(3, lease=False)
    one, two, three = net.nodes
    crash(one)
    crash(one)
    net.run(GONE_S)
    for number in range(4):
        reopened(one, f"r{number}")
        net.cut = {frozenset((1, 0)), frozenset((1, 2))} if number == 3 else set()
        kept_ttl(two, 60.0)
        close(one)
        one.flush()
        net.run(1.0)
    crash(three)
    reopened(three, "new")
    meet(net)
    assert ttls(net) == [20.0] * 3
    assert sizes(net) == [1] * 3


def test_a_lease_is_closed_for_those_too_whose_reservations_under_it_have_ended() -> None:
    """One of them has it open; another one cannot be reached, so what it booked still lives."""
    net = kept(4, lease=False)
    one, two, three, _ = net.nodes
    for number, node in enumerate((one, two)):
        opened(node)
        book(node, f"r{number}", lease_id="l")
        net.run(0.5)
    free(one, "r0")
    net.run(0.5)
    net.cut = {frozenset((1, number)) for number in (0, 2, 3)}
    close(three)
    net.run(0.5)
    for node in net.nodes:
        if node is not two:
            with pytest.raises((LeaseClosed, LeaseNotFound)):
                renew(node)


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_ended_leases_were_given_takes_no_room_from_those_that_live(
    *, is_closed: bool
) -> None:
    limits = msgspec.structs.replace(LIMITS, lease_copies_max=4)
    net = made(2, limits)
    one, two = net.nodes
    reservations = one.core.reservations
    for number in range(6):
        name = f"l{number}"
        reservations.open_lease(LeaseRequest(owner="o", ttl_s=20.0, lease_id=name), net.now)
        book(one, name, lease_id=name)
        net.run(0.2)
        two.core.reservations.renew_lease(name, LeaseRenewal(ttl_s=30.0), net.now)
        net.run(0.2)
        free(one, name)
        if is_closed:
            one.did(reservations.close_lease(name, net.now)[1])
        net.run(0.2)
    copies = two.core.lifecycle.announcer.claims.copies
    assert not copies.refused
    assert len(copies.recalled) == (0 if is_closed else 2)
    two.core.check()
