"""The fast loop with counts that are scraped now and then: `python -m bench.planner.scraped`.

With Prometheus arrivals are known up to the last scrape, fifteen seconds ago or thirty, and not up
to the look. The same traffic is played with counts of every look and with those; nothing else
differs. Leaves a JSON file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Final

import msgspec

from bench.output import progress
from bench.planner import __main__ as shapes
from bench.planner import bursts
from bench.provenance import provenance

SCRAPES_S: Final = (0.0, 15.0, 30.0)
LEARNT: Final = (
    *(("diurnal", 0), ("ramp", 0), ("recurring bursts", 2)),
    *(("odd bursts", 3), ("recurring bursts", 0), ("bursts", 1)),
)
RISES_S: Final = (180.0, 300.0, 600.0)


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    traffic: str
    scrape_s: float
    seed: int
    attainment: float
    gpu_hours: float
    turns: int


def run(traffic: str, learnt_hours: int, rise_s: float, scrape_s: float, seed: int) -> Done:
    if rise_s:
        settings = dataclasses.replace(bursts.SETTINGS, scrape_s=scrape_s)
        rising = bursts.run(rise_s, seed, "ours", settings)
        found = (rising.attainment, rising.gpu_hours, rising.turns)
    else:
        settings = dataclasses.replace(shapes.SETTINGS, scrape_s=scrape_s)
        task = shapes.Task(shape=traffic, policy="slo", seed=seed, learnt_hours=learnt_hours)
        made = shapes.run(task, settings)
        found = (made.attainment, made.gpu_hours, made.turns)
    attainment, gpu_hours, turns = found
    name = (
        f"bursts that rise in {rise_s:.0f} s" if rise_s else f"{traffic}, {learnt_hours} h learnt"
    )
    return Done(
        traffic=name,
        scrape_s=scrape_s,
        seed=seed,
        attainment=attainment,
        gpu_hours=gpu_hours,
        turns=turns,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-scraped.json"))
    args = parser.parse_args()
    kinds = [(shape, hours, 0.0) for shape, hours in LEARNT]
    kinds += [("rising", bursts.LEARNT_H, rise_s) for rise_s in RISES_S]
    done: list[Done] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        asked = [
            pool.submit(run, *kind, scrape_s, seed)
            for kind in kinds
            for seed in args.seeds
            for scrape_s in SCRAPES_S
        ]
        for one in as_completed(asked):
            done.append(one.result())
            progress(str(done[-1]))
    done.sort(key=lambda one: (one.traffic, one.scrape_s, one.seed))
    result = {
        "what": "the planner's fast loop with scraped counts, simulated",
        "provenance": provenance(),
        "runs": done,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    for traffic in dict.fromkeys(one.traffic for one in done):
        for scrape_s in SCRAPES_S:
            some = [one for one in done if (one.traffic, one.scrape_s) == (traffic, scrape_s)]
            shares = [100 * one.attainment for one in some]
            print(
                f"{traffic:30} scraped every {scrape_s:4.0f} s: {statistics.mean(shares):6.2f} % "
                f"(least {min(shares):6.2f}), "
                f"{statistics.mean(one.gpu_hours for one in some):5.2f} GPU-hours, "
                f"{statistics.mean(one.turns for one in some):4.1f} turns"
            )


if __name__ == "__main__":
    main()
