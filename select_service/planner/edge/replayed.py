"""`select-planner replay`: policies side by side on one trace, as numbers and as charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from select_service.planner.core.warming import TracedRequest
from select_service.planner.edge.charts import Chart, Line, page
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.replaying import Replay
from select_service.planner.edge.rivals import make_policy
from select_service.planner.edge.sources.trace import read_trace
from select_service.planner.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from select_service.planner.edge.predictors import PredictorSettings
    from select_service.planner.edge.replaying import ReplaySettings, Result

__all__ = ["ReplayQuestion", "brief", "html", "replay"]

_PREDICTING = ("slo", "compatible")


class ReplayQuestion(NamedTuple):
    """What is replayed, and how."""

    trace: Path
    profile: Path
    policies: tuple[str, ...]
    tunings: tuple[PredictorSettings, ...]
    settings: ReplaySettings
    gpus_max: int


def replay(question: ReplayQuestion, print_line: Callable[[str], None]) -> list[Result]:
    """Run every policy, those that predict once per predictor; tells each when it is over.

    Raises:
        PlannerError: the trace or the profile cannot be read, or something is not installed.
    """
    profile = read_profile(question.profile)
    requests = read_trace(question.trace)
    if not requests:
        raise TraceError(f"{question.trace}: there are no requests in it")
    first = requests[0].at_s
    requests = [TracedRequest(one.at_s - first, one.isl, one.osl) for one in requests]
    run = Replay(profile, requests, question.settings)
    results = []
    for name in question.policies:
        for tuning in question.tunings if name in _PREDICTING else question.tunings[:1]:
            chosen = msgspec.structs.replace(tuning, compatible=name == "compatible")
            policy = make_policy(
                *(name, profile, requests, chosen, question.settings, question.gpus_max)
            )
            result = run.run(policy)
            results.append(result)
            print_line(
                f"{result.name}: {100 * result.attainment:.2f} % in time, "
                f"{result.gpu_hours:.2f} GPU-hours, {result.changes} changes"
            )
    return results


def brief(result: Result) -> dict[str, object]:
    """Return the numbers of one policy."""
    return {
        "policy": result.name,
        "requests": result.requests,
        "attainment": result.attainment,
        "gpu_hours": result.gpu_hours,
        "changes": result.changes,
        "turns": result.turns,
    }


def html(results: list[Result], name: str) -> str:
    """Return one HTML document: a table, then replicas over time against load."""
    rows = [["policy", "in time", "GPU-hours", "changes", "turns back"]]
    rows += [
        [
            *(one.name, f"{100 * one.attainment:.2f} %", f"{one.gpu_hours:.2f}"),
            *(str(one.changes), str(one.turns)),
        ]
        for one in results
    ]
    load = Chart("Load", "seconds", "requests/s", [Line("arrivals", results[0].load, "step")])
    charts = [
        Chart(
            f"{pool} replicas",
            "seconds",
            "replicas",
            [Line(one.name, one.replicas[pool], "step") for one in results],
        )
        for pool in results[0].replicas
    ]
    attained = Chart(
        "Requests in time",
        "seconds",
        "share per interval",
        [Line(one.name, one.attained) for one in results],
    )
    return page(f"Replay of {name}", [rows, load, *charts, attained])
