"""KV events of the workloads: batches in vLLM's map form over one PUB per worker.

An XPUB shows when the service has subscribed, so nothing is published into the void; without a
high-water mark nothing is dropped on this side, and a slow consumer is waited for by TCP.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq

from bench.load.prompts import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Publishers", "SubscriptionMissing", "batch", "engine_hashes", "removed", "stored"]

_SUBSCRIBE_TIMEOUT_MS = 20_000
_ENCODER = msgspec.msgpack.Encoder()
_VLLM_FIELDS = {
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}


class SubscriptionMissing(RuntimeError):
    """The service did not subscribe in time."""


def engine_hashes(rng: Random, count: int) -> list[int]:
    """Opaque names of blocks, as an engine would choose them."""
    return [rng.getrandbits(64) for _ in range(count)]


def stored(hashes: Sequence[int], parent: int | None, token_ids: Sequence[int]) -> dict[str, Any]:
    """One BlockStored."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": BLOCK_SIZE,
        **_VLLM_FIELDS,
    }


def removed(hashes: Sequence[int]) -> dict[str, Any]:
    """One BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def batch(events: Sequence[dict[str, Any]]) -> bytes:
    """One message's payload."""
    return _ENCODER.encode([1.0, events, 0])


class Publishers:
    """One event stream per worker of one service under test."""

    def __init__(self, workers: int, *, shared: bool = False) -> None:
        """`shared`: one socket for all, for workloads without events (thousands of workers)."""
        self._context = zmq.Context()
        self._sockets = [self._bind() for _ in range(1 if shared else workers)]
        self._sequences = [0] * len(self._sockets)
        self.endpoints = [self._endpoint(i % len(self._sockets)) for i in range(workers)]
        self._expected = [workers if shared else 1] * len(self._sockets)

    def wait_subscribed(self) -> None:
        """Return when every worker's stream has its subscriber, and has reported a block.

        Of an engine that computes prompts and never reports any, ours estimates what it has
        cached (`--kv-estimate-after-s`), which is other work than the peer's.
        """
        for socket, expected in zip(self._sockets, self._expected, strict=True):
            for seen in range(expected):
                if not socket.poll(_SUBSCRIBE_TIMEOUT_MS):
                    missing = f"{seen} of {expected} subscriptions"
                    raise SubscriptionMissing(missing)
                socket.recv()
        for stream in range(len(self._sockets)):
            name = [stream + 1]
            came = stored(name, None, [stream] * BLOCK_SIZE)
            self.publish(stream, batch([came, removed(name)]))

    def publish(self, worker: int, payload: bytes) -> None:
        """Send the next batch of a worker."""
        sequence = self._sequences[worker]
        self._sockets[worker].send_multipart([b"", sequence.to_bytes(8, "big"), payload])
        self._sequences[worker] = sequence + 1

    def close(self) -> None:
        """Close the sockets at once."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bind(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.XPUB)
        socket.set_hwm(0)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscriber, not only the first
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def _endpoint(self, index: int) -> str:
        bound = self._sockets[index].getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()
