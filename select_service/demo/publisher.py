"""The ZMQ side of a simulated engine: numbered batches on a PUB, replay on a ROUTER.

It has neither threads nor a loop: whoever steps the engine calls `publish` and `serve_replay`, as
an engine's publishing thread does both in turn. A new publisher on the same ports looks like a
restarted engine: the sequence starts at 0 again.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, Self

import zmq

from indexer.core.endpoint import tcp_address
from indexer.edge.sockets import bind

if TYPE_CHECKING:
    from collections.abc import Iterator

_REQUEST: Final = ("identity", "empty", "start")
_U64: Final = 8
_END_OF_REPLAY: Final = b"\xff" * 8
_HIGH_WATER_MARK: Final = 100_000  # vLLM's default for its PUB
_BUFFER_STEPS: Final = 10_000  # vLLM's default


class EventPublisher:
    """One event stream of one (worker, rank).

    Args:
        endpoint: where the PUB binds; port `*` takes any free one (see `endpoint` afterwards), and
            host `*` means every address of both families.
        replay_endpoint: where the ROUTER binds, or None for an engine without replay.
        replay_with_topic: 4 frames as vLLM 0.26 and later, or 3 as before.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str | None = "tcp://127.0.0.1:*",
        *,
        topic: bytes = b"kv-events",
        replay_with_topic: bool = True,
        buffer_steps: int = _BUFFER_STEPS,
    ) -> None:
        self.topic = topic
        self.sequence = 0  # of the next batch
        self.replays_served = 0
        self._replay_with_topic = replay_with_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._pub = self._bind(zmq.PUB, endpoint)
        self._router = None if replay_endpoint is None else self._bind(zmq.ROUTER, replay_endpoint)
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._router is None else _address(self._router)

    def publish(self, payload: bytes) -> int:
        """Send one batch and return its sequence number; never blocks, a slow reader loses it."""
        sequence = self.sequence
        self._pub.send_multipart([self.topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._buffer.append((sequence, payload))
        self.sequence = sequence + 1
        return sequence

    def withhold(self, payload: bytes) -> int:
        """Number and remember a batch without sending it: a live message lost on the way."""
        sequence = self.sequence
        self._buffer.append((sequence, payload))
        self.sequence = sequence + 1
        return sequence

    def serve_replay(self) -> int:
        """Answer the replay requests that have arrived; returns how many."""
        if self._router is None:
            return 0
        served = 0
        while self._router.poll(0):
            frames = self._router.recv_multipart()
            # Like the engines, ignore a request without the empty delimiter.
            if len(frames) == len(_REQUEST) and frames[1] == b"" and len(frames[2]) == _U64:
                self._answer(self._router, frames[0], int.from_bytes(frames[2], "big"))
                served += 1
        self.replays_served += served
        return served

    def close(self) -> None:
        """Close both sockets; what is unsent is gone, as with a killed process."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answer(self, router: zmq.Socket[bytes], identity: bytes, start: int) -> None:
        middle = [self.topic] if self._replay_with_topic else []
        for sequence, payload in self._buffer:
            if sequence >= start:
                number = sequence.to_bytes(8, "big")
                router.send_multipart([identity, b"", *middle, number, payload])
        marker_middle = (
            [b""] if self._replay_with_topic else []
        )  # the marker has no topic (vLLM 0.26 … 0.33)
        router.send_multipart([identity, b"", *marker_middle, _END_OF_REPLAY, b""])

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        # a ROUTER drops beyond its mark, so it must hold the whole buffer (vLLM 0.33 does this)
        bound.set_hwm(_HIGH_WATER_MARK)
        bind(bound, endpoint)
        return bound


@contextlib.contextmanager
def held(endpoint: str) -> Iterator[None]:
    """Keep a TCP endpoint from everybody else while no publisher has it; connects are refused.

    A publisher may bind it within the block: both sockets reuse the address, and this one does not
    listen.
    """
    address = tcp_address(endpoint)
    assert address is not None, "as bound by a publisher"
    host, port = address[0].strip("[]"), address[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
        yield


def _address(of: zmq.Socket[bytes]) -> str:
    bound = of.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
