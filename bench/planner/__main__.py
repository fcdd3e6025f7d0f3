"""The planner's closed loop against its baselines: `python -m bench.planner`.

Made-up traffic (a day in an hour, a ramp, bursts of three kinds) through simulated engines that
each policy scales; engines take a minute to start, and the oracle's, too. Then what bursts cost
that could not be foreseen: the goal of `--attainment` against what was reached and paid. Last, the
same bursts when the hours before were learnt (`--load-predictor-warmup-trace`). `--predictors`
plays a day, a ramp and bursts with those, and nothing else. `--public` plays hours that are drawn
after public traces, beside the best fixed fleet, with whose engines every policy begins; `--days`
does so with days of eight hours. What has ended is kept beside `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from bench.output import write_json
from bench.planner.shapes import DAY_S, DAYS, HOUR_S, PUBLIC, SHAPES, traffic
from bench.provenance import provenance
from bench.resumable import Kept
from select_service.planner.core.demand import Interval, intervals_of
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge.baselines import Contest
from select_service.planner.edge.predictors import PredictorSettings
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.trace_replay import ReplaySettings
from select_service.planner.settings import POLICIES, PREDICTORS

PROFILE: Final = Path(__file__).parents[2] / "tests" / "golden" / "planner" / "profile_a"
GPUS_MAX: Final = 64
LEARNT: Final = (("recurring bursts", 2), ("odd bursts", 2), ("odd bursts", 3))
PREDICTED: Final = ("diurnal", "ramp", "bursts")
FIT_DEADLINE_S: Final = 300.0
"""A slow machine is not to decide which forecast there is."""
GOALS: Final = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
SETTINGS: Final = ReplaySettings(ttft_ms=600.0, itl_ms=20.0, start=(1, 1))
OF_PUBLIC: Final = ReplaySettings(ttft_ms=500.0, itl_ms=50.0)
OF_LUMPS: Final = ReplaySettings(ttft_ms=1_500.0, itl_ms=25.0)  # its prompts are longer


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    shape: str
    policy: str
    seed: int
    attainment: float = 0.99
    learnt_hours: int = 0
    predictor: str = "auto"


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    task: Task
    attainment: float
    gpu_hours: float
    changes: int
    turns: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the seeds."""

    shape: str
    policy: str
    goal: float
    learnt_hours: int
    predictor: str
    runs: int
    attainment: float
    attainment_least: float
    gpu_hours: float
    of_oracle: float | None
    """GPU-hours over those of the oracle, once that has run."""
    changes: float
    turns: float


def run(task: Task, surrounding: ReplaySettings = SETTINGS) -> Done:
    """Carry out one by itself."""
    (done,) = run_all(Group(surrounding, (task,)))
    return done


class Group(NamedTuple):
    """Tasks that differ in the policy alone, and the environment."""

    settings: ReplaySettings
    tasks: tuple[Task, ...]


def run_all(group: Group) -> list[Done]:
    """Carry out a group: fixed fleets are tried once for all of it."""
    first = group.tasks[0]
    settings = settings_of(first, group.settings)
    is_public = first.shape in PUBLIC or first.shape in DAYS
    if first.shape in PUBLIC:
        requests = PUBLIC[first.shape](first.seed, HOUR_S)
    elif first.shape in DAYS:
        requests = DAYS[first.shape](first.seed, DAY_S)
    else:
        requests = traffic(SHAPES[first.shape](first.seed), HOUR_S, first.seed)
    contest = Contest(read_profile(PROFILE), requests, settings, GPUS_MAX)
    start = contest.fixed.best if is_public else None
    done = []
    for task in group.tasks:
        compatible = task.policy == "compatible"
        tuning = PredictorSettings(
            name="kalman" if compatible else task.predictor,
            interval_s=settings.interval_s,
            compatible=compatible,
            fit_deadline_s=FIT_DEADLINE_S,
        )
        result = contest.result(task.policy, contest.policy(task.policy, tuning), start)
        done.append(
            Done(
                task=task,
                attainment=result.attainment,
                gpu_hours=result.gpu_hours,
                changes=result.changes,
                turns=result.turns,
            )
        )
    return done


def settings_of(task: Task, surrounding: ReplaySettings) -> ReplaySettings:
    past: tuple[Interval, ...] = ()
    if task.learnt_hours:
        end = task.learnt_hours * HOUR_S
        before = traffic(SHAPES[task.shape](task.seed), end, task.seed, -end)
        # `whole_bins` leaves the last interval out, which may be a part: add one that is
        whole = [*before, TracedRequest(end + 1.0, 1.0, 1.0)]
        past = tuple(intervals_of(whole, surrounding.interval_s))
    return dataclasses.replace(surrounding, attainment=task.attainment, warmup=past)


def rows_of(done: Sequence[Done]) -> list[Row]:
    oracles = {
        (one.task.shape, one.task.seed): one.gpu_hours
        for one in done
        if one.task.policy == "oracle"
    }
    groups: dict[Task, list[Done]] = {}
    for one in done:
        groups.setdefault(replace(one.task, seed=0), []).append(one)
    return [
        Row(
            shape=task.shape,
            policy=task.policy,
            goal=task.attainment,
            learnt_hours=task.learnt_hours,
            predictor=task.predictor,
            runs=len(runs),
            attainment=statistics.mean(one.attainment for one in runs),
            attainment_least=min(one.attainment for one in runs),
            gpu_hours=statistics.mean(one.gpu_hours for one in runs),
            of_oracle=statistics.mean(
                one.gpu_hours / oracles[one.task.shape, one.task.seed] for one in runs
            )
            if all((one.task.shape, one.task.seed) in oracles for one in runs)
            else None,
            changes=statistics.mean(one.changes for one in runs),
            turns=statistics.mean(one.turns for one in runs),
        )
        for task, runs in groups.items()
    ]


def tasks_of(policies: Sequence[str], seeds: Sequence[int]) -> list[Task]:
    tasks = [
        Task(shape=shape, policy=policy, seed=seed)
        for shape in SHAPES
        for policy in policies
        for seed in seeds
    ]
    tasks += [
        Task(shape=shape, policy="slo", seed=seed, learnt_hours=hours)
        for shape, hours in LEARNT
        for seed in seeds
    ]
    # what headroom for bursts costs, when an hour of their like is known
    tasks += [
        Task(shape="bursts", policy="slo", seed=seed, attainment=goal, learnt_hours=1)
        for goal in GOALS
        for seed in seeds
    ]
    return tasks


def tasks_of_predictors(predictors: Sequence[str], seeds: Sequence[int]) -> list[Task]:
    """Nothing learnt, or two hours; beside an oracle, which needs none."""
    tasks = [Task(shape=shape, policy="oracle", seed=seed) for shape in PREDICTED for seed in seeds]
    tasks += [
        Task(shape=shape, policy="slo", seed=seed, learnt_hours=hours, predictor=predictor)
        for shape in PREDICTED
        for hours in (0, 2)
        for predictor in predictors
        for seed in seeds
    ]
    return tasks


def groups_of(tasks: Sequence[Task], settings: ReplaySettings) -> list[Group]:
    """Put tasks together that differ in the policy alone."""

    def environment(task: Task) -> ReplaySettings:
        if task.shape not in PUBLIC and task.shape not in DAYS:
            return settings
        return OF_LUMPS if task.shape == "lumps" else OF_PUBLIC

    def place(task: Task) -> Task:
        return replace(task, policy="", predictor="")

    ordered = sorted(tasks, key=lambda one: repr(place(one)))
    return [Group(environment(one), tuple(group)) for one, group in groupby(ordered, key=place)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--predictors", nargs="+", choices=PREDICTORS, help="of the planner, only")
    parser.add_argument("--public", action="store_true", help="hours like public traces, only")
    parser.add_argument("--days", action="store_true", help="days of such clumps, only")
    parser.add_argument("--interval", type=float, default=SETTINGS.interval_s, metavar="SECONDS")
    parser.add_argument("--startup", type=float, default=SETTINGS.startup_s, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-planner.json"))
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    settings = dataclasses.replace(SETTINGS, interval_s=args.interval, startup_s=args.startup)
    if args.public or args.days:
        policies = [one for one in ("static", "slo", "oracle") if one in args.policies]
        tasks = [
            Task(shape=shape, policy=policy, seed=seed)
            for shape in (DAYS if args.days else PUBLIC)
            for policy in policies
            for seed in seeds
        ]
    elif args.predictors:
        tasks = tasks_of_predictors(args.predictors, seeds)
    else:
        tasks = tasks_of(args.policies, seeds)
    groups = groups_of(tasks, settings)
    kept = Kept(args.out.with_suffix(".done.jsonl"), args.jobs)
    ended = kept.results("planner", run_all, groups, list[Done])
    done = [one for group in ended for one in group]
    write(args.out, args.seeds, groups, done)
    for row in rows_of(done):
        print(
            f"{row.shape:17} {row.policy:10} goal {row.goal:5.3f} learnt {row.learnt_hours} h "
            f"{row.predictor:9} "
            f"{100 * row.attainment:6.2f} % (least {100 * row.attainment_least:6.2f}) "
            f"{row.gpu_hours:6.2f} GPU-h {row.of_oracle or 0.0:5.2f} x oracle "
            f"{row.changes:5.1f} changes {row.turns:4.1f} turns"
        )


def write(out: Path, seeds: int, groups: Sequence[Group], done: Sequence[Done]) -> None:
    settings = groups[0].settings
    result = {
        "what": "the planner's closed loop, simulated",
        "provenance": provenance(),
        "profile": PROFILE.name,
        "targets_ms": {
            one.tasks[0].shape: (one.settings.ttft_ms, one.settings.itl_ms) for one in groups
        },
        "startup_s": settings.startup_s,
        "interval_s": settings.interval_s,
        "seeds": seeds,
        "rows": rows_of(done),
    }
    write_json(out, result)


if __name__ == "__main__":
    main()
