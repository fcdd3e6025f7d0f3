"""What workers hold as chains of blocks, and the event batches by which it comes and goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.load.events import batch, engine_hashes, removed, stored
from bench.load.prompts import BLOCK_SIZE, VOCABULARY, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

__all__ = [
    "EVENT_BLOCKS",
    "Chain",
    "chains",
    "decodes",
    "drops",
    "evictions",
    "fresh_chains",
    "prefills",
]

EVENT_BLOCKS = 64
"""Blocks of an event in bulk: a chunk of 1024 tokens."""


@dataclass(slots=True)
class Chain:
    """One sequence of blocks as one worker holds it."""

    worker_id: int
    token_ids: Sequence[int]
    hashes: Sequence[int]  # as the engine names them

    def stores(self, blocks_per_event: int) -> Iterator[dict[str, object]]:
        """Its events, in order."""
        for first in range(0, len(self.hashes), blocks_per_event):
            last = min(first + blocks_per_event, len(self.hashes))
            yield stored(
                self.hashes[first:last],
                self.hashes[first - 1] if first else None,
                self.token_ids[first * BLOCK_SIZE : last * BLOCK_SIZE],
            )


def chains(rng: Random, count: int, blocks: int, workers: int) -> list[Chain]:
    """Unique content, a worker each in turn."""
    return [
        Chain(
            1 + number % workers,
            random_tokens(rng, blocks * BLOCK_SIZE),
            engine_hashes(rng, blocks),
        )
        for number in range(count)
    ]


def prefills(chains: Sequence[Chain]) -> Iterator[tuple[int, bytes]]:
    """A batch per event, as prefills in chunks of 1024 tokens make them."""
    for chain in chains:
        for event in chain.stores(EVENT_BLOCKS):
            yield chain.worker_id, batch([event])


def decodes(chains: Sequence[Chain], events_per_batch: int) -> Iterator[tuple[int, bytes]]:
    """All sequences grow by a block in turn; those of one worker share batches."""
    by_worker: dict[int, list[Iterator[dict[str, object]]]] = {}
    for chain in chains:
        by_worker.setdefault(chain.worker_id, []).append(chain.stores(1))
    for step in range(len(chains[0].hashes)):
        del step
        for worker_id, growing in by_worker.items():
            events = [next(one) for one in growing]
            for first in range(0, len(events), events_per_batch):
                yield worker_id, batch(events[first : first + events_per_batch])


def evictions(chains: Sequence[Chain]) -> Iterator[tuple[int, bytes]]:
    """One event per block, the tail first, as an engine makes room."""
    for chain in chains:
        hashes = chain.hashes[::-1]
        for first in range(0, len(hashes), EVENT_BLOCKS):
            yield (
                chain.worker_id,
                batch([removed([value]) for value in hashes[first : first + EVENT_BLOCKS]]),
            )


def drops(chains: Sequence[Chain]) -> Iterator[tuple[int, bytes]]:
    """Lists of blocks in one event, the tail first."""
    for chain in chains:
        hashes = chain.hashes[::-1]
        for first in range(0, len(hashes), EVENT_BLOCKS):
            yield chain.worker_id, batch([removed(hashes[first : first + EVENT_BLOCKS])])


def fresh_chains(seed: str, count: int, blocks: int) -> Iterator[Chain]:
    """The same kind of content many times faster, one chain at a time; of worker 1."""
    rng = np.random.default_rng(list(seed.encode()))
    for _ in range(count):
        tokens = rng.integers(0, VOCABULARY, blocks * BLOCK_SIZE).tolist()
        hashes = rng.integers(0, 1 << 64, blocks, dtype=np.uint64).tolist()
        yield Chain(1, tokens, hashes)
