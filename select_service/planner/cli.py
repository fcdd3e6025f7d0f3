"""`select-planner`: how many workers there should be.

`run` plans for a live fleet; `plan`, `predict`, `replay` and `profile inspect` answer questions.
Exit codes: 0 done, 1 it could not be done (standard error says why), 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from select_service import interrupts
from select_service.planner.errors import MissingExtra, PlannerError
from select_service.planner.settings import (
    SECTIONS,
    InspectSettings,
    PlanSettings,
    PredictSettings,
    ReplayedSettings,
    RunSettings,
)
from select_service.settings.command_line import add_flags, read_section
from select_service.standard_output import (
    CommandParser,
    command_line,
    complain,
    printing,
    redact_tracebacks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_FAILED = 1
_INTERRUPTED = 130
_NO_RESULT: Final = "it was done: there is no result"
_UNDONE: Final = {
    "select-planner": "it began",
    "select-planner run": "its first plan: it has scaled nothing",
}
"""What Ctrl-C came before, by command; of all others there is no result then."""
_TERMS: Final = {
    "prefill_engines": "engines that are needed, before rounding up",
    "prefill_service_s": "seconds that an engine computes for a prompt",
    "prefill_rho": "share of the time that so many engines compute",
    "prefill_rate": "requests per second",
    "decode_engines": "engines that are needed, before rounding up",
    "decode_corrected_itl": "ms between two tokens that are aimed at",
    "decode_rate": "requests per second",
    "decode_concurrency": "requests that decode at the same time, on all engines",
    "pred_prefill_thpt": "tokens of prompts per second that come",
    "prefill_thpt_per_gpu": "tokens of prompts per second that a GPU computes",
    "corrected_itl": "ms between two tokens that are aimed at",
    "decode_thpt_per_gpu": "tokens of answers per second that a GPU makes",
    "pred_decode_thpt": "tokens of answers per second that are asked for",
}
"""What the terms of a plan mean, of both modes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small fits; more threads are slower
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    redact_tracebacks()
    command = "select-planner"
    try:
        arguments = parser().parse_args(argv)
        arguments.command_line = command_line(command, argv)
        command = f"{command} {arguments.command}"
        interrupts.raise_again()
        run = partial(_COMMANDS[arguments.command], arguments)
        return printing(run, command, unread=_FAILED)
    except PlannerError as error:
        complain(f"{command}: {error}")
    except KeyboardInterrupt:
        complain(f"{command}: stopped by Ctrl-C before {_UNDONE.get(command, _NO_RESULT)}")
        return _INTERRUPTED
    return _FAILED


def parser() -> CommandParser:
    """Return the parser of all commands."""
    whole = CommandParser(
        prog="select-planner",
        description="Turns demand into replica counts that meet TTFT and ITL targets.",
        examples="select-planner plan --profile-results-dir profile --num-req 3000 --isl 3000 "
        "--osl 150\n"
        "select-planner run --help",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="Plans for a live fleet.",
        description="Plans for a live fleet, until it is stopped: reads demand, and scales.",
        examples="select-planner run --model-name llama --profile-results-dir profile "
        "--metrics-source selector "
        "--selector http://localhost:8092 --connector dry-run",
    )
    add_flags(run, SECTIONS["run"], brief=True)
    run.list_seldom_used()
    plan = commands.add_parser(
        "plan",
        help="Calculates one plan.",
        description="Calculates how many replicas one interval of demand needs.",
        examples="select-planner plan --profile-results-dir profile --num-req 3000 --isl 3000 "
        "--osl 150 --mode slo",
    )
    add_flags(plan, SECTIONS["plan"], brief=True)
    plan.list_seldom_used()
    predict = commands.add_parser(
        "predict",
        help="Forecasts a series of numbers.",
        description="Reads a JSON list of numbers (null: nothing was measured) from standard "
        "input and writes the forecast made after each of them.",
        examples="echo '[10, 12, 14]' | select-planner predict --predictor kalman",
    )
    add_flags(predict, SECTIONS["predict"])
    replay = commands.add_parser(
        "replay",
        help="Compares policies on recorded requests.",
        description="Plays recorded requests to a simulated fleet under several policies, and "
        "shows what each would have cost and kept.",
        examples="select-planner replay --trace requests.jsonl --profile-results-dir profile "
        "--out replay.html",
    )
    add_flags(replay, SECTIONS["replay"], brief=True)
    replay.list_seldom_used()
    profile = commands.add_parser(
        "profile",
        help="Inspects profiling results (profile inspect).",
        description="Inspects profiling results.",
    )
    what = profile.add_subparsers(dest="what", required=True, metavar="COMMAND")
    inspect = what.add_parser(
        "inspect",
        help="Checks and plots them.",
        description="Checks and plots profiling results.",
        examples="select-planner profile inspect profile --out profile.html",
    )
    inspect.add_argument(
        "directory", metavar="DIR", type=Path, help="Directory of the profiling results."
    )
    add_flags(inspect, SECTIONS["profile inspect"])
    return whole


def _run(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge.run_command import run  # a server, only for this command

    return run(read_section(RunSettings, arguments))


def _plan(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import what_if  # numpy, only for this command
    from select_service.planner.edge.profile_files import read_profile
    from select_service.simulator.progress_bar import progress_bar

    question = read_section(PlanSettings, arguments)
    profile = read_profile(question.profile_results_dir)
    try:
        plan = what_if.plan_slo if question.mode == "slo" else what_if.plan_compatible
        with progress_bar("planning", None):
            answer = plan(profile, question)
    except MissingExtra as error:
        if question.mode is not None:
            raise
        complain(f"select-planner plan: planned with --mode slo, as --mode {error}")
        answer = what_if.plan_slo(profile, question)
    if question.json:
        _print(answer)
    else:
        print(_plain(answer, question))
    return _FAILED if "error" in answer else 0


def _plain(answer: dict[str, object], question: PlanSettings) -> str:
    lines = _summary(answer, question)
    lines += [f"{name}: {answer[name]}" for name in ("error", "message", "gpus") if name in answer]
    terms = answer["intermediate"]
    assert isinstance(terms, dict), "both modes make one"
    rows = [
        (name, f"{value:.4g}" if isinstance(value, float) else str(value), _TERMS[name])
        for name, value in terms.items()
    ]
    names, numbers = (max((len(row[n]) for row in rows), default=0) for n in (0, 1))
    table = [f"  {name:{names}}  {number:{numbers}}  {what}" for name, number, what in rows]
    return "\n".join([*lines, *table])


def _summary(answer: dict[str, object], question: PlanSettings) -> list[str]:
    """Say in a sentence what the plan is, and whether it keeps the targets."""
    if "error" in answer:
        return []
    engines = f"{answer['num_p']} prefill and {answer['num_d']} decode engines"
    targets = f"a TTFT of {question.ttft:g} ms and an ITL of {question.itl:g} ms"
    if question.attainment is not None:
        targets += f" for {100 * question.attainment:g} % of requests"
    for why, remedy in (
        ("infeasible", "{}"),
        ("short_of_gpus", "a larger --max-gpu-budget is needed for {}"),
    ):
        if reasons := answer.get(why):
            assert isinstance(reasons, list), "one for each role"
            because = remedy.format(" and ".join(map(str, reasons)))
            return [f"Does not keep {targets}: {because}; the plan is {engines}."]
    return [f"{engines} keep {targets}."]


def _predict(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import what_if
    from select_service.planner.edge.predictors import predictor_settings

    if sys.stdin is None:  # it was closed by the parent process
        raise PlannerError("standard input is closed: a JSON list of numbers is read from it")
    if sys.stdin.isatty():
        complain(
            "select-planner predict: type a JSON list of numbers, e.g. [10, 12]; Ctrl-D ends it"
        )
    series = what_if.read_series(sys.stdin.read())
    options = read_section(PredictSettings, arguments)
    is_compatible = options.mode == "compatible"
    settings = predictor_settings(options.predictor, options, compatible=is_compatible)
    _print(what_if.predict(settings, series))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import replay_command  # the simulator

    options = read_section(ReplayedSettings, arguments)
    _expect_writable(options.out)
    question = replay_command.question_of(options)
    replayed = replay_command.replay(question, print_line=complain, quiet=options.quiet)
    if options.json:
        _print(replay_command.brief(replayed))
    if options.out is not None:
        _write(options.out, replay_command.html(replayed, question, arguments.command_line))
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import profile_report
    from select_service.planner.edge.profile_files import read_profile

    out = read_section(InspectSettings, arguments).out
    _expect_writable(out)
    profile = read_profile(arguments.directory)
    for text in profile_report.measured(profile):
        print(text)
    for text in profile_report.findings(profile):
        print(f"repaired: {text}")
    if out is not None:
        _write(out, profile_report.html(profile, str(arguments.directory), arguments.command_line))
    return 0


def _expect_writable(path: Path | None) -> None:
    """See that charts can be written before minutes are spent on them."""
    from select_service.simulator.results import expect_writable

    try:
        expect_writable(None if path is None else str(path))
    except OSError as error:
        raise PlannerError(f"{error.filename}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    from select_service.simulator.results import NotWritten, write_whole

    try:
        write_whole(path, text.encode())
    except NotWritten as error:
        raise PlannerError(str(error)) from error
    complain(f"charts: {path}")


def _print(answer: dict[str, object]) -> None:
    print(orjson.dumps(answer).decode())


_COMMANDS = {
    "run": _run,
    "plan": _plan,
    "predict": _predict,
    "replay": _replay,
    "profile": _profile,
}
