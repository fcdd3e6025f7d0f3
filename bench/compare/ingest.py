"""W6: KV events, CPU per block. One round stores and removes everything it stored.

A phase ends when the last block of every stream is seen in the index; the questions that find this
out are few and short, and part of the measured time for every contender alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from bench.compare.workloads import Phase
from bench.load.events import batch, engine_hashes, removed, stored
from bench.load.prompts import BLOCK_SIZE, Prompt, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bench.compare.target import Target

__all__ = ["Ingest"]

_CHAIN_BLOCKS = 512  # a prompt of 8192 tokens
_EVENT_BLOCKS = 64
_SENTINEL_BLOCKS = 4
_SEQUENCES = 64  # that grow at the same time
_PROBES = 3


@dataclass(slots=True)
class _Chain:
    """One sequence of blocks as one worker holds it."""

    worker_id: int
    token_ids: list[int]
    hashes: list[int]

    def stores(self, blocks_per_event: int) -> Iterator[dict[str, object]]:
        """Its events, in order."""
        for first in range(0, len(self.hashes), blocks_per_event):
            last = min(first + blocks_per_event, len(self.hashes))
            yield stored(
                self.hashes[first:last],
                self.hashes[first - 1] if first else None,
                self.token_ids[first * BLOCK_SIZE : last * BLOCK_SIZE],
            )


@dataclass(frozen=True, slots=True)
class Ingest:
    """Stores in bulk, block by block, eight sequences a step; removals one by one and in lists."""

    name: str
    blocks: int  # of the bulk phase; each of the small ones has an eighth
    workers: ClassVar[int] = 4
    shares_stream: ClassVar[bool] = False
    unit: ClassVar[str] = "block"

    def prepare(self, target: Target) -> None:
        """Nothing: the first round, which is not counted, warms up."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """Five phases over fresh content, the same for every contender."""
        rng = Random(f"{self.name} {round_number}")
        small = self.blocks // 8 // _SEQUENCES
        bulk = self._chains(rng, self.blocks // _CHAIN_BLOCKS, _CHAIN_BLOCKS)
        single = self._chains(rng, _SEQUENCES, small)
        steps = self._chains(rng, _SEQUENCES, small)
        first, second = bulk[: len(bulk) // 2] + single, bulk[len(bulk) // 2 :] + steps
        return [
            self._phase("store 64 blocks/event", target, rng, bulk, _prefills(bulk)),
            self._phase("store 1 block/event", target, rng, single, _decodes(single, 1)),
            self._phase(
                "store 1 block/event, 8 events/batch", target, rng, steps, _decodes(steps, 8)
            ),
            self._phase(
                "remove 1 block/event, 64 events/batch", target, rng, first, _evictions(first)
            ),
            self._phase("remove 64 blocks/event", target, rng, second, _drops(second)),
        ]

    def _chains(self, rng: Random, count: int, blocks: int) -> list[_Chain]:
        return [
            _Chain(
                1 + number % self.workers,
                random_tokens(rng, blocks * BLOCK_SIZE),
                engine_hashes(rng, blocks),
            )
            for number in range(count)
        ]

    def _phase(
        self,
        what: str,
        target: Target,
        rng: Random,
        chains: list[_Chain],
        batches: Iterable[tuple[int, bytes]],
    ) -> Phase:
        sentinels = [
            _Chain(
                worker_id,
                random_tokens(rng, _SENTINEL_BLOCKS * BLOCK_SIZE),
                engine_hashes(rng, _SENTINEL_BLOCKS),
            )
            for worker_id in target.worker_ids
        ]
        payloads = [*batches, *_prefills(sentinels)]
        asked = [(Prompt.of(one.token_ids), one.worker_id) for one in sentinels]
        probes = [(Prompt.of(one.token_ids), one) for one in rng.sample(chains, _PROBES)]

        def work() -> int:
            for worker_id, payload in payloads:
                target.publishers.publish(worker_id - 1, payload)
            for prompt, worker_id in asked:
                target.wait_indexed(prompt, worker_id, _SENTINEL_BLOCKS)
            return sum(len(chain.hashes) for chain in chains)

        def verify() -> None:
            removing = what.startswith("remove")
            target.check_indexed(
                [
                    (prompt, {} if removing else {chain.worker_id: len(chain.hashes)})
                    for prompt, chain in probes
                ]
            )

        return Phase(f"{self.name} {what}", work, verify)


def _prefills(chains: Sequence[_Chain]) -> Iterator[tuple[int, bytes]]:
    """A batch per event, as prefills in chunks of 1024 tokens make them."""
    for chain in chains:
        for event in chain.stores(_EVENT_BLOCKS):
            yield chain.worker_id, batch([event])


def _decodes(chains: Sequence[_Chain], events_per_batch: int) -> Iterator[tuple[int, bytes]]:
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


def _evictions(chains: Sequence[_Chain]) -> Iterator[tuple[int, bytes]]:
    """One event per block, the tail first, as an engine makes room."""
    for chain in chains:
        hashes = chain.hashes[::-1]
        for first in range(0, len(hashes), _EVENT_BLOCKS):
            yield (
                chain.worker_id,
                batch([removed([value]) for value in hashes[first : first + _EVENT_BLOCKS]]),
            )


def _drops(chains: Sequence[_Chain]) -> Iterator[tuple[int, bytes]]:
    """Lists of blocks in one event, the tail first."""
    for chain in chains:
        hashes = chain.hashes[::-1]
        for first in range(0, len(hashes), _EVENT_BLOCKS):
            yield chain.worker_id, batch([removed(hashes[first : first + _EVENT_BLOCKS])])
