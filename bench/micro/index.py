"""What the index itself costs: a block stored in bulk, a find, the bytes of a block.

Run `python -m bench.micro.index`. Times are the best of several repeats, in one process and with
the garbage collector frozen as in the service. The content is random and unique per worker but for
the shared prefixes that `find` walks; engine hashes are random 64-bit numbers.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import TYPE_CHECKING

from indexer.core.hashing import pack_u64
from indexer.core.index import KvIndex
from indexer.types import Tier, WorkerRank

if TYPE_CHECKING:
    from indexer.types import PackedHashes

BLOCK_SIZE = 16
REPEATS = 5
SEED = 20_261_121
CHUNKS, CHUNK_BLOCKS = 1_000, 512
HOLDERS, PROMPT_BLOCKS = 64, 512


def _numbers(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def _runs(rng: random.Random, count: int, blocks: int) -> list[tuple[list[int], PackedHashes]]:
    return [(_numbers(rng, blocks), pack_u64(_numbers(rng, blocks))) for _ in range(count)]


def bulk_store_us() -> float:
    """Microseconds per block: events of 512 blocks, unique content, one rank."""
    rng = random.Random(SEED)
    runs = _runs(rng, CHUNKS // 5, CHUNK_BLOCKS)
    best = float("inf")
    for _ in range(REPEATS):
        index, rank = KvIndex(BLOCK_SIZE), WorkerRank(1, 0)
        index.attach(rank)
        gc.collect()
        gc.freeze()
        start = time.perf_counter()
        for names, local in runs:
            index.store(rank, Tier.DEVICE, None, names, local)
        best = min(best, time.perf_counter() - start)
        gc.unfreeze()
    return best / (len(runs) * CHUNK_BLOCKS) * 1e6


def find_us(lengths: int) -> float:
    """Microseconds per find of 512 blocks; 64 ranks hold prefixes of it, of so many lengths.

    Every length is one more node on the path.
    """
    rng = random.Random(SEED)
    index = KvIndex(BLOCK_SIZE)
    content = _numbers(rng, PROMPT_BLOCKS)
    for worker in range(HOLDERS):
        rank = WorkerRank(worker, 0)
        index.attach(rank)
        length = PROMPT_BLOCKS * (worker % lengths + 1) // lengths
        names = _numbers(rng, length)
        index.store(rank, Tier.DEVICE, None, names, pack_u64(content[:length]))
    prompt = pack_u64(content)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(2_000):
            index.find_matches(prompt)
        best = min(best, time.perf_counter() - start)
    return best / 2_000 * 1e6


def bytes_per_block() -> tuple[float, float]:
    """Bytes per unique block, as allocated and as the index estimates them for /metrics."""
    rng = random.Random(SEED)
    runs = _runs(rng, CHUNKS, CHUNK_BLOCKS)
    index, rank = KvIndex(BLOCK_SIZE), WorkerRank(1, 0)
    index.attach(rank)
    tracemalloc.start()
    for names, local in runs:
        index.store(rank, Tier.DEVICE, None, [int(str(n)) for n in names], bytes(bytearray(local)))
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    blocks = CHUNKS * CHUNK_BLOCKS
    return allocated / blocks, index.stats.bytes / blocks


def main() -> None:
    """Print every number."""
    print(f"store in bulk: {bulk_store_us():.3f} us a block")
    for lengths in (1, 4, 8, HOLDERS):
        print(
            f"find {PROMPT_BLOCKS} blocks among {HOLDERS} holders of {lengths} lengths: "
            f"{find_us(lengths):.2f} us"
        )
    allocated, estimated = bytes_per_block()
    print(f"memory: {allocated:.0f} bytes a unique block allocated, {estimated:.0f} estimated")


if __name__ == "__main__":
    main()
