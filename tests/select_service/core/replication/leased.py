"""Replicas with workers, reservations under a lease at the first, and what clients do there."""

from __future__ import annotations

import msgspec

from select_service.types import (
    CoreLimits,
    LeaseRecord,
    LeaseRenewal,
    LeaseRequest,
    ReservationRequest,
)
from tests.models.replica_net import LIMITS, Net, Node

COUNT = 10


def made(nodes: int, limits: CoreLimits = LIMITS) -> Net:
    net = Net(1, nodes, limits)
    for node in net.nodes:
        node.put_worker(1)
    net.run(2.0)
    return net


def leased(nodes: int, limits: CoreLimits = LIMITS) -> Net:
    """Replicas, and ten reservations under a lease of 20 seconds at the first."""
    net = made(nodes, limits)
    opened(net.nodes[0])
    for number in range(COUNT):
        book(net.nodes[0], f"r{number}", lease_id="l")
    net.run(2.0)
    assert sizes(net) == [COUNT] * nodes
    return net


def opened(node: Node, ttl_s: float = 20.0, owner: str = "o") -> LeaseRecord:
    request = LeaseRequest(owner=owner, ttl_s=ttl_s, lease_id="l")
    return node.core.reservations.open_lease(request, node.net.now)[0]


def book(node: Node, name: str, lease_id: str | None = None, ttl_s: float | None = None) -> None:
    request = ReservationRequest(
        reservation_id=name,
        worker_id=1,
        sequence_hashes=[len(name)],
        isl_tokens=9,
        lease_id=lease_id,
        ttl_s=ttl_s,
    )
    node.did(node.core.reservations.reserve(request, node.net.now)[1])


def renew(node: Node, ttl_s: float | None = None) -> LeaseRecord:
    return node.core.reservations.renew_lease("l", LeaseRenewal(ttl_s=ttl_s), node.net.now)[0]


def close(node: Node) -> None:
    lease, effects = node.core.reservations.close_lease("l", node.net.now)
    node.did(effects)
    while lease is not None and lease.reservations:
        node.did(node.core.reservations.clear_lease(lease, node.net.now))


def sizes(net: Net) -> list[int]:
    return [len(node.ledger()) for node in net.nodes if not node.is_down]


def open_here(node: Node) -> list[tuple[str, str, float, int]]:
    return [
        (one.lease_id, one.owner, one.ttl_s, one.reservations)
        for one in node.core.reservations.leases(node.net.now, None, 100).leases
        if one.router_ids is msgspec.UNSET
    ]


def owned(node: Node) -> int:
    return len(node.core.lifecycle.announcer.claims.own)
