"""`first-token` against `kv-cost` on traffic it was not chosen on: `python -m bench.policy.unseen`.

Every shape of `shapes.py` around what its fleet can do, and some of them with other caches,
engines, blocks, replicas and delays. Both policies see the same requests, so what is shown is the
change, with its 95 % interval over seeds. What has ended is kept beside the output.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from bench.output import write_json
from bench.policy.shapes import SHAPES, drawn, write
from bench.provenance import provenance
from bench.resumable import Kept
from select_service.simulator.comparison import METRICS, as_text
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.engine_settings import SimulatedPool
from select_service.simulator.core.measures import Measures, measure
from select_service.simulator.runs import capacity_of, router, run, workload
from select_service.simulator.settings import (
    EngineSpec,
    FleetChange,
    SimulationSettings,
    Slow,
    Trace,
)
from select_service.simulator.statistics import Estimate, estimate
from select_service.types import RouterConfig
from select_service.types.router_config import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOADS: Final = (0.5, 0.8, 1.0, 1.2)
POLICIES: Final[tuple[Policy, Policy]] = ("kv-cost", "first-token")
TOLD: Final = ("ttft_mean", "ttft_p90", "ttft_p99", "e2e_mean", "itl_p90")
WHOLE: Final = ("hit_share", "load_cov")
_FIRST: Final = 10.0  # requests/s, of the trace that capacity is measured with


class Ground(NamedTuple):
    """What a shape is played on, besides the number of workers."""

    settings: SimulationSettings = SimulationSettings(block_size=64)
    odd_speed: float = 1.0  # of every other engine, against the rest
    odd_cache: float = 1.0
    has_faults: bool = False


def _with(**changes: object) -> SimulationSettings:
    return replace(Ground().settings, **changes)


GROUNDS: Final[dict[str, Ground]] = {
    "": Ground(),
    "ample caches": Ground(_with(engine=EngineSpec(kv_tokens=4_000_000))),
    "tight caches": Ground(_with(engine=EngineSpec(kv_tokens=200_000))),
    "tiny caches": Ground(_with(engine=EngineSpec(kv_tokens=110_000))),
    "blocks of 16": Ground(_with(block_size=16)),
    "blocks of 512": Ground(_with(block_size=512)),
    "events 1 s late": Ground(_with(event_lag_s=1.0)),
    "events 5 s late": Ground(_with(event_lag_s=5.0)),
    "2 replicas": Ground(_with(replicas=2, sync_delay_s=0.05)),
    "4 replicas": Ground(_with(replicas=4, sync_delay_s=0.05)),
    "every other at half speed": Ground(odd_speed=0.5),
    "one at a tenth of the speed": Ground(_with(slow=[Slow(count=1, speed=0.1)])),
    "every other with half the cache": Ground(odd_cache=0.5),
    "failures and additions": Ground(has_faults=True),
}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    shape: str
    ground: str
    workers: int
    load: float
    policy: Policy
    seed: int
    requests: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a capacity is of."""

    shape: str
    ground: str
    workers: int

    @classmethod
    def of(cls, task: Task) -> Place:
        """Return that of a run."""
        return cls(shape=task.shape, ground=task.ground, workers=task.workers)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: means of both policies, and what changes from one to the other."""

    shape: str
    ground: str
    workers: int
    load: float
    seeds: int
    before: dict[str, float]
    after: dict[str, float]
    change: dict[str, Estimate]  # share of before; of `WHOLE` the difference
    reasons: dict[str, dict[str, int]]

    @property
    def worse(self) -> list[str]:
        """Which of the times are longer beyond their interval."""
        return [
            name
            for name in ("ttft_mean", "ttft_p90", "ttft_p99", "e2e_mean")
            if self.change[name].mean - (self.change[name].half or 0.0) > 0.0
        ]


def settings_of(task: Task, capacity: float, directory: Path) -> SimulationSettings:
    """Write the trace, and return what plays it at the task's share of capacity."""
    rate = task.load * capacity
    path = directory / f"{os.getpid()}.jsonl"
    rng = random.Random(f"{task.shape}/{task.seed}")
    lines = drawn(task.shape, rng, task.requests, rate)
    write(lines, path)
    seconds = lines[-1].at_s - lines[0].at_s
    trace = Trace(path=str(path), speed=rate * seconds / (len(lines) - 1))  # the rate to the point
    weights = RouterConfig(policy=task.policy)
    ground = GROUNDS[task.ground]
    ends = task.requests / rate
    changes = [
        FleetChange(
            at=0.3 * ends, do="fail", count=max(1, task.workers // 8), startup_s=0.2 * ends
        ),
        FleetChange(at=0.5 * ends, do="add", count=max(1, task.workers // 8)),
        FleetChange(at=0.7 * ends, do="remove", count=max(1, task.workers // 8)),
    ]
    return replace(
        ground.settings,
        workers=task.workers,
        trace=trace,
        seed=task.seed,
        policy=task.policy,
        weights=weights,
        changes=changes if ground.has_faults else [],
    )


def mixed(settings: SimulationSettings, ground: Ground) -> Cluster:
    """Build a fleet of two kinds of engines, half of each."""
    engine = settings.engine
    other = replace(
        engine,
        kv_tokens=int(engine.build().kv_tokens * ground.odd_cache),
        **{name: getattr(engine, name) / ground.odd_speed for name in _TIMES},
    )
    pools = {
        "even": SimulatedPool("aggregated", engine.build()),
        "odd": SimulatedPool("aggregated", other.build()),
    }
    surroundings = ClusterSettings(
        pools,
        block_size=settings.block_size,
        event_lag_s=settings.event_lag_s,
        load_lag_s=settings.load_lag_s,
        detect_s=settings.detect_s,
    )
    built = Cluster(surroundings, router(settings), workload(settings))
    for number in range(settings.workers):
        built.add_worker("odd" if number % 2 else "even", 0.0)
    return built


_TIMES: Final = ("base_s", "prefill_token_s", "prefill_pair_s", "sequence_s", "kv_token_s")


def done(task: Task, capacities: Mapping[Place, float]) -> Measures:
    """Carry out a run."""
    with tempfile.TemporaryDirectory() as directory:
        settings = settings_of(task, capacities[Place.of(task)], Path(directory))
        ground = GROUNDS[task.ground]
        if ground.odd_speed == ground.odd_cache == 1.0:
            return run(settings)
        built = mixed(settings, ground)
        built.finish()
        built.check()
        return measure(built, task.policy, task.seed)


def capacity(place: Place) -> float:
    """Return the requests a second that the fleet answers, at a door where 2,000 wait.

    Where engines are slower by one number throughout, what the fast ones would, less that.
    """
    base = GROUNDS[place.ground]
    lost = sum(slow.count * (1.0 - slow.speed) for slow in base.settings.slow) / place.workers
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        rng = random.Random(f"{place.shape}/capacity")
        write(drawn(place.shape, rng, 2_000, _FIRST), path)
        settings = replace(
            base.settings,
            workers=place.workers,
            trace=Trace(path=str(path), limit=2_000),
            replicas=1,
            slow=[],
        )
        return capacity_of(settings) * (1.0 + base.odd_speed) / 2 * (1.0 - lost)


def rows_of(tasks: Sequence[Task], found: Sequence[Measures]) -> list[Row]:
    """Return the cells, of runs by both policies with the same seeds."""
    places: dict[tuple[Place, float], dict[str, list[tuple[Task, Measures]]]] = {}
    for task, measures in zip(tasks, found, strict=True):
        group = places.setdefault((Place.of(task), task.load), {})
        group.setdefault(task.policy, []).append((task, measures))
    rows = []
    for group in places.values():
        before, after = (group[policy] for policy in POLICIES)
        pairs = [(one[1], other[1]) for one, other in zip(before, after, strict=True)]
        rows.append(_row(before[0][0], pairs))
    return rows


def _row(task: Task, pairs: Sequence[tuple[Measures, Measures]]) -> Row:
    change: dict[str, Estimate] = {}
    for name in (*TOLD, *WHOLE):
        read = METRICS[name][1]
        values = [(read(before), read(after)) for before, after in pairs]
        if name in WHOLE:
            change[name] = estimate([after - before for before, after in values])
        else:
            change[name] = estimate(
                [after / before - 1 if before else 0.0 for before, after in values]
            )
    means = [
        {name: estimate([METRICS[name][1](one[at]) for one in pairs]).mean for name in change}
        for at in range(2)
    ]
    return Row(
        shape=task.shape,
        ground=task.ground,
        workers=task.workers,
        load=task.load,
        seeds=len(pairs),
        before=means[0],
        after=means[1],
        change=change,
        reasons={policy: pairs[0][at].reasons for at, policy in enumerate(POLICIES)},
    )


def table_of(rows: Sequence[Row]) -> str:
    """Lay the cells out for a terminal."""
    head = ["shape", "ground", "workers", "load", *(METRICS[name][0] for name in (*TOLD, *WHOLE))]
    lines = []
    for row in rows:
        cells = []
        for name in TOLD:
            _, _, scale, digits = METRICS[name]
            one = row.change[name]
            half = "" if one.half is None else f"±{100 * one.half:.0f}"
            before, after = row.before[name] * scale, row.after[name] * scale
            mark = "!" if name in row.worse else ""
            cells.append(
                f"{before:.{digits}f} → {after:.{digits}f} ({100 * one.mean:+.0f}{half} %){mark}"
            )
        for name in WHOLE:
            _, _, scale, digits = METRICS[name]
            cells.append(
                f"{row.before[name] * scale:.{digits}f} → {row.after[name] * scale:.{digits}f}"
            )
        lines.append([row.shape, row.ground, str(row.workers), f"{row.load:g}", *cells])
    return as_text(head, lines)


def main() -> None:
    """Run what is missing, and write all of it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--grounds", nargs="+", choices=GROUNDS, default=[""])
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=250, help="for each worker")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-unseen.json"))
    args = parser.parse_args()
    tasks = [
        Task(
            shape=shape,
            ground=ground,
            workers=workers,
            load=load,
            policy=policy,
            seed=seed,
            requests=max(2_000, args.requests * workers),
        )
        for shape in args.shapes
        for ground in args.grounds
        for workers in args.workers
        for load in args.loads
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for policy in POLICIES
    ]
    kept = Kept(args.out.with_suffix(".done.jsonl"), args.jobs)
    places = list(dict.fromkeys(map(Place.of, tasks)))
    rates = kept.results("capacity", capacity, places, float)
    capacities = dict(zip(places, rates, strict=True))
    found = kept.results("run", partial(done, capacities=capacities), tasks, Measures)
    rows = rows_of(tasks, found)
    result = {
        "what": "first-token against kv-cost on traffic that no term was chosen on, simulated",
        "provenance": provenance(),
        "capacity_requests_per_s": {
            f"{one.shape}|{one.ground}|{one.workers}": rate for one, rate in capacities.items()
        },
        "rows": rows,
    }
    write_json(args.out, result)
    print(table_of(rows))


if __name__ == "__main__":
    main()
