"""What a replica has acknowledged it knows after a restart, and the others learn of it then."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from select_service.core.replication.message_codec import decode_part, encode_part
from select_service.core.replication.messages import Closed, SnapshotEnd, SnapshotHead
from select_service.errors import LeaseNotFound, ReservationNotFound
from select_service.types import LeaseRequest, ReservationRequest
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

GONE_S = LIMITS.replica_timeout_s + 1.0
SOON_S = 4.0
"""Much less than a lease's time to live."""

LONG = "r" * 200


def kept(nodes: int, *, lease: bool = True) -> Net:
    """Replicas that keep their state, and ten reservations under a lease at the first."""
    net = made(nodes)
    for node in net.nodes:
        node.keep()
        node.put_worker(1)
        assert node.changes is not None
        node.changes.mark("worker", "1")
    net.prompt_writes = 1.0
    if lease:
        opened(net.nodes[0])
        for number in range(COUNT):
            book(net.nodes[0], f"r{number}", lease_id="l")
        net.run(2.0)
        assert sizes(net) == [COUNT] * nodes
    return net


def one_booked(nodes: int) -> tuple[Net, list[Node]]:
    """Replicas that keep their state, and one reservation, "r", at the first."""
    net = kept(nodes, lease=False)
    book(net.nodes[0], "r")
    net.run(1.0)
    return net, net.nodes


def crash(node: Node) -> None:
    node.is_down = True
    node.reboot()


def meet(net: Net) -> None:
    net.cut.clear()
    net.run(SOON_S)


def part(net: Net) -> None:
    """No replica hears another one, until each counts as gone."""
    cut_all(net)
    net.run(GONE_S)


def cut_all(net: Net) -> None:
    net.cut = {frozenset((one.number, two.number)) for one in net.nodes for two in net.nodes}


def free(node: Node, name: str) -> None:
    node.did(node.core.reservations.free(name, node.net.now))
    node.flush()


def complete(node: Node, name: str) -> None:
    node.did(node.core.reservations.prefill_complete(name, node.net.now))
    node.flush()


def output(node: Node, name: str) -> None:
    node.did(node.core.reservations.output_block(name, None, node.net.now))
    node.flush()


def killed(node: Node) -> None:
    node.is_down = True


def stopped(node: Node) -> None:
    node.stop()


Fall = Callable[[Node], None]
both_falls = pytest.mark.parametrize("falls", [killed, stopped])


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["short", LONG])
def test_an_end_is_told_by_the_next_life(name: str) -> None:
    net = kept(2, lease=False)
    one, two = net.nodes
    book(one, name)
    net.run(1.0)
    cut_all(net)
    free(two, name)
    crash(two)
    two.reboot()  # what was restored is kept
    meet(net)
    assert sizes(net) == [0, 0]


def test_what_counts_as_freed_while_its_owner_is_away_can_be_freed_after_a_restart() -> None:
    net, (_, two) = one_booked(2)
    cut_all(net)
    net.run(LIMITS.replica_timeout_s + LIMITS.replica_orphan_ttl_s + 2.0)
    assert sizes(net) == [1, 0], "it has aged"
    two.flush()
    crash(two)
    free(two, "r")
    meet(net)
    assert sizes(net) == [0, 0]


@both_falls
def test_an_end_that_its_owner_has_not_heard_of_ends_an_heir_there_as_soon_as_it_is_heard(
    falls: Fall,
) -> None:
    """With its rank it has ended there too, but that is not the end of what others took over.

    Until the owner hears of the free it cannot tell the heir from one whose client is still there.
    """
    net, (one, two, three) = one_booked(3)
    part(net)
    output(three, "r")  # takes it over
    free(two, "r")
    one.did(one.core.workers.delete_worker(1, net.now)[1])
    one.put_worker(1)
    falls(two)
    net.cut = {frozenset((0, 1)), frozenset((1, 2))}
    net.run(1.0)
    assert one.ledger().keys() == three.ledger().keys() == {"r"}
    two.reboot()
    meet(net)
    assert sizes(net) == [0, 0, 0]


def test_a_name_that_was_freed_may_be_booked_again() -> None:
    net, (one, two) = one_booked(2)
    free(two, "r")
    net.run(1.0)
    book(one, "r")
    net.run(1.0)
    for node in net.nodes:
        crash(node)
    net.run(SOON_S)
    assert sizes(net) == [1, 1]


def test_an_heir_is_freed_under_its_second_name_after_a_restart() -> None:
    """Only the end of the old claim was known where its selection was freed."""
    net = kept(3, lease=False)
    one, two, three = net.nodes
    request = ReservationRequest(
        reservation_id="r", worker_id=1, sequence_hashes=[1], isl_tokens=9, selection_id="s"
    )
    one.did(one.core.reservations.reserve(request, net.now)[1])
    net.run(1.0)
    part(net)
    output(three, "r")
    free(two, "s")
    crash(two)
    meet(net)
    assert sizes(net) == [0, 0, 0]


def test_ends_leave_the_disk_when_they_are_forgotten() -> None:
    net = kept(2)
    close(net.nodes[1])
    net.run(2.0)
    assert {"end", "closing"} <= {kind for kind, _ in net.nodes[1].rows}
    net.now += LIMITS.replica_ended_s + 1.0
    net.run(20.0)
    for node in net.nodes:
        node.flush()
        assert not [key for key in node.rows if key[0] in {"end", "claim", "closing"}]


def test_ends_of_earlier_builds_are_read() -> None:
    net, (_, two) = one_booked(2)
    key = next(iter(two.core.lifecycle.announcer.claims.alive("r"))).key
    two.is_down = True
    two.rows = {("reservation", "r"): b"\xc1" + msgspec.msgpack.encode([key])}
    two.reboot()
    net.run(SOON_S)
    assert sizes(net) == [0, 0]


# -- leases --------------------------------------------------------------------------------------


def test_a_lease_is_closed_for_good_where_it_was_taken_over() -> None:
    """Its client goes on at a replica that could not hear of it, and adopts what is under it."""
    net = kept(3)
    _, two, three = net.nodes
    cut_all(net)
    close(two)
    two.flush()
    net.run(GONE_S)
    renew(three)
    net.run(2.0)
    assert open_here(three) == [("l", "o", 20.0, COUNT)]
    crash(two)
    meet(net)
    assert sizes(net) == [0, 0, 0]
    assert not any(open_here(node) for node in net.nodes)


def test_a_lease_is_closed_for_good_where_another_one_took_it_over_too() -> None:
    """Two replicas adopt the same; the one that closes it has not heard of the other one."""
    net = kept(3)
    _, two, three = net.nodes
    part(net)
    renew(two)
    renew(three)
    net.run(2.0)
    close(two)
    two.flush()
    crash(two)
    meet(net)
    assert sizes(net) == [0, 0, 0]
    assert not any(open_here(node) for node in net.nodes)


def test_a_close_at_its_owner_ends_what_was_taken_over_elsewhere() -> None:
    net = kept(2)
    one, two = net.nodes
    part(net)
    renew(two)
    net.run(2.0)
    close(one)
    one.flush()
    crash(one)
    meet(net)
    assert sizes(net) == [0, 0]
    assert not any(open_here(node) for node in net.nodes)


def test_a_lease_opened_anew_outlives_what_is_retold_of_the_old_one() -> None:
    net = kept(2)
    one, two = net.nodes
    close(two)
    net.run(LIMITS.lease_reopen_s + 1.0)
    opened(one, ttl_s=60.0)
    book(one, "anew", lease_id="l")
    one.flush()
    for node in net.nodes:
        crash(node)
        net.run(SOON_S)
    assert sizes(net) == [1, 1]
    assert open_here(one) == [("l", "o", 60.0, 1)]


def test_what_a_client_has_opened_where_the_old_lease_was_taken_over_stays() -> None:
    """It was closed elsewhere, out of sight: what is new under its id is another client's."""
    net = kept(2)
    one, two = net.nodes
    part(net)
    two.core.reservations.open_lease(LeaseRequest(owner="o", ttl_s=60.0, lease_id="l"), net.now)
    net.run(2.0)
    book(two, "new", lease_id="l")
    close(one)
    meet(net)
    assert [list(node.ledger()) for node in net.nodes] == [["new"], ["new"]]


def test_older_versions_close_without_saying_what() -> None:
    net = kept(2)
    one, two = net.nodes
    router_id = one.router_id
    one.core.replicas.leases.closed(Closed("l", [router_id]), net.now)
    net.run(SOON_S)
    assert sizes(net) == [0, 0]
    with pytest.raises(LeaseNotFound):
        renew(two)


class _OldEnd(msgspec.Struct, frozen=True, tag="end"):
    claims: int


def test_older_versions_read_a_snapshot_with_closed_leases() -> None:
    net = kept(2)
    close(net.nodes[1])
    parts = list(net.nodes[1].core.replica_operations.snapshot(net.now))
    ends = [one for one in parts if isinstance(one, SnapshotEnd)]
    assert [len(one.closed) for one in ends] == [1, 0]
    assert isinstance(parts[0], SnapshotHead)
    for end in ends:
        assert decode_part(encode_part(end)) == end
        assert msgspec.msgpack.decode(encode_part(end), type=_OldEnd).claims == end.claims


# -- progress ------------------------------------------------------------------------------------


def test_what_the_old_owner_was_told_the_new_one_learns_after_a_restart() -> None:
    net, (one, two) = one_booked(2)
    part(net)
    output(two, "r")  # adopts it
    for _ in range(3):
        output(one, "r")
    crash(one)
    meet(net)
    assert [node.ledger()["r"][5] for node in net.nodes] == [4, 4]
    crash(one)
    net.run(SOON_S)
    assert [node.ledger()["r"][5] for node in net.nodes] == [4, 4]


@pytest.mark.parametrize("restarts", [False, True])
def test_progress_told_elsewhere_while_a_reservation_went_and_came_back_is_kept(
    restarts: bool,
) -> None:
    """Its first owner has it again, under another number, and has never heard of that progress."""
    net, (one, two, three) = one_booked(3)
    cut_all(net)
    output(two, "r")
    net.run(GONE_S)
    output(three, "r")  # takes it over
    net.cut = {frozenset((0, 1)), frozenset((1, 2))}
    net.run(1.0)
    part(net)
    output(one, "r")  # takes it over again
    three.is_down = True
    assert one.ledger()["r"][5] == 2
    if restarts:
        two.is_down = True
        two.reboot()
    meet(net)
    assert [node.ledger()["r"][5] for node in (one, two)] == [3, 3]


def test_the_last_fraction_is_the_last_one_after_a_restart() -> None:
    """One of 1 leaves nothing faded, so that an older one would count again."""
    net, (one, two) = one_booked(2)
    one.did(one.core.reservations.output_block("r", 0.5, net.now))
    net.run(1.0)
    cut_all(net)
    two.did(two.core.reservations.output_block("r", 0.25, net.now))
    for fraction in (None, None, 1.0):
        one.did(one.core.reservations.output_block("r", fraction, net.now))
    one.flush()
    crash(one)
    meet(net)
    assert [node.ledger()["r"][5:8] for node in net.nodes] == [(5, 0, 1.0), (5, 0, 1.0)]


def test_a_claim_whose_booking_is_another_ones_outlives_a_restart() -> None:
    """Two replicas adopt the same, one is booked: the other one may be all that is left."""
    net, (one, two, three) = one_booked(3)
    part(net)
    output(two, "r")
    output(three, "r")
    net.cut = {frozenset((0, 1)), frozenset((0, 2))}
    net.run(2.0)
    aside = max((two, three), key=lambda node: node.router_id)
    booked = min((two, three), key=lambda node: node.router_id)
    assert aside.core.lifecycle.announcer.claims.own.by_id["r"].reservation is None
    aside.flush()
    aside.is_down = booked.is_down = True
    aside.reboot()
    assert aside.ledger()["r"][5] >= 1
    meet(net)
    assert [node.ledger()["r"][5] >= 1 for node in (one, aside)] == [True, True]
    booked.reboot()
    net.run(SOON_S)
    assert [node.ledger()["r"][5] for node in net.nodes] == [2, 2, 2]


def test_an_adoption_is_told_once_it_is_on_disk() -> None:
    """A crash before that takes it back; its former owner would have let the reservation go."""
    net, (_, two) = one_booked(2)
    part(net)
    net.cut.clear()
    net.prompt_writes = 0.0  # the disk takes nothing
    two.did(two.core.reservations.output_block("r", None, net.now))
    for _ in range(3):
        two.tick()
    crash(two)
    net.prompt_writes = 1.0
    net.run(SOON_S)
    assert sizes(net) == [1, 1]


def test_what_ended_meanwhile_does_not_come_back_from_disk() -> None:
    net, (one, two) = one_booked(2)
    complete(two, "r")
    two.is_down = True
    free(one, "r")
    net.run(1.0)
    two.reboot()
    assert sizes(net) == [0, 1]
    net.run(SOON_S)
    assert sizes(net) == [0, 0]
    with pytest.raises(ReservationNotFound):
        two.core.reservations.prefill_complete("r", net.now)
