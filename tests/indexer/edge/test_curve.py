"""CURVE on genuine sockets: the event, the replay and the replica plane, and who is let in."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from indexer.edge.curve import KeyPair, ReplicaKeys, is_exposed, new_key_file, read_key_file
from indexer.edge.sockets import Link, Publisher, Sockets, Subscriber, open_publisher
from indexer.errors import EndpointRefused, KeyFileUnusable
from indexer.types import StreamLimits
from tests import wait
from tests.harms import HARMS, Harm, cut
from tests.live.relay import Relay
from tests.wait import until

SERVER, CLIENT, STRANGER = KeyPair.new(), KeyPair.new(), KeyPair.new()


def run(use: Callable[[], Awaitable[None]]) -> None:
    wait.run(use())


def encrypted(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> tuple[zmq.Socket[bytes], str]:
    """A server socket as an engine would have it."""
    server = context.socket(kind)
    server.setsockopt(zmq.CURVE_SERVER, 1)
    server.setsockopt(zmq.CURVE_SECRETKEY, SERVER.secret.encode())
    server.setsockopt(zmq.LINGER, 0)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    return server, f"tcp://127.0.0.1:{port}"


async def first_message(subscriber: Subscriber, send: Callable[[], object]) -> list[bytes]:
    """Send until the subscription has arrived, and so has a message."""
    while True:
        send()
        message = subscriber.receive()
        if message is not None:
            return message
        await asyncio.sleep(0.01)


def broken(subscriber: Subscriber) -> bool:
    return Link.BROKEN in set(subscriber.news())


async def test_events(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    engine, endpoint = encrypted(context, zmq.PUB)
    relay = Relay(endpoint)
    sockets = Sockets(StreamLimits())  # with nobody's keys: new ones
    subscriber = sockets.subscribe(await relay.start(), server_key=SERVER.public)
    said = [b"topic", struct.pack(">Q", 1), b"a secret prompt"]
    assert await first_message(subscriber, lambda: engine.send_multipart(said)) == said
    assert b"CURVE" in relay.seen
    assert b"a secret prompt" not in relay.seen
    plain = sockets.subscribe(endpoint)
    other = sockets.subscribe(endpoint, server_key=STRANGER.public)
    await until(lambda: broken(plain))
    engine.send_multipart(said)
    assert plain.receive() is None
    assert other.receive() is None
    for one in (subscriber, plain, other):
        one.close()
    sockets.close()
    engine.close()
    await relay.stop()


async def test_who_hangs_up_is_told_from_who_is_not_there(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    engine, endpoint = encrypted(context, zmq.PUB)
    port = engine.getsockopt(zmq.LAST_ENDPOINT)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        there = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"  # bound, and nobody listens
        sockets = Sockets(StreamLimits())
        plain = sockets.subscribe(endpoint)
        wrong = sockets.subscribe(endpoint, server_key=STRANGER.public)
        gone = sockets.subscribe(there, server_key=SERVER.public)

        def news() -> list[Link]:
            return [link for one in (plain, wrong, gone) for link in one.news()]

        await until(lambda: bool(news() or (plain.is_refused and wrong.is_refused)))
        await until(lambda: not news() and plain.is_refused and wrong.is_refused)
        assert not gone.is_refused
        # who does not encrypt reads either what is spoken there, or that it is hung up
        failed = sockets.handshakes_failed
        assert failed["silent"] >= 1
        assert failed["silent"] + failed["protocol"] >= 2
        assert sockets.handshakes_failed["key"] == 0
        engine.close()
        await until(lambda: bool(news() or not wrong.is_refused))
        await until(lambda: bool(news() or True) and not wrong.is_refused)
        other, _ = encrypted(context, zmq.PUB)
        other.bind(port)  # type: ignore[arg-type]
        wrong.move_to(None)
        for one in (plain, wrong, gone):
            one.close()
        sockets.close()
        other.close()


async def test_replays(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    engine, endpoint = encrypted(context, zmq.ROUTER)
    relay = Relay(endpoint)
    sockets = Sockets(StreamLimits(), CLIENT)
    receiver = sockets.ask_replay(await relay.start(), 7, SERVER.public)
    await until(lambda: bool(engine.poll(0)))
    identity, empty, start = engine.recv_multipart()
    assert struct.unpack(">Q", start) == (7,)
    engine.send_multipart([identity, empty, struct.pack(">Q", 7), b"a secret batch"])
    while (reply := receiver.receive()) is None:
        await asyncio.sleep(0.005)
    assert reply[-1] == b"a secret batch"
    assert b"a secret batch" not in relay.seen
    receiver.close()
    sockets.close()
    engine.close()
    await relay.stop()


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def judging(publisher: Publisher) -> Callable[[], object]:
    """Let a publisher's key check answer on the running loop; returns what ends that."""
    check = publisher.key_check
    assert check is not None
    loop = asyncio.get_running_loop()
    loop.add_reader(check.fd, check.answer, 8)
    check.answer(8)
    return lambda: loop.remove_reader(check.fd)


async def test_replicas_are_let_in_by_their_keys(tmp_path: Path) -> None:
    listed = tmp_path / "replicas"
    listed.write_text(f"# who may listen\n{CLIENT.public}\n")
    keys = ReplicaKeys(SERVER, str(listed))
    endpoint = free_endpoint()
    publisher = open_publisher(endpoint, keys=keys)
    stop = judging(publisher)
    relay = Relay(endpoint)
    through = await relay.start()
    known, same, unknown = (Sockets(StreamLimits(), who) for who in (CLIENT, SERVER, STRANGER))
    said = [b"topic", b"reservation-4711"]
    subscriber = known.subscribe(through, server_key=SERVER.public)
    ours = same.subscribe(endpoint, server_key=SERVER.public)
    assert await first_message(subscriber, lambda: publisher.send(said)) == said
    assert await first_message(ours, lambda: publisher.send(said)) == said
    assert b"reservation-4711" not in relay.seen
    evil, plain = (
        unknown.subscribe(endpoint, server_key=SERVER.public),
        known.subscribe(endpoint),
    )
    await until(lambda: broken(evil))
    await until(lambda: broken(plain))
    check = publisher.key_check
    assert check is not None
    assert check.accepted == 2
    assert check.refused >= 1
    publisher.send(said)
    assert evil.receive() is None
    assert plain.receive() is None
    # a list that is read again counts for the next handshake
    listed.write_text(f"{STRANGER.public}\n")
    keys.adopt(keys.prepare())
    late = unknown.subscribe(endpoint, server_key=SERVER.public)
    assert await first_message(late, lambda: publisher.send(said)) == said
    for one in (subscriber, ours, evil, plain, late):
        one.close()
    stop()
    publisher.close()
    for some in (known, same, unknown):
        some.close()
    await relay.stop()


async def test_without_keys_everything_is_to_be_read() -> None:
    """That the relay sees what there is to see."""
    endpoint = free_endpoint()
    publisher = open_publisher(endpoint)
    relay = Relay(endpoint)
    sockets = Sockets(StreamLimits())
    subscriber = sockets.subscribe(await relay.start())
    await first_message(subscriber, lambda: publisher.send([b"topic", b"reservation-4711"]))
    assert b"reservation-4711" in relay.seen
    subscriber.close()
    sockets.close()
    publisher.close()
    await relay.stop()


def test_a_port_that_is_taken_leaves_nothing_behind() -> None:
    endpoint = free_endpoint()
    keys = ReplicaKeys(SERVER, None)
    first = open_publisher(endpoint, keys=keys)
    with pytest.raises(EndpointRefused):
        open_publisher(endpoint, keys=keys)
    first.close()


# -- files -----------------------------------------------------------------------------------------


def test_a_new_key_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys = new_key_file(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert not is_exposed(str(path))
    read = read_key_file(str(path))
    assert (read.public, read.secret) == (keys.public, keys.secret)
    assert keys.secret not in repr(keys)
    with pytest.raises(KeyFileUnusable, match="File exists"):
        new_key_file(str(path))
    os.chmod(path, 0o640)
    assert is_exposed(str(path))
    assert not is_exposed(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"public {SERVER.public}",
        f"public {SERVER.public}\nsecret {CLIENT.secret}",
        f"public {SERVER.public}\nsecret nonsense",
        f"private {SERVER.secret}",
        f"secret {SERVER.secret} {SERVER.public}",
    ],
    ids=["empty", "half", "another's", "no key", "other words", "two on a line"],
)
def test_a_file_that_is_no_pair(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(KeyFileUnusable) as error:
        read_key_file(str(path))
    assert SERVER.secret not in str(error.value)
    assert CLIENT.secret not in str(error.value)


@pytest.mark.parametrize("harm", HARMS)
def test_a_key_file_changed_anywhere_is_refused_or_the_same(memory_path: Path, harm: Harm) -> None:
    path = memory_path / "key"
    keys = new_key_file(str(path))
    data = path.read_bytes()
    first_key = data.index(b"public")
    for at in range(len(data)):
        path.write_bytes(harm(data, at))
        try:
            found = read_key_file(str(path))
        except KeyFileUnusable:
            continue
        assert found.public == keys.public, at
        assert at < first_key or zmq.curve_public(found.secret.encode()) == keys.public.encode()
        assert harm is not cut or at == len(data) - 1, "of all cuts, only that of the last newline"


def test_keys_by_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    path.write_text(f"{CLIENT.public} tcp://b:1 tcp://c:1\n\n# more\n{STRANGER.public} tcp://d:1\n")
    keys = ReplicaKeys(SERVER, str(path))
    assert keys.key_of("tcp://b:1") == keys.key_of("tcp://c:1") == CLIENT.public
    assert keys.key_of("tcp://d:1") == STRANGER.public
    assert keys.key_of("tcp://e:1") == SERVER.public
    assert len(keys.allowed) == 3
    for bad in (f"{CLIENT.public} a\n{STRANGER.public} a", "nonsense", f" {CLIENT.public[:-1]}"):
        path.write_text(bad)
        with pytest.raises(KeyFileUnusable):
            keys.prepare()
        assert len(keys.allowed) == 3
