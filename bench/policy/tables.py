"""Every policy beside every other, as tables of Markdown: `make bench-policy`.

Each trace is played at shares of its fleet's capacity, and the load is found at which nine of ten
requests are in time (SLO capacity). Traces are files in Mooncake's format (`--trace`), and shapes
of `shapes.py`, drawn from a fixed seed. What has ended is a line of `OUT.done.jsonl`: started again
with the same `--out`, it goes on from there.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from bench.policy.shapes import SHAPES, drawn, write
from bench.provenance import provenance
from select_service.simulator.capacity import CapacityFound, CapacitySearch, search
from select_service.simulator.comparison import METRICS, base_of, by_policy, estimates, perform
from select_service.simulator.comparison import verdict as told
from select_service.simulator.core.measures import Measures
from select_service.simulator.runs import at_load, capacity_of, run
from select_service.simulator.settings import POLICIES, EngineSpec, SimulationSettings, Trace
from select_service.simulator.statistics import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LOADS: Final = (0.5, 0.8, 1.0, 1.2)
DRAWN: Final = ("toolagent", "conversations", "code")
COLUMNS: Final = ("ttft_p90", "itl_p90", "e2e_mean", "hit_share", "good")
_FIRST_RATE: Final = 10.0  # of the trace that a shape's capacity is measured with
_DRAWN_AT: Final = 0.8  # of capacity: bursts and thinking are those of a fleet that has work


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A trace on a fleet, and the requests per second that it answers at most."""

    name: str
    settings: SimulationSettings
    capacity: float
    drawn: list[str] = []  # a trace for each seed; none: all play the same, spread by its jitter

    def at(self, seed: int) -> SimulationSettings:
        """Return what plays it with this seed."""
        trace = self.settings.trace
        assert trace is not None
        path = self.drawn[seed - 1] if self.drawn else trace.path
        return replace(self.settings, seed=seed, trace=replace(trace, path=path))


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file that lets one go on."""

    key: str
    measures: Measures | None = None
    capacity: CapacityFound | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one scene: its metrics by load, and its SLO capacity as a share."""

    scene: str
    policy: str
    metrics: dict[str, dict[str, Estimate]]
    slo_capacity: Estimate
    against: Estimate  # the base's SLO capacity: a share of it, over the same requests
    beyond: bool = False  # it carries more: some search ended at its greatest load


Task = SimulationSettings | CapacitySearch


def key_of(task: Task) -> str:
    """Return what names a task among those that have ended."""
    return f"{type(task).__name__}/{xxh3_64_hexdigest(msgspec.json.encode(task))}"


def done(task: Task, progress: Callable[[float], None] | None = None) -> Ended:
    """Carry out a task."""
    if isinstance(task, CapacitySearch):
        return Ended(key=key_of(task), capacity=search(task, progress))
    return Ended(key=key_of(task), measures=run(task, progress))


def scenes_of(args: argparse.Namespace, folder: Path) -> list[Scene]:
    """Open traces, draw others, and measure what fleets answer of them."""
    found = []
    for workers in args.workers:
        base = SimulationSettings(
            workers=workers,
            engine=EngineSpec(kv_tokens=args.kv_tokens),
            slo_ttft_s=args.slo_ttft,
            slo_itl_s=args.slo_itl,
        )
        for path in args.trace:
            settings = replace(base, trace=Trace(path=path, jitter_s=args.jitter, limit=args.limit))
            name = f"{Path(path).stem}, {workers} workers"
            found.append(Scene(name=name, settings=settings, capacity=capacity_of(settings)))
        found += [_drawn(shape, base, args, folder) for shape in args.shapes]
    return found


def _drawn(shape: str, base: SimulationSettings, args: argparse.Namespace, folder: Path) -> Scene:
    """Draw a trace per seed at a rate that the fleet can answer, which is measured with another."""

    def trace(name: str, rate: float) -> str:
        path = folder / f"{shape}-{base.workers}-{name}.jsonl"
        write(drawn(shape, random.Random(f"{shape}/{name}"), args.requests, rate), path)
        return str(path)

    first = replace(base, trace=Trace(path=trace("first", _FIRST_RATE)))
    rate = _DRAWN_AT * capacity_of(first)
    paths = [trace(str(seed), rate) for seed in range(1, args.seeds + 1)]
    settings = replace(base, trace=Trace(path=paths[0]))
    name = f"{shape}, {base.workers} workers"
    return Scene(name=name, settings=settings, capacity=capacity_of(settings), drawn=paths)


def runs_of(
    scene: Scene, policies: Sequence[str], loads: Iterable[float], seeds: int
) -> list[Task]:
    """Return what is to be run of a scene."""
    tasks: list[Task] = []
    for load in loads:
        for seed in range(1, seeds + 1):
            at = at_load(scene.at(seed), load, scene.capacity)
            tasks += [replace(at, policy=policy) for policy in policies]
    return tasks


def searches_of(scene: Scene, policies: Sequence[str], seeds: int) -> list[Task]:
    """Return the searches of a scene."""
    return [
        CapacitySearch(
            settings=replace(scene.at(seed), policy=policy),
            workers=False,
            share=0.9,
            tolerance=0.01,
            capacity=scene.capacity,
        )
        for policy in policies
        for seed in range(1, seeds + 1)
    ]


def rows_of(
    scene: Scene,
    policies: Sequence[str],
    loads: Sequence[float],
    seeds: int,
    found: dict[str, Ended],
) -> list[Row]:
    """Return a row for each policy."""
    metrics: dict[str, dict[str, dict[str, Estimate]]] = {policy: {} for policy in policies}
    for load in loads:
        group = [found[key_of(one)].measures for one in runs_of(scene, policies, [load], seeds)]
        for policy, runs in by_policy([one for one in group if one is not None]).items():
            metrics[policy][f"{load:g}"] = estimates(runs)
    carried: dict[str, list[float]] = {}
    beyond = set()
    for task in searches_of(scene, policies, seeds):
        one = found[key_of(task)].capacity
        assert one is not None
        carried.setdefault(one.policy, []).append(one.found)
        if one.beyond:
            beyond.add(one.policy)
    base = carried[base_of(policies)]
    mean = sum(base) / len(base) or 1.0
    return [
        Row(
            scene=scene.name,
            policy=policy,
            metrics=metrics[policy],
            slo_capacity=estimate(carried[policy]),
            against=estimate([(x - y) / mean for x, y in zip(carried[policy], base, strict=True)]),
            beyond=policy in beyond,
        )
        for policy in policies
    ]


def markdown(rows: Sequence[Row], loads: Sequence[float]) -> str:
    """Return the table of one scene: a row per policy, values of a cell by load."""
    head = [f"{METRICS[name][0]}" for name in COLUMNS]
    lines = [
        f"| {rows[0].scene} | SLO capacity | {' | '.join(head)} |",
        f"|{'---|' * (len(head) + 2)}",
    ]
    for row in rows:
        half = "" if row.against.half is None else f" ±{100 * row.against.half:.0f}"
        more = "> " if row.beyond else ""
        carried = f"{more}{row.slo_capacity.text(3)} ({100 * row.against.mean:+.0f}{half} %)"
        cells = []
        for name in COLUMNS:
            _, _, scale, digits = METRICS[name]
            values = [row.metrics[f"{load:g}"][name].mean * scale for load in loads]
            cells.append(" / ".join(f"{value:,.{digits}f}" for value in values))
        lines.append(f"| `{row.policy}` | {carried} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write all of it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", nargs="*", default=[], help="files in Mooncake's format")
    parser.add_argument("--jitter", type=float, default=3.0, help="their clocks tick so far")
    parser.add_argument("--limit", type=int, default=0, help="requests of a trace; 0: all")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(DRAWN))
    parser.add_argument("--requests", type=int, default=6_000, help="of a drawn trace")
    parser.add_argument("--workers", type=int, nargs="+", default=[16])
    parser.add_argument("--kv-tokens", type=int, default=1_600_000, help="of an engine")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-itl", type=float, default=0.025)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-policies.json"))
    args = parser.parse_args()
    folder = args.out.parent / "policy-traces"
    folder.mkdir(parents=True, exist_ok=True)
    kept = args.out.with_suffix(".done.jsonl")
    lines = kept.read_bytes().splitlines() if kept.exists() else []
    found = {one.key: one for one in (msgspec.json.decode(line, type=Ended) for line in lines)}
    rows: list[Row] = []
    scenes = scenes_of(args, folder)
    for scene in scenes:
        runs = runs_of(scene, args.policies, args.loads, args.seeds)
        tasks = [*runs, *searches_of(scene, args.policies, args.seeds)]
        left = [task for task in tasks if key_of(task) not in found]
        print(f"{scene.name}: {scene.capacity:.2f} requests/s, {len(left)} to do", file=sys.stderr)
        with kept.open("ab") as file:
            batch = 8 * args.jobs if args.jobs > 1 else 1  # what an interrupted one loses
            for begin in range(0, len(left), batch):
                some = left[begin : begin + batch]
                for one in perform(done, some, args.jobs, lambda _: None):
                    found[one.key] = one
                    file.write(msgspec.json.encode(one) + b"\n")
                file.flush()
        mine = rows_of(scene, args.policies, args.loads, args.seeds, found)
        rows += mine
        print(markdown(mine, args.loads), flush=True)
        for load in args.loads:
            group = (
                found[key_of(one)].measures
                for one in runs_of(scene, args.policies, [load], args.seeds)
            )
            print(f"* At {load:g}: {told([one for one in group if one is not None])}")
        print(flush=True)
        write_result(args, scenes, rows)


def write_result(args: argparse.Namespace, scenes: Sequence[Scene], rows: Sequence[Row]) -> None:
    """Write what there is; names of traces without their folders."""
    result = {
        "what": "policies on public and drawn traces, simulated",
        "provenance": provenance(),
        "settings": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "capacity_requests_per_s": {one.name: one.capacity for one in scenes},
        "rows": rows,
    }
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
