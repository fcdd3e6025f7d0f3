"""`select-planner replay`: compares policies on one trace, in numbers and charts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from select_service.planner.core.demand import intervals_of
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge.baselines import make_policy
from select_service.planner.edge.predictors import predictor_settings
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.sources.trace import read_trace
from select_service.planner.edge.trace_replay import ReplaySettings, TraceReplay
from select_service.planner.errors import TraceError
from select_service.planner.settings import POLICIES
from select_service.simulator.page import figure, page, table
from select_service.simulator.plots import Series, lines
from select_service.simulator.progress_bar import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from select_service.planner.edge.predictors import PredictorSettings
    from select_service.planner.edge.trace_replay import Result
    from select_service.planner.settings import ReplayedSettings

__all__ = ["ReplayQuestion", "brief", "html", "question_of", "replay"]

SPAN_MOST_S: Final = 366 * 86400.0
"""The longest trace. With one stray time a replay would simulate ages without requests."""
_PREDICTING = ("slo", "compatible")
_AS_MANY = 0.005
"""Shares of requests in time that differ by less are as many."""
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class ReplayQuestion(NamedTuple):
    """What is replayed, and how."""

    trace: Path
    profile: Path
    policies: tuple[str, ...]
    tunings: tuple[PredictorSettings, ...]
    settings: ReplaySettings
    gpus_max: int


def question_of(told: ReplayedSettings) -> ReplayQuestion:
    """Return what the command's settings ask for.

    Raises:
        TraceError: the trace of the past cannot be read.
    """
    past, interval_s = told.load_predictor_warmup_trace, told.adjustment_interval
    settings = ReplaySettings(
        interval_s=interval_s,
        fast_s=min(told.load_interval, interval_s),
        startup_s=told.startup,
        ttft_ms=told.ttft,
        itl_ms=told.itl,
        prefill_gpus=told.prefill_engine_num_gpu,
        decode_gpus=told.decode_engine_num_gpu,
        start=(told.start_prefill, told.start_decode),
        seed=told.seed,
        attainment=told.attainment,
        likens=not told.no_likeness,
        warmup=() if past is None else tuple(intervals_of(read_trace(past), interval_s)),
    )
    return ReplayQuestion(
        told.trace,
        told.profile_results_dir,
        told.policy or POLICIES,
        tuple(predictor_settings(name, told) for name in told.load_predictor or ("auto",)),
        settings,
        told.max_gpu_budget,
    )


def replay(
    question: ReplayQuestion, print_line: Callable[[str], None], *, quiet: bool = True
) -> list[Result]:
    """Run every policy, forecasting ones once per predictor; prints a line as each ends.

    Args:
        question: what is replayed.
        print_line: prints it.
        quiet: show no progress bar.

    Raises:
        PlannerError: the trace or the profile cannot be read, or something is not installed.
    """
    profile = read_profile(question.profile)
    requests = read_trace(question.trace)
    if not requests:
        raise TraceError(f"{question.trace}: there are no requests in it")
    first = requests[0].at_s
    if requests[-1].at_s - first > SPAN_MOST_S:
        raise TraceError(
            f"{question.trace}: its requests span {(requests[-1].at_s - first) / 86400:.3g} days, "
            f"{SPAN_MOST_S / 86400:.0f} are replayed at most: is every `timestamp` in milliseconds?"
        )
    requests = [TracedRequest(one.at_s - first, one.isl, one.osl) for one in requests]
    run = TraceReplay(profile, requests, question.settings)
    # all first: what one of them lacks is told before minutes are spent on the others
    policies = [
        make_policy(
            name,
            profile,
            requests,
            msgspec.structs.replace(tuning, compatible=name == "compatible"),
            question.settings,
            question.gpus_max,
        )
        for name in question.policies
        for tuning in (question.tunings if name in _PREDICTING else question.tunings[:1])
    ]
    results = []
    with progress_bar("replaying", len(policies), quiet=quiet) as progress:
        for done, policy in enumerate(policies):

            def tell(share: float, done: int = done) -> None:
                progress(done + share)

            result = run.run(policy, tell)
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


def html(results: list[Result], question: ReplayQuestion, command_line: str = "") -> str:
    """Return one HTML document: a table, then replicas over time against load."""
    rows = [
        [
            one.name,
            f"{100 * one.attainment:.2f} %",
            f"{one.gpu_hours:.2f}",
            str(one.changes),
            str(one.turns),
        ]
        for one in results
    ]
    names = [one.name for one in results]
    end = max((at for one in results for at, _ in (*one.load, *one.attained)), default=0.0)
    unit, length_s = next(one for one in _UNITS if end >= 5 * one[1] or one[1] == 1.0)

    def over_time(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(at / length_s, value) for at, value in points]

    arrivals = [Series("arrivals", over_time(results[0].load), "step")]
    plots = [figure(lines("Load", arrivals, x=unit, y="requests/s"), ["arrivals"])]
    for pool in results[0].replicas:
        series = [Series(one.name, over_time(one.replicas[pool]), "step") for one in results]
        title = f"{pool.capitalize()} replicas"
        plots.append(figure(lines(title, series, x=unit, y="replicas", is_count=True), names))
    attained = [Series(one.name, over_time(one.attained), "step") for one in results]
    plots.append(figure(lines("Requests in time", attained, x=unit, y="share", most=1.0), names))
    return page(
        f"Replay of {question.trace}",
        [
            f"<p>{escape(_summary(results[0], question))}</p>",
            table(["policy", "in time", "GPU-hours", "changes", "turns back"], rows),
            "<p>In time: of all requests, those that met both targets. Changes: of replicas; "
            "turns back: those against the one before, within ten minutes.</p>",
            *plots,
        ],
        verdict=_verdict(results),
        command_line=command_line,
    )


def _verdict(results: Sequence[Result]) -> str:
    """Name the policy that needs the fewest GPU-hours of those that serve as many in time."""
    real = [one for one in results if one.name != "oracle"] or list(results)
    most = max(one.attainment for one in real)
    best = min((one for one in real if one.attainment >= most - _AS_MANY), key=_hours)
    text = f"{100 * best.attainment:.2f} % in time with {best.gpu_hours:.2f} GPU-hours"
    if len(real) == 1:
        return f"{best.name}: {text}."
    return f"{best.name} does best: {text}, the fewest of those that serve as many in time."


def _hours(one: Result) -> float:
    return one.gpu_hours


def _summary(result: Result, question: ReplayQuestion) -> str:
    settings = question.settings
    return (
        f"{result.requests:,} requests on engines of {question.profile}. Targets: TTFT "
        f"{settings.ttft_ms:g} ms, ITL {settings.itl_ms:g} ms; an engine takes "
        f"{settings.startup_s:g} s to start, and there are {question.gpus_max} GPUs at most."
    )
