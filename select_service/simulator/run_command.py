"""`select-sim run`: compares policies on the same requests, as a table, JSON and a report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from select_service.settings.command_line import read_section
from select_service.simulator.command_options import RunOptions, settings_of
from select_service.simulator.comparison import (
    Comparison,
    as_text,
    differences,
    legend,
    perform,
    table,
    verdict,
)
from select_service.simulator.progress_bar import progress_bar
from select_service.simulator.report import html_of
from select_service.simulator.results import expect_writable, write_whole
from select_service.simulator.runs import at_load, capacity_of, run
from select_service.simulator.settings import POLICIES
from select_service.standard_output import definitions

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from select_service.simulator.command_options import ReplayOptions, RunsOptions
    from select_service.simulator.settings import SimulationSettings

MEASURING: Final = "measuring the capacity"
"""What the progress bar before the runs of a load says."""


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError: it cannot be carried out.
        NotWritten: its results cannot be written.
    """
    options = read_section(RunOptions, args)
    settings = settings_of(args, options)
    names = policies_of(options.policy, settings)
    expect_writable(options.out, options.report)
    settings, capacity = loaded(settings, options.load, quiet=options.quiet)
    seeds = range(settings.seed, settings.seed + options.seeds)
    tasks = [replace(settings, policy=name, seed=seed) for name in names for seed in seeds]
    with progress_bar("simulating", len(tasks), quiet=options.quiet) as progress:
        runs = perform(run, tasks, options.jobs, progress)
    result = Comparison(settings=settings, runs=runs, capacity=capacity, load=options.load)
    sys.stdout.write(f"{verdict(runs)}\n{as_text(*table(runs))}")
    head, rows = differences(runs)
    if rows:
        sys.stdout.write(f"\n{as_text(head, rows)}")
    sys.stdout.write(f"\n{definitions('columns', legend(result))}\n")
    deliver(options, result, lambda: html_of(result, args.command_line))
    return 0


def policies_of(text: str, settings: SimulationSettings) -> list[str]:
    """Return the policies that are named.

    Raises:
        ValueError: there is no such policy, or one is named twice.
    """
    names = list(POLICIES) if text == "all" else text.split(",")
    for name in names:
        replace(settings, policy=name).validate()
    if len(set(names)) < len(names):
        raise ValueError("--policy: one is named twice, and its runs would count twice")
    return names


def loaded(
    settings: SimulationSettings, load: float | None, *, quiet: bool
) -> tuple[SimulationSettings, float | None]:
    """Scale a trace to a share of capacity, if requested; returns settings and capacity.

    Args:
        settings: with the trace.
        load: the share; None: as it is.
        quiet: show no progress.

    Raises:
        ValueError, OSError: it cannot be done.
    """
    if load is None:
        return settings, None
    with progress_bar(MEASURING, 1.0, quiet=quiet) as progress:
        capacity = capacity_of(settings, progress)
    sys.stdout.write(f"capacity {capacity:.2f} requests/s, offered {load * capacity:.2f}\n")
    return at_load(settings, load, capacity), capacity


def deliver(
    options: RunsOptions | ReplayOptions, result: msgspec.Struct, page: Callable[[], str]
) -> None:
    """Write results to the files that were asked for, as JSON and as a page.

    Raises:
        NotWritten: they could not be.
    """
    if options.out is not None:
        write_whole(options.out, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if options.report is not None:
        write_whole(options.report, page().encode())
