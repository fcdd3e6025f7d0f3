"""The longest holds of the loop: `python -m bench.micro.holds`.

One KV event of many blocks, turn by turn as the listener takes them, and single bookings while all
tables grow to 100,000 reservations. Processor time of this thread, without garbage collections.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque
from itertools import pairwise, product
from typing import TYPE_CHECKING

import msgspec

from indexer.core.registry import StreamRegistry
from indexer.types import Scope, WorkerRank
from select_service.core.service import SelectionCore
from select_service.types import ReservationRequest, RouterConfig, WorkerSpec

if TYPE_CHECKING:
    from indexer.core.stream import EventStream

EVENTS = (64, 512, 1024, 4096, 8192, 32_768, 80_000)
"""Blocks of one event; 80,000 of them are 6 MB."""

KINDS = ("plain", "adapter", "images")
BLOCK_SIZE = 16
RESERVATIONS = 100_000
BLOCKS = 16
ROUNDS = 5
SLOWEST = 3


def stream() -> EventStream:
    """A rank's stream into an index of its own."""
    registry, scope = StreamRegistry(), Scope("m", "t")
    registry.open_index(scope, BLOCK_SIZE)
    return registry.open_stream(scope, WorkerRank(1, 0), worker_ranks=range(1), has_replay=False)


def stored(rng: random.Random, blocks: int, kind: str) -> bytes:
    """One store as vLLM says it: plain, of an adapter, or with an image in every fourth block."""
    names = [rng.getrandbits(64) for _ in range(blocks)]
    tokens = [rng.randrange(150_000) for _ in range(blocks * BLOCK_SIZE)]
    event: list[object] = ["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"]
    if kind == "adapter":
        event += ["adapter", [["adapter"]] * blocks]
    if kind == "images":
        keys = [[[f"{at:064x}", 0]] if at % 4 == 0 else None for at in range(blocks)]
        event += [None, keys]
    return msgspec.msgpack.encode([1.0, [event], 0])


def turns_of(one: EventStream, number: int, payload: bytes) -> list[float]:
    """Milliseconds of each turn that a message takes."""
    inbox = deque([[b"", number.to_bytes(8, "big"), payload]])
    times = [time.thread_time()]
    one.take(inbox, 1.0)
    times.append(time.thread_time())
    while one.is_busy:
        one.resume(1.0)
        times.append(time.thread_time())
    return [(after - before) * 1e3 for before, after in pairwise(times)]


def measure_events() -> None:
    """Print the longest turns by size of the event."""
    rng, one, number = random.Random(1), stream(), 0
    for kind, blocks in product(KINDS, EVENTS):
        best: list[float] = []
        size = 0
        for _ in range(ROUNDS):
            payload = stored(rng, blocks, kind)
            turns, size = turns_of(one, number, payload), len(payload)
            number += 1
            if not best or max(turns) < max(best):
                best = turns
        slowest = ", ".join(f"{ms:.2f}" for ms in sorted(best, reverse=True)[:SLOWEST])
        text = f"{kind:8} {blocks:6} blocks {size:8} bytes {len(best):4} turns"
        print(f"{text}, the longest {slowest} ms")


def measure_bookings() -> None:
    """Print the slowest single bookings and ends."""
    core = SelectionCore(StreamRegistry(), RouterConfig(use_kv_events=False), random.Random(1))
    for worker_id in (1, 2):
        spec = WorkerSpec(worker_id=worker_id, endpoint="http://w", block_size=BLOCK_SIZE)
        core.workers.upsert_worker(spec, 1.0)
    booked: list[tuple[float, int]] = []
    for number in range(RESERVATIONS):
        first = number * BLOCKS
        request = ReservationRequest(
            reservation_id=f"r{number}",
            worker_id=1 + number % 2,
            sequence_hashes=list(range(first, first + BLOCKS)),
            isl_tokens=BLOCK_SIZE * BLOCKS,
        )
        before = time.thread_time()
        core.reservations.reserve(request, 1.0)
        booked.append(((time.thread_time() - before) * 1e3, number))
    ended: list[tuple[float, int]] = []
    for number in range(RESERVATIONS):
        before = time.thread_time()
        core.reservations.free(f"r{number}", 1.0)
        ended.append(((time.thread_time() - before) * 1e3, number))
    for what, seen in (("booking", booked), ("end", ended)):
        slowest = ", ".join(
            f"{ms:.2f} (the {at}th)" for ms, at in sorted(seen)[: -1 - SLOWEST : -1]
        )
        print(f"slowest of {RESERVATIONS} {what}s: {slowest} ms")


def main() -> None:
    """Print all of it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    gc.disable()
    measure_events()
    measure_bookings()


if __name__ == "__main__":
    main()
