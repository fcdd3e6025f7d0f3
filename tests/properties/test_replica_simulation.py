"""Replicas on a bad network agree in the end, whatever was lost, doubled, late or cut off.

Every seed is a world of its own. While it is bad, each core's promises hold after every single
message; when it is good again, all ledgers are equal, and equal to what was acknowledged.
"""

from __future__ import annotations

import os
import random
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from select_service.errors import ReservationConflict, ReservationNotFound, ServiceError
from select_service.types import ReservationRequest
from tests.models.replica_net import LIMITS, Net, Node

WORKERS = (1, 2, 3)
QUIET_S = 6.0


class World:
    """Clients, operators and bad luck."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed ^ 0x5EED)
        self.net = Net(seed, self.rng.choice([2, 2, 3, 3, 4]))
        self.names = 0
        self.firm: dict[str, int] = {}  # booked once, never freed nor endangered → output blocks
        self.done: set[str] = set()
        self.freed: set[str] = set()  # acknowledged, and booked once
        self.live: list[str] = []  # names a client may still use
        for node in self.net.nodes:
            for worker_id in WORKERS:
                if self.rng.random() < 0.8:
                    node.put_worker(worker_id)

    def pick(self) -> Node:
        return self.rng.choice(self.net.nodes)

    def step(self) -> None:
        """Something happens, or time passes."""
        acts = (
            [self.book] * 8
            + [self.free] * 4
            + [self.complete] * 4
            + [self.output] * 5
            + [self.wait] * 4
            + [self.book_twice, self.workers, self.weather]
        )
        if self.rng.random() < 0.01:
            self.crash()
        self.rng.choice(acts)()

    def wait(self) -> None:
        self.net.run(self.rng.choice([0.02, 0.1, 0.4, 1.0]))

    # -- clients -------------------------------------------------------------------------------

    def book(self) -> None:
        self.names += 1
        name = f"r{self.names}"
        if self.book_at(self.pick(), name):
            self.firm[name] = 0

    def book_twice(self) -> None:
        """The same id at two replicas: each acknowledges unless it has heard of the other."""
        self.names += 1
        name = f"twice{self.names}"
        for node in self.rng.sample(self.net.nodes, 2):
            self.book_at(node, name)
            if self.rng.random() < 0.5:
                self.wait()

    def book_at(self, node: Node, name: str) -> bool:
        length = self.rng.randint(0, 4)
        request = ReservationRequest(
            reservation_id=name,
            worker_id=self.rng.choice(WORKERS),
            dp_rank=self.rng.randint(0, 1),
            sequence_hashes=[self.rng.randint(1, 3) for _ in range(length)],
            isl_tokens=self.rng.randint(1, 40),
            selection_id=f"s-{name}" if self.rng.random() < 0.3 else None,
        )
        try:
            _, effects = node.core.reserve(request, self.net.now)
        except (ReservationConflict, ServiceError):
            return False
        node.did(effects)
        self.live.append(name)
        return True

    def any_name(self) -> str:
        return self.rng.choice(self.live[-12:]) if self.live else "none"

    def free(self) -> None:
        name = self.any_name()
        node = self.pick()
        try:
            node.did(node.core.free(name, self.net.now))
        except ReservationNotFound:
            return
        if self.firm.pop(name, None) is not None:
            self.freed.add(name)
        if name in self.live and self.rng.random() < 0.7:  # else it is freed again
            self.live.remove(name)

    def complete(self) -> None:
        name, node = self.any_name(), self.pick()
        try:
            node.did(node.core.prefill_complete(name, self.net.now))
        except ReservationNotFound:
            return
        self.done.add(name)

    def output(self) -> None:
        name, node = self.any_name(), self.pick()
        fraction = self.rng.choice([None, None, 0.5, 0.25, 1.0])
        try:
            node.did(node.core.output_block(name, fraction, self.net.now))
        except ReservationNotFound:
            return
        if self.firm.get(name, -1) >= 0:
            self.firm[name] += 1

    # -- operators -----------------------------------------------------------------------------

    def workers(self) -> None:
        node, worker_id = self.pick(), self.rng.choice(WORKERS)
        if self.rng.random() < 0.6 or node.core.catalog.find(worker_id) is None:
            node.put_worker(worker_id)
            return
        for name, claim in node.core.desk.announcer.claims.own.by_id.items():
            if claim.record.worker_id == worker_id:
                self.firm.pop(name, None)
        node.did(node.core.delete_worker(worker_id, self.net.now)[1])

    def weather(self) -> None:
        rng = self.rng
        self.net.loss = rng.choice([0.0, 0.1, 0.3])
        self.net.doubling = rng.choice([0.0, 0.2])
        self.net.delay_s = rng.choice([0.001, 0.02, 0.2])
        self.net.cut.clear()
        if rng.random() < 0.3:
            one, other = rng.sample(self.net.nodes, 2)
            self.net.cut.add(frozenset((one.number, other.number)))

    def crash(self) -> None:
        node = self.pick()
        for name in node.core.desk.announcer.claims.own.by_id:
            self.firm.pop(name, None)
        for name in list(self.firm):  # adopted ones and lifecycle calls nobody else has heard
            self.firm[name] = -1
        self.freed.clear()  # its last frees may not have been heard
        self.done.clear()
        self.net.crash(node)
        for worker_id in WORKERS:
            node.put_worker(worker_id)

    # -- the end -------------------------------------------------------------------------------

    def agree(self) -> None:
        """Everything works again for a while; then everybody knows everything."""
        for node in self.net.nodes:
            for worker_id in WORKERS:
                node.put_worker(worker_id)
        crashed = bool(self.net.dead_routers)
        self.quiet()
        ledgers = [node.ledger() for node in self.net.nodes]
        for ledger in ledgers[1:]:
            assert ledger == ledgers[0]
        self.compare(ledgers[0], crashed=crashed)
        for node in self.net.nodes:
            self.at_rest(node)

    def quiet(self) -> None:
        """Long enough to hear everything, and for what dead replicas have left to age out."""
        orphans_s = LIMITS.replica_timeout_s + 2 * LIMITS.replica_orphan_ttl_s + 2.0
        self.net.settle(QUIET_S + (orphans_s if self.net.dead_routers else 0.0))

    def compare(self, ledger: dict[str, Any], *, crashed: bool) -> None:
        if not crashed:  # a crash may take claims with it that nobody has heard
            assert ledger.keys() == self.net.expected().keys()
            assert not ledger.keys() & self.freed
        adopted = any(node.core.desk.announcer.claims.adopted for node in self.net.nodes)
        for name, outputs in self.firm.items():
            assert name in ledger, "acknowledged, and not freed"
            _, _, _, _, prefill_done, output_blocks, *_ = ledger[name]
            assert adopted or outputs in (-1, output_blocks), "every output block is counted once"
            assert adopted or prefill_done or name not in self.done

    def at_rest(self, node: Node) -> None:
        claims = node.core.desk.announcer.claims
        assert not claims.unsaid_count
        assert not claims.homeless
        for row in node.core.replica_status(self.net.now):
            if row.router_id in self.net.dead_routers:
                assert row.state == "gone"
                continue
            assert row.state == "synced", row
            other = next(one for one in self.net.nodes if one.router_id == row.router_id)
            theirs = other.core.desk.announcer.claims
            assert claims.sets[row.router_id].digest == theirs.own.digest
            assert row.claims == len(theirs.own)

    def drain(self) -> None:
        """Every id is freed, anywhere: nothing is left anywhere."""
        for name in list(self.net.nodes[0].ledger()):
            node = self.pick()
            node.did(node.core.free(name, self.net.now))
        self.quiet()
        for node in self.net.nodes:
            assert node.ledger() == {}
            assert node.core.loads()[0].loads
            for scope in node.core.loads():
                for row in scope.loads:
                    assert row.potential_decode_blocks == row.potential_prefill_tokens == 0


def live_through(seed: int, steps: int) -> None:
    world = World(seed)
    world.weather()
    for _ in range(steps):
        world.step()
    world.agree()
    world.drain()


@pytest.mark.parametrize("seed", range(8))
def test_replicas_agree(seed: int) -> None:
    live_through(seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_replicas_agree_for_long() -> None:
    """Thousands of worlds, as many at a time as there are processors."""
    seeds = range(8, 8 + int(os.environ.get("REPLICA_SEEDS", "2000")))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        failures = [text for text in pool.map(_what_fails, seeds, chunksize=20) if text]
    assert not failures


def _what_fails(seed: int) -> str:
    try:
        live_through(seed, 40 + seed % 120)
    except AssertionError:
        return f"seed {seed}: {traceback.format_exc(limit=-2)}"
    return ""
