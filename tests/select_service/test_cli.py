"""Commands, their helps, and what they answer to words that they do not know."""

from __future__ import annotations

import argparse
import gc
import runpy
import shlex
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from select_service import cli
from select_service.demo import cli as demo
from select_service.edge import app
from select_service.settings import (
    ENVIRONMENT,
    FLAGS,
    SECTIONS,
    Layers,
    Settings,
)
from select_service.standard_output import CommandParser
from select_service.version import __version__

WIDTH, SCREEN = 80, 39  # the next prompt has a line, too
"""Lines of a terminal of usual size."""

SUBPARSERS = argparse._SubParsersAction


def test_what_may_have_been_meant(capsys: pytest.CaptureFixture[str]) -> None:
    meant = {"--decision-rin=5": "--decision-ring", "doctr": "doctor", "--prt": "--port"}
    for wrong, right in meant.items():
        with pytest.raises(SystemExit):
            cli.parse([wrong], {})
        assert f"unknown argument: {wrong} (is {right} meant?)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.parse(["--zzz"], {})
    assert capsys.readouterr().err.endswith("unknown argument: --zzz\n")
    for word in ("serve", "start", "run"):
        with pytest.raises(SystemExit):
            cli.parse([word], {})
        assert "without one the service starts\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "usage", "meant"),
    [
        ("workers --modle-name x", "workers", "--modle-name (is --model-name meant?)"),
        ("demo --engine 2", "demo", "--engine (is --engines meant?)"),
        ("doctor --zzz", "doctor", "--zzz"),
        ("token new --nam x --scopes read --name y", "token new", "--nam (is --name meant?)"),
    ],
)
def test_a_command_refuses_what_it_does_not_know_in_its_own_words(
    typed: str, usage: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(typed.split())
    errors = capsys.readouterr().err
    assert errors.startswith(f"usage: select-service {usage} ")
    assert errors.endswith(f"unknown argument: {meant}\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--url http://x:1 doctor", "doctor --url http://x:1"),
        ("--uds 's o' workers --json", "workers --uds 's o' --json"),
        ("--port 9000 demo", "demo --port 9000"),
    ],
)
def test_a_command_behind_its_flags_is_refused_with_where_it_belongs(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--url` is none of the service's flags: it was answered with `--uds`."""
    with pytest.raises(SystemExit):
        cli.parse(shlex.split(typed), {})
    errors = capsys.readouterr().err
    assert errors.endswith(f"error: a command comes first: select-service {meant}\n")


@pytest.fixture
def _as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` prepares its process for serving; this one goes on with other tests."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    yield
    gc.enable()


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
def test_help_names_the_common_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(flag.name in text for flag in FLAGS if flag.type.is_common)
    assert all(word in text for word in ("--help-all", "--version", "examples:"))


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    squeezed = "".join(text.split())  # lines break wherever they are full
    for flag in FLAGS:
        assert flag.name in text
        assert "".join(flag.default_text.split()) in squeezed
    assert "no effect" in text  # --threads says so
    head = text.splitlines()[:24]
    for command in ("demo", "doctor", "leave", "token new", "keys new", "workers", "explain"):
        assert any(command in line for line in head), "who looks for a command reads no 570 lines"
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[:1].isalpha()]
    by_subject = [*SECTIONS, "examples", "admission policies", "environment"]
    assert titles == ["commands", "options", *by_subject], "in the order of the reference"
    assert all(flag.type.env in text for flag in FLAGS)
    assert all(variable.name in text for variable in ENVIRONMENT)
    for name, section in SECTIONS.items():
        begin = text.index(f"\n{name}:")
        assert all(text.index(f"  {flag.name}", begin) for flag in section)


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"select-service {__version__}\n"


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
def test_main_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, layers: Layers) -> int:
        assert layers.source_of("port") == "flag"
        seen.append(settings)
        return 7

    monkeypatch.setattr(app, "serve", serve)
    monkeypatch.setattr("sys.argv", ["select-service", "--port", "5"])
    assert cli.main() == 7
    assert seen[0].port == 5


def test_main_shows_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "main", len)
    assert cli.main(["demo", "--requests", "3"]) == 3


def parsers(program: str) -> Iterator[CommandParser]:
    """Every parser of a program, the outer ones first."""
    left = [cli._whole_parser(program, lambda _: None)]
    while left:
        parser = left.pop(0)
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                left += action.choices.values()


@pytest.mark.parametrize("program", ["select-service", "select-sim", "select-planner"])
def test_every_command_explains_itself(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one screen, in sentences, with an example, and with its version."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    commands = [*parsers(program)]
    if program == "select-service":
        named = {parser.prog.split()[1] for parser in commands[1:]}
        assert named == {*cli._COMMANDS} - {"completion"}
        commands[0] = cli.service_parser()  # its description lists them
    for parser in commands:
        shown = parser.format_help().splitlines()
        assert len(shown) <= SCREEN, parser.prog
        assert [line for line in shown if len(line) > WIDTH] == [], parser.prog
        assert {"--help", "--version"} < set(parser._option_string_actions), parser.prog
        groups = {"select-service token", "select-service keys", "select-planner profile"}
        assert parser.epilog or parser.prog in groups, parser.prog
        for one in parser._actions:
            if one.help and one.help is not argparse.SUPPRESS and not isinstance(one, SUBPARSERS):
                assert one.help[0].isupper() or not one.help[0].isalpha(), (parser.prog, one.help)
                assert one.help.endswith("."), (parser.prog, one.help)


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
@pytest.mark.parametrize(("terminal", "widest"), [("80", 80), ("100", 100), ("200", 100)])
def test_no_line_of_the_help_is_wider_than_the_terminal(
    terminal: str,
    widest: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", terminal)
    with pytest.raises(SystemExit):
        cli.main(["--help-all"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > widest] == []


def test_a_command_that_there_is_none_of_is_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = CommandParser(prog="a")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in ("replay", "sweep"):
        commands.add_parser(name)
    with pytest.raises(SystemExit):
        parser.parse_args(["repaly"])
    assert "'repaly' is none of replay, sweep (is replay meant?)" in capsys.readouterr().err
    assert parser.format_usage() == "usage: a COMMAND ...\n", "flags are the command's"
    for command in (["--help-all"], ["sweep", "--help-all"]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(command)
        assert ended.value.code == 0, "who knows it from another command gets the help"


@pytest.mark.usefixtures("_as_in_a_process_of_its_own")
def test_ctrl_c_before_it_serves_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_chosen", lambda _: interrupted)
    assert cli.main([]) == 130


def test_what_help_leaves_out_is_said_by_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="a", examples='a --json \'{"not": "split"}\' ' + "--word " * 12)
    parser.list_seldom_used()
    parser.add_argument("--w", help="Where. Default: off. Environment: SELECT_SERVICE_W.")
    shown = parser.format_help()
    typed = shown.partition("examples:\n")[2].replace("\\\n", "")  # as a shell joins lines
    assert "Where.\n" in shown
    assert ' \'{"not": "split"}\' ' in shown
    assert shlex.split(typed)[-12:] == ["--word"] * 12
    with pytest.raises(SystemExit):
        parser.parse_args(["--help-all"])
    assert "Where. Default: off. Environment: SELECT_SERVICE_W." in capsys.readouterr().out


def test_a_shell_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for program, names in {
        "select-service": ("doctor", "token", "--kubernetes-workers", "--probe"),
        "select-sim": ("sweep", "--vary"),
        "select-planner": ("replay", "--connector"),
    }.items():
        assert cli.main(["completion", "bash", "--program", program]) == 0
        script = capsys.readouterr().out
        assert all(word in script for word in names), program
        assert f"-F _shtab_{program.replace('-', '_')} {program}" in script


def test_without_shtab_completion_still_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "--help"])
    assert ended.value.code == 0
    assert "select-service completion" in capsys.readouterr().out
    assert cli.main(["completion", "bash"]) == 1
    assert "shtab" in capsys.readouterr().err


def test_python_dash_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: 3)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("select_service", run_name="__main__")
    assert ended.value.code == 3
