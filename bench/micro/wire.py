"""What one block of an engine's event stream costs, step by step, in one process.

Run `python -m bench.micro.wire`. Payloads are those of vLLM's two encodings with random token ids
of a 152,000-word vocabulary. Each number is the best of several repeats: on a shared machine the
best is what the code costs, the rest is what the neighbours cost.
"""

from __future__ import annotations

import random
import time
import timeit
from typing import TYPE_CHECKING

import msgspec

from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.core.registry import StreamRegistry
from indexer.core.wire import BatchDecoder
from indexer.types import Scope, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.core.stream import EventStream

BLOCK_SIZE = 16
REPEATS = 7
SEED = 20_261_121


def _stored(rng: random.Random, first: int, blocks: int, parent: int | None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [(first + at) * 0x9E3779B97F4A7C15 % (1 << 64) for at in range(blocks)],
        "parent_block_hash": parent,
        "token_ids": [rng.randrange(152_000) for _ in range(BLOCK_SIZE * blocks)],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }


def _removed(first: int, blocks: int) -> dict[str, object]:
    """Backwards, as an engine lets go of a sequence."""
    hashes = [(first + at) * 0x9E3779B97F4A7C15 % (1 << 64) for at in range(blocks - 1, -1, -1)]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def _payload(events: list[dict[str, object]], form: str) -> bytes:
    shaped: list[object] = [e if form == "map" else list(e.values()) for e in events]
    return msgspec.msgpack.encode([1.0, shaped, 0])


def _payloads(form: str, count: int, blocks: int) -> list[bytes]:
    rng = random.Random(SEED)
    return [_payload([_stored(rng, n * blocks, blocks, None)], form) for n in range(count)]


def _stream() -> EventStream:
    registry = StreamRegistry()
    scope = Scope("m", "t")
    registry.open_index(scope, BLOCK_SIZE)
    return registry.open_stream(scope, WorkerRank(1, 0), worker_ranks=range(1), has_replay=False)


def _feed(messages: list[list[bytes]]) -> None:
    _hear(_stream(), messages)


def _hear(stream: EventStream, messages: list[list[bytes]]) -> None:
    before = stream.tallies.batches
    for frames in messages:
        stream.on_live(frames, 0.0)
        while stream.is_busy:
            stream.resume(0.0)
    assert stream.tallies.batches == before + len(messages)


def _removal(stores: list[bytes], removals: list[bytes], blocks: int) -> float:
    """Microseconds per block; what is removed is stored anew each time, off the clock."""
    best = float("inf")
    for _ in range(REPEATS):
        stream = _stream()
        messages = _messages(stores + removals)
        _hear(stream, messages[: len(stores)])
        start = time.perf_counter()
        _hear(stream, messages[len(stores) :])
        best = min(best, time.perf_counter() - start)
    return best / blocks * 1e6


def _best(work: Callable[[], object], units: int) -> float:
    """Microseconds per unit."""
    return min(timeit.repeat(work, number=1, repeat=REPEATS)) / units * 1e6


def _messages(payloads: list[bytes]) -> list[list[bytes]]:
    return [[b"", seq.to_bytes(8, "big"), payload] for seq, payload in enumerate(payloads)]


def main() -> None:
    """Print every number."""
    rng = random.Random(SEED)
    tokens = [rng.randrange(152_000) for _ in range(BLOCK_SIZE * 64)]
    local = block_hashes(tokens, BLOCK_SIZE)
    rows = [
        (
            "block hash",
            _best(lambda: [block_hashes(tokens, BLOCK_SIZE) for _ in range(200)], 12_800),
        ),
        ("sequence hash", _best(lambda: [sequence_hashes(local) for _ in range(200)], 12_800)),
    ]
    for form in ("map", "array"):
        bulk, single = _payloads(form, 300, 64), _payloads(form, 4_000, 1)
        decoder = BatchDecoder()
        rows += [
            (
                f"decode, {form}, 64 blocks an event: a block",
                _best(lambda: [decoder.decode(p) for p in bulk], 300 * 64),
            ),
            (
                f"decode, {form}, 1 block an event: an event",
                _best(lambda: [decoder.decode(p) for p in single], 4_000),
            ),
            (
                f"bytes to index, {form}, 64 blocks an event: a block",
                _best(lambda: _feed(_messages(bulk)), 300 * 64),
            ),
            (
                f"bytes to index, {form}, 1 block an event: an event",
                _best(lambda: _feed(_messages(single)), 4_000),
            ),
            (
                f"removals, {form}, 64 blocks an event: a block",
                _removal(
                    bulk, [_payload([_removed(n * 64, 64)], form) for n in range(300)], 300 * 64
                ),
            ),
            (
                f"removals, {form}, 1 block an event, 64 a batch: a block",
                _removal(
                    bulk,
                    [
                        _payload([_removed(n * 64 + at, 1) for at in range(63, -1, -1)], form)
                        for n in range(300)
                    ],
                    300 * 64,
                ),
            ),
        ]
    for name, cost in rows:
        print(f"{name:60} {cost:7.2f} µs")


if __name__ == "__main__":
    main()
