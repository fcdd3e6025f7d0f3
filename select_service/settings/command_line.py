"""Rows of the table as flags of a command line, and back: for each of the three commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from select_service.standard_output import SeldomUsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.settings.row import Flag, ValueType

Section = TypeVar("Section", bound=msgspec.Struct)


def add_flags(
    parser: argparse._ActionsContainer,
    flags: Iterable[Flag],
    *,
    within: str = "",
    brief: bool = False,
) -> None:
    """Add a flag per row; the namespace has only those that are given.

    Args:
        parser: of the command.
        flags: the rows.
        within: put before the names in the namespace, where other rows have the same ones.
        brief: whether `--help` leaves out those that are not common.
    """
    for flag in flags:
        text = _help(flag)
        is_shown = flag.is_required or flag.type.is_common or not brief
        _add(parser, flag, within + flag.field, text if is_shown else SeldomUsed(text))


def read_section(section: type[Section], given: argparse.Namespace) -> Section:
    """Return the settings of a command: what is given, and defaults for the rest."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(given).items()
        if name in section.__struct_fields__
    }
    return section(**values)


def _add(parser: argparse._ActionsContainer, flag: Flag, dest: str, text: str) -> None:
    names = (flag.name, *flag.type.aliases)
    if flag.type.parse is None:
        parser.add_argument(
            *names, dest=dest, action="store_true", default=argparse.SUPPRESS, help=text
        )
        return
    parser.add_argument(
        *names,
        dest=dest,
        action="append" if flag.type.repeats else "store",
        type=argument(flag.type),
        required=flag.is_required,
        default=argparse.SUPPRESS,  # what is not there was not given
        metavar=flag.type.metavar,
        help=text,
    )


def _help(flag: Flag) -> str:
    """Return the row's text as a sentence, with the default and the variable."""
    text = f"{flag.help[0].upper()}{flag.help[1:]}."
    if flag.type.parse is not None and not flag.is_required:
        text += f" Default: {flag.default_text}."
    if flag.type.env:
        text += f" Environment: {flag.type.env}."
    return text.replace("%", "%%")


def argument(kind: ValueType) -> Callable[[str], Any]:
    """Return what reads an argument, and says why it cannot.

    argparse would replace the text of a ValueError by a bare 'invalid value'.
    """
    parse = kind.parse
    assert parse is not None, "a switch has no value"

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
