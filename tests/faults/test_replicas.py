"""Replicas that are cut off, stopped, killed, hostile, or do not read what is said to them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from select_service.core.replication.dynamo_events import Ending, ReplicaEnvelope, ReplicaEvent
from select_service.core.replication.message_codec import decode_message, encode_message
from select_service.core.replication.messages import OWN_TOPIC, Closed, Ended, Heartbeat, Said
from tests.faults.patient import Patient, is_sum, service
from tests.faults.proxy import BLACK_HOLE, HEALTHY, REFUSING, Fault, Proxy
from tests.faults.traffic import Traffic
from tests.live.engine import FakeEngine
from tests.live.ports import free_port
from tests.live.replicas import Replica
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
WORKERS = (1, 2)
ENDINGS: tuple[Ending, ...] = ("Free", "MarkPrefillCompleted")
# Not garbled: a name or a number with another bit is one, too; keys show it (CURVE), nothing else
# can.
FAULTS = {
    "late": Fault(late_s=0.3),
    "black hole": BLACK_HOLE,
    "refusing": REFUSING,
}


@dataclass
class Pair:
    """Two replicas, what is between them, and clients that ask either."""

    a: Replica
    b: Replica
    ways: list[Proxy] = field(default_factory=list)
    turns: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def both(self) -> tuple[Replica, Replica]:
        return self.a, self.b

    def weather(self, fault: Fault) -> None:
        for way in self.ways:
            way.set(fault)

    @contextlib.contextmanager
    def suffering(self, name: str, record: Record) -> Iterator[Traffic]:
        """As a patient's, with clients at `b` as well."""
        patient = Patient(self.a)
        patient.worker_ids = list(WORKERS)
        there = Traffic(
            [self.b.port], list(WORKERS), clients=2, seed=next(self.turns), pause_s=0.01
        )
        self.patient, self.there = patient, there
        with patient.suffering(name, record, clients=2), there:
            # ids of their own: `b` may receive them late
            for client in patient.traffic.all:
                client.name_prefix = f"{there.seed}-a-{client.name_prefix}"
            yield there
        assert not there.odd, there.odd[:5]

    def agree(self, traffics: list[Traffic]) -> None:
        """Wait until both carry what clients have, and nothing else."""
        eventually(self.apart, set(), deadline_s=30.0)
        for traffic in traffics:
            traffic.resolve_doubts()
        wanted = {name: worker for one in traffics for name, worker in one.live.items()}

        def found() -> list[dict[str, int]]:
            views = [one.view() for one in self.both]
            for view in views:
                is_sum(view)
            return [{one.name: one.worker_id for one in view.booked} for view in views]

        eventually(found, [wanted, wanted], deadline_s=30.0)
        for traffic in traffics:
            traffic.free_all()
        eventually(found, [{}, {}], deadline_s=30.0)

    def apart(self) -> set[str]:
        """The ids that one has and the other has not."""
        a, b = ({one.name for one in replica.view().booked} for replica in self.both)
        return a ^ b


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folders: list[Path] = [tmp_path_factory.mktemp(name) for name in "ab"]
    with service(folders[0]) as a, service(folders[1]) as b, contextlib.ExitStack() as stack:
        pair = Pair(a, b)
        for speaker, hearer in ((a, b), (b, a)):
            way = stack.enter_context(Proxy(speaker.replica_port))
            pair.ways.append(way)
            hearer.listen_to(way.endpoint)
        for one in pair.both:
            one.add_worker(*WORKERS)
        for one in pair.both:
            synced(one)
        yield pair


def synced(one: Replica, count: int = 1) -> None:
    eventually(
        lambda: one.metric("replica_publishers", state="synced"), float(count), deadline_s=30.0
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_way_between_replicas(pair: Pair, name: str, record_property: Record) -> None:
    with pair.suffering(f"replicas {name}", record_property) as there:
        time.sleep(0.5)
        pair.weather(FAULTS[name])
        for _ in range(4):
            time.sleep(0.6)
            pair.ways[0].reset()
        pair.weather(HEALTHY)
    pair.agree([pair.patient.traffic, there])


def test_a_replica_that_stands_still(pair: Pair, record_property: Record) -> None:
    """The other one goes on, and it receives everything when it does again."""
    assert pair.b.process is not None
    with pair.suffering("replica frozen", record_property) as there:
        time.sleep(0.5)
        os.kill(pair.b.process.pid, signal.SIGSTOP)
        time.sleep(4.0)  # longer than --replica-timeout-s
        os.kill(pair.b.process.pid, signal.SIGCONT)
        time.sleep(0.5)
    pair.agree([pair.patient.traffic, there])


def test_subscribers_that_do_not_read(pair: Pair, record_property: Record) -> None:
    """Nobody waits for them, and what is kept for them is bounded."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            deaf = context.socket(zmq.SUB)
            stack.callback(deaf.close, 0)
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.setsockopt(zmq.RCVBUF, 4096)
            deaf.setsockopt(zmq.SUBSCRIBE, b"")
            deaf.connect(pair.a.replica_endpoint)
        with pair.suffering("5 deaf subscribers", record_property) as there:
            time.sleep(2.0)
    context.term()
    pair.agree([pair.patient.traffic, there])


def test_a_hostile_replica(pair: Pair, record_property: Record) -> None:
    """Forged frees, messages under another's name, repeats, and noise change nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as stack:
        spy = context.socket(zmq.SUB)
        stack.callback(spy.close, 0)
        spy.setsockopt(zmq.SUBSCRIBE, b"")
        spy.connect(pair.b.replica_endpoint)
        liar = stack.enter_context(FakeEngine(free_port()))
        for one in pair.both:
            one.listen_to(liar.endpoint)
        liar.wait_for_subscribers(2)
        dice, lies = random.Random(0), 0
        with pair.suffering("hostile replica", record_property) as there:
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                if spy.poll(50):
                    frames = spy.recv_multipart()
                    for said in forged(frames, dice):
                        liar.publish_raw(said)
                        lies += 1
        eventually(pair.apart, set(), deadline_s=30.0)
        refused = pair.a.metric("replica_refused_total")
        assert refused > lies / 4, "it was received, and not believed"
        for one in pair.both:
            endpoint = {"endpoint": liar.endpoint}
            one.ask("POST", "/replica_sync/deregister_peer", endpoint, ok=(200, 204))
    context.term()
    pair.agree([pair.patient.traffic, there])


def forged(frames: list[bytes], dice: random.Random) -> Iterator[list[bytes]]:
    """What a hostile one makes of something that was said."""
    yield frames  # again
    topic, payload = frames[0], frames[-1]
    message = decode_message(topic, payload)
    yield [OWN_TOPIC, dice.randbytes(50)]
    yield [topic, payload[: len(payload) // 2]]
    if isinstance(message, ReplicaEnvelope):
        event = message.event
        assert event is not None
        for data in ENDINGS:
            end = ReplicaEvent(event.request_id, event.worker, data, event.router_id)
            yield list(encode_message(replace(message, event=end)))
    elif isinstance(message, Said):
        # its own messages, under the other's name and number
        ends = [
            Ended(one.reservation_id, message.router_id, one.born, freed=True)
            for one in message.items
            if hasattr(one, "reservation_id") and hasattr(one, "born")
        ]
        closing = [Closed("lease", [message.router_id])]
        yield list(encode_message(replace(message, items=[*ends, *closing], seq=message.seq + 1)))
    elif isinstance(message, Heartbeat):
        yield list(encode_message(replace(message, live=0, digest=0, seq=message.seq + 100)))
