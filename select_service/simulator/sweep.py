"""`select-sim sweep`: many weights on the same requests, and their Pareto front.

Weights form a grid, or are drawn from it. The front has the settings that no other beats in one aim
without losing in another; confidence intervals are shown. A difference to the front below its
interval is not significant.
"""

from __future__ import annotations

import math
import os
import random
import sys
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from select_service.settings.command_line import read_section
from select_service.simulator.command_options import SweepOptions, settings_of
from select_service.simulator.comparison import (
    METRICS,
    as_text,
    estimates,
    perform,
)
from select_service.simulator.page import figure, folded, key, page, table
from select_service.simulator.plots import Series, lines
from select_service.simulator.progress_bar import progress_bar
from select_service.simulator.results import expect_writable
from select_service.simulator.run_command import deliver, loaded
from select_service.simulator.runs import run
from select_service.simulator.settings import SimulationSettings, peer_of, weights_with
from select_service.simulator.statistics import Estimate
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from select_service.simulator.core.measures import Measures

_MORE_IS_BETTER: Final = frozenset({"hit_rate", "hit_share", "good", "goodput"})
_RANGE: Final = 3  # begin:end:step
_POINTS_MAX: Final = 10_000
"""Each takes at least one run: more would take too long, and is not read."""


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and its results."""

    weights: dict[str, float]  # that differ from the base; empty: the base itself
    policy: str
    metrics: dict[str, Estimate]
    is_on_front: bool = False


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the command."""

    settings: SimulationSettings
    aims: list[str]
    candidates: list[SweepResult]


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError: it cannot be carried out.
        NotWritten: its results cannot be written.
    """
    options = read_section(SweepOptions, args)
    aims = options.aims.split(",")
    unknown = [name for name in aims if name not in METRICS]
    if unknown:
        raise ValueError(f"--aims: there is no {', '.join(unknown)}, but {', '.join(METRICS)}")
    expect_writable(options.out, options.report)
    asked = settings_of(args, options)
    settings, _ = loaded(
        replace(asked, policy=asked.weights.policy), options.load, quiet=options.quiet
    )
    points = _points(_grid(options.vary, settings.weights), options.draw, settings.seed)
    variants = [replace(settings, weights=weights_with(settings.weights, one)) for one in points]
    variants.append(peer_of(settings))
    tasks = [
        replace(variant, seed=settings.seed + at)
        for variant in variants
        for at in range(options.seeds)
    ]
    with progress_bar("simulating", len(tasks), quiet=options.quiet) as progress:
        runs = perform(run, tasks, options.jobs or os.cpu_count() or 1, progress)
    groups = [runs[at : at + options.seeds] for at in range(0, len(runs), options.seeds)]
    candidates = _judged([*points, {}], variants, groups, aims)
    head, rows = _table(candidates, aims)
    sys.stdout.write(as_text(head, rows))
    result = Sweep(settings=settings, aims=aims, candidates=candidates)
    deliver(options, result, lambda: _page(result, table(head, rows), args.command_line))
    return 0


def _grid(texts: Sequence[str], base: RouterConfig) -> dict[str, list[float]]:
    """Return the values of each weight."""
    grid: dict[str, list[float]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            raise ValueError(f"--vary: {text} should be WEIGHT=VALUES")
        if name in grid:
            raise ValueError(f"--vary: {name} is named twice")
        grid[name] = _values(values)
        for value in grid[name]:
            weights_with(base, {name: value})
    return grid


def _points(grid: dict[str, list[float]], draw: int | None, seed: int) -> list[dict[str, float]]:
    """Return all points of a grid in order, or a sample of them.

    A sampled grid may have any size.
    """
    total = math.prod(map(len, grid.values()))
    chosen: Iterable[int] = range(total)
    if draw is not None and draw < total:
        chosen = sorted(random.Random(f"{seed}/sweep").sample(range(total), draw))
    elif total > _POINTS_MAX:
        raise ValueError(f"--vary: {total:,} points, at most {_POINTS_MAX:,}: --draw some of them")
    return [_point(grid, number) for number in chosen]


def _point(grid: dict[str, list[float]], number: int) -> dict[str, float]:
    point: dict[str, float] = {}
    for name, values in reversed(grid.items()):  # the last one changes fastest
        number, at = divmod(number, len(values))
        point[name] = values[at]
    return {name: point[name] for name in grid}


def _values(text: str) -> list[float]:
    pieces = text.split(":")
    try:
        if len(pieces) != _RANGE:
            return [float(piece) for piece in text.split(",")]
        begin, end, step = (float(piece) for piece in pieces)
    except ValueError:
        raise ValueError(f"--vary: {text} should be numbers") from None
    if not (step > 0.0 and begin <= end < math.inf):
        raise ValueError(f"--vary: {text} should go up, to an end")
    count = (end - begin) / step + 1e-9
    if count >= _POINTS_MAX:
        raise ValueError(f"--vary: {text} has {count:,.0f} points, at most {_POINTS_MAX:,}")
    return [round(begin + step * at, 9) for at in range(int(count) + 1)]


def _judged(
    points: Sequence[dict[str, float]],
    variants: Sequence[SimulationSettings],
    groups: Sequence[Sequence[Measures]],
    aims: Sequence[str],
) -> list[SweepResult]:
    candidates = [
        SweepResult(weights=point, policy=variant.policy, metrics=estimates(group))
        for point, variant, group in zip(points, variants, groups, strict=True)
    ]
    costs = [[_cost(one.metrics[aim].mean, aim) for aim in aims] for one in candidates]
    front = pareto(costs)
    return [replace(one, is_on_front=at in front) for at, one in enumerate(candidates)]


def _cost(value: float, aim: str) -> float:
    return -value if aim in _MORE_IS_BETTER else value


def pareto(costs: Sequence[Sequence[float]]) -> set[int]:
    """Return the positions of those that no other beats in one aim without losing in another."""
    front = set()
    for at, mine in enumerate(costs):
        beaten = any(
            all(x <= y for x, y in zip(other, mine, strict=True)) and list(other) != list(mine)
            for other in costs
        )
        if not beaten:
            front.add(at)
    return front


def _table(
    candidates: Sequence[SweepResult], aims: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return a header, and a row per candidate, the best by the first aim first."""
    head = ["weights", *(METRICS[aim][0] for aim in aims), "front"]
    rows = []
    order = sorted(candidates, key=lambda one: _cost(one.metrics[aims[0]].mean, aims[0]))
    for one in order:
        cells = [one.metrics[aim].text(METRICS[aim][3], METRICS[aim][2]) for aim in aims]
        rows.append([_called(one), *cells, "*" if one.is_on_front else ""])
    return head, rows


def _page(result: Sweep, summary: str, command_line: str) -> str:
    """Return an HTML page: the table, and plots of each further aim against the first."""
    candidates, aims = result.candidates, result.aims
    kinds = {
        "on the front": [one for one in candidates if one.is_on_front],
        "beaten": [one for one in candidates if not one.is_on_front],
    }
    plots = [
        lines(
            f"{METRICS[other][0]} by {METRICS[aims[0]][0]}",
            [
                Series(
                    name,
                    [_place(one, aims[0], other) for one in some],
                    "dots",
                    [f"{_called(one)} ({name})" for one in some],
                )
                for name, some in kinds.items()
            ],
            x=METRICS[aims[0]][0],
            y=METRICS[other][0],
        )
        for other in aims[1:]
    ]
    body = [
        summary,
        "<p>Means over seeds ± 95 % of Student's t; one seed has no interval. The front has those "
        "that are not worse in every aim than another; what is beyond it by less than their "
        "interval is no finding.</p>",
        key(kinds),
        *map(figure, plots),
        folded("Settings", "Of all but what is varied.", result.settings),
    ]
    best = min(candidates, key=lambda one: _cost(one.metrics[aims[0]].mean, aims[0]))
    label, _, scale, digits = METRICS[aims[0]]
    name, _, unit = label.partition(", ")
    verdict = (
        f"{sum(one.is_on_front for one in candidates)} of {len(candidates)} settings are on the "
        f"front; the best {name} has {_called(best)}, "
        f"with {f'{best.metrics[aims[0]].text(digits, scale)} {unit}'.rstrip()}."
    )
    return page("select-sim: sweep", body, verdict=verdict, command_line=command_line)


def _called(one: SweepResult) -> str:
    return " ".join(f"{key}={value:g}" for key, value in one.weights.items()) or one.policy


def _place(one: SweepResult, across: str, up: str) -> tuple[float, float]:
    x, y = (one.metrics[aim].mean * METRICS[aim][2] for aim in (across, up))
    return x, y
