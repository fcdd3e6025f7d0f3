"""Replicas that lose, repeat, delay and reorder each other's words agree soon after it is quiet.

Real processes, a lossy link for each direction between two of them, and clients that ask whichever
replica they like. What a client was told is the truth: a model keeps it, and in the end every
replica carries exactly that.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.live.lossy import CALM, LossyLink, Weather
from tests.live.ports import free_port
from tests.live.replicas import WORKERS, Loads, Replica, agree, eventually, ours

pytestmark = pytest.mark.e2e

STORM = Weather(lost=0.3, repeated=0.3, delayed=0.3, delay_s=0.5)
OPERATIONS = 400
QUIET_S = 15.0  # a few heartbeats, pulls and time-outs of the brisk settings
GONE = 404


@dataclass
class Booking:
    """What clients know of one reservation."""

    name: str
    worker_id: int
    hashes: int
    outputs: int = 0
    prefilled: bool = False


@dataclass
class Clients:
    """Ask replicas, remember what was acknowledged."""

    replicas: list[Replica]
    dice: random.Random
    live: dict[str, Booking] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    done: dict[str, int] = field(default_factory=dict)

    def act(self) -> None:
        """One call to one replica."""
        replica = self.dice.choice(self.replicas)
        if len(self.live) < 5 or self.dice.random() < 0.4:
            self.book(replica)
            return
        booking = self.live[self.dice.choice(list(self.live))]
        self.dice.choice((self.prefill, self.output, self.free))(replica, booking)

    def book(self, replica: Replica) -> None:
        number = next(self.numbers)
        booking = Booking(f"r{number}", self.dice.choice(WORKERS), self.dice.randrange(1, 6))
        first = 100 * number
        replica.reserve(booking.name, booking.worker_id, range(first, first + booking.hashes))
        self.live[booking.name] = booking

    def prefill(self, replica: Replica, booking: Booking) -> None:
        if self._call(replica, "POST", f"/reservations/{booking.name}/prefill_complete"):
            booking.prefilled = True

    def output(self, replica: Replica, booking: Booking) -> None:
        if self._call(replica, "POST", f"/reservations/{booking.name}/output_block", {}):
            booking.outputs += 1

    def free(self, replica: Replica, booking: Booking) -> None:
        if self._call(replica, "DELETE", f"/reservations/{booking.name}"):
            del self.live[booking.name]

    def _call(self, replica: Replica, method: str, path: str, body: object = None) -> bool:
        """False where the replica has not heard of the reservation yet."""
        answer = replica.request(method, path, body)
        assert answer.status in {200, GONE}, (path, answer)
        self.done[f"{method} {answer.status}"] = self.done.get(f"{method} {answer.status}", 0) + 1
        return answer.status != GONE

    @property
    def truth(self) -> Loads:
        """What every replica has to carry."""
        loads = {("default", "default", worker_id, 0): [0, 0, 0] for worker_id in WORKERS}
        for booking in self.live.values():
            row = loads["default", "default", booking.worker_id, 0]
            row[0] += 0 if booking.prefilled else 16 * booking.hashes
            row[1] += booking.hashes + booking.outputs
            row[2] += 1
        return {rank: (row[0], row[1], row[2]) for rank, row in loads.items()}


@contextlib.contextmanager
def mesh(folder: Path, count: int, seed: int) -> Iterator[tuple[list[Replica], list[LossyLink]]]:
    """Replicas that hear each other through links of their own."""
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(ours(folder, f"r{number}", replica_port=free_port()))
            for number in range(count)
        ]
        links: list[LossyLink] = []
        for speaker, hearer in itertools.permutations(replicas, 2):
            link = LossyLink(speaker.replica_port, free_port(), seed + len(links))
            links.append(stack.enter_context(link))
            hearer.listen_to(link.endpoint)
        for replica in replicas:
            replica.seat()
            eventually(
                lambda replica=replica: replica.metric("replica_publishers", state="synced"),  # type: ignore[misc]
                float(count - 1),
            )
        yield replicas, links


def weather(links: list[LossyLink], now: Weather) -> None:
    for link in links:
        link.set(now)


def check_healed(clients: Clients, *, others: tuple[Replica, ...] = ()) -> None:
    """All agree with what clients were told, and nothing is left when they end it."""
    assert agree(clients.replicas, deadline_s=QUIET_S) == clients.truth
    for booking in list(clients.live.values()):
        clients.free(clients.dice.choice(clients.replicas), booking)
    assert not clients.live, "who agrees knows every reservation"
    for replica in (*clients.replicas, *others):
        eventually(replica.loads, clients.truth)


@pytest.mark.parametrize("seed", range(2))
def test_a_storm(tmp_path: Path, seed: int) -> None:
    with mesh(tmp_path, 3, seed) as (replicas, links):
        weather(links, STORM)
        clients = Clients(replicas, random.Random(seed))
        for _ in range(OPERATIONS):
            clients.act()
        assert sum(link.counts["lost"] for link in links) > 10, "there was a storm"
        weather(links, CALM)
        check_healed(clients)
        assert sum(
            replica.metric("replica_pulls_total", outcome="complete") for replica in replicas
        )


def test_a_partition(tmp_path: Path) -> None:
    """Both halves go on; afterwards all is one again, also what was gone for the other half."""
    with mesh(tmp_path, 3, 7) as (replicas, links):
        clients = Clients(replicas, random.Random(7))
        for _ in range(60):
            clients.act()
        agree(replicas)
        alone = replicas[2]
        for link, (speaker, hearer) in zip(links, itertools.permutations(replicas, 2), strict=True):
            link.set(CALM, cut=alone in (speaker, hearer))
        for _ in range(120):
            clients.act()
        eventually(lambda: alone.metric("replica_publishers", state="gone"), 2.0)
        for _ in range(60):
            clients.act()
        weather(links, CALM)
        check_healed(clients)


def test_a_replica_that_dies_in_the_storm(tmp_path: Path) -> None:
    """What it had told anybody goes on; nobody waits for it."""
    with mesh(tmp_path, 3, 3) as (replicas, links):
        clients = Clients(replicas, random.Random(3))
        for _ in range(100):
            clients.act()
        expected = agree(replicas)
        assert expected == clients.truth
        weather(links, STORM)
        dead = replicas[0]
        assert dead.process
        dead.process.kill()
        dead.process.wait()
        clients.replicas = replicas[1:]
        slowest = 0.0
        for _ in range(200):
            started = time.monotonic()
            clients.act()
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < 2.0
        weather(links, CALM)
        check_healed(clients)
