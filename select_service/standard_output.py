"""What commands print: help of one screen, and answers without secrets.

Readers may stop, as `| head` does, and disks may be full. Either is no bug of ours and shows no
traceback; the interpreter would say so once more at its exit, when it flushes what is left, and end
with a code of its own.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from indexer.redaction import redact
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from _typeshed import SupportsWrite

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FAILED: Final = 1
_WIDEST: Final = 100
_FLAG_COLUMNS: Final = 26
_MEANING_COLUMNS_MIN: Final = 30
_EXAMPLE_COLUMNS: Final = 78
_ARGUMENT: Final = re.compile(r"(?:'[^']*'|[^\s'])+")
_WHOLE_ONLY: Final = re.compile(r" (Default: off|Environment: \w+)\.")
"""What `--help` leaves out of a flag's text, and `--help-all` has."""


class SeldomUsed(str):
    """The help of a flag that only `--help-all` lists."""

    __slots__ = ()


class CommandParser(argparse.ArgumentParser):
    """The parser of every command and subcommand.

    Each has `--version`. `--help` lists the flags that most people need, on one screen, and
    `--help-all` those whose help is `SeldomUsed`, too. Messages show no secrets: an argument that
    is wrong may contain some.
    """

    def __init__(self, *, examples: str = "", **settings: Any) -> None:
        """Make a parser without abbreviations.

        Args:
            examples: lines that are shown below the flags.
            settings: of `argparse.ArgumentParser`.
        """
        epilog = "examples:\n" + "\n".join(map(_typed, examples.splitlines()))
        usual = {"allow_abbrev": False, "formatter_class": _Brief, "add_help": False}
        super().__init__(**{**usual, "epilog": epilog if examples else None, **settings})
        self._commands: Mapping[str, CommandParser] = {}
        program, version = self.prog.partition(" ")[0], __version__
        self._helps = self.add_argument(
            "-h", "--help", action="help", help="Show this help and exit."
        )
        self._helps_all = self.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        self.add_argument(
            "--version",
            action="version",
            version=f"{program} {version}",
            help="Show the version and exit.",
        )

    def add_subparsers(self, **settings: Any) -> Any:
        """Add commands, which are named without the flags of this one."""
        added = super().add_subparsers(**{"prog": self.prog, **settings})
        self._commands = added.choices
        return added

    def list_seldom_used(self, note: str = "") -> None:
        """List `--help-all`: without seldom used flags it shows what `--help` shows.

        Args:
            note: shown below the flags that it lists.
        """
        self._helps_all.const = note
        self._helps_all.help = SeldomUsed("Show every flag and exit.")
        self._helps.help = "Show this help and exit; --help-all shows every flag."

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a command that there is none of, and say which may have been meant."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(one) for one in action.choices]
        problem = f"{value!r} is none of {', '.join(choices)}{meant(str(value), choices)}"
        raise argparse.ArgumentError(action, problem)

    def parse_args(  # type: ignore[override] # into a namespace of its own, as all of ours
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse, and refuse what is unknown in the words of the command that does not know it."""
        arguments = list(sys.argv[1:] if args is None else args)
        parsed, strange = self.parse_known_args(arguments, namespace)
        if strange:
            self.refuse(strange[0], arguments)
        return parsed

    def refuse(self, strange: str, arguments: Sequence[str]) -> NoReturn:
        """End with the usage of the command among these arguments, which has none like this."""
        parser: CommandParser = self
        for one in arguments:
            parser = parser._commands.get(one, parser)
        near = meant(strange.partition("=")[0], parser._option_string_actions)  # noqa: SLF001
        parser.error(f"unknown argument: {strange}{near}")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        super()._print_message(redact(message) if message else message, file)


def meant(name: str, names: Iterable[str], least: float = 0.6) -> str:
    """Return which of some names may have been meant, in brackets; nothing if none is near.

    Args:
        name: there is none of this name.
        names: those that there are.
        least: how near one has to be, 0 to 1.
    """
    near = get_close_matches(name, list(names), n=1, cutoff=least)
    return f" (is {near[0]} meant?)" if near else ""


Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"  # noqa: SLF001 - as typeshed has it
"""What `add_subparsers` returns; each module of commands adds its own."""


def parse_command(add: Callable[[Commands], None], arguments: Sequence[str]) -> argparse.Namespace:
    """Parse one of the commands of `select-service` that a module adds, the command first."""
    parser = CommandParser(prog="select-service")
    add(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    return parser.parse_args(arguments)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)


def definitions(title: str, meanings: Mapping[str, str]) -> str:
    """Return what names mean, in lines that fit the terminal."""
    width = max(map(len, meanings)) + 4
    lines = [f"{title}:"]
    for name, meaning in meanings.items():
        begin = f"  {name}".ljust(width)
        indent = " " * width
        lines.append(
            textwrap.fill(
                meaning,
                max(_columns(), width + _MEANING_COLUMNS_MIN),
                initial_indent=begin,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)


def _typed(line: str) -> str:
    """Return an example in lines that fit, between its arguments, as a shell continues them."""
    lines = [" "]
    for argument in _ARGUMENT.findall(line):
        if len(lines[-1]) + 1 + len(argument) > _EXAMPLE_COLUMNS:
            lines.append("   ")
        lines[-1] += f" {argument}"
    return " \\\n".join(lines)


class _Brief(argparse.HelpFormatter):
    """Wraps text unless its author has broken the lines; leaves out what is seldom used."""

    lists_all = False

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, max_help_position=_FLAG_COLUMNS, width=_columns(), **settings)

    def add_argument(self, action: argparse.Action) -> None:
        if self.lists_all or not isinstance(action.help, SeldomUsed):
            super().add_argument(action)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Name what is required: the other flags would bury it, and the error behind it.

        Flags come behind the command that they belong to.
        """
        flags = argparse.Action([], "", metavar="[FLAG ...]")
        required = [one for one in actions if one.required or not one.option_strings]
        has_commands = any(one.nargs == argparse.PARSER for one in required)
        super().add_usage(usage, required if has_commands else [flags, *required], [], prefix)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return text if self.lists_all else _WHOLE_ONLY.sub("", text)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in text.splitlines())


class _Whole(_Brief):
    lists_all = True


class _HelpAll(argparse.Action):
    """Shows the help with every flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.formatter_class = _Whole
        parser.epilog = "\n\n".join(filter(None, (parser.epilog, self.const)))
        parser.print_help()
        parser.exit()


def positive_seconds(text: str) -> float:
    """Read a time limit of a command.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def command_line(program: str, argv: Sequence[str] | None) -> str:
    """Return what was typed, as a shell takes it and without secrets; None: of this process."""
    return redact(shlex.join([program, *(sys.argv[1:] if argv is None else argv)]))


def complain(text: str) -> None:
    """Write a line to standard error."""
    print(redact(text), file=sys.stderr, flush=True)  # noqa: T201 - for commands


def redact_tracebacks() -> None:
    """Let the interpreter show no secrets when an error ends the process."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        complain("".join(traceback.format_exception(kind, error, trace)).rstrip())

    sys.excepthook = show


def printing(run: Callable[[], int], command: str, unread: int) -> int:
    """Run what prints an answer.

    Args:
        run: returns the exit code.
        command: what it calls itself.
        unread: the exit code where the output was not read to the end.

    Returns:
        The exit code; 1 where it cannot be written, and standard error says why.
    """
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _let_go()
        return unread
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        _let_go()
        sys.stderr.write(f"{command}: standard output: {error.strerror}\n")
        return _FAILED
    return code


def _let_go() -> None:
    """Let nothing be flushed at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
