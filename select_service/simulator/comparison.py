"""Many runs: executed on several processors, collected, and presented as one table.

A run is one task and returns only its measures, so that little data is transferred.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.simulator.core.measures import Measures
from select_service.simulator.runs import run
from select_service.simulator.settings import SimulationSettings
from select_service.simulator.statistics import Estimate, estimate
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["METRICS", "Comparison", "estimates", "perform", "table"]

METRICS: Final[dict[str, tuple[str, Callable[[Measures], float], float, int]]] = {
    "ttft_mean": ("TTFT mean, ms", lambda one: one.ttft_s.mean, 1e3, 0),
    "ttft_p90": ("TTFT p90, ms", lambda one: one.ttft_s.p90, 1e3, 0),
    "ttft_p99": ("TTFT p99, ms", lambda one: one.ttft_s.p99, 1e3, 0),
    "itl_p90": ("ITL p90, ms", lambda one: one.itl_s.p90, 1e3, 1),
    "e2e_mean": ("E2E mean, s", lambda one: one.e2e_s.mean, 1.0, 2),
    "hit_rate": ("hit rate, %", lambda one: one.hit_rate, 1e2, 1),
    "hit_share": ("of ceiling, %", lambda one: one.hit_share, 1e2, 1),
    "load_cov": ("load CoV", lambda one: one.load_cov, 1.0, 3),
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
    "ttft_mean",
    "ttft_p90",
    "itl_p90",
    "e2e_mean",
    "hit_rate",
    "hit_share",
    "load_cov",
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
    tasks: Sequence[SimulationSettings], jobs: int, progress: Callable[[float], None]
) -> list[Measures]:
    """Execute runs on `jobs` processors; results are in the order of the tasks.

    Args:
        tasks: one per run.
        jobs: processes; 1: only this one.
        progress: called with the progress, in runs.

    Raises:
        ValueError, OSError: a run cannot be carried out.
    """
    if jobs <= 1 or len(tasks) == 1:
        return [_one(task, at, progress) for at, task in enumerate(tasks)]
    results: dict[int, Measures] = {}
    with ProcessPoolExecutor(min(jobs, len(tasks))) as pool:
        places = {pool.submit(run, task): at for at, task in enumerate(tasks)}
        try:
            for done in as_completed(places):
                results[places[done]] = done.result()
                progress(len(results))
        except BaseException:  # including Ctrl-C: do not wait for runs whose results are lost
            workers = list((pool._processes or {}).values())  # noqa: SLF001 - terminate_workers() is 3.14
            pool.shutdown(wait=False, cancel_futures=True)
            for process in workers:
                process.terminate()
            raise
    return [results[at] for at in range(len(tasks))]


def _one(task: SimulationSettings, at: int, progress: Callable[[float], None]) -> Measures:
    result = run(task, lambda share: progress(at + share))
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
        rows.append([policy, *cells])
    return head, rows


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
