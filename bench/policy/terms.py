"""`first-token` against `kv-cost`, with and without each of its terms.

Workloads that are drawn, and with `--trace` a recorded one around capacity. Leaves `--out` (means
and halves of 95 % intervals) and a picture; what has ended is kept beside it.
"""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from bench.output import write_json
from bench.provenance import provenance
from bench.resumable import Kept
from select_service.simulator.comparison import METRICS, as_text, estimates
from select_service.simulator.core.measures import Measures
from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.plots import Series, lines, sample
from select_service.simulator.runs import at_load, capacity_of, run
from select_service.simulator.settings import EngineSpec, SimulationSettings, Slow, Trace
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from select_service.simulator.statistics import Estimate

FIRST_TOKEN: Final = RouterConfig(policy="first-token")
POLICIES: Final[dict[str, RouterConfig | None]] = {
    "kv-cost": RouterConfig(),
    "first-token": FIRST_TOKEN,
    "prefix-affinity": None,
}
WITHOUT: Final = {
    "distinct blocks": replace(FIRST_TOKEN, context_load_scale=0.0, decode_load_scale=0.125),
    "- context": replace(FIRST_TOKEN, context_load_scale=0.0),
    "context, half": replace(FIRST_TOKEN, context_load_scale=0.03125),
    "context, twice": replace(FIRST_TOKEN, context_load_scale=0.125),
    "- delay of others": replace(FIRST_TOKEN, delay_scale=0.0),
    "- eviction": replace(FIRST_TOKEN, eviction_scale=0.0),
    "- interference": replace(FIRST_TOKEN, interference_scale=0.0),
    "- slowness": replace(FIRST_TOKEN, slowness_scale=0.0),
    "- expected blocks": replace(FIRST_TOKEN, expects_booked=False),
    "- queues worked off": replace(FIRST_TOKEN, pace_scale=0.0),
    "- overtaking": replace(FIRST_TOKEN, overtaking_s=0.0, overtaking_share=0.0),
    "- share of the wait": replace(FIRST_TOKEN, overtaking_share=0.0),
}
FLEETS: Final = (8, 16, 64)
LOADS: Final = (0.5, 0.8, 1.0, 1.2, 1.5)
SHOWN: Final = ("ttft_mean", "ttft_p90", "itl_p90", "e2e_mean", "hit_share", "load_cov")
PLOTTED: Final = (("ttft_p90", True), ("itl_p90", False), ("hit_share", False))


def held_out() -> dict[str, SimulationSettings]:
    """Workloads that no weight was chosen on, each near what its fleet can do."""
    one = partial(WorkloadSettings, requests=3_000)

    def on(*workloads: WorkloadSettings) -> SimulationSettings:
        return SimulationSettings(block_size=64, workloads=list(workloads))

    chat, agents = one(kind="chat", rate=8.0), one(kind="agents", rate=2.0)
    shared = one(kind="shared-prompts", rate=60.0)
    bursts = one(kind="shared-prompts", rate=40.0, arrivals="bursts")
    tools = WorkloadSettings(  # one-shot calls of agents: each caller has a long prompt of its own
        kind="shared-prompts",
        rate=14.0,
        requests=3_000,
        prompts=200,
        prompt_tokens=6_000,
        turn_tokens=2_600,
    )
    tenants = (
        one(kind="chat", rate=5.0, tenant="a", requests=1_500),
        one(kind="agents", rate=1.0, tenant="b", requests=1_500),
    )
    return {
        "chat": on(chat),
        "chat, 3x": on(replace(chat, rate=24.0)),
        "agents": on(agents),
        "agents, half": on(replace(agents, rate=1.0)),
        "shared prompts": on(shared),
        "shared prompts, half": on(replace(shared, rate=30.0)),
        "shared prompts, 1.3x": on(replace(shared, rate=78.0)),
        "four shared prompts": on(replace(shared, prompts=4)),
        "tool calls": replace(on(tools), block_size=512),
        "tool calls, 1.6x": replace(on(replace(tools, rate=22.0)), block_size=512),
        "rl groups": on(one(kind="rl")),
        "bursts": on(bursts),
        "tenants": on(*tenants),
        "diurnal agents": on(replace(agents, diurnal_period_s=300.0)),
        "closed loop": on(one(kind="agents", arrivals="closed", users=48)),
        "agents, events 1 s late": replace(on(agents), event_lag_s=1.0),
        "agents, a worn engine": replace(on(agents), slow=[Slow(count=1, speed=0.1)]),
        "agents, two generations": replace(on(agents), slow=[Slow(count=4, speed=0.5)]),
        "agents, 4 replicas 50 ms apart": replace(on(agents), replicas=4, sync_delay_s=0.05),
        "bursts, 4 replicas 50 ms apart": replace(on(bursts), replicas=4, sync_delay_s=0.05),
        "ample cache": replace(on(agents), engine=EngineSpec(kv_tokens=4_000_000)),
    }


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One run: where it belongs in the tables, and its settings."""

    scene: str
    load: float  # 0: of a held-out workload
    workers: int
    policy: str
    settings: SimulationSettings


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one scene, over all seeds."""

    scene: str
    load: float
    workers: int
    policy: str
    metrics: dict[str, Estimate]


def done(task: Task) -> Measures:
    return run(task.settings)


def variants(
    settings: SimulationSettings, *, ablations: bool
) -> Iterator[tuple[str, SimulationSettings]]:
    for name, weights in (POLICIES | (WITHOUT if ablations else {})).items():
        if weights is None:
            yield name, replace(settings, policy=name)
        else:
            yield name, replace(settings, policy=weights.policy, weights=weights)


def tasks_of(args: argparse.Namespace, capacities: dict[int, float], kept: Kept) -> list[Task]:
    scenes: list[tuple[str, float, SimulationSettings, bool]] = []
    if args.trace is not None:
        trace = Trace(path=args.trace, jitter_s=args.jitter, limit=args.limit)
        for workers in args.workers:
            base = SimulationSettings(trace=trace, workers=workers)
            (capacities[workers],) = kept.results("capacity", capacity_of, [base], float)
            for load in args.loads:
                at = at_load(base, load, capacities[workers])
                scenes.append((f"trace, {workers} workers", load, at, workers == args.ablate_on))
    scenes += [(name, 0.0, one, True) for name, one in held_out().items()]
    tasks = [
        Task(
            scene=scene,
            load=load,
            workers=settings.workers,
            policy=policy,
            settings=replace(varied, seed=seed),
        )
        for seed in range(1, args.seeds + 1)
        for scene, load, settings, ablations in scenes
        for policy, varied in variants(settings, ablations=ablations)
    ]
    return [
        one
        for one in tasks
        if (not args.policies or one.policy in args.policies)
        and (not args.scenes or any(name in one.scene for name in args.scenes))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="in Mooncake's format; without it only held-out workloads")
    parser.add_argument("--jitter", type=float, default=3.0, help="the trace's clock ticks so far")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=FLEETS)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--policies", nargs="+", help="only these")
    parser.add_argument("--scenes", nargs="+", help="only those with such a word in their name")
    parser.add_argument("--ablate-on", type=int, default=16, help="this fleet, term by term")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-terms.json"))
    args = parser.parse_args()
    kept = Kept(args.out.with_suffix(".done.jsonl"), args.jobs)
    capacities: dict[int, float] = {}
    tasks = tasks_of(args, capacities, kept)
    cells = cells_of(tasks, kept.results("run", done, tasks, Measures))
    write(args, capacities, cells)
    print(table_of(cells))


def cells_of(tasks: Sequence[Task], found: Sequence[Measures]) -> list[Cell]:
    groups: dict[tuple[str, float, int, str], list[Measures]] = {}
    for task, measures in zip(tasks, found, strict=True):
        place = task.scene, task.load, task.workers, task.policy
        groups.setdefault(place, []).append(measures)
    return [
        Cell(scene=scene, load=load, workers=workers, policy=policy, metrics=estimates(group))
        for (scene, load, workers, policy), group in sorted(groups.items(), key=lambda one: one[0])
    ]


def write(args: argparse.Namespace, capacities: dict[int, float], cells: list[Cell]) -> None:
    result = {
        "what": "first-token against kv-cost, with and without each of its terms, simulated",
        "provenance": provenance(),
        "trace": None if args.trace is None else Path(args.trace).name,
        "limit": args.limit,
        "seeds": args.seeds,
        "capacity_requests_per_s": capacities,
        "weights": {name: one for name, one in (POLICIES | WITHOUT).items() if one is not None},
        "cells": cells,
    }
    write_json(args.out, result)
    plotted = [one for one in cells if one.load and one.policy in POLICIES]
    if plotted:
        args.out.with_suffix(".svg").write_text(picture_of(plotted), encoding="utf-8")


def picture_of(cells: Sequence[Cell]) -> str:
    """Return a row of plots for each fleet, over load; metrics, and whether on a log scale."""
    sheets = []
    fleets = sorted({one.workers for one in cells})
    policies = list(dict.fromkeys(one.policy for one in cells))
    head = 30 + 20 * ((len(policies) - 1) // 7)
    for row, workers in enumerate(fleets):
        for column, (metric, log_y) in enumerate(PLOTTED):
            series = [
                Series(
                    policy,
                    [
                        (one.load, one.metrics[metric].mean * METRICS[metric][2])
                        for one in cells
                        if one.policy == policy and one.workers == workers
                    ],
                )
                for policy in policies
            ]
            title = f"{METRICS[metric][0]}, {workers} workers"
            plot = lines(title, series, x="share of capacity", y="", log_y=log_y)
            at = f'x="{470 * column}" y="{290 * row + head}"'
            sheets.append(re.sub("^<svg ", f"<svg {at} ", plot))
    names = "".join(
        f'<g transform="translate({20 + 198 * (at % 7)} {8 + 20 * (at // 7)})">{sample(at)}'
        f'<text x="40" y="10" style="font:13px sans-serif">{policy}</text></g>'
        for at, policy in enumerate(policies)
    )
    height = 290 * len(fleets) + head + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1410" height="{height}">'
        f'<rect width="100%" height="100%" fill="white"/>{names}{"".join(sheets)}</svg>\n'
    )


def table_of(cells: Sequence[Cell]) -> str:
    head = ["scene", "load", "policy", *(METRICS[name][0] for name in SHOWN)]
    rows = [
        [one.scene, f"{one.load:g}" if one.load else "", one.policy]
        + [one.metrics[name].text(METRICS[name][3], METRICS[name][2]) for name in SHOWN]
        for one in cells
    ]
    return as_text(head, rows)


if __name__ == "__main__":
    main()
