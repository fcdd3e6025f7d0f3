"""What it costs to keep a record of every decision: `python -m bench.micro.decisions`.

Prints µs of CPU of one selection, and of one request's whole life (select_and_reserve,
prefill_complete, free), in the core, without a ring and with the default one, which is full,
interleaved; the difference is what records cost. "changing" is a selection between two bookings:
the load columns are copied anew for each record.
"""

from __future__ import annotations

import argparse
import gc
import random
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, Any

from indexer.core.hashing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.service import SelectionCore
from select_service.types import (
    CoreLimits,
    RouterConfig,
    SelectAndReserveRequest,
    SelectRequest,
    WorkerSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 1000
REPEATS = 41
BLOCKS = 32
STANDING = 4
_random = random.Random(1)


def core_of(
    workers: int, *, ring: bool, stopwatch: Callable[[], float] | None = None
) -> SelectionCore:
    """A service with its workers, each with some requests on it, and a ring that is full."""
    limits = CoreLimits() if ring else CoreLimits(decision_ring=0)
    config = RouterConfig(use_kv_events=False)
    rng = random.Random(1)
    core = SelectionCore(
        StreamRegistry(), config, rng, limits=limits, watch=CoreObservers(stopwatch=stopwatch)
    )
    for worker_id in range(workers):
        core.workers.upsert_worker(
            WorkerSpec(worker_id=worker_id, endpoint="http://w", block_size=16), 0.0
        )
    for number in range(STANDING * workers):
        core.selection.select_and_reserve(booking(f"standing-{number}", hashes()), 0.0)
    index = core.partitions[Scope("default", "default")].index
    for worker_id in range(workers):
        index.store(WorkerRank(worker_id, 0), Tier.DEVICE, None, [*range(1, 17)], HELD)
    for _ in range(limits.decision_ring + 1):
        core.selection.select(SelectRequest(**_fields(hashes())), 0.0)
    return core


def hashes() -> bytes:
    """A prompt nobody has sent before."""
    return pack_u64([_random.getrandbits(63) for _ in range(BLOCKS)])


HELD = hashes()[: 16 * 8]


def _fields(packed: bytes) -> dict[str, Any]:
    return {"block_hashes": packed, "sequence_hashes": packed, "isl_tokens": BLOCKS * 16}


def booking(name: str, packed: bytes) -> SelectAndReserveRequest:
    """A request that books."""
    return SelectAndReserveRequest(reservation_id=name, **_fields(packed))


def selections(core: SelectionCore, number: int) -> float:
    """µs of CPU of one selection of a new prompt."""
    asks = [SelectRequest(**_fields(hashes())) for _ in range(ROUNDS)]
    start = process_time()
    for ask in asks:
        core.selection.select(ask, float(number))
    return (process_time() - start) / ROUNDS * 1e6


def matched(core: SelectionCore, number: int) -> float:
    """The same where half of the prompt is held everywhere."""
    asks = [SelectRequest(**_fields(HELD + hashes()[: 16 * 8])) for _ in range(ROUNDS)]
    start = process_time()
    for ask in asks:
        core.selection.select(ask, float(number))
    return (process_time() - start) / ROUNDS * 1e6


def lives(core: SelectionCore, number: int) -> float:
    """µs of CPU of one request's life."""
    asks = [booking(f"{number}-{one}", hashes()) for one in range(ROUNDS)]
    start = process_time()
    for ask in asks:
        name = ask.reservation_id or ""
        core.selection.select_and_reserve(ask, float(number))
        core.reservations.prefill_complete(name, float(number))
        core.reservations.free(name, float(number))
    return (process_time() - start) / ROUNDS * 1e6


KINDS: dict[str, Callable[[SelectionCore, int], float]] = {
    "select": selections,
    "select, half of it matched": matched,
    "lifecycle": lives,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, action="append")
    arguments = parser.parse_args()
    for workers in arguments.workers or [16, 256, 1024]:
        cores = {"off": core_of(workers, ring=False), "on": core_of(workers, ring=True)}
        gc.collect()
        gc.freeze()
        print(f"{workers} workers, µs of CPU (median without, with, difference)")
        for name, kind in KINDS.items():
            times: dict[str, list[float]] = {one: [] for one in cores}
            for repeat in range(REPEATS):
                for one in ("off", "on") if repeat % 2 else ("on", "off"):
                    times[one].append(kind(cores[one], 1 + repeat))
            off, on = median(times["off"]), median(times["on"])
            more = median(b - a for a, b in zip(times["off"], times["on"], strict=True))
            print(f"  {name:28} {off:7.2f} {on:7.2f}   {more:+6.2f}")
        decisions = cores["on"].decisions
        print(f"  {len(decisions)} records, {decisions.bytes / 1e6:.1f} MB charged")
        record = next(decisions.newest_first())
        start = process_time()
        for _ in range(20):
            ExplainedRecord(record, 0.0, 0.1).decision()
        short = (process_time() - start) / 20 * 1e6
        start = process_time()
        for _ in range(20):
            ExplainedRecord(record, 0.0, 0.1).whole()
        whole = (process_time() - start) / 20 * 1e6
        print(f"  told: {short:.0f} µs without, {whole:.0f} with all ranks")


if __name__ == "__main__":
    main()
