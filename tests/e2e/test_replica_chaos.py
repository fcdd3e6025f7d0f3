"""Replicas that lose, repeat, delay and reorder each other's messages agree soon after it is quiet.

Real processes, a lossy link for each direction between two of them, and clients that ask whichever
replica they like. What a client was answered is the truth: a model keeps it, and in the end every
replica carries exactly that.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.live.lossy import CALM, LossyLink, Weather
from tests.live.ports import free_port
from tests.live.replicas import WORKERS, Loads, Replica, ours
from tests.live.window import WATCHED, Booked, View
from tests.wait import eventually

pytestmark = pytest.mark.e2e

STORM = Weather(lost=0.3, repeated=0.3, delayed=0.3, delay_s=0.5)
GONE = 404


@dataclass
class Booking:
    """What clients know of one reservation; replicas are named by their HTTP port."""

    name: str
    worker_id: int
    hashes: int
    booked_at: int
    outputs: Counter[int] = field(default_factory=Counter)  # by the replica that received it
    prefilled_at: set[int] = field(default_factory=set)
    freed_at: set[int] = field(default_factory=set)

    @property
    def load(self) -> tuple[int, int]:
        """Prefill tokens and decode blocks it adds to its rank."""
        return (
            0 if self.prefilled_at else 16 * self.hashes,
            self.hashes + self.outputs.total(),
        )


@dataclass
class Clients:
    """Ask replicas, remember what was acknowledged."""

    replicas: list[Replica]
    dice: random.Random
    ever: dict[str, Booking] = field(default_factory=dict)
    live: dict[str, Booking] = field(default_factory=dict)

    def act(self) -> None:
        """One call to one replica."""
        replica = self.dice.choice(self.replicas)
        if len(self.live) < 5 or self.dice.random() < 0.4:
            self.book(replica)
            return
        booking = self.live[self.dice.choice(list(self.live))]
        self.dice.choice((self.prefill, self.output, self.free))(replica, booking)

    def book(self, replica: Replica) -> None:
        number = len(self.ever)
        worker_id, hashes = self.dice.choice(WORKERS), self.dice.randrange(1, 6)
        booking = Booking(f"r{number}", worker_id, hashes, replica.port)
        first = 100 * number  # hashes of its own: then blocks are the sum of what everybody has
        replica.reserve(booking.name, worker_id, range(first, first + hashes))
        self.ever[booking.name] = self.live[booking.name] = booking

    def prefill(self, replica: Replica, booking: Booking) -> None:
        if self._call(replica, "POST", booking, "/prefill_complete"):
            booking.prefilled_at.add(replica.port)

    def output(self, replica: Replica, booking: Booking) -> None:
        if self._call(replica, "POST", booking, "/output_block", {}):
            booking.outputs[replica.port] += 1

    def free(self, replica: Replica, booking: Booking) -> None:
        if self._call(replica, "DELETE", booking, ""):
            booking.freed_at.add(replica.port)
            del self.live[booking.name]

    def _call(
        self, replica: Replica, method: str, booking: Booking, verb: str, body: object = None
    ) -> bool:
        """False where the replica does not know the reservation yet."""
        answer = replica.request(method, f"/reservations/{booking.name}{verb}", body)
        assert answer.status in {200, GONE}, (verb, answer)
        return answer.status != GONE

    @property
    def truth(self) -> Loads:
        """What every replica has to carry."""
        return carried((one.worker_id, *one.load) for one in self.live.values())


def carried(rows: Iterable[tuple[int, int, int]]) -> Loads:
    """Sum up (worker, prefill tokens, decode blocks) by rank."""
    loads = {("default", "default", worker_id, 0): [0, 0, 0] for worker_id in WORKERS}
    for worker_id, prefill_tokens, decode_blocks in rows:
        row = loads["default", "default", worker_id, 0]
        row[0] += prefill_tokens
        row[1] += decode_blocks
        row[2] += 1
    return {rank: (row[0], row[1], row[2]) for rank, row in loads.items()}


class Watch:
    """What holds on every replica at every instant, whatever becomes of its messages.

    Load is neither made nor lost: it is the sum of the reservations that are live there, each of
    them once, each as it was admitted somewhere and no larger than what clients have added to it;
    what this replica has acknowledged itself or was seen to know stays until somebody frees it,
    and what it has seen the end of does not come back. That holds for a reservation that changes
    its owner, too: what shows that the old one has let go shows the new one.
    """

    def __init__(self, clients: Clients) -> None:
        self.looks = 0
        self._clients = clients
        self._seen: dict[int, dict[str, Booked]] = {}  # by replica: what was live at the last look
        self._over: dict[int, set[str]] = {}  # by replica: what was live before that, and is not

    def look(self, replica: Replica) -> View:
        """Ask a replica for everything and compare."""
        self.looks += 1
        view = replica.view()
        here = {one.name: one for one in view.booked}
        assert len(here) == len(view.booked), "a reservation is counted twice"
        assert loads_of(view) == carried(
            (
                one.worker_id,
                0 if one.prefill_done else one.prefill_tokens,
                one.hashes + one.outputs,
            )
            for one in view.booked
        ), "load is the sum of what is live"
        for one in view.booked:
            self._was_admitted(one)
        before = self._seen.get(replica.port, {})
        over = self._over.setdefault(replica.port, set())
        assert not over & here.keys(), "what is over does not come back"
        ever = self._clients.ever
        over |= before.keys() - here.keys()
        for booking in ever.values():
            self._keeps_its_word(replica.port, booking, here.get(booking.name))
        for name, then in before.items():
            if name in here:
                assert here[name].outputs >= then.outputs
                assert here[name].prefill_done >= then.prefill_done
            else:
                assert ever[name].freed_at, f"{name} is lost: nobody freed it"
        self._seen[replica.port] = here
        return view

    def _was_admitted(self, one: Booked) -> None:
        booking = self._clients.ever[one.name]
        facts = (one.worker_id, one.dp_rank, one.hashes, one.prefill_tokens)
        assert facts == (booking.worker_id, 0, booking.hashes, 16 * booking.hashes)
        assert one.outputs <= booking.outputs.total(), "more blocks than anybody has added"
        assert booking.prefilled_at or not one.prefill_done

    def _keeps_its_word(self, port: int, booking: Booking, one: Booked | None) -> None:
        assert one is None or port not in booking.freed_at, f"{booking.name} was freed here"
        is_known = (
            port == booking.booked_at or booking.outputs[port] or port in booking.prefilled_at
        )
        if is_known and not booking.freed_at:
            assert one is not None, f"{booking.name} was acknowledged here and freed nowhere"
            assert one.outputs >= booking.outputs[port]
            assert one.prefill_done or port not in booking.prefilled_at


def loads_of(view: View) -> Loads:
    """What the same instant's GET /loads says."""
    return {
        (scope.model_name, scope.tenant_id, row.worker_id, row.dp_rank): (
            row.potential_prefill_tokens,
            row.potential_decode_blocks,
            row.active_requests,
        )
        for scope in view.loads
        for row in scope.loads
    }


@contextlib.contextmanager
def mesh(folder: Path, count: int, seed: int) -> Iterator[tuple[list[Replica], list[LossyLink]]]:
    """Replicas that receive each other through links of their own."""
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(
                ours(folder, f"r{number}", replica_port=free_port(), command=WATCHED)
            )
            for number in range(count)
        ]
        links: list[LossyLink] = []
        for speaker, hearer in itertools.permutations(replicas, 2):
            link = LossyLink(speaker.replica_port, free_port(), seed + len(links))
            links.append(stack.enter_context(link))
            hearer.listen_to(link.endpoint)
        for replica in replicas:
            replica.add_worker()
            eventually(
                lambda: replica.metric("replica_publishers", state="synced"),
                float(count - 1),
            )
        yield replicas, links


def weather(links: list[LossyLink], now: Weather) -> None:
    for link in links:
        link.set(now)


def live_on(clients: Clients, watch: Watch, acts: int) -> None:
    """Clients act, and after each act somebody looks at one of the replicas."""
    for _ in range(acts):
        clients.act()
        watch.look(clients.dice.choice(clients.replicas))


def check_healed(clients: Clients, watch: Watch) -> None:
    """All agree with what clients were answered, and nothing is left when they end it."""
    healed(clients, watch)
    for booking in list(clients.live.values()):
        clients.free(clients.dice.choice(clients.replicas), booking)
    assert not clients.live, "who agrees knows every reservation"
    healed(clients, watch)


def healed(clients: Clients, watch: Watch) -> None:
    """Wait until every replica carries the truth; on the way there too, what must hold does."""
    eventually(
        lambda: [loads_of(watch.look(one)) for one in clients.replicas],
        [clients.truth] * len(clients.replicas),
    )


def storm(folder: Path, seed: int, acts: int) -> None:
    with mesh(folder, 3, seed) as (replicas, links):
        weather(links, STORM)
        clients = Clients(replicas, random.Random(seed))
        watch = Watch(clients)
        live_on(clients, watch, acts)
        assert watch.looks == acts
        assert sum(link.counts["lost"] for link in links) > acts // 20, "there was a storm"
        weather(links, CALM)
        check_healed(clients, watch)
        assert sum(
            replica.metric("replica_pulls_total", outcome="complete") for replica in replicas
        )


def test_a_storm(tmp_path: Path) -> None:
    storm(tmp_path, 0, 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 5))]
)
def test_a_long_storm(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed, 1200)


@pytest.mark.slow
def test_a_partition(tmp_path: Path) -> None:
    """Both halves go on; afterwards all is one again, also what was gone for the other half."""
    with mesh(tmp_path, 3, 7) as (replicas, links):
        clients = Clients(replicas, random.Random(7))
        watch = Watch(clients)
        live_on(clients, watch, 60)
        healed(clients, watch)
        alone = replicas[2]
        for link, (speaker, hearer) in zip(links, itertools.permutations(replicas, 2), strict=True):
            link.set(CALM, cut=alone in (speaker, hearer))
        live_on(clients, watch, 120)
        eventually(lambda: alone.metric("replica_publishers", state="gone"), 2.0)
        live_on(clients, watch, 60)
        weather(links, CALM)
        check_healed(clients, watch)


@pytest.mark.slow
def test_a_replica_that_dies_in_the_storm(tmp_path: Path) -> None:
    """What it had sent goes on; nobody waits for it."""
    with mesh(tmp_path, 3, 3) as (replicas, links):
        clients = Clients(replicas, random.Random(3))
        watch = Watch(clients)
        live_on(clients, watch, 100)
        healed(clients, watch)
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
            watch.look(clients.dice.choice(clients.replicas))
        assert slowest < 2.0
        weather(links, CALM)
        check_healed(clients, watch)
