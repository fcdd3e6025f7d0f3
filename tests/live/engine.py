"""A fake engine: one PUB socket whose subscribers are counted, so that no message is sent too soon.

PUB drops what it sends before a subscription has arrived. XPUB hands subscriptions over as
messages; `publish` waits for the number of subscribers a test expects instead of sleeping.
"""

from __future__ import annotations

import struct
import time
from typing import Self

import msgspec
import zmq

from tests.live.ports import HOST

SUBSCRIBER_DEADLINE_S = 10.0
QUIET_MS = 30  # no subscription news for so long: the picture is current


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
        """Return once at least `count` subscribers are connected and the news has settled."""
        deadline = time.monotonic() + SUBSCRIBER_DEADLINE_S
        while True:
            quiet = not self._socket.poll(QUIET_MS)
            if not quiet:
                self.subscribers += 1 if self._socket.recv()[:1] == b"\x01" else -1
            elif self.subscribers >= count:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"port {self.port}: {self.subscribers} of {count} subscribers")

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
