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
from typing import TYPE_CHECKING

import orjson

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

__all__ = ["main"]

_FAILED = 1
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small fits; more threads are slower
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    redact_tracebacks()
    command = "select-planner"
    try:
        arguments = _parser().parse_args(argv)
        arguments.command_line = command_line(command, argv)
        command = f"{command} {arguments.command}"
        run = partial(_COMMANDS[arguments.command], arguments)
        return printing(run, command, unread=_FAILED)
    except PlannerError as error:
        complain(f"{command}: {error}")
    except KeyboardInterrupt:
        complain(f"{command}: interrupted, nothing was written")
        return _INTERRUPTED
    return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="select-planner",
        description="Turns demand into replica counts that meet TTFT and ITL targets.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="plan for a live fleet", allow_abbrev=False)
    add_flags(run, SECTIONS["run"])
    plan = commands.add_parser("plan", help="one calculation", allow_abbrev=False)
    add_flags(plan, SECTIONS["plan"])
    predict = commands.add_parser(
        "predict",
        help="forecasts of a series",
        description="Reads a JSON list of numbers (null: nothing was measured) from standard "
        "input and writes the forecast made after each of them.",
        allow_abbrev=False,
    )
    add_flags(predict, SECTIONS["predict"])
    replay = commands.add_parser(
        "replay", help="what planning would have been worth", allow_abbrev=False
    )
    add_flags(replay, SECTIONS["replay"])
    profile = commands.add_parser("profile", help="profiling results", allow_abbrev=False)
    what = profile.add_subparsers(dest="what", required=True, metavar="WHAT")
    inspect = what.add_parser("inspect", help="check and plot them", allow_abbrev=False)
    inspect.add_argument("directory", metavar="DIR", type=Path, help="profiling results")
    add_flags(inspect, SECTIONS["profile inspect"])
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge.run_command import run  # a server, for who runs

    return run(read_section(RunSettings, arguments))


def _plan(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import what_if  # numpy, for who asks
    from select_service.planner.edge.profile_files import read_profile

    question = read_section(PlanSettings, arguments)
    profile = read_profile(question.profile_results_dir)
    try:
        plan = what_if.plan_slo if question.mode == "slo" else what_if.plan_compatible
        answer = plan(profile, question)
    except MissingExtra as error:
        if question.mode is not None:
            raise
        complain(f"select-planner plan: planned with --mode slo, as --mode {error}")
        answer = what_if.plan_slo(profile, question)
    if question.json:
        _print(answer)
    else:
        print(_plain(answer))
    return _FAILED if "error" in answer else 0


def _plain(answer: dict[str, object]) -> str:
    lines = [f"{name}: {value}" for name, value in answer.items() if name != "intermediate"]
    terms = answer["intermediate"]
    assert isinstance(terms, dict), "both modes make one"
    return "\n".join([*lines, *(f"  {name} = {value}" for name, value in terms.items())])


def _predict(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import what_if
    from select_service.planner.edge.predictors import predictor_settings

    if sys.stdin is None:  # it was closed by who started this
        raise PlannerError("standard input is closed: a JSON list of numbers is read from it")
    series = what_if.read_series(sys.stdin.read())
    told = read_section(PredictSettings, arguments)
    is_compatible = told.mode == "compatible"
    settings = predictor_settings(told.predictor, told, compatible=is_compatible)
    _print(what_if.predict(settings, series))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from select_service.planner.edge import replay_command  # the simulator

    told = read_section(ReplayedSettings, arguments)
    _expect_writable(told.out)
    question = replay_command.question_of(told)
    results = replay_command.replay(question, print_line=_tell)
    if told.json:
        _print({"results": [replay_command.brief(one) for one in results]})
    if told.out is not None:
        _write(told.out, replay_command.html(results, question, arguments.command_line))
    return 0


def _tell(line: str) -> None:
    complain(line)


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
