"""A fake engine: one PUB socket whose subscribers are counted, so that no message is sent too soon.

PUB drops what it sends before a subscription has arrived. XPUB hands subscriptions over as
messages; `publish` waits for the number of subscribers a test expects instead of sleeping.
"""

from __future__ import annotations

import struct
from typing import Self

import msgspec
import zmq

from tests.live.ports import HOST
from tests.wait import block_until


class FakeEngine:
    """Publishes batches of KV events on one loopback port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.subscribers = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"tcp://{HOST}:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """What a worker record names as its kv_events_endpoint."""
        return f"tcp://{HOST}:{self.port}"

    def wait_for_subscribers(self, count: int = 1) -> None:
        """Return once at least `count` subscribers are connected."""
        block_until(
            lambda: self._count_subscribers() >= count,
            lambda: f"port {self.port}: {self.subscribers} of {count} subscribers",
        )

    def wait_for_nobody(self) -> None:
        """Return once all subscribers are gone."""
        block_until(
            lambda: not self._count_subscribers(), lambda: f"{self.subscribers} subscribers"
        )

    def _count_subscribers(self) -> int:
        """The number of subscribers by all messages so far."""
        while self._socket.poll(0):
            self.subscribers += 1 if self._socket.recv()[:1] == b"\x01" else -1
        return self.subscribers

    def publish(self, seq: int, payload: object, topic: str = "kv-events") -> None:
        """Send one batch once somebody listens: topic, sequence number, MessagePack payload."""
        self.publish_raw([topic.encode(), struct.pack(">Q", seq), msgspec.msgpack.encode(payload)])

    def publish_raw(self, frames: list[bytes]) -> None:
        """Send exactly these frames once somebody listens."""
        if not self.subscribers:
            self.wait_for_subscribers()
        self._socket.send_multipart(frames)

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close()
        self._context.term()
