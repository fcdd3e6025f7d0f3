"""`select-planner replay`: compares policies on one trace, in numbers and charts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from select_service.planner.core.demand import intervals_of
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge.baselines import Contest
from select_service.planner.edge.predictors import predictor_settings
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.sources.trace import read_trace
from select_service.planner.edge.trace_replay import ReplaySettings
from select_service.planner.errors import MissingExtra, TraceError
from select_service.planner.settings import POLICIES
from select_service.simulator.page import figure, folded, page, table
from select_service.simulator.plots import Series, lines
from select_service.simulator.progress_bar import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from select_service.planner.core.engine_speed import SpeedSource
    from select_service.planner.edge.fixed_fleets import FixedPoint
    from select_service.planner.edge.predictors import PredictorSettings
    from select_service.planner.edge.trace_replay import Result, ScalingPolicy
    from select_service.planner.settings import ReplayedSettings

SPAN_MOST_S: Final = 366 * 86400.0
"""The longest trace. With one stray time a replay would simulate ages without requests."""
_PREDICTING = ("slo", "compatible")
_AS_MANY = 0.005
"""Shares of requests in time that differ by less are as many."""
_AS_MUCH = 0.005
"""Prices that differ by less, relative to each other, are the same."""
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class ReplayQuestion(NamedTuple):
    """What is replayed, and how."""

    trace: Path
    profile: Path
    policies: tuple[str, ...]
    tunings: tuple[PredictorSettings, ...]
    settings: ReplaySettings
    gpus_max: int
    start: tuple[int | None, int | None] = (None, None)
    """Prefill and decode engines at the beginning; None: those of the best fixed fleet."""
    skips: bool = False
    """Whether policies are left out that lack an extra, instead of refused."""


class Replayed(NamedTuple):
    """What came of it."""

    results: list[Result]
    frontier: list[FixedPoint]
    """What fixed fleets attain, cheapest first; empty: static was not asked for."""
    target: float
    """Share of requests that are to be in time."""
    is_whole: bool = True
    """Whether the search for fixed fleets and the oracle's plan came to its end."""


def question_of(options: ReplayedSettings) -> ReplayQuestion:
    """Return what the command's settings ask for.

    Raises:
        TraceError: the trace of the past cannot be read.
    """
    past, interval_s = options.load_predictor_warmup_trace, options.adjustment_interval
    settings = ReplaySettings(
        interval_s=interval_s,
        fast_s=min(options.load_interval, interval_s),
        startup_s=options.startup,
        ttft_ms=options.ttft,
        itl_ms=options.itl,
        prefill_gpus=options.prefill_engine_num_gpu,
        decode_gpus=options.decode_engine_num_gpu,
        seed=options.seed,
        search_requests=options.search_requests,
        attainment=options.attainment,
        engine_speed=cast("SpeedSource", options.engine_speed),
        likens=not options.no_likeness,
        warmup=() if past is None else tuple(intervals_of(read_trace(past), interval_s)),
    )
    return ReplayQuestion(
        options.trace,
        options.profile_results_dir,
        options.policy or POLICIES,
        tuple(predictor_settings(name, options) for name in options.load_predictor or ("auto",)),
        settings,
        options.max_gpu_budget,
        (options.start_prefill, options.start_decode),
        skips=not options.policy,
    )


def replay(
    question: ReplayQuestion, print_line: Callable[[str], None], *, quiet: bool = True
) -> Replayed:
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
    contest = Contest(profile, requests, question.settings, question.gpus_max, _plays(question))
    # all first: what one of them lacks is reported before minutes are spent on the others
    entered = list(_policies(question, contest, print_line))
    results = []
    start = question.start
    if None in start:
        bar = progress_bar("searching the best fixed fleet", 1.0, quiet=quiet)
        with bar as progress, contest.watched(progress):
            best = contest.fixed.best
        start = (start[0] or best[0], start[1] or best[1])
    with progress_bar("replaying", len(entered), quiet=quiet) as progress:
        for done, (name, policy) in enumerate(entered):

            def report(share: float, done: int = done) -> None:
                progress(done + share)

            results.append(contest.result(name, policy, (start[0] or 1, start[1] or 1), report))
            print_line(_line(results[-1]))
    is_static = any(name == "static" for name, _ in entered)
    least = min(one.gpu_hours for one in results)
    frontier = []
    if is_static:
        bar = progress_bar("searching other fixed fleets", 1.0, quiet=quiet)
        with bar as progress, contest.watched(progress):
            frontier = contest.fixed.frontier(least)
    for one in frontier:
        print_line(
            f"frontier, {one.prefill} prefill and {one.decode} decode: "
            f"{100 * one.attainment:.2f} % in time, {one.gpu_hours:.2f} GPU-hours"
        )
    replayed = Replayed(results, frontier, contest.fixed.target, contest.fixed.is_whole)
    print_line(verdict(replayed))
    return replayed


def _plays(question: ReplayQuestion) -> int:
    """Return how often the trace is played by policies that are not found by trying."""
    predicting = sum(name in _PREDICTING for name in question.policies)
    others = sum(name == "reactive" for name in question.policies)
    return predicting * len(question.tunings) + others


def _policies(
    question: ReplayQuestion, contest: Contest, print_line: Callable[[str], None]
) -> Iterator[tuple[str, ScalingPolicy | None]]:
    for name in question.policies:
        for tuning in question.tunings if name in _PREDICTING else question.tunings[:1]:
            compatible = name == "compatible"
            try:
                yield (
                    name,
                    contest.policy(name, msgspec.structs.replace(tuning, compatible=compatible)),
                )
            except MissingExtra as error:
                if not (question.skips and compatible):
                    raise
                print_line(f"left out: {error}")
                break


def _line(one: Result) -> str:
    return (
        f"{one.name}: {100 * one.attainment:.2f} % in time, "
        f"{one.gpu_hours:.2f} GPU-hours, {one.changes} changes"
    )


def brief(replayed: Replayed) -> dict[str, object]:
    """Return the numbers of all policies, the frontier and the verdict.

    `fixed_gpu_hours` is what the cheapest fixed fleet costs that serves as many in time, None: none
    does; `fixed_attainment` what fixed fleets attain that cost no more.
    """
    return {
        "results": [
            {
                "policy": one.name,
                "requests": one.requests,
                "attainment": one.attainment,
                "gpu_hours": one.gpu_hours,
                "changes": one.changes,
                "turns": one.turns,
                "fixed_gpu_hours": None
                if (as_good := _as_good(one, replayed)) is None
                else as_good.gpu_hours,
                "fixed_attainment": max(
                    (
                        point.attainment
                        for point in replayed.frontier
                        if point.gpu_hours <= one.gpu_hours
                    ),
                    default=None,
                ),
            }
            for one in replayed.results
        ],
        "frontier": [one._asdict() for one in replayed.frontier],
        "target": replayed.target,
        "verdict": verdict(replayed),
    }


def html(replayed: Replayed, question: ReplayQuestion, command_line: str = "") -> str:
    """Return one HTML document: a table, then replicas over time against load."""
    results = replayed.results
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
    plots = [_frontier(replayed)] if replayed.frontier else []
    plots.append(figure(lines("Load", arrivals, x=unit, y="requests/s"), ["arrivals"]))
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
            folded(
                "Settings",
                "Of every policy; forecasts have those of the predictor.",
                _settings_shown(question),
            ),
        ],
        verdict=verdict(replayed),
        command_line=command_line,
    )


def _frontier(replayed: Replayed) -> str:
    """Draw what is late by price: of fixed fleets a line, of each policy a dot."""
    series = [
        *(  # first: in the colours that they have elsewhere
            Series(one.name, [(one.gpu_hours, 100 * one.attainment)], "dots")
            for one in replayed.results
        ),
        Series(
            "fixed fleets", [(one.gpu_hours, 100 * one.attainment) for one in replayed.frontier]
        ),
    ]
    plot = lines("Price and requests in time", series, x="GPU-hours", y="in time, %", most=100.0)
    return figure(plot, [one.name for one in series])


def verdict(replayed: Replayed) -> str:
    """Say in a sentence which does best, and how the planner compares with fixed fleets."""
    results = replayed.results
    real = [one for one in results if one.name != "oracle"] or list(results)
    most = max(one.attainment for one in real)
    best = min((one for one in real if one.attainment >= most - _AS_MANY), key=_hours)
    text = f"{100 * best.attainment:.2f} % in time with {best.gpu_hours:.2f} GPU-hours"
    if len(real) > 1 and all(_alike(one, best) for one in real):
        sentences = [f"No policy is ahead of another: {text}."]
    elif len(real) == 1:
        sentences = [f"{best.name}: {text}."]
    else:
        sentences = [
            f"{best.name} does best: {text}, the fewest of those that serve as many in time."
        ]
    sentences += [_against_fixed(one, replayed) for one in real if one.name.startswith("slo")]
    sentences += [
        f"Nothing that was tried keeps {100 * replayed.target:g} %, not even the oracle."
        for one in results
        if one.name == "oracle" and one.attainment < replayed.target
    ]
    if not replayed.is_whole:
        sentences.append(
            "The trace is too long to try all fixed fleets and repairs of the oracle's plan: "
            "cheaper ones may keep the target too (--search-requests)."
        )
    return " ".join(one for one in sentences if one)


def _against_fixed(one: Result, replayed: Replayed) -> str:
    """Compare a policy with the cheapest fixed fleet that serves as many in time."""
    if not replayed.frontier:
        return ""
    as_good = _as_good(one, replayed)
    if as_good is None:
        best = replayed.frontier[-1]
        return (
            f"{one.name} serves more in time than any fixed fleet that was tried "
            f"({100 * best.attainment:.2f} % with {best.gpu_hours:.2f} GPU-hours)."
        )
    fleet = (
        f"a fixed fleet of {as_good.prefill} prefill and {as_good.decode} decode engines serves "
        f"{100 * as_good.attainment:.2f} % with {as_good.gpu_hours:.2f} GPU-hours"
    )
    share = one.gpu_hours / as_good.gpu_hours
    if abs(share - 1.0) <= _AS_MUCH:
        return f"{one.name} is as good as no planning: {fleet}."
    if as_good.gpu_hours > one.gpu_hours:
        return f"{one.name} beats fixed fleets: as many in time cost them more, {fleet}."
    return f"{one.name} is beaten by no planning at all: {fleet}, it costs {share:.2f} times that."


def _as_good(one: Result, replayed: Replayed) -> FixedPoint | None:
    """Return the cheapest fixed fleet that serves as many in time."""
    return next((point for point in replayed.frontier if point.attainment >= one.attainment), None)


def _alike(one: Result, other: Result) -> bool:
    """Whether two serve as many in time for the same price."""
    dearer = abs(one.gpu_hours - other.gpu_hours)
    return (
        abs(one.attainment - other.attainment) <= _AS_MANY and dearer <= _AS_MUCH * other.gpu_hours
    )


def _settings_shown(question: ReplayQuestion) -> dict[str, object]:
    """Return the settings, without the history that forecasts begin with."""
    settings = msgspec.to_builtins(question.settings)
    settings["warmup"] = f"{len(question.settings.warmup)} intervals"
    return {
        "settings": settings,
        "predictors": msgspec.to_builtins(question.tunings),
        "max_gpu_budget": question.gpus_max,
    }


def _hours(one: Result) -> float:
    return one.gpu_hours


def _summary(result: Result, question: ReplayQuestion) -> str:
    settings = question.settings
    return (
        f"{result.requests:,} requests on engines of {question.profile}. Targets: TTFT "
        f"{settings.ttft_ms:g} ms, ITL {settings.itl_ms:g} ms; an engine takes "
        f"{settings.startup_s:g} s to start, and there are {question.gpus_max} GPUs at most."
    )
