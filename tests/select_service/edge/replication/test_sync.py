"""The sockets of the replica plane: bounded slices, and peers that are dead, hostile or back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import time
from collections.abc import AsyncIterator

import pytest
import zmq

from indexer.edge import endpoint_follower, sockets
from indexer.edge.addresses import Addresses
from indexer.types import EgressSettings
from select_service.edge.replication import sync as replica_sync
from select_service.edge.replication.sync import ReplicaPublisher, Subscriptions
from select_service.types import ReplicaLimits
from tests.coroutines import within
from tests.live.ports import free_port
from tests.wait import until

TOPICS = (b"one", b"two")
NAMES = {
    "no-such-host.invalid": [],
    "other": ["127.0.0.1"],
    "metadata": ["169.254.169.254"],
    "several": ["127.0.0.2", "127.0.0.1", "127.0.0.3"],
}
Received = list[tuple[str, list[bytes]]]


@contextlib.asynccontextmanager
async def listener(**limits: int) -> AsyncIterator[tuple[Subscriptions, Received]]:
    received: Received = []
    subscriptions = Subscriptions(
        TOPICS,
        lambda peer, frames: received.append((peer, frames)),
        ReplicaLimits(**limits),
        time.monotonic,
        Addresses(EgressSettings(schemes=("tcp", "ipc")), look_up=NAMES.__getitem__),
    )
    try:
        yield subscriptions, received
    finally:
        subscriptions.close()


@contextlib.asynccontextmanager
async def publisher(
    port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[zmq.Socket[bytes], str]]:
    """A socket that reports its subscribers, and its endpoint."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.XPUB)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    endpoint = f"tcp://{host}:{port or free_port()}"
    sock.bind(endpoint)
    try:
        yield sock, endpoint
    finally:
        sock.close()
        context.term()


async def subscribed(sock: zmq.Socket[bytes], topics: int = len(TOPICS)) -> None:
    for _ in range(topics):
        await until(lambda: bool(sock.poll(0)))
        sock.recv()


async def test_a_flood_leaves_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_sync, "TURN_S", 0.0)  # every turn ends after one message
    async with (
        listener() as (subscriptions, received),
        publisher() as (loud, one),
        publisher() as (quiet, two),
    ):
        subscriptions.add(one)
        subscriptions.add(two)
        await subscribed(loud)
        await subscribed(quiet)
        for _ in range(2000):
            loud.send_multipart([b"one", b"noise"])
        quiet.send_multipart([b"one", b"word"])
        turns: list[int] = []
        while len(received) < 2001:
            turns.append(len(received))
            await asyncio.sleep(0)
        steps = [after - before for before, after in itertools.pairwise(turns)]
        assert max(steps) <= 2, "one message per turn, and the loop in between"
        assert received.index((two, [b"one", b"word"])) < 2000, "the loud one does not go first"


@within(listener)
async def test_a_removed_peer_is_not_heard(
    subscriptions: Subscriptions, received: Received
) -> None:
    async with publisher() as (sock, endpoint), publisher() as (other, second):
        subscriptions.add(endpoint)
        subscriptions.add(second)
        await subscribed(sock)
        await subscribed(other)
        sock.send_multipart([b"one", b"x"])
        assert subscriptions.remove(endpoint)
        assert not subscriptions.remove(endpoint)
        other.send_multipart([b"one", b"y"])
        await until(lambda: bool(received))
        assert received == [(second, [b"one", b"y"])]
        assert list(subscriptions) == [second]


@within(listener)
async def test_a_peer_may_remove_itself_while_it_speaks(
    subscriptions: Subscriptions, received: Received
) -> None:
    async with publisher() as (sock, endpoint):

        def on_message(peer: str, frames: list[bytes]) -> None:
            received.append((peer, frames))
            subscriptions.remove(peer)

        subscriptions._on_message = on_message
        subscriptions.add(endpoint)
        await subscribed(sock)
        for _ in range(3):
            sock.send_multipart([b"one", b"x"])
        await until(lambda: not len(subscriptions))
        await asyncio.sleep(0)
        assert len(received) == 1


@within(listener)
async def test_a_fault_costs_one_message(subscriptions: Subscriptions, received: Received) -> None:
    async with publisher() as (sock, endpoint):

        def on_message(peer: str, frames: list[bytes]) -> None:
            received.append((peer, frames))
            if len(received) == 1:
                raise ZeroDivisionError

        subscriptions._on_message = on_message
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        subscriptions.add(endpoint)
        await subscribed(sock)
        for _ in range(3):
            sock.send_multipart([b"one", b"x"])
        await until(lambda: len(received) == 3)
        assert subscriptions.faults == 1


async def test_a_message_beyond_the_limit_costs_its_sender_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_sync, "RECONNECT_AFTER_S", 0.01)
    async with (
        listener(message_bytes_max=1000) as (subscriptions, received),
        publisher() as (sock, endpoint),
    ):
        subscriptions.add(endpoint)
        await subscribed(sock)
        sock.send_multipart([b"one", b"x" * 2000])
        await subscribed(sock, 2 * len(TOPICS))  # unsubscribed, and here again
        sock.send_multipart([b"one", b"x" * 900])
        await until(lambda: bool(received))
        assert len(received[0][1][1]) == 900


@within(listener)
async def test_a_port_that_speaks_something_else_is_left_alone(
    subscriptions: Subscriptions, received: Received
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        subscriptions.add(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        caller, _ = await asyncio.to_thread(server.accept)
        with caller:
            caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 10)
        async with publisher() as (sock, endpoint):
            subscriptions.add("tcp://no-such-host.invalid:1")
            subscriptions.add("inproc://nobody")
            subscriptions.add(endpoint)
            await subscribed(sock)
            sock.send_multipart([b"one", b"x"])
            await until(lambda: bool(received))


@within(listener)
async def test_a_peer_that_is_told_by_name(
    subscriptions: Subscriptions, received: Received
) -> None:
    async with publisher() as (sock, endpoint):
        named = endpoint.replace("127.0.0.1", "other")
        subscriptions.add(named)
        subscriptions.add("tcp://metadata:80")
        await subscribed(sock)
        sock.send_multipart([b"one", b"x"])
        await until(lambda: bool(received))
        assert received == [(named, [b"one", b"x"])], "known by the name it was given"
        assert list(subscriptions) == ["tcp://metadata:80", named]


async def test_a_peer_with_several_addresses_is_heard_where_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_S", 0.01)
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_MAX_S", 0.02)
    async with listener() as (subscriptions, received):
        named = f"tcp://several:{free_port()}"
        subscriptions.add(named)
        for number, host in enumerate(("127.0.0.1", "127.0.0.3", "127.0.0.1"), 1):
            async with publisher(int(named.rpartition(":")[2]), host) as (sock, _):
                await subscribed(sock)
                sock.send_multipart([b"one", b"x"])
                await until(lambda: len(received) == number)
        assert received == [(named, [b"one", b"x"])] * 3


def test_a_subscriber_that_does_not_read_costs_messages_not_time() -> None:
    port = free_port()
    ours = ReplicaPublisher(port, messages_max=10)
    with socket.create_connection(("127.0.0.1", port)) as deaf:  # never says or reads a thing
        for _ in range(10_000):
            ours.publish(b"one", b"x" * 1000)
        assert ours.sent + ours.dropped == 10_000
        assert deaf.fileno() >= 0
    ours.close()


async def test_who_sends_heartbeats_and_falls_silent_is_connected_to_anew() -> None:
    """As after a garbled subscription: the connection stands, and nothing is sent to us."""
    now = [1000.0]
    received: Received = []
    subscriptions = Subscriptions(
        TOPICS,
        lambda peer, frames: received.append((peer, frames)),
        ReplicaLimits(),
        lambda: now[0],
        Addresses(EgressSettings(schemes=("tcp",)), look_up=NAMES.__getitem__),
        beats_on=b"two",
        silence_s=lambda: 10.0,
    )

    def passes(seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            now[0] += 0.5
            subscriptions.renew_silent()

    async with publisher() as (beating, one), publisher() as (other, two):
        for sock, endpoint, topic in ((beating, one, b"two"), (other, two, b"one")):
            subscriptions.add(endpoint)
            await subscribed(sock)
            sock.send_multipart([topic, b"x"])
        await until(lambda: len(received) == 2)
        passes(9.5)
        beating.send_multipart([b"two", b"y"])
        await until(lambda: len(received) == 3)
        passes(9.5)
        assert subscriptions.renewed == 0
        now[0] += 60.0  # we have slept, not they
        passes(9.5)
        assert subscriptions.renewed == 0
        passes(2.0)
        assert subscriptions.renewed == 1

        def heard_anew() -> bool:
            beating.send_multipart([b"two", b"z"])
            return (one, [b"two", b"z"]) in received

        await until(heard_anew)
        other.send_multipart([b"one", b"z"])
        await until(lambda: (two, [b"one", b"z"]) in received)
        assert not other.poll(0), "who sends no heartbeats may be silent"
    subscriptions.close()


async def test_replicas_have_the_descriptors_that_others_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever leaves any to others finds none; a replica that nobody listens to is no replica."""
    monkeypatch.setattr(sockets, "descriptors_end", lambda kept: 0 if kept else sys.maxsize)
    async with listener() as (subscriptions, _), publisher() as (_sock, endpoint):
        subscriptions.add(endpoint)
