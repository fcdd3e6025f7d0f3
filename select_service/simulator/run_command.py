"""`select-sim run`: compares policies on the same requests, as a table, JSON and a report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from select_service.simulator.comparison import (
    Comparison,
    as_text,
    perform,
    shown_progress,
    table,
)
from select_service.simulator.options import add_options, settings_of
from select_service.simulator.report import html_of
from select_service.simulator.results import expect_writable, write_whole
from select_service.simulator.runs import POLICIES, at_load, capacity_of, expect_load

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from select_service.simulator.runs import SimulationSettings

__all__ = ["configure", "execute"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--policy",
        default="ours,kv-cost",
        metavar="NAME,...",
        help=f"all, or some of {', '.join(POLICIES)} (default: %(default)s)",
    )
    add_options(parser)
    parser.add_argument("--report", metavar="FILE", help="results as one HTML file with plots")
    parser.set_defaults(execute=execute)


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError: it cannot be carried out.
        NotWritten: its results cannot be written.
    """
    names = list(POLICIES) if args.policy == "all" else args.policy.split(",")
    settings = settings_of(args)
    for name in names:
        replace(settings, policy=name).validate()
    if len(set(names)) < len(names):
        raise ValueError("--policy: one is named twice, and its runs would count twice")
    expect_writable(args.out, args.report)
    settings, capacity = loaded(settings, args.load)
    seeds = range(settings.seed, settings.seed + args.seeds)
    tasks = [replace(settings, policy=name, seed=seed) for name in names for seed in seeds]
    with shown_progress(len(tasks), quiet=args.quiet) as progress:
        runs = perform(tasks, args.jobs, progress)
    result = Comparison(settings=settings, runs=runs, capacity=capacity, load=args.load)
    sys.stdout.write(as_text(*table(runs)))
    if args.out is not None:
        write_json(args.out, result)
    if args.report is not None:
        write_whole(args.report, html_of(result).encode())
    return 0


def loaded(
    settings: SimulationSettings, load: float | None
) -> tuple[SimulationSettings, float | None]:
    """Scale a trace to a share of capacity, if requested; returns settings and capacity.

    Raises:
        ValueError, OSError: it cannot be done.
    """
    if load is None:
        return settings, None
    expect_load(load)
    capacity = capacity_of(settings)
    sys.stdout.write(f"capacity {capacity:.2f} requests/s, offered {load * capacity:.2f}\n")
    return at_load(settings, load, capacity), capacity


def write_json(path: str, result: msgspec.Struct) -> None:
    """Write results as JSON for people and programs.

    Raises:
        NotWritten: they could not be.
    """
    write_whole(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
