"""A lease is renewed, closed and missed anywhere; what owners who are gone leave goes with it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from select_service.core.replication import shared_leases
from select_service.core.replication.messages import Closed, Renewed, Said
from select_service.errors import (
    InvalidField,
    LeaseClosed,
    LeaseConflict,
    LeaseExpired,
    LeaseNotFound,
    LeaseReopened,
)
from select_service.types import LeaseRequest
from tests.models.replica_net import LIMITS, Net
from tests.select_service.core.replication.leased import (
    COUNT,
    book,
    close,
    leased,
    made,
    open_here,
    opened,
    owned,
    renew,
    sizes,
)


@pytest.fixture
def net() -> Net:
    return leased(2)


@pytest.fixture
def three() -> Net:
    return leased(3)


# -- while the owner lives -----------------------------------------------------------------------


def test_a_missed_lease_is_told_to_the_others(net: Net) -> None:
    net.run(25.0)
    assert sizes(net) == [0, 0]
    with pytest.raises(LeaseExpired):
        renew(net.nodes[0])
    with pytest.raises(LeaseNotFound):
        renew(net.nodes[1])


@pytest.mark.parametrize("sign", ["output", "done", "free", "renew", "open"])
def test_a_sign_of_life_at_another_replica_renews_all(net: Net, sign: str) -> None:
    node = net.nodes[1]
    signs: dict[str, Callable[[int], object]] = {
        "output": lambda _: node.did(node.core.reservations.output_block("r3", None, net.now)),
        "done": lambda _: node.did(node.core.reservations.prefill_complete("r3", net.now)),
        "free": lambda turn: node.did(node.core.reservations.free(f"r{turn}", net.now)),
        "renew": lambda _: renew(node),
        "open": lambda _: opened(node),
    }
    for turn in range(4):
        net.run(15.0)
        signs[sign](turn)
    left = COUNT - 4 if sign == "free" else COUNT
    net.run(15.0)
    assert sizes(net) == [left, left]
    net.run(10.0)
    assert sizes(net) == [0, 0]


def test_a_renewal_elsewhere_answers_with_what_is_known_there(net: Net) -> None:
    record = renew(net.nodes[1], 40.0)
    assert (record.lease_id, record.owner, record.ttl_s, record.reservations) == (
        *("l", "o", 40.0),
        COUNT,
    )
    assert record.expires_in_s == 40.0
    assert record.router_ids == [net.nodes[0].router_id]
    net.run(30.0)
    assert sizes(net) == [COUNT, COUNT], "with the new time to live, at its owner too"
    with pytest.raises(InvalidField):
        renew(net.nodes[1], 1e9)
    net.run(15.0)
    assert sizes(net) == [0, 0], "a refused renewal is none"


def test_renewals_of_one_turn_are_told_once(net: Net) -> None:
    told: list[object] = []
    node = net.nodes[1]
    for _ in range(50):
        renew(node)
        node.core.reservations.output_block("r1", None, net.now)
    for message in node.core.replica_operations.tick(net.now)[1].published:
        if isinstance(message, Said):
            told += [item for item in message.items if isinstance(item, Renewed)]
    assert told == [Renewed("l")]


def test_many_lifecycle_calls_tell_it_now_and_then(net: Net) -> None:
    told = 0
    node = net.nodes[1]
    for _ in range(100):  # ten seconds of half a lease's time
        net.run(0.1)
        node.did(node.core.reservations.output_block("r1", None, net.now))
        effects = node.core.replica_operations.tick(net.now)[1]
        node.did(effects)
        for message in effects.published:
            if isinstance(message, Said):
                told += sum(isinstance(item, Renewed) for item in message.items)
    assert 3 <= told <= 5


def test_a_renewal_that_is_lost_comes_with_the_snapshot(net: Net) -> None:
    net.run(15.0)
    net.cut.add(frozenset((0, 1)))
    renew(net.nodes[1])
    net.run(0.2)
    net.cut.clear()
    net.run(12.0)
    assert sizes(net) == [COUNT, COUNT]
    net.run(15.0)
    assert sizes(net) == [0, 0], "and counts from when it was"


def test_one_lease_open_at_two_replicas(net: Net) -> None:
    one, other = net.nodes
    opened(other)
    book(other, "extra", lease_id="l")
    for turn in range(6):
        net.run(15.0)
        assert renew(net.nodes[turn % 2]).reservations == COUNT + 1
    assert sizes(net) == [COUNT + 1] * 2
    assert open_here(one) == [("l", "o", 20.0, COUNT)]
    assert open_here(other) == [("l", "o", 20.0, 1)]
    net.run(25.0)
    assert sizes(net) == [0, 0]


def test_an_empty_lease_is_kept_open_by_renewals_elsewhere(net: Net) -> None:
    opened(net.nodes[1])
    for _ in range(4):
        net.run(15.0)
        renew(net.nodes[0])
    book(net.nodes[1], "late", lease_id="l")


def test_a_lease_of_another_owner_elsewhere_is_a_conflict(net: Net) -> None:
    with pytest.raises(LeaseConflict):
        opened(net.nodes[1], owner="thief")
    assert open_here(net.nodes[1]) == []


def test_closing_elsewhere_closes_it_at_its_owner(three: Net) -> None:
    close(three.nodes[1])
    with pytest.raises(LeaseClosed):
        renew(three.nodes[1])
    three.run(2.0)
    assert sizes(three) == [0, 0, 0]
    assert open_here(three.nodes[0]) == []
    for node in three.nodes[:2]:
        with pytest.raises(LeaseClosed):
            renew(node)
    close(three.nodes[1])  # again is no error
    with pytest.raises(LeaseNotFound):
        close(three.nodes[2])


def test_closing_spares_the_same_id_opened_anew_elsewhere(three: Net) -> None:
    close(three.nodes[0])
    opened(three.nodes[1])
    book(three.nodes[1], "anew", lease_id="l")
    three.run(3.0)
    assert sizes(three) == [1, 1, 1]
    assert open_here(three.nodes[1]) == [("l", "o", 20.0, 1)]
    assert renew(three.nodes[0]).reservations == 1, "where the old one was closed, too"


def test_leases_of_others_are_listed_with_whose_they_are(three: Net) -> None:
    node = three.nodes[2]
    node.core.reservations.open_lease(
        LeaseRequest(owner="me", ttl_s=9.0, lease_id="mine"), three.now
    )
    found = node.core.reservations.leases(three.now, None, 100)
    assert found.total == 2
    mine, theirs = found.leases
    assert (mine.lease_id, mine.router_ids) == ("mine", msgspec.UNSET)
    assert (theirs.lease_id, theirs.owner, theirs.reservations) == ("l", "o", COUNT)
    assert theirs.router_ids == [three.nodes[0].router_id]
    assert 0 < theirs.expires_in_s <= 20.0
    assert b"router_ids" not in msgspec.json.encode(mine)
    assert [one.lease_id for one in node.core.reservations.leases(three.now, "o", 100).leases] == [
        "l"
    ]
    assert node.core.reservations.leases(three.now, None, 1).leases == [mine]
    assert node.core.reservations.leases(three.now, "nobody", 9).total == 0


def test_no_list_is_longer_than_one_turn_allows(
    three: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in three.nodes[:2]:
        for name in "abc":
            lease_id = f"{node.number}{name}"
            request = LeaseRequest(owner="me", ttl_s=9.0, lease_id=lease_id)
            node.core.reservations.open_lease(request, three.now)
            book(node, f"of-{lease_id}", lease_id=lease_id)
    three.run(2.0)
    monkeypatch.setattr(shared_leases, "LISTED_MAX", 5)
    found = three.nodes[1].core.reservations.leases(three.now, None, 1000)
    assert [one.lease_id for one in found.leases[:4]] == ["1a", "1b", "1c", "l"]
    assert len(found.leases) == 5
    assert found.total == 7


# -- when it is gone -----------------------------------------------------------------------------


def test_orphans_age_by_their_own_time_to_live() -> None:
    net = made(2)
    book(net.nodes[0], "brief", ttl_s=2.0)
    book(net.nodes[0], "default")
    book(net.nodes[0], "long", ttl_s=30.0)
    net.run(1.0)
    net.kill(net.nodes[0])
    left = net.nodes[1]
    net.run(LIMITS.replica_timeout_s + 2.5)
    assert left.ledger().keys() == {"default", "long"}
    net.run(LIMITS.replica_timeout_s + 1.0)
    assert left.ledger().keys() == {"long"}
    net.run(LIMITS.replica_timeout_s + 20.0)
    assert left.ledger().keys() == set()


def test_the_owner_alone_ends_what_is_brief_while_it_lives() -> None:
    net = made(2)
    book(net.nodes[0], "brief", ttl_s=3.0)
    for _ in range(10):
        net.run(2.0)
        net.nodes[0].did(net.nodes[0].core.reservations.output_block("brief", None, net.now))
    assert sizes(net) == [1, 1]
    net.run(4.0)
    assert sizes(net) == [0, 0]


def test_a_renewal_adopts_all_orphans_of_the_lease(three: Net) -> None:
    three.kill(three.nodes[0])
    three.run(5.0)
    for turn in range(8):
        node = three.nodes[1 + turn % 2]
        assert renew(node).reservations == COUNT
        three.run(15.0)
    assert sizes(three) == [COUNT, COUNT]
    assert [owned(node) for node in three.nodes[1:]] == [COUNT, 0], "published as its own"
    assert open_here(three.nodes[1]) == [("l", "o", 20.0, COUNT)]
    three.run(10.0)
    assert sizes(three) == [0, 0]
    assert three.nodes[1].core.counters.reservations_lease_ended == COUNT


def test_a_renewal_before_anybody_knows_that_the_owner_is_gone_counts(three: Net) -> None:
    three.run(14.0)
    three.kill(three.nodes[0])
    three.run(1.0)
    renew(three.nodes[1])
    three.run(LIMITS.replica_timeout_s + 15.0)
    assert sizes(three) == [COUNT, COUNT], "at the third, too, which nobody has asked"
    assert owned(three.nodes[1]) == 0
    renew(three.nodes[2])
    three.run(18.0)
    assert sizes(three) == [COUNT, COUNT]


def test_a_lifecycle_call_adopts_one_and_opens_its_lease(three: Net) -> None:
    three.kill(three.nodes[0])
    three.run(5.0)
    node = three.nodes[1]
    node.did(node.core.reservations.output_block("r3", None, three.now))
    assert open_here(node) == [("l", "o", 20.0, 1)]
    for _ in range(4):
        three.run(15.0)
        node.did(node.core.reservations.output_block("r3", None, three.now))
    assert sizes(three) == [COUNT, COUNT], "it keeps all"
    assert open_here(node) == [("l", "o", 20.0, COUNT)], "none is left to age alone"


def test_what_was_closed_stays_closed_when_its_id_is_opened_again_at_once() -> None:
    three = leased(3, msgspec.structs.replace(LIMITS, lease_reopen_s=0.0))
    three.kill(three.nodes[0])
    three.run(5.0)
    close(three.nodes[1])
    opened(three.nodes[1])
    book(three.nodes[1], "anew", lease_id="l")
    three.run(2.0)
    assert [node.ledger().keys() for node in three.nodes[1:]] == [{"anew"}, {"anew"}]
    assert open_here(three.nodes[1]) == [("l", "o", 20.0, 1)]


def test_an_opening_that_comes_late_opens_nothing(three: Net) -> None:
    close(three.nodes[1])  # whoever was asked remembers
    with pytest.raises(LeaseReopened):
        opened(three.nodes[1])
    three.run(2.0)
    with pytest.raises(LeaseReopened):
        opened(three.nodes[0])  # and its owner, who was told
    three.run(5.0)
    assert sizes(three) == [0, 0, 0]


def test_without_room_for_another_lease_a_renewal_keeps_the_orphans_alive() -> None:
    net = leased(3, msgspec.structs.replace(LIMITS, leases_max=1))
    for number, node in enumerate(net.nodes[1:]):
        name = f"other{number}"
        node.core.reservations.open_lease(
            LeaseRequest(owner="x", ttl_s=3600.0, lease_id=name), net.now
        )
    net.kill(net.nodes[0])
    for _ in range(4):
        net.run(15.0)
        assert renew(net.nodes[1]).reservations == COUNT
    assert sizes(net) == [COUNT, COUNT]
    node = net.nodes[1]
    node.did(node.core.reservations.output_block("r1", None, net.now))
    assert owned(node) == 1, "adopted, with the time to live of its lease"
    net.run(30.0)
    assert sizes(net) == [0, 0]
    assert net.nodes[1].core.lifecycle.leases.refused >= 4


def test_without_room_for_a_copy_orphans_age_singly() -> None:
    net = leased(2, msgspec.structs.replace(LIMITS, lease_copies_max=0))
    with pytest.raises(LeaseNotFound):
        renew(net.nodes[1])
    net.kill(net.nodes[0])
    net.run(15.0)
    assert sizes(net) == [COUNT]
    net.run(LIMITS.replica_timeout_s + 20.0)
    assert sizes(net) == [0]
    assert net.nodes[1].core.lifecycle.announcer.claims.copies.refused >= COUNT


def test_an_owner_that_comes_back_finds_its_lease_as_it_is(three: Net) -> None:
    three.cut = {frozenset((0, 1)), frozenset((0, 2))}
    for _ in range(4):  # it renews at its owner; for the others nobody does
        three.run(15.0)
        renew(three.nodes[0])
    assert sizes(three) == [COUNT, 0, 0]
    three.cut.clear()
    three.run(5.0)
    assert sizes(three) == [COUNT] * 3
    assert renew(three.nodes[2]).reservations == COUNT
    three.run(25.0)
    assert sizes(three) == [0, 0, 0]


@pytest.mark.parametrize("has_load", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_another_time_to_live_reaches_what_was_opened_apart(*, first: int, has_load: bool) -> None:
    """A client opens its lease at each replica before it reserves, and changes it at any."""
    net = made(2)
    for number in range(5):
        book(net.nodes[first], f"busy{number}")  # it has said more than the other
    for node in net.nodes:
        opened(node)
    if has_load:
        book(net.nodes[0], "r", lease_id="l")
    net.run(1.0)
    for number, change, ttl_s in (
        (0, renew, 40.0),
        (0, renew, 30.0),
        (1, renew, 50.0),
        (0, opened, 20.0),
        (1, renew, 50.0),
    ):
        change(net.nodes[number], ttl_s)
        net.run(1.0)
        assert [open_here(node)[0][2] for node in net.nodes] == [ttl_s] * 2


def test_what_is_told_in_snapshots_has_its_lease_too(three: Net) -> None:
    three.kill(three.nodes[0])
    three.run(1.0)
    three.crash(three.nodes[2])  # knows of the lease from one who heard its owner, if at all
    three.nodes[2].put_worker(1)
    three.run(8.0)
    assert sizes(three) == [COUNT, COUNT]
    assert renew(three.nodes[2]).reservations == COUNT
    three.run(18.0)
    assert sizes(three) == [COUNT, COUNT]


def test_what_is_told_but_makes_no_sense_changes_nothing(net: Net) -> None:
    told = net.nodes[0].core.replicas.leases
    for ttl_s in (-1.0, 0.0, float("inf"), float("nan"), 1e12):
        told.renewed(Renewed("l", ttl_s), net.now)
        told.renewed(Renewed("nobody's", ttl_s), net.now)
    told.closed(Closed("l", [1, 2]), net.now)
    told.closed(Closed("nobody's", [net.nodes[0].router_id]), net.now)
    assert open_here(net.nodes[0]) == [("l", "o", 20.0, COUNT)]
    net.nodes[0].core.check()
