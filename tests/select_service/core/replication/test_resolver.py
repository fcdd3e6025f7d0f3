"""Of the claims on an id one is booked, on its own terms; the others wait, on theirs."""

from __future__ import annotations

from select_service.types import LeaseRenewal, LeaseRequest
from tests.models.replica_net import LIMITS, Net, Node
from tests.select_service.core.replication.leased import book, made, sizes


def booked_twice() -> tuple[Net, Node, Node]:
    """The same id at two replicas, each under a lease of its own; the first one's counts."""
    net = made(2)
    one, other = sorted(net.nodes, key=lambda node: node.router_id)
    net.cut.add(frozenset((0, 1)))
    for node, lease_id in ((one, "first"), (other, "second")):
        request = LeaseRequest(owner="o", ttl_s=20.0, lease_id=lease_id)
        node.core.reservations.open_lease(request, net.now)
        book(node, "r", lease_id=lease_id)
    net.cut.clear()
    net.run(2.0)
    assert sizes(net) == [1, 1]
    assert other.ledger().keys() == {"r"}
    assert other.core.lifecycle.bookings.get("r").reservation.origin == one.router_id
    return net, one, other


def test_a_claim_that_is_booked_again_has_its_lease_again() -> None:
    net, _one, other = booked_twice()
    for _ in range(2):
        net.run(15.0)
        other.core.reservations.renew_lease("second", LeaseRenewal(), net.now)
    assert sizes(net) == [1, 1], "that the first was missed ends the first alone"
    reservation = other.core.lifecycle.bookings.get("r").reservation
    assert reservation.origin == "local"
    assert reservation.lease is not None
    assert reservation.lease.lease_id == "second"
    net.run(25.0)
    assert sizes(net) == [0, 0]


def test_a_claim_whose_lease_ended_meanwhile_is_not_booked_again() -> None:
    net, one, _other = booked_twice()
    for _ in range(2):
        net.run(15.0)
        one.core.reservations.renew_lease("first", LeaseRenewal(), net.now)
    net.run(25.0)
    assert sizes(net) == [0, 0]


def test_a_claim_that_is_booked_again_has_its_time_to_live_again() -> None:
    net = made(2)
    one, other = sorted(net.nodes, key=lambda node: node.router_id)
    net.cut.add(frozenset((0, 1)))
    book(one, "r", ttl_s=5.0)
    book(other, "r", ttl_s=12.0)
    net.cut.clear()
    net.run(7.0)
    assert sizes(net) == [1, 1]
    assert other.core.lifecycle.bookings.get("r").reservation.ttl_s == 12.0
    net.run(13.0)
    assert sizes(net) == [0, 0]


def test_what_became_of_an_orphan_that_has_aged_is_told_to_its_owner() -> None:
    net = made(2)
    one, other = net.nodes
    book(one, "r")
    net.run(1.0)
    net.cut.add(frozenset((0, 1)))
    other.did(other.core.reservations.output_block("r", None, net.now))  # nobody hears of it
    net.run(LIMITS.replica_timeout_s + LIMITS.replica_orphan_ttl_s + 1.0)
    assert sizes(net) == [1, 0]
    net.cut.clear()
    net.run(5.0)
    assert sizes(net) == [1, 1]
    assert one.ledger() == other.ledger()
