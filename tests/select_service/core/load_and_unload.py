"""A process of its own that books, ends and forgets; prints its memory in megabytes, as JSON.

`python -m tests.select_service.core.load_and_unload reservations|partitions COUNT`
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import resource
import sys
from collections.abc import Callable

from indexer.core.registry import StreamRegistry
from select_service.core.service import SelectionCore
from select_service.types import ReservationRequest, RouterConfig, WorkerSpec

BLOCKS = 16
TERMS_S = 900.0
"""Longer than anything that has ended is remembered, and than empty partitions linger."""


def rss_mb() -> float:
    """What the process takes now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def settled_mb() -> float:
    """The same in a quiet moment, as `edge/garbage_collection.py` makes them."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return rss_mb()


def core_with(workers: int) -> SelectionCore:
    core = SelectionCore(StreamRegistry(), RouterConfig(use_kv_events=False), random.Random(1))
    for worker_id in range(1, workers + 1):
        core.workers.upsert_worker(spec(worker_id), 1.0)
    return core


def spec(worker_id: int, model_name: str = "m") -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id, endpoint="http://w", block_size=16, model_name=model_name
    )


def let_pass(core: SelectionCore, now: float, turns: int) -> float:
    """Half a minute at a time, each with so many turns for what is done in slices."""
    end = now + TERMS_S
    while now < end:
        now += 30.0
        for _ in range(turns):
            core.tick(now)
    return now


def reservations(core: SelectionCore, count: int, now: float) -> tuple[float, float, float]:
    for number in range(count):
        first = number * BLOCKS
        request = ReservationRequest(
            reservation_id=f"r{now:.0f}-{number}",
            worker_id=1 + number % 2,
            sequence_hashes=list(range(first, first + BLOCKS)),
            isl_tokens=16 * BLOCKS,
            model_name="m",
        )
        core.reservations.reserve(request, now)
    full = rss_mb()
    for number in range(count):
        core.reservations.free(f"r{now:.0f}-{number}", now)
    for _ in range(2000):
        core.tick(now + 1.0)
    return full, settled_mb(), let_pass(core, now, 200)


def partitions(core: SelectionCore, count: int, now: float) -> tuple[float, float, float]:
    for number in range(count):
        core.workers.upsert_worker(spec(100 + number, model_name=f"m{now:.0f}-{number}"), now)
    full = rss_mb()
    for number in range(count):
        core.workers.delete_worker(100 + number, now)
    return full, settled_mb(), let_pass(core, now, 40)


LOADS: dict[str, Callable[[SelectionCore, int, float], tuple[float, float, float]]] = {
    "reservations": reservations,
    "partitions": partitions,
}


def main(what: str, count: int) -> None:
    core, load = core_with(2), LOADS[what]
    _, _, now = load(core, count // 100, 1.0)  # what is imported and set up once
    before, blocks = settled_mb(), sys.getallocatedblocks()
    full, ended, now = load(core, count, now)
    after, blocks_after = settled_mb(), sys.getallocatedblocks()
    load(core, count, now)
    again = settled_mb()
    core.check()
    measured = {"before": before, "full": full, "ended": ended, "after": after, "again": again}
    measured["blocks"] = blocks_after - blocks
    measured["left"] = len(core.membership.partitions)
    sys.stdout.write(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
