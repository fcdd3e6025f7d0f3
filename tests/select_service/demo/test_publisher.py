"""Frames on the wire: live batches, replay in both forms, restart on the same ports."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import zmq

from select_service.demo.worker import EventPublisher, held
from tests.wait import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

END = b"\xff" * 8
WAIT_MS = round(PATIENCE_S * 1000)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        context.linger = 0
        yield context


def ask(
    context: zmq.Context[zmq.Socket[bytes]], publisher: EventPublisher, start: int
) -> list[list[bytes]]:
    assert publisher.replay_endpoint is not None
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    while not publisher.serve_replay():
        pass
    replies: list[list[bytes]] = []
    while not replies or replies[-1][-2] != END:
        assert dealer.poll(WAIT_MS)
        replies.append(dealer.recv_multipart())
    dealer.close()
    return replies


@pytest.mark.parametrize("with_topic", [True, False])
def test_replay_from_the_middle_and_the_marker(
    context: zmq.Context[zmq.Socket[bytes]], with_topic: bool
) -> None:
    with EventPublisher(topic=b"t", replay_with_topic=with_topic) as publisher:
        publisher.publish(b"zero")
        publisher.withhold(b"one")
        publisher.publish(b"two")
        topic, no_topic = ([b"t"], [b""]) if with_topic else ([], [])
        assert ask(context, publisher, 1) == [
            [b"", *topic, (1).to_bytes(8, "big"), b"one"],
            [b"", *topic, (2).to_bytes(8, "big"), b"two"],
            [b"", *no_topic, END, b""],
        ]
        assert publisher.replays_served == 1


def test_the_buffer_forgets(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher(buffer_steps=2) as publisher:
        for number in range(5):
            publisher.publish(bytes([number]))
        assert [reply[-1] for reply in ask(context, publisher, 0)] == [b"\x03", b"\x04", b""]


def test_a_malformed_request_gets_no_answer(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with EventPublisher() as publisher:
        assert publisher.replay_endpoint is not None
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([bytes(8)])
        dealer.send_multipart([b"", bytes(8)])
        while not publisher.serve_replay():
            pass
        assert publisher.replays_served == 1
        dealer.close()


def test_a_restart_begins_at_zero_on_the_same_ports() -> None:
    with EventPublisher() as first:
        first.publish(b"x")
        endpoints = first.endpoint, first.replay_endpoint
    with held(first.endpoint), EventPublisher(*endpoints) as second:
        assert (second.endpoint, second.replay_endpoint) == endpoints
        assert second.sequence == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_endpoint_that_is_held_is_nobody_elses_and_refuses(host: str) -> None:
    with EventPublisher(f"tcp://{host}:*", None) as first:
        endpoint = first.endpoint
    name, port = host.strip("[]"), int(endpoint.rpartition(":")[2])
    with held(endpoint):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((name, port), PATIENCE_S)
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        with socket.socket(family) as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((name, port))


def test_without_replay() -> None:
    with EventPublisher(replay_endpoint=None) as publisher:
        assert publisher.replay_endpoint is None
        assert publisher.serve_replay() == 0
