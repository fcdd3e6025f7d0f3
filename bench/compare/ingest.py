"""W6: KV events, CPU per block. One round stores and removes everything it stored.

A phase ends when the last block of every stream is seen in the index; the questions that find this
out are few and short, and part of the measured time for every contender alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from bench.compare.served import Phase
from bench.load.chains import Chain, chains, decodes, drops, evictions, prefills
from bench.load.events import engine_hashes
from bench.load.prompts import BLOCK_SIZE, Prompt, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.compare.target import Target

__all__ = ["Ingest"]

_CHAIN_BLOCKS = 512  # a prompt of 8192 tokens
_SENTINEL_BLOCKS = 4
_SEQUENCES = 64  # that grow at the same time
_PROBES = 3
_PHASES = (
    "store 64 blocks/event",
    "store 1 block/event",
    "store 1 block/event, 8 events/batch",
    "remove 1 block/event, 64 events/batch",
    "remove 64 blocks/event",
)


@dataclass(frozen=True, slots=True)
class Ingest:
    """Stores in bulk, block by block, eight sequences a step; removals one by one and in lists."""

    name: str
    blocks: int  # of the bulk phase; each of the small ones has an eighth
    workers: ClassVar[int] = 4
    shares_stream: ClassVar[bool] = False
    unit: ClassVar[str] = "block"

    @property
    def rows(self) -> tuple[str, ...]:
        """One per phase."""
        return tuple(f"{self.name} {phase}" for phase in _PHASES)

    def prepare(self, target: Target) -> None:
        """Nothing: the first round, which is not counted, warms up."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """Five phases over fresh content, the same for every contender."""
        rng = Random(f"{self.name} {round_number}")
        small = self.blocks // 8 // _SEQUENCES
        bulk = chains(rng, self.blocks // _CHAIN_BLOCKS, _CHAIN_BLOCKS, self.workers)
        single = chains(rng, _SEQUENCES, small, self.workers)
        steps = chains(rng, _SEQUENCES, small, self.workers)
        first, second = bulk[: len(bulk) // 2] + single, bulk[len(bulk) // 2 :] + steps
        work = [
            (bulk, prefills(bulk)),
            (single, decodes(single, 1)),
            (steps, decodes(steps, 8)),
            (first, evictions(first)),
            (second, drops(second)),
        ]
        return [
            self._phase(row, target, rng, *one) for row, one in zip(self.rows, work, strict=True)
        ]

    def _phase(
        self,
        row: str,
        target: Target,
        rng: Random,
        stored: list[Chain],
        batches: Iterable[tuple[int, bytes]],
    ) -> Phase:
        sentinels = [
            Chain(
                worker_id,
                random_tokens(rng, _SENTINEL_BLOCKS * BLOCK_SIZE),
                engine_hashes(rng, _SENTINEL_BLOCKS),
            )
            for worker_id in target.worker_ids
        ]
        payloads = [*batches, *prefills(sentinels)]
        asked = [(Prompt.of(one.token_ids), one.worker_id) for one in sentinels]
        probes = [(Prompt.of(one.token_ids), one) for one in rng.sample(stored, _PROBES)]

        def work() -> int:
            for worker_id, payload in payloads:
                target.publishers.publish(worker_id - 1, payload)
            for prompt, worker_id in asked:
                target.wait_indexed(prompt, worker_id, _SENTINEL_BLOCKS)
            return sum(len(chain.hashes) for chain in stored)

        def verify() -> None:
            removing = " remove " in row
            target.check_indexed(
                [
                    (prompt, {} if removing else {chain.worker_id: len(chain.hashes)})
                    for prompt, chain in probes
                ]
            )

        return Phase(row, work, verify)
