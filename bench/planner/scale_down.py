"""Who may go, on a recorded trace: `python -m bench.planner.scale_down --trace FILE`.

The service routes Mooncake's conversation trace over simulated engines. Halfway some of them
are taken away: those it advises (`/scale_down_candidates`), the newest ones, or none. What counts
is the hit rate of the next quarter of the trace. Leaves a JSON file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from bench.provenance import provenance
from select_service.drain_types import ScaleDownCandidate
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.settings import PoolSettings
from select_service.simulator.core.worker import EngineSettings
from select_service.simulator.traces import READERS, TraceWorkload

T = TypeVar("T")
BLOCK: Final = 512
TRACE_S: Final = 3_600.0
CHOICES: Final = ("none", "advised", "newest")
TRACE: Final = (
    Path(__file__).parents[3] / "shared" / "golden" / "traces" / "mooncake_conversation_trace.jsonl"
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    trace: str
    removed: str
    workers: int = 8
    gone: int = 2
    speed: float = 1.0
    kv_tokens: int = 400_000
    seed: int = 1


def told(asked: Generator[None, None, T]) -> T:
    """Let a sliced answer finish."""
    while True:
        try:
            next(asked)
        except StopIteration as ended:
            found: T = ended.value
            return found


def hit_rate_after(task: Task) -> float:
    """Return the share of prompt tokens that were cached, after workers were taken away."""
    router = CoreRouter(CoreSettings(), [random.Random(task.seed)])
    with Path(task.trace).open("rb") as lines:
        workload = TraceWorkload(
            READERS["mooncake"](lines, BLOCK),
            BLOCK,
            random.Random(f"{task.seed}/trace"),
            speed=task.speed,
            jitter_s=3.0,
        )
        pool = PoolSettings("aggregated", EngineSettings(kv_tokens=task.kv_tokens))
        settings = ClusterSettings({"workers": pool}, block_size=BLOCK)
        cluster = Cluster(settings, router, workload)
        half_s = TRACE_S / task.speed / 2
        for _ in range(task.workers):
            cluster.add_worker("workers", 0.0)
        cluster.advance(half_s)
        cluster.observe()
        for worker_id in _leaving(router, cluster, task):
            cluster.remove_worker(worker_id, cluster.now)
        cluster.advance(1.5 * half_s)
        rate = cluster.observe().hit_rate
    assert rate is not None, "there was traffic"
    return rate


def _leaving(router: CoreRouter, cluster: Cluster, task: Task) -> list[int]:
    if task.removed == "none":
        return []
    if task.removed == "newest":
        return cluster.worker_ids("workers")[-task.gone :]
    core = router.replicas[0].core
    asked: list[ScaleDownCandidate] = told(core.scale_down_candidates(task.gone, None, None))
    return [one.worker_id for one in asked]


def rates(like: Task, seeds: int, jobs: int) -> dict[str, list[float]]:
    """Return hit rates by whom was taken away, one per seed."""
    tasks = [
        replace(like, removed=one, seed=seed) for one in CHOICES for seed in range(1, seeds + 1)
    ]
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(hit_rate_after, tasks))
    return {
        choice: [rate for task, rate in zip(tasks, found, strict=True) if task.removed == choice]
        for choice in CHOICES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--gone", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="of one engine's cache")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale-down.json"))
    args = parser.parse_args()
    like = Task(
        trace=str(args.trace),
        removed="none",
        workers=args.workers,
        gone=args.gone,
        speed=args.speed,
        kv_tokens=args.kv_tokens,
    )
    found = rates(like, args.seeds, args.jobs)
    for choice, values in found.items():
        each = " ".join(f"{100 * one:.2f}" for one in values)
        print(f"{choice:8} {100 * statistics.mean(values):6.2f} % hits ({each})")
    result = {
        "what": "hit rate after workers were taken away, on a recorded trace",
        "provenance": provenance(),
        "settings": replace(like, trace=args.trace.name),
        "hit_rate": found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
