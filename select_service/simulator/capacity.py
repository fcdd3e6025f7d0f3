"""`select-sim capacity`: what each policy carries within targets, or how many workers that takes.

SLO capacity is the load at which a share of the requests, nine of ten, is just in time. It is found
by bisection, for each policy and seed by itself; policies have the same requests, so what is
reported of two of them is the difference over seeds. The same search over workers answers what a
load takes.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from select_service.settings.command_line import read_section
from select_service.simulator.command_options import CapacityOptions, settings_of
from select_service.simulator.comparison import as_text, base_of, perform
from select_service.simulator.core.baselines import BEYOND
from select_service.simulator.page import folded, page, table
from select_service.simulator.progress_bar import progress_bar
from select_service.simulator.results import expect_writable
from select_service.simulator.run_command import MEASURING, deliver, policies_of
from select_service.simulator.runs import at_load, capacity_of, run
from select_service.simulator.settings import WORKERS_MAX, SimulationSettings
from select_service.simulator.statistics import Estimate, estimate
from select_service.simulator.traces import WITH_TARGETS
from select_service.version import __version__

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

_FIRST_LOAD: Final = 0.5
_LOAD_MAX: Final = 64.0
_LOAD_MIN: Final = 0.01
_STEPS: Final = 10
"""As many runs a search takes, about: for the progress bar."""
_NEARLY_DONE: Final = 0.95
"""What the bar shows of a search that takes more of them."""


class CapacitySearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search: one policy, one seed."""

    settings: SimulationSettings
    workers: bool  # their number is looked for, else the load
    share: float
    tolerance: float
    capacity: float | None = None  # of the fleet, in requests per second, if a trace is played


class CapacityFound(msgspec.Struct, frozen=True, kw_only=True):
    """What a search has found, and what it tried: load or workers, and the share in time."""

    policy: str
    seed: int
    found: float  # 0: no load is light enough
    trials: list[tuple[float, float]]
    beyond: bool = False  # more than what was found: the search ended there


class Capacities(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the command."""

    version: str = __version__
    settings: SimulationSettings
    find: str
    share: float
    capacity: float | None
    searches: list[CapacityFound]


def search(task: CapacitySearch, progress: Callable[[float], None] | None = None) -> CapacityFound:
    """Find the load, or the number of workers.

    Raises:
        ValueError, BadTrace, OSError: it cannot be run.
    """
    trials: list[tuple[float, float]] = []

    def report(share: float) -> None:
        if progress is not None:
            progress(min((len(trials) + share) / _STEPS, _NEARLY_DONE))

    def good(at: float) -> float:
        settings = task.settings
        if task.workers:
            settings = replace(settings, workers=int(at))
        else:
            settings = _scaled(settings, at, task.capacity)
        trials.append((at, run(settings, report).good))
        return trials[-1][1]

    found, beyond = _workers(task, good) if task.workers else _load(task, good)
    settings = task.settings
    return CapacityFound(
        policy=settings.policy, seed=settings.seed, found=found, trials=trials, beyond=beyond
    )


def _scaled(
    settings: SimulationSettings, load: float, capacity: float | None
) -> SimulationSettings:
    """Return a trace at this share of capacity, or so many times the rates, or the users."""
    trace = settings.trace
    if trace is not None and not trace.users:
        return at_load(settings, load, capacity)
    if trace is not None:
        return replace(settings, trace=replace(trace, users=max(1, round(load * trace.users))))
    workloads = [
        replace(one, users=max(1, round(load * one.users)))
        if one.arrivals == "closed"
        else replace(one, rate=load * one.rate)
        for one in settings.workloads
    ]
    return replace(settings, workloads=workloads)


def _load(task: CapacitySearch, good: Callable[[float], float]) -> tuple[float, bool]:
    """Bisect between a load that is good and one that is not; between the last two, in line.

    Also returns whether even the greatest load was good.
    """
    low, share_low, high = 0.0, 1.0, _FIRST_LOAD
    while (share_high := good(high)) >= task.share:
        low, share_low, high = high, share_high, 2.0 * high
        if high > _LOAD_MAX:
            return low, True
    while high - low > task.tolerance * high:
        middle = (low + high) / 2
        if middle < _LOAD_MIN:
            return 0.0, False
        share = good(middle)
        if share >= task.share:
            low, share_low = middle, share
        else:
            high, share_high = middle, share
    users = _users(task.settings)
    if users:  # there is no part of one
        return _users(_scaled(task.settings, low, task.capacity)) / users, False
    return low + (high - low) * (share_low - task.share) / (share_low - share_high), False


def _users(settings: SimulationSettings) -> int:
    """Return the users whose number sets the pace; 0: rates or times do, too."""
    if settings.trace is not None:
        return settings.trace.users
    is_closed = all(one.arrivals == "closed" for one in settings.workloads)
    return sum(one.users for one in settings.workloads) if is_closed else 0


def _workers(task: CapacitySearch, good: Callable[[float], float]) -> tuple[float, bool]:
    """Bisect between too few workers and enough; also returns whether the most were too few."""
    settings = task.settings
    most = WORKERS_MAX - settings.prefill_workers
    # the slow ones are always there
    few, enough = max(0, sum(one.count for one in settings.slow) - 1), settings.workers
    while good(enough) < task.share:
        if enough >= most or enough >= 64 * settings.workers:
            return float(enough), True
        few, enough = enough, min(2 * enough, most)
    while enough - few > 1:
        middle = (few + enough) // 2
        if good(middle) >= task.share:
            enough = middle
        else:
            few = middle
    return float(enough), False


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError: it cannot be carried out.
        NotWritten: its results cannot be written.
    """
    options = read_section(CapacityOptions, args)
    settings = settings_of(args, options)
    _expect_targets(settings)
    names = policies_of(options.policy, settings)
    expect_writable(options.out, options.report)
    by_workers = options.find == "workers"
    has_pace = settings.trace is not None and not settings.trace.users
    capacity = None
    if has_pace and not by_workers:
        with progress_bar(MEASURING, 1.0, quiet=options.quiet) as progress:
            capacity = capacity_of(settings, progress)
    tasks = [
        CapacitySearch(
            settings=replace(settings, policy=name, seed=settings.seed + at),
            workers=by_workers,
            share=options.share,
            tolerance=options.tolerance,
            capacity=capacity,
        )
        for name in names
        for at in range(options.seeds)
    ]
    with progress_bar("searching", len(tasks), quiet=options.quiet) as progress:
        found = perform(search, tasks, options.jobs, progress)
    result = Capacities(
        settings=settings,
        find=options.find,
        share=options.share,
        capacity=capacity,
        searches=found,
    )
    head, rows = table_of(result)
    sys.stdout.write(f"{verdict(result)}\n{as_text(head, rows)}")
    deliver(options, result, lambda: _page(result, table(head, rows), args.command_line))
    return 0


def _page(result: Capacities, summary: str, command_line: str) -> str:
    """Return an HTML page: the table, and the settings."""
    about = "Of the first search; others differ in policy, seed and load."
    body = [
        summary,
        "<p>Means over seeds ± 95 % of Student's t; one seed has no interval.</p>",
        folded("Settings", about, result.settings),
    ]
    what = "workers for targets" if result.find == "workers" else "SLO capacity"
    return page(f"select-sim: {what}", body, verdict=verdict(result), command_line=command_line)


def _expect_targets(settings: SimulationSettings) -> None:
    """Refuse requests that nothing is asked of; a trace's own targets are only known later."""
    asked = settings.slo_ttft_s is not None or settings.slo_itl_s is not None
    of_workloads = any(
        one.slo_ttft_s is not None or one.slo_itl_s is not None for one in settings.workloads
    )
    if not (
        asked
        or of_workloads
        or (settings.trace is not None and settings.trace.format in WITH_TARGETS)
    ):
        raise ValueError("--slo-ttft, --slo-itl or both: when is a request in time?")


class _Group(NamedTuple):
    """What was found of one policy, by seed."""

    values: list[float]
    beyond: int  # seeds of more than that: their searches ended at the limit

    @property
    def is_beyond(self) -> bool:
        """Whether no seed says what it carries, or needs."""
        return self.beyond == len(self.values)

    @property
    def bound(self) -> float:
        """What every seed carries, or needs, at least; only a bound where some are beyond."""
        return min(self.values)

    def text(self, scale: float = 1.0) -> str:
        """Format it, without digits that say nothing: those of a limit, or of whole numbers."""
        whole = scale == 1.0 and all(one.is_integer() for one in self.values)
        if not self.beyond:
            found = estimate(self.values)
            is_one = whole and found.half is None
            return found.text(0 if is_one else _digits(scale * found.mean), scale)
        # a mean of numbers of which some are only known to be greater would be none
        low, high = (_significant(scale * one(self.values)) for one in (min, max))
        return f"> {high}" if self.is_beyond else f"{low} to > {high} (by seed)"


def _digits(value: float) -> int:
    """Return how many decimals of a number are significant: the border is found to a percent."""
    return 0 if not value else max(0, 2 - math.floor(math.log10(value)))


def _significant(value: float) -> str:
    return f"{value:.{0 if value.is_integer() else _digits(value)}f}"


def _by_policy(result: Capacities) -> dict[str, _Group]:
    groups: dict[str, list[CapacityFound]] = {}
    for one in result.searches:
        groups.setdefault(one.policy, []).append(one)
    return {
        policy: _Group([one.found for one in group], sum(one.beyond for one in group))
        for policy, group in groups.items()
    }


def _against(group: _Group, base: _Group) -> Estimate | None:
    """Return the mean difference to the base's, as a share of it.

    None: that carries nothing, or one of both was not found.
    """
    mean = sum(base.values) / len(base.values)
    if not mean or group.beyond or base.beyond:
        return None
    pairs = zip(group.values, base.values, strict=True)
    return estimate([(one - other) / mean for one, other in pairs])


def table_of(result: Capacities) -> tuple[list[str], list[list[str]]]:
    """Return a header, and a row per policy."""
    groups = _by_policy(result)
    base = base_of(groups)
    by_workers, capacity = result.find == "workers", result.capacity
    what = "workers" if by_workers else "of capacity" if capacity else "times the load"
    head = ["policy", what, *(["requests/s"] if capacity else [])]
    is_compared = len(groups) > 1
    if is_compared:
        head.append(f"against {base}, %")
    rows = []
    for policy, group in groups.items():
        row = [policy, group.text()]
        if capacity:
            row.append(group.text(capacity))
        if is_compared:
            change = None if policy == base else _against(group, groups[base])
            row.append("-" if change is None else change.signed())
        rows.append(row)
    return head, rows


def verdict(result: Capacities) -> str:
    """Say which policy carries the most, or needs the fewest workers, and by how much."""
    groups = _by_policy(result)
    by_workers = result.find == "workers"

    def order(name: str) -> tuple[float, float]:
        sign, group = 1.0 if by_workers else -1.0, groups[name]
        amount = group.bound if group.beyond else estimate(group.values).mean
        return sign * group.is_beyond, sign * amount

    ranking = sorted(groups, key=order)
    first, *others = [name for name in ranking if name not in BEYOND] or ranking
    settings = result.settings
    targets = [
        f"{name} {1e3 * value:g} ms"
        for name, value in (("TTFT", settings.slo_ttft_s), ("ITL", settings.slo_itl_s))
        if value is not None
    ]
    best, amount = groups[first], estimate(groups[first].values)
    within = f" ({', '.join(targets)})" if targets else ""
    in_time = f"{100 * result.share:g} % of requests in time"
    if by_workers and best.is_beyond:
        return (
            f"{best.bound:.0f} workers are not enough for {in_time}{within} with {first}: a "
            "request that is alone may be late."
        )
    if not amount.mean:
        return f"However light the load, {first} does not have {in_time}{within}."
    if by_workers:
        text = f"{first} needs {best.text()} workers"
    elif result.capacity is not None:
        least = best.bound if best.beyond else amount.mean
        rate = (
            f"{'at least ' * bool(best.beyond)}{_significant(least * result.capacity)} requests/s"
        )
        text = f"{first} carries {best.text()} of capacity, {rate},"
    else:
        text = f"{first} carries {best.text()} times the given load"
    text += f" with {in_time}{within}"
    if not others:
        return f"{text}."
    return f"{text}, {_beside(best, groups[others[0]], others[0])}."


def _beside(best: _Group, other: _Group, name: str) -> str:
    """Say what the next policy has, or by how much the best one is ahead of it."""
    if best.is_beyond and other.is_beyond:
        return f"as does {name}: more requests, or tighter targets, separate them"
    if other.is_beyond:
        return f"and for {name} {other.bound:.0f} are not enough"
    if best.beyond or other.beyond:
        more = "" if best.is_beyond else ": not every seed has a number"
        return f"{name} {other.text()}{more}"
    gap = _against(best, other)
    if gap is None:
        return f"{name} no load"
    if abs(gap.mean) <= (gap.half or 0.0):
        if gap.mean or gap.half:
            text = f"not clearly ahead of {name} ({gap.signed()} %)"
        else:
            text = f"the same as for {name}"
        return text
    more = " (one seed, so no interval)" if gap.half is None else ""
    return f"{gap.signed()} % against {name}{more}"
