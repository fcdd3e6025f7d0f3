"""Which workers may go, on a recorded trace: `python -m bench.planner.scale_down --trace FILE`.

The service routes Mooncake's conversation trace over simulated engines. Halfway some of them
are taken away: those it advises (`/scale_down_candidates`), the newest ones, or none. What counts
is the hit rate of the next quarter of the trace. Beside them stands a fleet that was as small from
the beginning: what it misses is for want of room, and no choice of workers brings it back.
Rows of those the service names show what it forecast of their loss (`hit_rate_loss_so_far`), and in
how many seeds they were `advised` to go at all.
`--every` tries every set of so many, too: the best of them bounds what any advice could do.
`--pause` lets the advised ones go one after the other, too. Leaves a JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from bench.output import progress
from bench.provenance import provenance
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.engine_settings import EngineSettings, SimulatedPool
from select_service.simulator.traces import READERS, TraceWorkload
from select_service.types.workers import ScaleDownCandidate

T = TypeVar("T")
BLOCK: Final = 512
TRACE_S: Final = 3_600.0
STAGES_S: Final = (60.0, 180.0, 300.0, 900.0)
"""After the removal, in seconds of the trace: ends of the stretches that are shown."""
TRACE: Final = (
    Path(__file__).parents[3] / "shared" / "golden" / "traces" / "mooncake_conversation_trace.jsonl"
)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Engines, and how fast the trace is played to them: twice as many take it twice as fast."""

    workers: int = 8
    speed: float = 1.0
    kv_tokens: int = 400_000
    seed: int = 1
    trace: str = str(TRACE)


FLEETS: Final = {
    Fleet(workers=8): (1, 2),
    Fleet(workers=16, speed=2.0): (1, 2, 4),
    Fleet(workers=64, speed=8.0): (1, 4, 8),
    Fleet(workers=64, speed=4.0): (1, 4, 8),  # half the load: when fleets are made smaller
}
"""Fleets, and how many of each are taken away."""


class After(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a fleet that lost some."""

    hit_rate: float  # share of prompt tokens that were cached
    stages: tuple[float, ...]  # of it, by `STAGES_S`
    busy: float  # share of the engines' time


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One removal."""

    fleet: Fleet
    gone: int
    choice: str
    after: After
    foretold: float | None = None  # the share of the hit rate that can go with them
    advised: bool | None = None  # whether they may go, by that


def result_of(asked: Generator[None, None, T]) -> T:
    """Let a sliced answer finish."""
    while True:
        try:
            next(asked)
        except StopIteration as ended:
            found: T = ended.value
            return found


class Halfway:
    """A fleet in the middle of the trace.

    The first half is gone through once, and a process is forked off for each way to go on.
    """

    def __init__(self, fleet: Fleet, router: CoreRouter, cluster: Cluster) -> None:
        self._fleet = fleet
        self._router = router
        self._cluster = cluster
        self.ids = cluster.worker_ids("workers")

    def candidates(self, gone: int) -> list[ScaleDownCandidate]:
        """Return what the service advises to take away, and its reasons."""
        core = self._router.replicas[0].core
        asked: list[ScaleDownCandidate] = result_of(core.scale_down.candidates(gone, None, None))
        return asked

    def advised(self, gone: int) -> list[int]:
        """Return what the service advises to take away."""
        return [one.worker_id for one in self.candidates(gone)]

    def newest(self, gone: int) -> list[int]:
        """Return those that came last."""
        return self.ids[-gone:]

    def without(self, leaving: Sequence[int], pause_s: float = 0.0) -> After:
        """Go on without some, in a copy of this process: what it changes is gone with it.

        Between two of them are so many seconds of the trace, and no more than its next quarter.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, msgspec.json.encode(self._went_on(leaving, pause_s)))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        return msgspec.json.decode(answer, type=After)

    def _went_on(self, leaving: Sequence[int], pause_s: float) -> After:
        cluster, begin = self._cluster, self._cluster.now
        for number, worker_id in enumerate(leaving):
            when = begin + min(number * pause_s, STAGES_S[-1]) / self._fleet.speed
            cluster.at(when, partial(cluster.remove_worker, worker_id, when))
        stages, cached, prompts, busy = [], 0.0, 0.0, 0.0
        for end in STAGES_S:
            cluster.advance(begin + end / self._fleet.speed)
            seen = cluster.observe()
            assert seen.hit_rate is not None, "there was traffic"
            stages.append(seen.hit_rate)
            cached += seen.hit_rate * seen.prompt_tokens
            prompts += seen.prompt_tokens
            busy = seen.pools["workers"].busy
        return After(hit_rate=cached / prompts, stages=tuple(stages), busy=busy)


@contextmanager
def halfway(fleet: Fleet) -> Iterator[Halfway]:
    """Play the first half of the trace."""
    router = CoreRouter(CoreSettings(), [random.Random(fleet.seed)])
    with Path(fleet.trace).open("rb") as lines:  # all of it: forks would share what is left of it
        requests = list(READERS["mooncake"](lines, BLOCK))
    workload = TraceWorkload(
        requests,
        BLOCK,
        random.Random(f"{fleet.seed}/trace"),
        speed=fleet.speed,
        jitter_s=3.0,
    )
    pool = SimulatedPool("aggregated", EngineSettings(kv_tokens=fleet.kv_tokens))
    cluster = Cluster(ClusterSettings({"workers": pool}, block_size=BLOCK), router, workload)
    for _ in range(fleet.workers):
        cluster.add_worker("workers", 0.0)
    cluster.advance(TRACE_S / fleet.speed / 2)
    cluster.observe()
    yield Halfway(fleet, router, cluster)


def removals(fleet: Fleet, gone: Sequence[int], pause_s: float = 0.0) -> list[Run]:
    """Take so many away, or so many, by each choice there is; 0 is none."""
    with halfway(fleet) as there:
        found = [Run(fleet=fleet, gone=0, choice="none", after=there.without([]))]
        for count in gone:
            named = there.candidates(count)
            found.append(
                Run(
                    fleet=fleet,
                    gone=count,
                    choice="advised",
                    after=there.without([one.worker_id for one in named]),
                    foretold=named[-1].hit_rate_loss_so_far,
                    advised=named[-1].advised,
                )
            )
            after = there.without(there.newest(count))
            found.append(Run(fleet=fleet, gone=count, choice="newest", after=after))
            if pause_s and count > 1:
                after = there.without(there.advised(count), pause_s)
                choice = f"advised, {pause_s:g} s apart"
                found.append(Run(fleet=fleet, gone=count, choice=choice, after=after))
    return found


def never_there(fleet: Fleet, gone: int) -> Run:
    """Let the fleet be smaller by so many from the beginning."""
    with halfway(replace(fleet, workers=fleet.workers - gone)) as there:
        return Run(fleet=fleet, gone=gone, choice="never there", after=there.without([]))


def every_hit_rate(fleet: Fleet, gone: int) -> dict[tuple[int, ...], float]:
    """Return that of every set of workers that could be taken away, by their places in order."""
    with halfway(fleet) as there:
        return {
            places: there.without([there.ids[place] for place in places]).hit_rate
            for places in itertools.combinations(range(fleet.workers), gone)
        }


def advised_places(fleet: Fleet, gone: int) -> tuple[int, ...]:
    """Return what the service advises to take away, by their places in order."""
    with halfway(fleet) as there:
        return tuple(sorted(there.ids.index(one) for one in there.advised(gone)))


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all the sets of workers there are, of one fleet."""

    fleet: Fleet
    gone: int
    sets: int
    best: float
    mean: float
    deviation: float
    worst: float
    advised_rank: int
    newest_rank: int


def bound_of(fleet: Fleet, gone: int) -> Bound:
    """Try every set of so many workers."""
    found = every_hit_rate(fleet, gone)
    ordered = sorted(found.values(), reverse=True)
    newest = tuple(range(fleet.workers - gone, fleet.workers))
    return Bound(
        fleet=fleet,
        gone=gone,
        sets=len(found),
        best=ordered[0],
        mean=statistics.mean(ordered),
        deviation=statistics.pstdev(ordered),
        worst=ordered[-1],
        advised_rank=1 + ordered.index(found[advised_places(fleet, gone)]),
        newest_rank=1 + ordered.index(found[newest]),
    )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the seeds; losses are in points, of the same seed's fleet that lost none."""

    workers: int
    gone: int
    speed: float
    kv_tokens: int
    choice: str
    seeds: int
    hit_rate: float
    lost: float
    lost_error: float  # standard error of that mean
    lost_by_stage: tuple[float, ...]
    busy: float
    foretold: float | None = None  # points, of those that the service named
    advised_seeds: int | None = None  # in which it says that they may go


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Compare each removal with the same fleet without one."""
    whole = {run.fleet: run.after for run in runs if not run.gone}
    groups: dict[tuple[Fleet, int, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.fleet in whole:
            groups[replace(run.fleet, seed=0), run.gone, run.choice].append(run)
    rows = []
    for (fleet, gone, choice), found in groups.items():
        lost = [100 * (whole[run.fleet].hit_rate - run.after.hit_rate) for run in found]
        stages = zip(
            *(
                [
                    100 * (before - after)
                    for before, after in zip(whole[run.fleet].stages, run.after.stages, strict=True)
                ]
                for run in found
            ),
            strict=True,
        )
        foretold = [100 * run.foretold for run in found if run.foretold is not None]
        rows.append(
            Row(
                workers=fleet.workers,
                gone=gone,
                speed=fleet.speed,
                kv_tokens=fleet.kv_tokens,
                choice=choice,
                seeds=len(found),
                hit_rate=statistics.mean(run.after.hit_rate for run in found),
                lost=statistics.mean(lost),
                lost_error=statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else 0.0,
                lost_by_stage=tuple(statistics.mean(one) for one in stages),
                busy=statistics.mean(run.after.busy for run in found),
                foretold=statistics.mean(foretold) if foretold else None,
                advised_seeds=sum(map(bool, (run.advised for run in found))) if foretold else None,
            )
        )
    return rows


def _row_text(row: Row) -> str:
    stages = " ".join(f"{one:5.2f}" for one in row.lost_by_stage)
    foretold = ""
    if row.foretold is not None:
        foretold = f", foretold {row.foretold:.2f}, advised in {row.advised_seeds}"
    return (
        f"{row.gone} of {row.workers}, speed {row.speed:g}, {row.choice:11} "
        f"{100 * row.hit_rate:6.2f} % hits, {row.lost:5.2f} +- {row.lost_error:.2f} points lost "
        f"(by stage {stages}), {row.busy:.2f} busy, {row.seeds} seeds{foretold}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, help="only this fleet, of so many engines")
    parser.add_argument("--gone", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="of one engine's cache")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="of the trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", action="store_true", help="try every set of so many, too")
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale-down.json"))
    args = parser.parse_args()
    fleets = FLEETS
    if args.workers is not None:
        one = Fleet(workers=args.workers, speed=args.speed, kv_tokens=args.kv_tokens)
        fleets = {one: tuple(args.gone)}
    tasks = [
        (replace(fleet, seed=seed, trace=str(args.trace)), gone)
        for seed in range(1, 1 + args.seeds)
        for fleet, gone in fleets.items()
    ]
    runs: list[Run] = []
    bounds: list[Bound] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        asked = [pool.submit(removals, fleet, gone, args.pause) for fleet, gone in tasks]
        smaller = [
            pool.submit(never_there, fleet, count) for fleet, gone in tasks for count in gone
        ]
        every = [
            pool.submit(bound_of, fleet, count)
            for fleet, gone in tasks
            for count in gone
            if args.every
        ]
        for done in as_completed(asked):
            runs += done.result()
            progress(f"{len(runs)} runs")
            _write(args.out, runs, bounds)  # what there is: it may take half an hour
        for one_smaller in as_completed(smaller):
            runs.append(one_smaller.result())
            _write(args.out, runs, bounds)
        for bound in as_completed(every):
            bounds.append(bound.result())
            progress(str(bounds[-1]))
    for row in rows_of(runs):
        print(_row_text(row))
    _write(args.out, runs, bounds)


def _write(out: Path, runs: Sequence[Run], bounds: Sequence[Bound]) -> None:
    result = {
        "what": "hit rate after workers were taken away, on a recorded trace",
        "provenance": provenance(),
        "trace": TRACE.name,
        "stages_s": STAGES_S,
        "rows": rows_of(runs),
        "every_set": bounds,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
