"""What the gate costs inside the service: `python -m bench.micro.gate`.

Prints µs of CPU of one request's whole life in the core (select_and_reserve, prefill_complete,
free) with 256 workers of one rank, without a gate and behind each policy with thresholds and caps
on, interleaved; the difference is what admission costs. Once more with a cache-hit threshold on
every request, which then is all there is. A request comes every millisecond and lives for 64,
every prompt is new (the threshold is 0: measured and told, nobody is refused), and some requests
stand on every worker.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import process_time
from typing import Any

from indexer.core.registry import StreamRegistry
from select_service.core.service import SelectionCore
from select_service.types import RouterConfig, SelectAndReserveRequest, WorkerSpec

ROUNDS = 400
REPEATS = 15
BLOCKS = 32
PREFILL_ROUNDS = 32  # a prompt is computed after so many milliseconds
LIFE_ROUNDS = 64  # and its request ends after so many
ON: dict[str, Any] = {
    "mode": "token-capacity",
    "active_decode_blocks_threshold": 0.95,
    "active_prefill_tokens_threshold_frac": 100.0,
    "max_inflight": 1000,
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "no gate": None,
    "always-admit": {},
    "token-bucket": {
        "policy": "token-bucket",
        "policy_config": {"capacity": 1e12, "refill_rate": 1e9},
    },
    "tier-shed": {"policy": "tier-shed", "policy_config": {"threshold": 10_000}},
    "gaie-legacy": {"policy": "gaie-legacy"},
    "slo-shed": {"policy": "slo-shed"},
}

_random = random.Random(1)


def core_of(variant: dict[str, Any] | None, workers: int) -> SelectionCore:
    """A service with its workers, each with four requests on it."""
    settings: dict[str, Any] = {}
    if variant is not None:
        from select_service.types.admission import AdmissionSettings  # or without

        settings["admission"] = AdmissionSettings(**(ON | variant))
    config = RouterConfig(use_kv_events=False)
    core = SelectionCore(StreamRegistry(), config, random.Random(1), **settings)
    for worker_id in range(workers):
        spec = WorkerSpec(
            worker_id=worker_id,
            endpoint="http://w",
            block_size=16,
            max_num_batched_tokens=8192,
            total_kv_blocks=100_000,
        )
        core.workers.upsert_worker(spec, 0.0)
    for number in range(4 * workers):
        core.selection.select_and_reserve(prompt(f"standing-{number}"), 0.0)
        core.reservations.prefill_complete(f"standing-{number}", 0.0)
    return core


def prompt(
    name: str, slo_class: str | None = None, threshold: float | None = None
) -> SelectAndReserveRequest:
    """A prompt nobody has sent before."""
    hashes = [_random.getrandbits(63) for _ in range(BLOCKS)]
    return SelectAndReserveRequest(
        reservation_id=name,
        block_hashes=hashes,
        sequence_hashes=hashes,
        isl_tokens=BLOCKS * 16,
        slo_class=slo_class,
        cache_hit_threshold=threshold,
    )


def lives(
    core: SelectionCore,
    round_number: int,
    slo_class: str | None = None,
    threshold: float | None = None,
) -> float:
    """µs of CPU of one request's life, mean of some rounds a millisecond apart."""
    names = [f"{round_number}-{number}" for number in range(ROUNDS)]
    requests = [prompt(name, slo_class, threshold) for name in names]
    begin = 1.0 + round_number
    start = process_time()
    for number, request in enumerate(requests):
        now = begin + number * 1e-3
        core.selection.select_and_reserve(request, now)
        if number >= PREFILL_ROUNDS:
            core.reservations.prefill_complete(names[number - PREFILL_ROUNDS], now)
        if number >= LIFE_ROUNDS:
            core.reservations.free(names[number - LIFE_ROUNDS], now)
    seconds = process_time() - start
    for name in names[ROUNDS - LIFE_ROUNDS :]:
        core.reservations.free(name, begin + 0.5)
    return seconds / ROUNDS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--only", choices=VARIANTS, action="append")
    parser.add_argument("--slo-class", help="policies look at the pool for sheddable ones only")
    arguments = parser.parse_args()
    names = arguments.only or list(VARIANTS)
    cores = {name: core_of(VARIANTS[name], arguments.workers) for name in names}
    with_hits = {name: f"{name}, cache-hit" for name in names if VARIANTS[name] is not None}
    times: dict[str, list[float]] = {name: [] for name in (*names, *with_hits.values())}
    for repeat in range(REPEATS):
        for name, core in cores.items():
            lives(core, 3 * repeat, arguments.slo_class)  # its data comes near again
            times[name].append(lives(core, 3 * repeat + 1, arguments.slo_class))
            if name in with_hits:
                spent = lives(core, 3 * repeat + 2, arguments.slo_class, threshold=0.0)
                times[with_hits[name]].append(spent)
    first = times[names[0]]
    print(f"one request's life, {arguments.workers} workers, µs of CPU (best, median)")
    for name, some in times.items():
        more = median(one - other for one, other in zip(some, first, strict=True))
        print(f"  {name:24} {min(some):7.1f} {median(some):7.1f}   {more:+6.1f}")


if __name__ == "__main__":
    main()
