"""Policies beside each other, as tables of Markdown: the first part of `make bench-policy`.

Each trace is played at shares of its fleet's capacity, and the load is found at which nine of ten
requests are in time (SLO capacity). Traces are files in Mooncake's format (`--trace`), and shapes
of `shapes.py`, drawn for each fleet, with a trace for each seed that all policies play. Last comes
what was asked of `first-token`, met or missed (`targets.py`). What has ended is kept beside
`--out`: started again, it goes on from there.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from bench.output import write_json
from bench.policy.shapes import SHAPES, drawn, write
from bench.policy.targets import Played, targets_of
from bench.provenance import provenance
from bench.resumable import Kept
from select_service.simulator.capacity import CapacityFound, CapacitySearch, search
from select_service.simulator.comparison import METRICS, base_of, by_policy, estimates
from select_service.simulator.comparison import verdict as verdict_of
from select_service.simulator.core.baselines import BEYOND
from select_service.simulator.core.measures import Measures
from select_service.simulator.runs import at_load, capacity_of, run
from select_service.simulator.settings import POLICIES, EngineSpec, SimulationSettings, Trace
from select_service.simulator.statistics import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALL: Final = "all"
LOADS: Final = (0.5, 0.8, 1.0)
COMPARED: Final = ("kv-cost", "first-token", "lmetric", "llm-d", "bound")
DRAWN: Final = ("toolagent", "conversations", "code")
COLUMNS: Final = ("ttft_p90", "itl_p90", "e2e_mean", "hit_share", "good")
_FIRST_RATE: Final = 10.0  # of the trace that a shape's capacity is measured with
_FLEET: Final = 16  # workers whose drawn traces have `--requests`; larger fleets get more
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


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one scene: its metrics by load, and its SLO capacity as a share."""

    scene: str
    policy: str
    metrics: dict[str, dict[str, Estimate]]
    slo_capacity: Estimate | None = None  # none: no router can be it, so it was not looked for
    against: Estimate | None = None  # the base's SLO capacity: a share of it, same requests
    beyond: bool = False  # it carries as much or more: some search ended at its greatest load


def scenes_of(args: argparse.Namespace, folder: Path, kept: Kept) -> list[Scene]:
    """Open traces, draw others, and measure what fleets answer of them."""
    fleets = [
        _fleet(args, workers, kv_tokens) for kv_tokens in args.kv_tokens for workers in args.workers
    ]
    traces = [Trace(path=path, jitter_s=args.jitter, limit=args.limit) for path in args.trace]
    found = [
        (Path(trace.path).stem, replace(fleet, trace=trace)) for fleet in fleets for trace in traces
    ]
    capacities = kept.results("capacity", capacity_of, [one for _, one in found], float)
    scenes = [
        Scene(name=_name(stem, settings), settings=settings, capacity=capacity)
        for (stem, settings), capacity in zip(found, capacities, strict=True)
    ]
    return scenes + [
        _drawn(shape, fleet, args, folder, kept) for fleet in fleets for shape in args.shapes
    ]


def _fleet(args: argparse.Namespace, workers: int, kv_tokens: int) -> SimulationSettings:
    return SimulationSettings(
        workers=workers,
        engine=EngineSpec(kv_tokens=kv_tokens),
        slo_ttft_s=args.slo_ttft,
        slo_itl_s=args.slo_itl,
    )


def _name(trace: str, settings: SimulationSettings) -> str:
    tokens = settings.engine.build().kv_tokens
    return f"{trace}, {settings.workers} workers, {tokens / 1e6:.1f}M tokens"


def _drawn(
    shape: str, base: SimulationSettings, args: argparse.Namespace, folder: Path, kept: Kept
) -> Scene:
    """Draw a trace per seed at a rate that the fleet can answer, which is measured with another."""
    requests = args.requests * max(1, base.workers // _FLEET)
    fleet = f"{shape}-{base.workers}-{base.engine.kv_tokens}-{requests}"

    def trace(name: str, rate: float) -> str:
        path = folder / f"{fleet}-{name}.jsonl"
        write(drawn(shape, random.Random(f"{shape}/{name}"), requests, rate), path)
        return str(path)

    def capacity(settings: SimulationSettings) -> float:
        return kept.results("capacity", capacity_of, [settings], float)[0]

    first = replace(base, trace=Trace(path=trace("first", _FIRST_RATE)))
    rate = _DRAWN_AT * capacity(first)
    paths = [trace(str(seed), rate) for seed in range(1, args.seeds + 1)]
    settings = replace(base, trace=Trace(path=paths[0]))
    name = _name(shape, settings)
    return Scene(name=name, settings=settings, capacity=capacity(settings), drawn=paths)


def runs_of(
    scene: Scene, policies: Sequence[str], loads: Iterable[float], seeds: int
) -> list[SimulationSettings]:
    """Return what is to be run of a scene."""
    return [
        replace(at_load(scene.at(seed), load, scene.capacity), policy=policy)
        for load in loads
        for seed in range(1, seeds + 1)
        for policy in policies
    ]


def searches_of(scene: Scene, policies: Sequence[str], seeds: int) -> list[CapacitySearch]:
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
        if policy not in BEYOND
        for seed in range(1, seeds + 1)
    ]


def rows_of(
    scene: Scene, runs: dict[float, list[Measures]], searches: Sequence[CapacityFound]
) -> list[Row]:
    """Return a row for each policy."""
    metrics: dict[str, dict[str, dict[str, Estimate]]] = {}
    for load, group in runs.items():
        for policy, some in by_policy(group).items():
            found = estimates(some)
            metrics.setdefault(policy, {})[f"{load:g}"] = {name: found[name] for name in COLUMNS}
    carried: dict[str, list[float]] = {}
    for one in searches:
        carried.setdefault(one.policy, []).append(one.found)
    base = carried[base_of(carried)] if carried else []
    mean = sum(base) / len(base) if sum(base) else 1.0
    beyond = {one.policy for one in searches if one.beyond}

    def row(policy: str, values: Sequence[float]) -> Row:
        found = Row(scene=scene.name, policy=policy, metrics=metrics[policy])
        if policy in beyond:  # what every seed carries
            return replace(found, slo_capacity=Estimate(min(values), None), beyond=True)
        if not values:
            return found
        gaps = [(x - y) / mean for x, y in zip(values, base, strict=True)]
        return replace(found, slo_capacity=estimate(values), against=estimate(gaps))

    return [row(policy, carried.get(policy, [])) for policy in metrics]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of one scene: a row per policy, values of a cell by load."""
    loads = list(rows[0].metrics)
    head = [METRICS[name][0] for name in COLUMNS]
    lines = [
        f"| {rows[0].scene}; at {' / '.join(loads)} | SLO capacity | {' | '.join(head)} |",
        f"|{'---|' * (len(head) + 2)}",
    ]
    for row in rows:
        cells = [_carried(row)]
        for name in COLUMNS:
            _, _, scale, digits = METRICS[name]
            values = [row.metrics[load][name].mean * scale for load in loads]
            cells.append(" / ".join(f"{value:,.{digits}f}" for value in values))
        lines.append(f"| `{row.policy}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _carried(row: Row) -> str:
    if row.slo_capacity is None:
        return "-"
    if row.against is None:
        return f"≥ {row.slo_capacity.mean:.3f}"
    half = "" if row.against.half is None else f" ±{100 * row.against.half:.0f}"
    return f"{row.slo_capacity.mean:.3f} ({100 * row.against.mean:+.0f}{half} %)"


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", nargs="*", default=[], help="files in Mooncake's format")
    parser.add_argument("--jitter", type=float, default=3.0, help="their clocks tick so far")
    parser.add_argument("--limit", type=int, default=0, help="requests of a trace; 0: all")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(DRAWN))
    parser.add_argument(
        "--requests", type=int, default=3_000, help="of a drawn trace, for up to 16 workers"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[16])
    parser.add_argument(
        "--kv-tokens", type=int, nargs="+", default=[1_600_000], help="of an engine"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-itl", type=float, default=0.025)
    parser.add_argument("--policies", nargs="+", choices=(ALL, *POLICIES), default=COMPARED)
    parser.add_argument(
        "--no-search", dest="search", action="store_false", help="leave SLO capacities out"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-policies.json"))
    return parser


def main() -> None:
    """Run what is missing, and write all of it down."""
    args = options().parse_args()
    if ALL in args.policies:
        args.policies = POLICIES
    folder = args.out.parent / "policy-traces"
    folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(args.out.with_suffix(".done.jsonl"), args.jobs)
    scenes = scenes_of(args, folder, kept)
    runs = {
        scene.name: kept.results(
            "run", run, runs_of(scene, args.policies, args.loads, args.seeds), Measures
        )
        for scene in scenes
    }
    rows: list[Row] = []
    played: list[Played] = []
    for scene in scenes:
        searches = searches_of(scene, args.policies, args.seeds) if args.search else []
        searched = kept.results("search", search, searches, CapacityFound)
        mine = runs[scene.name]
        each = len(mine) // len(args.loads)
        by_load = {load: mine[at * each : (at + 1) * each] for at, load in enumerate(args.loads)}
        rows += rows_of(scene, by_load, searched)
        played += [
            Played(scene.name, load, scene.settings, by_policy(group), searched)
            for load, group in by_load.items()
        ]
        print(markdown([row for row in rows if row.scene == scene.name]), flush=True)
        for load, group in by_load.items():
            print(f"* At {load:g}: {verdict_of(group)}")
        print(flush=True)
    targets = targets_of(played)
    print(targets)
    result = {
        "what": "policies on public and drawn traces, simulated",
        "provenance": provenance(),
        "settings": {
            name: str(value) for name, value in vars(args).items() if name not in ("out", "trace")
        },
        "capacity_requests_per_s": {one.name: one.capacity for one in scenes},
        "rows": rows,
        "targets": targets.splitlines(),
    }
    write_json(args.out, result)


if __name__ == "__main__":
    main()
