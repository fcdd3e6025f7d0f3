"""Many runs: executed on several processors, collected, and presented as tables and a sentence.

A run is one task and returns only its measures, so that little data is transferred. Policies get
the same requests, so what is reported of two of them is the mean of their differences, whose
interval is a fraction of either's own.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from select_service.simulator.core.baselines import BEYOND
from select_service.simulator.core.measures import Measures, RunPart
from select_service.simulator.settings import PEER, SimulationSettings
from select_service.simulator.statistics import Estimate, estimate
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from select_service.core.columns import Floats

Task = TypeVar("Task")
Result = TypeVar("Result")

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  # nosec B108 - a directory of its own
_REDRAWN_S: Final = 0.2
"""Between two looks at how far the tasks of other processes are."""

METRICS: Final[dict[str, tuple[str, Callable[[Measures], float], float, int]]] = {
    "ttft_p50": ("TTFT p50, ms", lambda one: one.ttft_s.p50, 1e3, 0),
    "ttft_mean": ("TTFT mean, ms", lambda one: one.ttft_s.mean, 1e3, 0),
    "ttft_p90": ("TTFT p90, ms", lambda one: one.ttft_s.p90, 1e3, 0),
    "ttft_p99": ("TTFT p99, ms", lambda one: one.ttft_s.p99, 1e3, 0),
    "itl_mean": ("ITL mean, ms", lambda one: one.itl_s.mean, 1e3, 1),
    "itl_p50": ("ITL p50, ms", lambda one: one.itl_s.p50, 1e3, 1),
    "itl_p90": ("ITL p90, ms", lambda one: one.itl_s.p90, 1e3, 1),
    "itl_p99": ("ITL p99, ms", lambda one: one.itl_s.p99, 1e3, 1),
    "e2e_mean": ("E2E mean, s", lambda one: one.e2e_s.mean, 1.0, 2),
    "hit_rate": ("hit rate, %", lambda one: one.hit_rate, 1e2, 1),
    "hit_share": ("of ceiling, %", lambda one: one.hit_share, 1e2, 1),
    "load_cov": ("load CoV", lambda one: one.load_cov, 1.0, 3),
    "good": ("in time, %", lambda one: one.good, 1e2, 1),
    "goodput": ("goodput, 1/s", lambda one: one.goodput_per_s, 1.0, 2),
    "not_ok": (
        "not answered, %",
        lambda one: (one.requests - one.ok) / max(1, one.requests),
        1e2,
        2,
    ),
}
"""Name → label, value, its scale and digits."""

_SHOWN: Final = (
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "itl_p50",
    "itl_p90",
    "itl_p99",
    "e2e_mean",
    "hit_rate",
    "hit_share",
    "load_cov",
    "good",
    "goodput",
    "not_ok",
)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command: its settings and all runs, by policy and seed."""

    version: str = __version__
    settings: SimulationSettings
    runs: list[Measures]
    capacity: float | None = None  # requests per second, if measured
    load: float | None = None  # the share of it that was offered


def perform(
    do: Callable[[Task, Callable[[float], None] | None], Result],
    tasks: Sequence[Task],
    jobs: int,
    progress: Callable[[float], None],
) -> list[Result]:
    """Execute tasks on `jobs` processors; results are in the order of the tasks.

    Args:
        do: what to do with a task; it may call its second argument with the share that is done.
        tasks: one per run.
        jobs: processes; 1: only this one.
        progress: called with the progress, in tasks.

    Raises:
        ValueError, OSError: a task cannot be carried out.
    """
    if jobs <= 1 or len(tasks) == 1:
        return [_one(do, task, at, progress) for at, task in enumerate(tasks)]
    with (
        TemporaryDirectory(dir=_memory()) as folder,
        ProcessPoolExecutor(min(jobs, len(tasks)), initializer=_leave_ctrl_c_to_others) as pool,
    ):
        shares = Path(folder, "shares")
        np.zeros(len(tasks)).tofile(shares)
        running = [pool.submit(_in_the_pool, do, task, at, shares) for at, task in enumerate(tasks)]
        try:
            _watch(running, shares, progress)
        except BaseException:  # including Ctrl-C: do not wait for runs whose results are lost
            workers = list((pool._processes or {}).values())  # noqa: SLF001 - terminate_workers() is 3.14
            pool.shutdown(wait=False, cancel_futures=True)
            for process in workers:
                process.terminate()
            raise
    return [one.result() for one in running]


def _watch(
    running: Sequence[Future[Result]], shares: Path, progress: Callable[[float], None]
) -> None:
    """Tell how far the tasks are, until all are done or one has failed."""
    pending, done_of_each = set(running), _mapped(shares)
    while pending:
        done, pending = wait(pending, _REDRAWN_S, FIRST_COMPLETED)
        for one in done:
            one.result()
        progress(float(done_of_each.sum()))


def _memory() -> str | None:
    """Return where files are memory, which a pool needs anyway; None: where others put theirs."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None


def _mapped(shares: Path) -> Floats:
    """Return of each task the share that is done, in the memory of all processes."""
    return np.memmap(shares, np.float64, "r+")


def _leave_ctrl_c_to_others() -> None:
    """Do nothing about it in a process of the pool: it reaches all, and the parent ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _in_the_pool(
    do: Callable[[Task, Callable[[float], None] | None], Result], task: Task, at: int, shares: Path
) -> Result:
    mapped = _mapped(shares)
    result = do(task, partial(mapped.__setitem__, at))
    mapped[at] = 1.0
    return result


def _one(
    do: Callable[[Task, Callable[[float], None] | None], Result],
    task: Task,
    at: int,
    progress: Callable[[float], None],
) -> Result:
    result = do(task, lambda share: progress(at + share))
    progress(at + 1)
    return result


def by_policy(runs: Sequence[Measures]) -> dict[str, list[Measures]]:
    """Return the runs of each policy, in order of first appearance."""
    groups: dict[str, list[Measures]] = {}
    for one in runs:
        groups.setdefault(one.policy, []).append(one)
    return groups


def estimates(runs: Sequence[Measures]) -> dict[str, Estimate]:
    """Return every metric of one policy over its seeds."""
    return {
        name: estimate([read(one) for one in runs]) for name, (_, read, _, _) in METRICS.items()
    }


def table(runs: Sequence[Measures]) -> tuple[list[str], list[list[str]]]:
    """Return a header, and a row per policy."""
    head = ["policy", *(METRICS[name][0] for name in _SHOWN)]
    rows = []
    for policy, group in by_policy(runs).items():
        found = estimates(group)
        cells = [found[name].text(METRICS[name][3], METRICS[name][2]) for name in _SHOWN]
        if not _has_targets(group):
            cells[_SHOWN.index("good")] = "-"
        rows.append([policy, *cells])
    return head, rows


def _has_targets(runs: Iterable[Measures]) -> bool:
    """Whether anything says when a request is in time; without, `good` is what was answered."""
    return any(one.slo for one in runs)


def legend(result: Comparison) -> dict[str, str]:
    """Return what the columns of `table` mean that do not say so themselves."""
    has_targets = _has_targets(result.runs)
    rates = [one.rate for one in result.settings.workloads if one.has_rate]
    goodput = "requests per second that were " + (
        "in time" if has_targets else "answered, as there is no target"
    )
    if rates:
        goodput += (
            f", until the last answer; rate={sum(rates):g} counts sessions that begin in a second, "
            "of one request or several with pauses between"
        )
    return {
        "E2E": "from arrival to the last token",
        "of ceiling": "the hit rate as a share of that of one infinite cache for all",
        "load CoV": "standard deviation over mean of the requests per worker; 0 is even",
        "in time": "within the targets for TTFT and ITL"
        if has_targets
        else "no target was given: --slo-ttft, --slo-itl",
        "goodput": goodput,
    }


# -- one policy beside another -------------------------------------------------------------------

_COMPARED: Final = ("ttft_mean", "ttft_p90", "ttft_p99", "itl_mean", "itl_p90", "e2e_mean", "good")
_OF_PARTS: Final = frozenset(RunPart.__struct_fields__)


def changes(before: Sequence[Measures], after: Sequence[Measures]) -> dict[str, Estimate]:
    """Return the mean differences of two policies that had the same requests.

    With several seeds each is a difference. With one, the twentieths of the run are, for what
    is a mean; other measures then have no interval.
    """
    pairs = list(zip(before, after, strict=True))
    found: dict[str, Estimate] = {}
    for name in _COMPARED:
        read = METRICS[name][1]
        values = [read(other) - read(one) for one, other in pairs]
        if len(pairs) == 1 and name in _OF_PARTS:
            one, other = pairs[0]
            in_parts = zip(one.parts, other.parts, strict=True)
            gaps = [getattr(b, name) - getattr(a, name) for a, b in in_parts]
            half = estimate(gaps).half if gaps else None
            found[name] = Estimate(values[0], half)
        else:
            found[name] = estimate(values)
    return found


def base_of(names: Iterable[str]) -> str:
    """Return the policy that others are compared with: the service's default, else the last."""
    known = list(names)
    return PEER if PEER in known else known[-1]


def differences(runs: Sequence[Measures]) -> tuple[list[str], list[list[str]]]:
    """Return a header, and a row per policy: how it differs from the one that is compared with.

    Times in per cent of that one's, what is in time in percentage points.
    """
    groups = by_policy(runs)
    base = base_of(groups)
    compared = [name for name in _COMPARED if name != "good" or _has_targets(runs)]
    head = [f"against {base}", *(_label_of_change(name) for name in compared)]
    rows = []
    for policy, group in groups.items():
        if policy == base:
            continue
        row = [policy]
        found = changes(groups[base], group)
        for name in compared:
            change = found[name]
            mean = estimate([METRICS[name][1](one) for one in groups[base]]).mean
            scale = 1.0 if name == "good" else mean
            row.append(change.signed(100.0 / scale) if scale else "-")
        rows.append(row)
    return head, rows


def _label_of_change(name: str) -> str:
    return METRICS[name][0].partition(",")[0] + (", points" if name == "good" else ", %")


def verdict(runs: Sequence[Measures]) -> str:
    """Say which policy wins and by how much, and whether the interval bears that out.

    Where times were asked for, the most requests in time win, and among those with as many, as
    without targets, the shortest TTFT p90. What no router can be does not take part, and is shown
    behind.
    """
    if not any(one.ok for one in runs):
        return "No request was answered."
    groups = {
        policy: group
        for policy, group in by_policy(runs).items()
        if any(one.ok for one in group)  # else its TTFT is no time, and not the shortest
    }
    by_slo = _has_targets(runs)
    name = "good" if by_slo else "ttft_p90"
    beyond = [policy for policy in groups if policy in BEYOND and len(groups) > 1]
    named = {policy: group for policy, group in groups.items() if policy not in beyond} or groups
    limits = "".join(f"; {policy}: {_mean_text(groups[policy], name)}" for policy in beyond)
    first, *others = _ranked(named, name)
    if not others:
        return f"{first}: {_amount(groups[first])}{limits}."
    equal, lead = _equals(named, name)
    as_many = ""
    if by_slo and equal:
        name, named = "ttft_p90", {one: named[one] for one in (first, *equal)}
        first, *others = _ranked(named, name)
        as_many = f"as many are in time with {' and '.join(others)}, and "
        equal, lead = _equals(named, name)
    second = others[0]
    text = _amount(groups[first])
    if equal:
        other = _amount(groups[second])
        return f"{first} ({text}) is not clearly ahead of {second} ({other}){limits}."
    if name == "good":
        lead_text = f"{lead.signed()} points more than {second}"
    else:
        of = estimates(groups[second])[name].mean
        lead_text = f"{as_many}the TTFT p90 is {_percent(lead, of)} below that of {second}"
    more = " (one run, so no interval)" if lead.half is None else ""
    return f"{first} is ahead: {text}; {lead_text}{more}{limits}."


def _ranked(groups: Mapping[str, Sequence[Measures]], name: str) -> list[str]:
    """Return the policies, the best by a measure first."""
    means = {policy: estimates(group)[name].mean for policy, group in groups.items()}
    return sorted(means, key=lambda policy: -means[policy] if name == "good" else means[policy])


def _equals(groups: Mapping[str, Sequence[Measures]], name: str) -> tuple[list[str], Estimate]:
    """Return the policies that the best is not clearly ahead of, and its lead over the second."""
    first, *others = _ranked(groups, name)
    found = {}
    for policy in others:
        change = changes(groups[first], groups[policy])[name]
        found[policy] = change._replace(mean=-change.mean) if name == "good" else change
    equal = [policy for policy, lead in found.items() if lead.mean <= (lead.half or 0.0)]
    return equal, found[others[0]]


def _amount(group: Sequence[Measures]) -> str:
    found = estimates(group)
    text = f"TTFT p90 of {_short(found['ttft_p90'].mean, 'ttft_p90')}"
    if _has_targets(group):
        text = f"{_short(found['good'].mean, 'good')} of requests in time, {text}"
    return f"{text}, hit rate of {100 * found['hit_rate'].mean:.1f} %"


def _mean_text(group: Sequence[Measures], name: str) -> str:
    return _short(estimates(group)[name].mean, name)


def _short(mean: float, name: str) -> str:
    return f"{100 * mean:.1f} %" if name == "good" else f"{1e3 * mean:,.0f} ms"


def _percent(lead: Estimate, of: float) -> str:
    width = "" if lead.half is None else f" ±{100 * lead.half / of:.0f}"
    return f"{100 * lead.mean / of:.0f}{width} %"


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal: the first column left-aligned, numbers right-aligned."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
