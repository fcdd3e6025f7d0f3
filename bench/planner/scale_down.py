"""Who may go, on a recorded trace: `python -m bench.planner.scale_down --trace FILE`.

The service routes Mooncake's conversation trace over simulated engines. Halfway some of them
are taken away: those it advises (`/scale_down_candidates`), the newest ones, or none. What counts
is the hit rate of the next quarter of the trace. `--every` tries every set of so many, too: the
best of them bounds what any advice could do. Leaves a JSON file.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import random
import statistics
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
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
    with _half_done(task) as (router, cluster):
        return _went_on(cluster, task, _leaving(router, cluster, task))


def every_hit_rate(task: Task) -> dict[tuple[int, ...], float]:
    """Return that of every set of workers that could be taken away, by their places in order.

    The first half of the trace is the same for all: it is gone through once, and a process is
    forked off for each set.
    """
    found: dict[tuple[int, ...], float] = {}
    with _half_done(task) as (_, cluster):
        ids = cluster.worker_ids("workers")
        for places in itertools.combinations(range(len(ids)), task.gone):
            leaving = [ids[place] for place in places]
            found[places] = _forked(cluster, task, leaving)
    return found


def advised_places(task: Task) -> tuple[int, ...]:
    """Return whom the service advises to take away, by their places in order."""
    with _half_done(task) as (router, cluster):
        ids = cluster.worker_ids("workers")
        leaving = _leaving(router, cluster, replace(task, removed="advised"))
        return tuple(sorted(ids.index(one) for one in leaving))


@contextmanager
def _half_done(task: Task) -> Iterator[tuple[CoreRouter, Cluster]]:
    router = CoreRouter(CoreSettings(), [random.Random(task.seed)])
    # in memory: a file that forks read on would be one file for all of them
    lines = io.BytesIO(Path(task.trace).read_bytes())
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
    for _ in range(task.workers):
        cluster.add_worker("workers", 0.0)
    cluster.advance(TRACE_S / task.speed / 2)
    cluster.observe()
    yield router, cluster


def _went_on(cluster: Cluster, task: Task, leaving: Sequence[int]) -> float:
    for worker_id in leaving:
        cluster.remove_worker(worker_id, cluster.now)
    cluster.advance(1.5 * TRACE_S / task.speed / 2)
    rate = cluster.observe().hit_rate
    assert rate is not None, "there was traffic"
    return rate


def _forked(cluster: Cluster, task: Task, leaving: Sequence[int]) -> float:
    """Go on in a copy of this process: whatever it changes is gone with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(_went_on(cluster, task, leaving)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        answer = told.read()
    os.waitpid(child, 0)
    return float(answer)


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


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all the sets of workers there are, of one seed."""

    seed: int
    sets: int
    best: float
    mean: float
    deviation: float
    worst: float
    advised_rank: int
    newest_rank: int


def _bounds(like: Task, seeds: int, jobs: int) -> list[Bound]:
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(bound_of, [replace(like, seed=one + 1) for one in range(seeds)]))


def bound_of(task: Task) -> Bound:
    """Try every set of so many workers."""
    found = every_hit_rate(task)
    ordered = sorted(found.values(), reverse=True)
    newest = tuple(range(task.workers - task.gone, task.workers))
    return Bound(
        seed=task.seed,
        sets=len(found),
        best=ordered[0],
        mean=statistics.mean(ordered),
        deviation=statistics.pstdev(ordered),
        worst=ordered[-1],
        advised_rank=1 + ordered.index(found[advised_places(task)]),
        newest_rank=1 + ordered.index(found[newest]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--gone", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="of one engine's cache")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", action="store_true", help="try every set of so many, too")
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
    bounds = _bounds(like, args.seeds, args.jobs) if args.every else []
    for bound in bounds:
        print(
            f"seed {bound.seed}: of {bound.sets} sets the best leaves {100 * bound.best:.2f} %, on "
            f"average {100 * bound.mean:.2f} +- {100 * bound.deviation:.2f}, the worst "
            f"{100 * bound.worst:.2f}; advised is no. {bound.advised_rank}, newest no. "
            f"{bound.newest_rank}"
        )
    result = {
        "what": "hit rate after workers were taken away, on a recorded trace",
        "provenance": provenance(),
        "settings": replace(like, trace=args.trace.name),
        "hit_rate": found,
        "every_set": bounds,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
