"""Requests of a batch come again, at any replica, while it is under way, taken back, or cut short.

Whoever was told of a reservation finds it everywhere, and nothing else stays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import pytest

from select_service.core.batches.batch_selection import RunningBatch
from select_service.core.effects import Effects
from select_service.errors import ReservationUnderWay, ServiceError
from select_service.types import SelectAndReserveRequest
from select_service.types.batches import SelectBatchAnswer, SelectBatchRequest
from tests.models.replica_net import LIMITS, Net, Node
from tests.select_service.core.batches.test_batch_selection import prompt
from tests.select_service.core.replication.replica import Replica, acquainted, tell
from tests.select_service.core.replication.test_kept import crash, kept

WORKER = 3  # which takes whole requests
SAMPLES = 4


class Scene:
    """Three replicas with state, the first of which places a batch, and clients who ask again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.net: Net = kept(3, lease=False)
        for node in self.net.nodes:
            node.put_worker(WORKER)
            assert node.changes is not None
            node.changes.mark("worker", str(WORKER))
            node.flush()
        self.net.run(1.0)
        self.net.loss = self.rng.choice([0.0, 0.0, 0.2])
        self.told: set[str] = set()
        self.codes: list[str] = []
        self.was_done = False  # and cut short before its caller was told
        self.owner = self.net.nodes[0]
        item = prompt(1, 2, n=SAMPLES, isl=8, reservation_id="b")
        self.is_atomic = self.rng.random() < 0.7
        request = SelectBatchRequest(requests=[], reserve=True, atomic=self.is_atomic)
        self.batch = self.owner.core.batch_selection.begin(request, [(item, b"")])

    def repeat(self, node: Node) -> None:
        name = f"b.{self.rng.randrange(SAMPLES)}"
        request = SelectAndReserveRequest(
            block_hashes=[1, 2], sequence_hashes=[1, 2], isl_tokens=8, reservation_id=name
        )
        try:
            _, effects = node.core.selection.select_and_reserve(request, self.net.now)
        except ServiceError as refusal:
            self.codes.append(refusal.code)
            return
        node.did(effects)
        node.flush()
        self.told.add(name)

    def others_go_on(self) -> None:
        chance = self.rng.random
        if chance() < 0.5:
            self.net.run(self.rng.choice([0.02, 0.1, 0.3]))
        if chance() < 0.5:
            self.repeat(self.rng.choice(self.net.nodes))
        if chance() < 0.1:
            self.net.cut = {frozenset((0, self.rng.choice([1, 2])))}
        elif chance() < 0.1:
            self.net.cut.clear()

    def drive(self, steps: Generator[Effects, float, Any], most: int) -> Any:
        """Take up to so many steps; return what they return, None before that."""
        try:
            self.owner.did(next(steps))
            for _ in range(most):
                self.others_go_on()
                self.owner.did(steps.send(self.net.now))
        except StopIteration as done:
            return done.value
        return None

    def place(self) -> None:
        steps = self.batch.steps(self.net.now)
        answer = self.drive(steps, self.rng.randint(1, 9))
        if isinstance(answer, SelectBatchAnswer):
            self.owner.flush()
            self.told |= {f"b.{number}" for number in range(SAMPLES)}
            assert answer.placed == SAMPLES
            return
        self.was_done = not self.batch._hold.is_open
        if self.rng.random() < 0.3:
            self.owner.is_down = True
            self.net.run(self.rng.choice([0.1, 3.0]))
            for node in self.net.nodes[1:]:
                self.repeat(node)
            self.owner.reboot()
        else:
            self.drive(self.batch.undo(self.net.now), 99)
            self.owner.flush()


@pytest.mark.parametrize("seed", [17, 86, 113, 114, 128, 146, 168, *range(5)])
def test_whoever_was_told_of_a_reservation_finds_it(seed: int) -> None:
    scene = Scene(seed)
    scene.place()
    scene.net.settle(4.0)
    ledgers = [node.ledger() for node in scene.net.nodes]
    for node in scene.net.nodes:
        node.core.check()
    assert all(ledger.keys() == ledgers[0].keys() for ledger in ledgers)
    if not scene.was_done:  # else its caller has left it, wherever others ask for it
        assert scene.told <= ledgers[0].keys(), "it was acknowledged"
        assert scene.told == ledgers[0].keys() or not scene.is_atomic


def begun(owner: Replica | Node, n: int, lease_id: str | None = None) -> RunningBatch:
    item = prompt(1, 2, n=n, isl=8, reservation_id="b", lease_id=lease_id)
    request = SelectBatchRequest(requests=[], reserve=True, atomic=True)
    return owner.core.batch_selection.begin(request, [(item, b"")])


def driven(
    here: Replica, there: Replica, steps: Generator[Effects, float, Any], is_far: Callable[[], bool]
) -> None:
    """Take steps until it has come so far, or to the end; the other replica hears of each."""
    effects = next(steps, None)
    while effects is not None:
        tell(here, there, effects.published)
        try:
            effects = None if is_far() else steps.send(here.now)
        except StopIteration:
            return


def never() -> bool:
    return False


def test_what_stays_of_a_batch_that_is_cut_short_once_it_is_done_is_told_so() -> None:
    """Under a lease reservations stay: repeats elsewhere would wait for as long as that lives."""
    here, there = acquainted()
    here.core.lifecycle.leases.open("l", "o", 60.0, here.now)
    batch = begun(here, 2 * here.core.limits.replica_items_per_message_max, lease_id="l")
    driven(here, there, batch.steps(here.now), lambda: not batch._hold.is_open)
    driven(here, there, batch.undo(here.now), never)
    learnt = there.core.lifecycle.announcer.claims.sets[here.router_id].by_id.values()
    assert len(learnt) == len(batch._samples)
    assert not [claim.reservation_id for claim in learnt if claim.is_held]


def test_what_is_booked_anew_while_its_batch_is_under_way_is_taken_back_with_it() -> None:
    here, there = acquainted()
    other = Replica(here.router_id - 1)  # whose claims come first
    bookings = here.core.lifecycle.bookings
    batch = begun(here, 2)
    driven(here, there, batch.steps(here.now), lambda: bookings.live("b.0") is not None)
    other.take("b.0", 1, 2, isl=8)
    tell(other, here)
    booking = other.core.lifecycle.bookings.get("b.0")
    told = other.core.lifecycle.announcer.expired(booking.partition, booking.reservation, other.now)
    tell(other, here, [told])
    here.turn()
    assert bookings.get("b.0").reservation.origin == "local"
    driven(here, there, batch.undo(here.now), never)
    here.core.check()
    assert bookings.live("b.0") is None


def test_what_another_replica_has_the_booking_of_is_lost_with_its_batch_in_a_crash() -> None:
    """Restored, it would be held for ever: nobody goes on with that batch."""
    net = kept(2, lease=False)
    first, owner = sorted(net.nodes, key=lambda node: node.router_id)
    for node in net.nodes:
        node.put_worker(WORKER)
        assert node.changes is not None
        node.changes.mark("worker", str(WORKER))
    net.run(1.0)
    steps = begun(owner, 2).steps(net.now)
    effects = next(steps)
    while owner.core.lifecycle.bookings.live("b.0") is None:
        effects = steps.send(net.now)  # not told yet
    request = SelectAndReserveRequest(
        block_hashes=[1, 2], sequence_hashes=[1, 2], isl_tokens=8, reservation_id="b.0"
    )
    first.did(first.core.selection.select_and_reserve(request, net.now)[1])
    owner.did(effects)
    net.run(0.1)
    assert owner.core.lifecycle.bookings.get("b.0").reservation.origin == first.router_id
    owner.flush()
    crash(owner)
    assert not owner.core.lifecycle.announcer.claims.own.by_id


def with_worker(nodes: int) -> Net:
    net = kept(nodes, lease=False)
    for node in net.nodes:
        node.put_worker(WORKER)
        assert node.changes is not None
        node.changes.mark("worker", str(WORKER))
        node.flush()
    net.run(1.0)
    net.prompt_writes = 0.0  # only what is acknowledged
    return net


def placed(owner: Node, *, is_done: bool) -> None:
    """Place a batch, to its end or until all of it is booked."""
    steps = begun(owner, 2).steps(owner.net.now)
    with suppress(StopIteration):
        owner.did(next(steps))
        while is_done or owner.core.lifecycle.bookings.live("b.1") is None:
            owner.did(steps.send(owner.net.now))


def asked(node: Node, name: str = "b.0") -> None:
    """Who asks is answered once all that the answer says is on disk."""
    request = SelectAndReserveRequest(
        block_hashes=[1, 2], sequence_hashes=[1, 2], isl_tokens=8, reservation_id=name
    )
    node.did(node.core.selection.select_and_reserve(request, node.net.now)[1])
    node.flush()


def returns(owner: Node, other: Node) -> None:
    owner.reboot()


def returns_at_once(owner: Node, other: Node) -> None:
    """It is heard before the other one has had its next turn."""
    owner.reboot()
    owner.tick()
    other.net.run(0.0)


def both_return(owner: Node, other: Node) -> None:
    crash(other)
    owner.reboot()


@pytest.mark.parametrize("come_back", [returns, returns_at_once, both_return])
@pytest.mark.parametrize("booked", ["under way", "done", "alone"])
def test_what_its_owner_had_not_on_disk_stays_where_a_repeat_was_answered(
    booked: str, come_back: Callable[[Node, Node], None]
) -> None:
    net = with_worker(3)
    owner, other, _ = net.nodes
    if booked == "alone":
        request = SelectAndReserveRequest(
            block_hashes=[1, 2], sequence_hashes=[1, 2], isl_tokens=8, reservation_id="b.0"
        )
        owner.did(owner.core.selection.select_and_reserve(request, net.now)[1])
    else:
        placed(owner, is_done=booked == "done")
    net.run(0.1)
    owner.is_down = True
    if booked == "under way":
        net.run(LIMITS.replica_timeout_s + 0.5)
    asked(other)
    come_back(owner, other)
    net.run(4.0)
    for node in net.nodes:
        node.core.check()
    assert [sorted(node.ledger()) for node in net.nodes] == [["b.0"]] * 3
    other.did(other.core.reservations.free("b.0", net.now))
    net.run(1.0)
    assert [sorted(node.ledger()) for node in net.nodes] == [[]] * 3


def repeated(net: Net) -> None:
    """One reservation, booked at the first replica; a repeat of it was answered at the second."""
    owner, other, _ = net.nodes
    asked(owner)
    net.run(0.1)
    asked(other)
    net.run(0.1)


def owners(net: Net) -> list[int]:
    numbers = {node.router_id: node.number for node in net.nodes}
    found = []
    for node in net.nodes:
        claim = node.core.lifecycle.bookings.get("b.0").reservation.claim
        assert claim is not None
        found.append(numbers[claim.owner])
    return found


def test_more_repeats_cost_nothing_more() -> None:
    net = with_worker(3)
    repeated(net)
    core, changes = net.nodes[1].core, net.nodes[1].changes
    assert changes is not None
    before = changes.marks
    asked(net.nodes[1])
    assert changes.marks == before
    assert not core.lifecycle.announcer.claims.homeless


def test_who_answered_a_repeat_and_restarts_takes_nothing_from_an_owner_that_lives() -> None:
    net = with_worker(3)
    repeated(net)
    crash(net.nodes[1])
    net.run(4.0)
    assert owners(net) == [0, 0, 0]


@pytest.mark.parametrize("is_down", [False, True])
def test_what_ended_while_it_was_away_for_long_stays_ended(*, is_down: bool) -> None:
    """Its owner remembers the end no more, but it has not lost anything."""
    net = with_worker(3)
    repeated(net)
    owner, other, _ = net.nodes
    other.is_down = is_down
    net.cut = {frozenset((1, 0)), frozenset((1, 2))}
    owner.did(owner.core.reservations.free("b.0", net.now))
    owner.flush()
    net.run(1.0)
    for node in net.nodes:  # as if ten minutes had gone by
        node.core.lifecycle.announcer.claims.endings.purge(net.now, 1000)
    if is_down:
        other.reboot()
    net.cut.clear()
    net.run(4.0)
    assert [sorted(node.ledger()) for node in net.nodes] == [[]] * 3


def test_who_lacks_the_worker_does_not_answer_for_a_batch_whose_owner_is_lost() -> None:
    """It cannot keep the reservation when the owner comes back without it."""
    net = with_worker(2)
    owner, other = net.nodes
    other.did(other.core.workers.delete_worker(WORKER, net.now)[1])
    placed(owner, is_done=False)
    net.run(0.1)
    owner.is_down = True
    net.run(LIMITS.replica_timeout_s + 0.5)
    with pytest.raises(ReservationUnderWay):
        asked(other)
