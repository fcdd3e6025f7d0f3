"""What the sockets promise beyond listening."""

from __future__ import annotations

import pytest
import zmq

from indexer.edge.sockets import Sockets, open_publisher
from indexer.errors import EndpointRefused
from indexer.types import StreamLimits


def test_a_publisher_reaches_its_subscribers() -> None:
    sockets = Sockets(StreamLimits())
    publisher = open_publisher("tcp://127.0.0.1:*")
    endpoint = publisher._socket.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]
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


def test_an_address_that_is_taken() -> None:
    publisher = open_publisher("tcp://127.0.0.1:*")
    endpoint = publisher._socket.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]
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
