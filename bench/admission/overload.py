"""`python -m bench.admission.overload`: policies far beyond capacity, on long prompts and answers.

Simulated, hence the same on every machine: long prompts, long answers, both, and tenants of a class
that send either, at multiples of what the pool can compute at all. Policies run with their
defaults; requests bring their targets.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from bench.admission.capacity import measure_throughput
from bench.admission.play import Script
from bench.admission.policies import contenders
from bench.admission.simulated import simulate
from bench.admission.workload import read_workload
from bench.output import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.admission.measures import Result

__all__ = ["main"]

_WORKLOADS = "prefill-bound,decode-bound,mixed"
_POLICIES = "always-admit,token-bucket,gaie-legacy,slo-shed"
"""tier-shed and tenant-budgets come out as always-admit here."""
_OURS = "slo-shed"
_LOADS = "0.8,1.2,1.6,2.5,4"
_WARM_UP_S = 60.0
"""The longest answers take as long: before, the pool is only filling."""


class Case(NamedTuple):
    """One policy on one workload at one load."""

    workload: str
    load: float
    policy: str


def main(argv: Sequence[str] | None = None) -> int:
    """Play every case with every seed, and print a table with the means.

    Returns:
        1 if a request was not accounted for.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.admission.overload", description=__doc__)
    parser.add_argument("--workloads", default=_WORKLOADS, help="default: %(default)s")
    parser.add_argument("--loads", default=_LOADS, help="default: %(default)s")
    parser.add_argument("--policies", default=_POLICIES, help="default: %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--untold", action="store_true", help="requests do not say how long their answers will be"
    )
    args = parser.parse_args(argv)
    seeds = [int(one) for one in args.seeds.split(",")]
    loads = [float(one) for one in args.loads.split(",")]
    lines = []
    with ProcessPoolExecutor(args.processes) as pool:
        for workload in args.workloads.split(","):
            script = Script(
                read_workload(workload),
                rate=0.0,
                seconds=args.seconds,
                warm_up_s=_WARM_UP_S,
                tells_answers=not args.untold,
            )
            capacity = measure_throughput(script)
            progress(f"{workload}: {capacity.rate:.1f} requests/s")
            chosen = [
                replace(one, config={}) if one.name == _OURS else one
                for one in contenders(script, capacity)
                if one.name in args.policies.split(",")
            ]
            jobs = {
                Case(workload, load, one.name): [
                    pool.submit(
                        simulate, replace(script, rate=load * capacity.rate, seed=seed), one
                    )
                    for seed in seeds
                ]
                for load, one in product(loads, chosen)
            }
            for case, runs in jobs.items():
                lines.append((case, [run.result() for run in runs]))
                progress(" | ".join(_row(*lines[-1])))
    print(table(lines))
    lost = [one for _, runs in lines for one in runs if one.offered != sum(one.outcomes.values())]
    return 1 if lost else 0


def table(lines: Sequence[tuple[Case, list[Result]]]) -> str:
    """Return one Markdown table: shares in time in per cent, with returns, and the worst seed's.

    A row is of one policy; "of the best" compares its requests in time with the best policy's.
    """
    names = list(dict.fromkeys(name for _, runs in lines for name in runs[0].classes))
    head = ["workload", "load", "policy", *names]
    head += ["in time/s", "of the best", "Jain in class", "first retry", "inversions"]
    best: dict[tuple[str, float], float] = {}
    for case, runs in lines:
        best[case[:2]] = max(best.get(case[:2], 0.0), mean(one.goodput for one in runs))
    rows = [head, ["---"] * len(head)]
    for case, runs in lines:
        row = _row(case, runs)
        most = best[case[:2]]
        row.insert(-3, f"{mean(one.goodput for one in runs) / most:.2f}" if most else "-")
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(case: Case, runs: list[Result]) -> list[str]:
    came_back = sum(one.first_retries for one in runs)
    let_in = sum(one.first_retries_in for one in runs)
    return [
        case.workload,
        f"{case.load:g}",
        case.policy,
        *(_shares([100 * one.classes[name].attained for one in runs]) for name in runs[0].classes),
        f"{mean(one.goodput for one in runs):.1f}",
        f"{min(min(one.jain_in_class.values()) for one in runs):.2f}",
        f"{100 * let_in / came_back:.0f} % of {came_back}" if came_back else "-",
        str(sum(one.inversions for one in runs)),
    ]


def _shares(of_seeds: list[float]) -> str:
    """Return the mean, and the worst seed where that is another."""
    usual, worst = f"{mean(of_seeds):.1f}", f"{min(of_seeds):.1f}"
    return usual if usual == worst else f"{usual} ({worst})"


if __name__ == "__main__":
    sys.exit(main())
