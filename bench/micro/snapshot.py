"""What the index snapshot costs and saves: `python -m bench.micro.snapshot [--blocks N]`.

One process, no sockets: ranks are filled through their streams with encoded events, a snapshot is
written, another registry takes it back, and each stream is proven by the replay it asks for. The
longest hold is the longest time that a task which does nothing but yield had to wait for its turn,
beside what it waits when nothing runs. Chains are as long as a chat's: an edge of the tree each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec

from indexer.core.registry import StreamRegistry
from indexer.core.stream import EventStream
from indexer.edge.listener import Listeners
from indexer.edge.snapshot_file import NAME
from indexer.edge.snapshots import IndexSnapshots, SnapshotSource
from indexer.types import Scope, SnapshotLimits, WorkerRank

SCOPE = Scope("model", "tenant")
BLOCK_SIZE = 16
SEED = 20_261_121
ENDPOINT = ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
Batch = list[bytes]
R = TypeVar("R")


class House:
    """A registry with its streams and the snapshots of one directory."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.registry = StreamRegistry()
        self.registry.open_index(SCOPE, BLOCK_SIZE)
        self.listeners = Listeners(self.registry)
        self.snapshots = IndexSnapshots(directory, self.registry, SnapshotLimits(hold_s=60.0))
        self.sources = [
            SnapshotSource(
                self.registry.open_stream(
                    SCOPE, WorkerRank(number, 0), worker_ranks=range(1), has_replay=True
                ),
                *ENDPOINT,
            )
            for number in range(ranks)
        ]

    def credited(self) -> int:
        """Ranks whose engine has proven them."""
        return sum(not source.stream.is_unproven for source in self.sources)


def events(blocks: int, chain: int) -> list[Batch]:
    """Encoded batches of one chain each, as a rank publishes them."""
    rng = random.Random(SEED + blocks)
    encode = msgspec.msgpack.Encoder().encode
    batches = []
    for number in range(blocks // chain):
        names = [rng.getrandbits(64) for _ in range(chain)]
        tokens = [rng.randrange(150_000) for _ in range(chain * BLOCK_SIZE)]
        stored = ["BlockStored", names, None, tokens, BLOCK_SIZE, None, None]
        batches.append([b"", number.to_bytes(8, "big"), encode([float(number), [stored], None])])
    return batches


def feed(stream: EventStream, batches: list[Batch]) -> None:
    for batch in batches:
        stream.on_live(batch, 0.0)
        while stream.is_busy:
            stream.resume(0.0)


def prove(stream: EventStream, last: Batch) -> None:
    """Answer as an engine that has said nothing since."""
    assert stream.request is not None
    stream.on_replay([b"", *last], 0.0)
    stream.on_replay([b"", b"", b"\xff" * 8, b""], 0.0)


async def watched(work: Awaitable[R]) -> tuple[R, float, float, float]:
    """Result, seconds, CPU seconds, and the longest hold of the loop in seconds."""
    worst, watching = 0.0, True

    async def watch() -> None:
        nonlocal worst
        while watching:
            before = time.thread_time()
            await asyncio.sleep(0)
            # the loop's own time: what other processes take of this machine is not our hold
            worst = max(worst, time.thread_time() - before)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        started, cpu = time.perf_counter(), time.process_time()
        result = await work
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        watching = False
    return result, seconds, cpu, worst


async def measure(directory: Path, blocks: int, ranks: int, chain: int) -> None:
    house = House(directory, ranks)
    batches = events(blocks // ranks, chain)
    stored = len(batches) * chain * ranks
    started = time.perf_counter()
    for source in house.sources:
        feed(source.stream, batches)
    fed = time.perf_counter() - started
    gc.collect()
    gc.freeze()
    _, seconds, cpu, hold = await watched(house.snapshots.write(house.sources, house.listeners))
    size = (directory / NAME).stat().st_size
    assert house.snapshots.blocks == stored, house.snapshots.left_out
    print(f"\n{stored} blocks of {ranks} ranks, {chain} in a chain")
    print(f"  on disk        {size / stored:7.2f} bytes a block")
    per = 1e6 / stored
    print(f"  publish again  {fed * per:7.2f} µs a block   {fed:6.2f} s")
    print(
        f"  write          {cpu * per:7.2f} µs a block   {seconds:6.2f} s   {ms(hold)} ms at once"
    )
    other = House(directory, ranks)

    async def load() -> None:
        await other.snapshots.open()
        for source in other.sources:
            assert await other.snapshots.load(source), other.snapshots.rejected
            prove(source.stream, batches[-1])

    _, seconds, cpu, hold = await watched(load())
    assert other.credited() == ranks
    index = other.registry.index(SCOPE)
    assert index is not None
    assert sum(index.stats.holdings) == stored
    print(
        f"  to credited    {cpu * per:7.2f} µs a block   {seconds:6.2f} s   {ms(hold)} ms at once"
    )
    gc.unfreeze()


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--state-dir", type=Path, default=None, help="where; default: a temporary")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.state_dir) as directory:
        for ranks, chain in ((1, 64), (64, 64), (64, 8)):
            asyncio.run(measure(Path(directory), chosen.blocks, ranks, chain))


if __name__ == "__main__":
    main()
