"""What the KV index costs per operation: `python -m bench.micro.index [--blocks N]`.

Prints µs per block stored, removed and appended, µs per find on several fleets, and bytes per
unique block of an index with N blocks (default a million): the growth of the process' resident
memory, engine-hash map included, and what tracemalloc attributes to Python objects. Times are CPU time. Hashes are new
random 64-bit numbers each time, so the tables are as cold as their size makes them. The collector
is frozen and off while timing, as the service does it at start-up.
"""

from __future__ import annotations

import argparse
import gc
import random
import tracemalloc
from pathlib import Path
from statistics import median
from struct import Struct
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import numpy as np

from indexer.core.index import KvIndex
from indexer.types import Tier, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

EVENT_BLOCKS = 64
DEVICE = Tier.DEVICE
_random = random.Random(1)

Prompt = tuple[list[int], bytes]  # engine hashes, packed local hashes


def prompt(blocks: int) -> Prompt:
    """Content and names nobody has seen before."""
    return [_random.getrandbits(64) for _ in range(blocks)], _random.randbytes(8 * blocks)


def fleet(ranks: int) -> tuple[KvIndex, list[WorkerRank]]:
    index = KvIndex(16)
    names = [WorkerRank(worker, 0) for worker in range(ranks)]
    for rank in names:
        index.attach(rank)
    return index, names


def store_prompt(index: KvIndex, rank: WorkerRank, text: Prompt, tier: Tier = DEVICE) -> None:
    """Announce a prompt in events of 64 blocks."""
    parent = None
    for at in range(0, len(text[0]), EVENT_BLOCKS):
        own = text[0][at : at + EVENT_BLOCKS]
        index.store(rank, tier, parent, own, text[1][8 * at : 8 * (at + EVENT_BLOCKS)])
        parent = own[-1]


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call with the collector out of the way."""
    gc.collect()
    gc.freeze()
    gc.disable()
    start = process_time()
    action()
    seconds = process_time() - start
    gc.enable()
    return seconds


def per_item(action: Callable[[Prompt], object], items: Iterable[Prompt]) -> float:
    """Median seconds of an action over items."""
    times = []
    for item in items:
        start = perf_counter()
        action(item)
        times.append(perf_counter() - start)
    return median(times)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def stores(blocks: int) -> None:
    for length, title in ((64, "one event per prompt"), (512, "8 events per prompt")):
        texts = [prompt(length) for _ in range(blocks // length)]
        index, ranks = fleet(1)
        seconds = timed(lambda t=texts, i=index, r=ranks: [store_prompt(i, r[0], x) for x in t])
        print(f"store, 64 new blocks per event, {title}: {seconds / blocks * 1e6:.3f} µs per block")
    turns = shared_turns(blocks)
    index, ranks = fleet(1)
    count = sum(len(own) for _, own, _ in turns)
    seconds = timed(lambda: [index.store(ranks[0], DEVICE, p, own, loc) for p, own, loc in turns])
    print(f"store, turns that branch off shared prefixes: {seconds / count * 1e6:.3f} µs per block")


def shared_turns(blocks: int) -> list[tuple[int | None, list[int], bytes]]:
    """Conversations: each turn goes on behind a random block announced before."""
    events: list[tuple[int | None, list[int], bytes]] = []
    known: list[int] = []
    while blocks > 0:
        own, local = prompt(_random.randint(4, 60))
        parent = _random.choice(known) if known and _random.random() < 0.9 else None
        events.append((parent, own, local))
        known.append(own[-1] if _random.random() < 0.9 else own[len(own) // 2])
        blocks -= len(own)
    return events


def append(rounds: int) -> None:
    index, ranks = fleet(1)
    grown, local = prompt(rounds)
    steps = [
        (grown[i - 1] if i else None, [grown[i]], local[8 * i : 8 * i + 8]) for i in range(rounds)
    ]
    seconds = timed(lambda: [index.store(ranks[0], DEVICE, *step) for step in steps])
    print(f"append one block to a growing sequence: {seconds / rounds * 1e6:.2f} µs")


def removals(blocks: int) -> None:
    for title, order in (("leaf first", -1), ("root first", 1)):
        index, ranks = fleet(1)
        texts = [prompt(256) for _ in range(blocks // 256)]
        for text in texts:
            store_prompt(index, ranks[0], text)
        doomed = [[name] for text in texts for name in text[0][::order]]
        seconds = timed(lambda i=index, r=ranks, d=doomed: [i.remove(r[0], DEVICE, x) for x in d])
        print(f"remove, one hash per event, {title}: {seconds / len(doomed) * 1e6:.2f} µs")
    index, ranks = fleet(1)
    texts = [prompt(256) for _ in range(blocks // 256)]
    for text in texts:
        store_prompt(index, ranks[0], text)
    doomed = [[name] for text in texts for name in text[0]]
    _random.shuffle(doomed)
    seconds = timed(lambda: [index.remove(ranks[0], DEVICE, x) for x in doomed])
    print(f"remove, one hash per event, any order: {seconds / len(doomed) * 1e6:.2f} µs")


def scattered(holders: int, lower: bool, blocks: int = 512) -> tuple[KvIndex, Prompt]:
    """A prompt of which each rank holds a part of another length, and branches of it."""
    index, ranks = fleet(holders)
    text = prompt(blocks)
    for number, rank in enumerate(ranks):
        own = [_random.getrandbits(64) for _ in range(blocks)]
        cut = blocks * (1 + number % 8) // 8
        store_prompt(index, rank, (own[:cut], text[1][: 8 * cut]))
        more, local = prompt(30)
        index.store(rank, DEVICE, own[cut - 1], more, local)
        if lower and cut < blocks:
            rest = (own[cut:], text[1][8 * cut :])
            index.store(rank, Tier.HOST_PINNED, own[cut - 1], *rest)
    return index, text


def finds() -> None:
    for holders in (1, 64, 1024):
        for lower in (False, True):
            index, text = scattered(holders, lower)
            probes = [text] * 2000
            find = per_item(lambda t, i=index: i.find_matches(t[1]), probes) * 1e6
            columns = np.zeros((3, index.capacity))
            matches = index.find_matches(text[1])
            fill = per_item(lambda _, m=matches, c=columns: m.fill(*c), probes) * 1e6
            tiers = "device and host" if lower else "device"
            print(
                f"find 512 blocks among {holders} holders, {tiers}: {find:.2f} µs, fill {fill:.2f} µs"
            )
    index, ranks = fleet(64)
    text = prompt(512)
    for rank in ranks:
        store_prompt(index, rank, ([_random.getrandbits(64) for _ in range(512)], text[1]))
    find = per_item(lambda t: index.find_matches(t[1]), [text] * 2000) * 1e6
    print(f"find 512 blocks among 64 holders of all of it: {find:.2f} µs")
    other = text[1][: 8 * 300] + _random.randbytes(8 * 212)
    find = per_item(lambda _: index.find_matches(other), [text] * 2000) * 1e6
    print(f"find, leaving the path inside an edge: {find:.2f} µs")


def memory(blocks: int) -> None:
    for length in (64, 512):
        index, ranks = fleet(1)
        gc.collect()
        before = resident()
        for _ in range(blocks // length):
            store_prompt(index, ranks[0], prompt(length))
        grown = resident() - before
        stats = index.stats
        print(
            f"memory, prompts of {length}: {grown / stats.blocks:.0f} bytes per unique block "
            f"(own estimate {stats.bytes / stats.blocks:.0f}), {stats.blocks:,} blocks in "
            f"{stats.nodes:,} nodes"
        )
        start = process_time()
        index.clear(ranks[0])
        worst, left = 0.0, 1
        while left:
            slice_start = process_time()
            left = index.sweep(64)
            worst = max(worst, process_time() - slice_start)
        print(
            f"  swept in {process_time() - start:.2f} s, longest slice of 64 {worst * 1e6:.0f} µs, "
            f"then {index.stats.blocks} blocks in {index.stats.nodes} nodes"
        )
        del index
    turns = shared_turns(blocks // 4)
    index, ranks = fleet(1)
    tracemalloc.start()
    for parent, own, local in turns:
        index.store(ranks[0], DEVICE, parent, [+name for name in own], local)
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    stats = index.stats
    print(
        f"memory, branching turns of 32 blocks: {traced / stats.blocks:.0f} bytes per unique block "
        f"traced without the hashes' own 48 (own estimate {stats.bytes / stats.blocks:.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["stores", "append", "removals", "finds", "memory"])
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "memory": lambda: memory(arguments.blocks),
        "stores": lambda: stores(arguments.blocks),
        "append": lambda: append(arguments.blocks // 10),
        "removals": lambda: removals(arguments.blocks // 4),
        "finds": finds,
    }
    for name, part in parts.items():
        if arguments.only in {None, name}:
            part()


if __name__ == "__main__":
    main()
