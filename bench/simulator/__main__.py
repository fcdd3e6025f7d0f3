"""All policies on a recorded trace, around capacity: `python -m bench.simulator --trace FILE`.

For each size of fleet the capacity is measured first (requests a second with thousands waiting,
the peer's formula), then the trace is played at shares of it, every policy with the same seeds.
Leaves a JSON file, every metric as mean and half of its 95 % interval, and a picture beside it.
Ends with how fast it was: simulated requests per minute of processor time, all work included.
With `--others FILE` cells of policies that do not run come from an earlier result: a policy that
has not changed has the same numbers again.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from bench.provenance import provenance
from select_service.simulator.comparison import METRICS, as_text, by_policy, estimates
from select_service.simulator.core.engine_settings import KV_TOKENS
from select_service.simulator.core.measures import Measures
from select_service.simulator.plots import COLOURS, Series, lines
from select_service.simulator.runs import at_load, capacity_of, run
from select_service.simulator.settings import (
    FIRST_TOKEN,
    POLICIES,
    EngineSpec,
    SimulationSettings,
    Trace,
)
from select_service.simulator.statistics import Estimate

LOADS = (0.5, 0.8, 1.0, 1.2, 1.5)
FLEETS = (8, 16, 64)
SHOWN = ("ttft_mean", "ttft_p90", "hit_rate", "hit_share", "load_cov")
PLOTTED = (("ttft_p90", True), ("hit_share", False), ("load_cov", False))


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one load on one fleet."""

    workers: int
    load: float
    policy: str
    metrics: dict[str, Estimate]


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier result, as far as it is taken over."""

    provenance: dict[str, Any]
    settings: SimulationSettings
    seeds: int
    capacity_requests_per_s: dict[int, float]
    cells: list[Cell]
    others: dict[str, Any] = {}

    def origin(self, name: str, kept: list[str]) -> dict[str, Any]:
        """Return where the cells of these policies were run: here, or where this took them from."""
        if set(kept) <= set(self.others.get("policies", ())):
            return self.others | {"policies": kept}
        return {"from": name, "policies": kept, "provenance": self.provenance}

    def expect(
        self, settings: SimulationSettings, seeds: int, capacities: dict[int, float]
    ) -> None:
        """Refuse to lay cells beside these that had other requests, engines or loads.

        Raises:
            ValueError: naming what differs.
        """
        if self.settings != settings:
            raise ValueError("--others: its settings are not those of this run")
        if self.seeds != seeds:
            raise ValueError(f"--others: it has {self.seeds} seeds, this run {seeds}")
        for workers, capacity in capacities.items():
            if (known := self.capacity_requests_per_s.get(workers)) != capacity:
                raise ValueError(
                    f"--others: capacity of {workers} workers is {known}, not {capacity}"
                )

    def with_anew(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return its cells of other policies, and these: where they were, else behind."""
        anew = {(one.workers, one.load, one.policy): one for one in cells}
        policies = {one.policy for one in cells}
        taken = [
            anew.pop(place, one)
            for one in self.cells
            if (place := (one.workers, one.load, one.policy)) in anew or one.policy not in policies
        ]
        return [*taken, *anew.values()]


class Timed(msgspec.Struct, frozen=True):
    """Measures, and the processor time they took."""

    measures: Measures
    cpu_s: float


def timed(settings: SimulationSettings) -> Timed:
    begin = time.process_time()
    measures = run(settings)
    return Timed(measures, time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True, help="in Mooncake's format")
    parser.add_argument("--jitter", type=float, default=3.0, help="the trace's clock ticks so far")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="of an engine")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=FLEETS)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument(
        "--policies", nargs="+", default=[one for one in POLICIES if one != FIRST_TOKEN]
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-simulator.json"))
    parser.add_argument("--others", type=Path, help="earlier result, for policies that do not run")
    args = parser.parse_args()
    trace = Trace(path=args.trace, jitter_s=args.jitter, limit=args.limit)
    before = msgspec.json.decode(args.others.read_bytes(), type=Before) if args.others else None
    cells: list[Cell] = []
    capacities: dict[int, float] = {}
    spent: dict[str, list[tuple[int, float]]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for workers in args.workers:
            engine = EngineSpec(kv_tokens=args.kv_tokens)
            base = SimulationSettings(trace=trace, workers=workers, engine=engine)
            capacity = capacities[workers] = capacity_of(base)
            print(f"{workers} workers: capacity {capacity:.2f} requests/s", flush=True)
            if before is not None:
                before.expect(settings_of(args), args.seeds, capacities)
            for load in args.loads:
                offered = at_load(base, load, capacity)
                tasks = [
                    replace(offered, policy=policy, seed=seed)
                    for policy in args.policies
                    for seed in range(1, args.seeds + 1)
                ]
                done = list(pool.map(timed, tasks))
                for one in done:
                    of_policy = spent.setdefault(one.measures.policy, [])
                    of_policy.append((one.measures.requests, one.cpu_s))
                cells += cells_of(workers, load, [one.measures for one in done])
                print(told(cells[-len(args.policies) :]), flush=True)
            write(args, before, capacities, cells, spent)  # what there is: it may take an hour
    print("requests per minute of processor time:", speed_of(spent))


def speed_of(spent: dict[str, list[tuple[int, float]]]) -> dict[str, int]:
    """Return simulated requests per minute of processor time, by policy."""
    return {
        policy: round(60 * sum(n for n, _ in runs) / sum(s for _, s in runs))
        for policy, runs in spent.items()
    }


def settings_of(args: argparse.Namespace) -> SimulationSettings:
    """Return what all runs have in common, but the speed of the trace."""
    name = Path(args.trace).name  # wherever it lies
    return SimulationSettings(
        trace=Trace(path=name, jitter_s=args.jitter, limit=args.limit),
        engine=EngineSpec(kv_tokens=args.kv_tokens),
    )


def write(
    args: argparse.Namespace,
    before: Before | None,
    capacities: dict[int, float],
    cells: Sequence[Cell],
    spent: dict[str, list[tuple[int, float]]],
) -> None:
    result: dict[str, Any] = {
        "what": "policies on a recorded trace, simulated",
        "provenance": provenance(),
        "settings": settings_of(args),
        "seeds": args.seeds,
        "capacity_requests_per_s": capacities,
        "requests_per_cpu_minute": speed_of(spent),
        "cells": cells,
    }
    if before is not None:
        run_anew = {one.policy for one in cells}
        kept = sorted({one.policy for one in before.cells} - run_anew)
        result["others"] = before.origin(args.others.name, kept)
        result["cells"] = cells = before.with_anew(cells)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    args.out.with_suffix(".svg").write_text(picture_of(cells), encoding="utf-8")


def cells_of(workers: int, load: float, runs: Sequence[Measures]) -> list[Cell]:
    return [
        Cell(workers=workers, load=load, policy=policy, metrics=estimates(group))
        for policy, group in by_policy(runs).items()
    ]


def told(cells: Sequence[Cell]) -> str:
    head = [f"load {cells[0].load:g}", *(METRICS[name][0] for name in SHOWN)]
    rows = [
        [one.policy]
        + [one.metrics[name].text(METRICS[name][3], METRICS[name][2]) for name in SHOWN]
        for one in cells
    ]
    return as_text(head, rows)


class Point(Protocol):
    """What one policy made of one load on one fleet."""

    @property
    def workers(self) -> int:
        """Of the fleet."""

    @property
    def load(self) -> float:
        """As a share of capacity."""

    @property
    def policy(self) -> str:
        """Its name."""

    @property
    def metrics(self) -> dict[str, Estimate]:
        """By the names of METRICS."""


def picture_of(cells: Sequence[Point], plotted: Sequence[tuple[str, bool]] = PLOTTED) -> str:
    """Return a row of plots for each fleet, over load; metrics, and whether on a log scale."""
    sheets = []
    fleets = sorted({one.workers for one in cells})
    policies = list(dict.fromkeys(one.policy for one in cells))
    head = 30 + 20 * ((len(policies) - 1) // 8)
    for row, workers in enumerate(fleets):
        for column, (metric, log_y) in enumerate(plotted):
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
        f'<rect x="{20 + 170 * (at % 8)}" y="{8 + 20 * (at // 8)}" width="14" height="10" '
        f'fill="{COLOURS[at % len(COLOURS)]}"/><text x="{40 + 170 * (at % 8)}" '
        f'y="{17 + 20 * (at // 8)}" style="font:13px sans-serif">{policy}</text>'
        for at, policy in enumerate(policies)
    )
    height = 290 * len(fleets) + head + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1410" height="{height}">'
        f'<rect width="100%" height="100%" fill="white"/>{names}{"".join(sheets)}</svg>\n'
    )


if __name__ == "__main__":
    main()
