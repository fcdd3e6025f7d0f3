"""Listens to the replica plane of the services under test, and reads its messages as data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec
import zmq

from select_service.core.replication.dynamo_events import TOPIC
from select_service.core.replication.messages import OWN_TOPIC
from tests.live.ports import HOST
from tests.wait import PATIENCE_S, block_until

DEAF_S = 0.3  # the reference says nothing by itself: time for it to hear of our subscription

# 1.3.1 ignores salts; here `cache_salt` enters the hashes, and so the wire.
SALTED = frozenset({("34_token_ids_sequence_hashes", 11)})
UNCOMPARED = frozenset({"router_id"})  # random


class ReplicaWire:
    """A subscriber to one or more services' replica ports."""

    def __init__(self, ports: Iterable[int]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._subscribe(port) for port in ports]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _subscribe(self, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        socket.setsockopt(zmq.SUBSCRIBE, OWN_TOPIC)
        socket.connect(f"tcp://{HOST}:{port}")
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def wait_until_heard(self, *, has_heartbeats: bool) -> None:
        """Return once every service has been heard, so that nothing later is missed."""
        if not has_heartbeats:
            time.sleep(DEAF_S)
            return
        for socket in self._sockets:
            assert socket.poll(round(PATIENCE_S * 1000)), "a service without heartbeats"

    def next_event(self) -> list[bytes]:
        """The next message on the reference's topic, from whichever service."""
        found: list[list[bytes]] = []

        def has_come() -> bool:
            while not found and (ready := self._poller.poll(0)):
                frames: list[bytes] = ready[0][0].recv_multipart()
                if frames[0] == TOPIC:
                    found.append(frames)
            return bool(found)

        block_until(has_come, lambda: "no replica event was published")
        return found[0]


def expected_event(step: Mapping[str, Any], merged: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a recorded event looks like here: both names of the scope, listed differences in."""
    payload = bytes.fromhex(step["replica_event"]["frames_hex"][1])
    event: dict[str, Any] = _without_chance(msgspec.msgpack.decode(payload))
    if merged is not None:
        event["routing_group"] = event["tenant_id"]
        _merge(event, merged)
    return event


def take_over_hashes(expected: dict[str, Any], got: Mapping[str, Any]) -> None:
    """Expect other hashes than recorded, as many, and anything else as recorded."""
    recorded = expected["event"]["data"]["AddRequest"]
    published = got["event"]["data"]["AddRequest"]["token_sequence"]
    assert len(published) == len(recorded["token_sequence"])
    assert not set(published) & set(recorded["token_sequence"])
    recorded["token_sequence"] = published


def event_of(frames: list[bytes]) -> dict[str, Any]:
    """What was published, comparable."""
    event: dict[str, Any] = _without_chance(msgspec.msgpack.decode(frames[1]))
    return event


def _without_chance(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: _without_chance(v) for k, v in value.items() if k not in UNCOMPARED}


def _merge(into: dict[str, Any], news: Mapping[str, Any]) -> None:
    for key, value in news.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
