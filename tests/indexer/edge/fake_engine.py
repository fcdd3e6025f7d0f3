"""An engine's two sockets: events out, replays on request. Driven by the test, no thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import zmq

from tests import wait
from tests.indexer.encoding import end_marker, message
from tests.live.ports import HOST, free_port


class FakeEngine:
    """Publishes what it is told and keeps it for replays."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ports: tuple[int, int] = (0, 0),
        host: str = HOST,
    ) -> None:
        # XPUB instead of PUB: subscriptions can be awaited
        self.pub = self._bind(context, zmq.XPUB, host, ports[0])
        # of every connection: the next one may come before libzmq has given up the last
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            self.router = self._bind(context, zmq.ROUTER, host, ports[1])
        except zmq.ZMQError:
            self.pub.close(linger=0)
            raise
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=10_000)
        self.sequence = 0
        self.is_mute = False
        self.requests: list[int] = []

    @staticmethod
    def _bind(
        context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int
    ) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        try:
            # not one of the kernel's choice: it might give it to a client while an heir is awaited
            socket.bind(f"tcp://{host}:{port or free_port()}")
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    @property
    def endpoint(self) -> str:
        return self.pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        return self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def ports(self) -> tuple[int, int]:
        return int(self.endpoint.rpartition(":")[2]), int(self.replay_endpoint.rpartition(":")[2])

    def has_subscriber(self) -> bool:
        """Whether a subscription has arrived since the last call."""
        try:
            return self.pub.recv(zmq.NOBLOCK) == b"\x01"
        except zmq.Again:
            return False

    def publish(self, payload: bytes, *, is_lost: bool = False) -> None:
        self.buffer.append((self.sequence, payload))
        if not is_lost:
            self.pub.send_multipart(message(self.sequence, payload))
        self.sequence += 1

    def serve(self) -> None:
        """Answer the replay requests that have come."""
        while True:
            try:
                identity, _, start = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            first = int.from_bytes(start, "big")
            self.requests.append(first)
            if self.is_mute:
                continue
            for seq, payload in self.buffer:
                if seq >= first:
                    self.router.send_multipart([identity, b"", *message(seq, payload)])
            self.router.send_multipart([identity, *end_marker()])

    def close(self) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)


async def serve_until(engines: Collection[FakeEngine], condition: Callable[[], Any]) -> None:
    """Let the loop and the engines run until it holds."""

    def holds() -> bool:
        if condition():
            return True
        for engine in engines:
            engine.serve()
        return False

    await wait.until(holds)
