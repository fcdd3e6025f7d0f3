"""A lease is its opener's to watch; what happens to its reservations elsewhere counts too."""

from __future__ import annotations

import pytest

from select_service.types import LeaseRenewal, LeaseRequest, ReservationRequest
from tests.models.replica_net import Net


@pytest.fixture
def net() -> Net:
    """Two replicas, and ten reservations under a lease of 20 seconds at the first."""
    made = Net(1, 2)
    for node in made.nodes:
        node.put_worker(1)
    made.run(2.0)
    core = made.nodes[0].core
    core.open_lease(LeaseRequest(owner="o", ttl_s=20.0, lease_id="l"), made.now)
    for number in range(10):
        request = ReservationRequest(
            reservation_id=f"r{number}",
            worker_id=1,
            sequence_hashes=[number],
            isl_tokens=9,
            lease_id="l",
        )
        made.nodes[0].did(core.reserve(request, made.now)[1])
    made.run(2.0)
    assert sizes(made) == [10, 10]
    return made


def sizes(net: Net) -> list[int]:
    return [len(node.ledger()) for node in net.nodes]


def run(net: Net, seconds: int) -> None:
    for _ in range(seconds):
        net.run(1.0)
        for node in net.nodes:
            more = True
            while more:
                more, effects = node.core.tick(net.now)
                node.did(effects)


def test_a_renewed_lease_keeps_the_copies_too(net: Net) -> None:
    for _ in range(8):
        run(net, 15)
        net.nodes[0].core.renew_lease("l", LeaseRenewal(), net.now)
    assert sizes(net) == [10, 10]


def test_a_missed_lease_is_told_to_the_others(net: Net) -> None:
    run(net, 25)
    assert sizes(net) == [0, 0]


def test_a_sign_of_life_at_another_replica_renews_all(net: Net) -> None:
    for _ in range(4):
        run(net, 15)
        net.nodes[1].did(net.nodes[1].core.output_block("r3", None, net.now))
    assert sizes(net) == [10, 10]
    run(net, 25)
    assert sizes(net) == [0, 0]
