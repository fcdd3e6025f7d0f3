"""W8: resident memory per indexed block, a fresh process per round.

A *pair* is one block held by one worker: what events report and an index must be able to answer
for. The value is the growth of resident memory from "workers registered" to "everything indexed,
and memory has come to rest", divided by the number of pairs.

* unique: every block has one holder, so pairs and blocks are the same number;
* shared: eight workers hold the same prompts, so every block is in eight pairs;
* burst: unique, published as fast as it goes. What piled up in front of the index and was not given
  back afterwards counts there, and nowhere else: otherwise publishing waits for the index.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.compare.run import Reading
from bench.compare.servers import RunningServer
from bench.compare.target import Target
from bench.load.chains import fresh_chains, prefills
from bench.load.events import Publishers
from bench.load.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.compare.servers import Contender

__all__ = ["Memory", "store_chains"]

_CHAIN_BLOCKS = 512  # prompts of 8192 tokens
_PROBES = 8
AHEAD_PAIRS = 1 << 14  # published before they are waited for
_REST_S = 0.2
_REST_GROWTH = 0.002
_RESTS = 5  # so many looks in a row without a change
_REST_LOOKS_MAX = 50


@dataclass(frozen=True, slots=True)
class Memory:
    """Store a number of (holder, block) pairs and look at the process."""

    name: str
    pairs: int
    holders: int = 1
    burst: bool = False
    workers: ClassVar[int] = 8
    rounds_max: ClassVar[int | None] = 3
    warms_up: ClassVar[bool] = False

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    @contextmanager
    def session(self, contender: Contender, connections: int) -> Iterator[_MemorySession]:
        """Nothing yet: processes start in each round."""
        yield _MemorySession(self, contender, connections)


@dataclass(frozen=True, slots=True)
class _MemorySession:
    workload: Memory
    contender: Contender
    connections: int

    def round(self, number: int) -> list[Reading]:
        """One life of a process."""
        of = self.workload
        with RunningServer(self.contender) as server, Publishers(of.workers) as publishers:
            target = Target(server, publishers, self.connections)
            target.register_workers()
            before, own_before = _at_rest(server), server.own_memory_bytes()
            cpu_before = server.cpu_s()
            ahead = of.pairs if of.burst else AHEAD_PAIRS
            pairs = store_chains(
                target, f"{of.name} {number}", of.pairs, holders=of.holders, ahead=ahead
            )
            cpu_s = server.cpu_s() - cpu_before
            after, own_after = _at_rest(server), server.own_memory_bytes()
        detail = {
            "pairs": pairs,
            "blocks": pairs / of.holders,
            "rss_before": before,
            "rss_after": after,
            "pss_growth": own_after - own_before,
            "ingest_cpu_s": cpu_s,
        }
        return [Reading(of.name, "bytes / pair", (after - before) / pairs, detail)]


def store_chains(
    target: Target, seed: str, pairs: int, *, holders: int = 1, ahead: int = AHEAD_PAIRS
) -> int:
    """Publish chains of blocks and wait until they are indexed; the number of pairs.

    At most `ahead` pairs are on their way at a time. Each chain is held by `holders` workers in a
    row, the next by the next ones. Afterwards the last chain of every worker and some others are
    looked up whole.

    Raises:
        BadAnswer: a block is not in the index, or is where it should not be.
    """
    workers = len(target.worker_ids)
    count = pairs // _CHAIN_BLOCKS // holders
    if count * holders < workers:
        raise ValueError("too few pairs for every worker to have a chain")
    asked: list[tuple[Prompt, dict[int, int]]] = []
    pause = max(1, ahead // _CHAIN_BLOCKS // holders)
    look_at = {*range(count - workers, count), *range(0, count, max(1, count // _PROBES))}
    for position, chain in enumerate(fresh_chains(seed, count, _CHAIN_BLOCKS)):
        held_by = [1 + (position * holders + step) % workers for step in range(holders)]
        for worker_id in held_by:
            chain.worker_id = worker_id
            for _, payload in prefills([chain]):
                target.publishers.publish(worker_id - 1, payload)
        if position in look_at or position % pause == 0:
            asked.append((Prompt.of(chain.token_ids), dict.fromkeys(held_by, _CHAIN_BLOCKS)))
        if position % pause == 0:
            target.wait_indexed(asked[-1][0], held_by[-1], _CHAIN_BLOCKS)
    # streams are indexed in order: a worker with its last chain has them all
    for prompt, held in asked[-workers:]:
        for worker_id, blocks in held.items():
            target.wait_indexed(prompt, worker_id, blocks)
    target.check_indexed(asked)
    return count * holders * _CHAIN_BLOCKS


def _at_rest(server: RunningServer) -> int:
    """Resident memory once it does not change any more; what it is if it never rests."""
    last, unchanged = server.memory_bytes(), 0
    for _ in range(_REST_LOOKS_MAX):
        time.sleep(_REST_S)
        now = server.memory_bytes()
        unchanged = unchanged + 1 if abs(now - last) <= _REST_GROWTH * last else 0
        last = now
        if unchanged == _RESTS:
            break
    return last
