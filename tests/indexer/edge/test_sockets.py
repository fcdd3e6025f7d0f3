"""What the sockets promise beyond listening."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import zmq

from indexer.compiled import kernels_in_use
from indexer.core.events import HEAD_BYTES, Oversized, size_of
from indexer.edge import receiver as receiver_module
from indexer.edge.receiver import READ_BYTES_MAX, Receiver
from indexer.edge.sockets import Link, Sockets, Subscriber, open_publisher
from indexer.errors import EndpointRefused
from indexer.types import StreamLimits

LONGEST = 1 << 20


def test_a_publisher_reaches_its_subscribers() -> None:
    sockets = Sockets(StreamLimits())
    publisher = open_publisher("tcp://127.0.0.1:*")
    endpoint = publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    receiver = sockets.subscribe(endpoint)
    poller = zmq.Poller()
    poller.register(receiver._socket, zmq.POLLIN)
    got = None
    while got is None:
        assert publisher.send([b"topic", b"payload"])
        poller.poll(5)
        got = receiver.receive()
    assert got == [b"topic", b"payload"]
    receiver.close()
    assert receiver.receive() is None
    sockets.close()
    publisher.close()
    assert not publisher.send([b"late"])


def test_libzmq_says_that_it_retries_before_it_tells_of_our_own_attempt() -> None:
    """Or a publisher that has gone would look like one whose connection libzmq gave up."""
    sockets = Sockets(StreamLimits())
    masks = set()
    for _ in range(60):
        publisher = open_publisher("tcp://127.0.0.1:*")
        subscriber = sockets.subscribe(publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        masks.add(subscriber._socket.getsockopt(zmq.AFFINITY))
        _heard_until(subscriber, Link.CONNECTED)
        publisher.close()
        heard = _heard_until(subscriber, Link.BROKEN)
        subscriber.connect_again()  # at once, whatever libzmq is about to say
        heard += _heard_until(subscriber, Link.CONNECTING)
        assert heard[heard.index(Link.BROKEN) + 1] is Link.RETRYING
        subscriber.close()
    assert masks == {1, 2}, "each has one thread, and both have some"
    sockets.close()


def _heard_until(subscriber: Subscriber, last: Link) -> list[Link]:
    heard: list[Link] = []
    while last not in heard:
        assert subscriber._monitor.poll(30_000), heard
        heard += subscriber.news()
    return heard


def test_an_address_that_is_taken() -> None:
    publisher = open_publisher("tcp://127.0.0.1:*")
    endpoint = publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(EndpointRefused, match="in use"):
        open_publisher(endpoint)
    publisher.close()


@pytest.mark.parametrize("room", [1, 2])
def test_a_subscriber_takes_three_sockets(room: int) -> None:
    sockets = Sockets(StreamLimits())
    sockets._context.set(zmq.MAX_SOCKETS, room)
    with pytest.raises(EndpointRefused):
        sockets.subscribe("tcp://127.0.0.1:1")
    sockets.close()


def test_a_context_that_is_full_refuses() -> None:
    sockets = Sockets(StreamLimits())
    sockets._context.set(zmq.MAX_SOCKETS, 1)
    receiver = sockets.ask_replay("tcp://127.0.0.1:1", 0)
    with pytest.raises(EndpointRefused):
        sockets.try_connect("tcp://127.0.0.1:1")
    receiver.close()
    sockets.close()


# -- many messages at once, the compiled way and the plain one ------------------------------------


@pytest.fixture(params=["plain", "kernel"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[zmq.Socket[bytes], Receiver]]:
    """A sender and a receiver that has what was sent at once."""
    is_compiled = request.param == "kernel"
    if is_compiled and not kernels_in_use().get("indexer._frames"):
        pytest.skip("not built, or not wanted")
    monkeypatch.setattr(receiver_module, "_FINDS_LIBZMQ", is_compiled)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.bind("inproc://pair")
    receiver.connect("inproc://pair")
    yield sender, Receiver(receiver, LONGEST)
    context.destroy(linger=0)


def test_messages_come_in_order_with_all_their_frames(
    pair: tuple[zmq.Socket[bytes], Receiver],
) -> None:
    sender, receiver = pair
    random = Random(1)
    sent = [
        [random.randbytes(random.choice([0, 1, 8, 33, 300])) for _ in range(random.choice([1, 3]))]
        for _ in range(100)
    ]
    for frames in sent:
        sender.send_multipart(frames)
    got = receiver.receive_some(40, b"apart")
    assert len(got) == 40
    got += receiver.receive_some(100, b"apart")
    assert got == sent
    assert receiver.receive_some(100, b"apart") == []


def test_a_message_apart_is_the_last(pair: tuple[zmq.Socket[bytes], Receiver]) -> None:
    sender, receiver = pair
    for topic in (b"", b"apart", b"apart", b"apart from that"):
        sender.send_multipart([topic, b"x"])
    topics = [[m[0] for m in receiver.receive_some(10, b"apart")] for _ in range(4)]
    assert topics == [[b"", b"apart"], [b"apart"], [b"apart from that"], []]


def test_long_messages_come_a_few_at_a_time(pair: tuple[zmq.Socket[bytes], Receiver]) -> None:
    sender, receiver = pair
    long = b"x" * (READ_BYTES_MAX // 2)
    for _ in range(5):
        sender.send_multipart([b"", long])
    assert [len(receiver.receive_some(10, b"")) for _ in range(1)] == [1], "topic apart"
    assert [len(receiver.receive_some(10, b"apart")) for _ in range(3)] == [2, 2, 0]


def test_a_closed_socket_has_no_messages(pair: tuple[zmq.Socket[bytes], Receiver]) -> None:
    _, receiver = pair
    receiver.close()
    assert receiver.receive_some(10, b"") == []


def test_what_has_no_address_yet_is_not_called_by_an_empty_one() -> None:
    """Out of descriptors, the sockets of names that are not resolved yet are refused, too."""
    assert (
        str(EndpointRefused("", "Too many open files"))
        == "cannot open a socket: Too many open files"
    )
    assert "`tcp://*:1`" in str(EndpointRefused("tcp://*:1", "no"))


def test_of_a_frame_that_is_too_long_only_the_head_is_kept(
    pair: tuple[zmq.Socket[bytes], Receiver],
) -> None:
    sender, receiver = pair
    whole = Random(2).randbytes(LONGEST + 1)
    sent = [[b"topic", b"12345678", whole], [whole], [b"", b"1", whole[:-1]]]
    for frames in sent:
        sender.send_multipart(frames)
    got: list[list[bytes]] = []
    while (more := receiver.receive_some(40, b"apart")) or receiver.is_copying:
        got += more
    assert got[2] == sent[2], "as long as it may be"
    for frames, kept in zip(sent[:2], got[:2], strict=True):
        assert [size_of(one) for one in kept] == [len(one) for one in frames]
        assert isinstance(kept[-1], Oversized)
        assert kept[-1] == whole[:HEAD_BYTES]
    for frames in sent:
        sender.send_multipart(frames)
    assert [size_of(one) for one in receiver.receive() or []] == [5, 8, LONGEST + 1]


@pytest.mark.parametrize("pair", ["kernel"], indirect=True)
@pytest.mark.parametrize("at_once", [1, 40])
def test_a_long_message_is_copied_in_pieces(
    pair: tuple[zmq.Socket[bytes], Receiver], at_once: int
) -> None:
    """The largest uninterrupted step is one piece, however long the message is."""
    sender, receiver = pair
    random = Random(3)
    long = random.randbytes(LONGEST)
    sent = [
        *([b"topic", b"12345678", b"short"], [b"topic", b"12345678", long]),
        *([b"", long, long[: READ_BYTES_MAX + 1]], [b"topic", b"12345678", b"last"]),
    ]
    for frames in sent:
        sender.send_multipart(frames)
    got: list[list[bytes]] = []
    steps, copied = 0, 0
    while True:
        if at_once == 1:
            one = receiver.receive()
            more = [] if one is None else [one]
        else:
            more = receiver.receive_some(at_once, b"apart")
        unfinished = [one for one in receiver._unfinished or [] if not isinstance(one, bytes)]
        before, copied = copied, sum(one.copied for one in unfinished)
        assert copied - before <= READ_BYTES_MAX
        if not more and not receiver.is_copying:
            break
        steps += 1
        got += more
    assert got == sent
    assert steps >= 2 * LONGEST // READ_BYTES_MAX


@pytest.mark.parametrize("pair", ["kernel"], indirect=True)
def test_a_socket_closes_while_it_copies(pair: tuple[zmq.Socket[bytes], Receiver]) -> None:
    sender, receiver = pair
    sender.send_multipart([b"", b"x" * LONGEST])
    assert receiver.receive() is None
    assert receiver.is_copying
    receiver.close()
    assert (receiver.receive(), receiver.is_copying) == (None, False)
