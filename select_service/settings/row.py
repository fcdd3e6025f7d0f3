"""One row of the table of settings: what a setting is called, accepts, defaults to and means.

A row is one field of a section's class: `name: Annotated[type, value_type, help] = default`.
`Flag` is that row as the command line, files, requests and the reference page read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Final

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

HITS: Final = "limit_hits_total"
"""Metric that counts how often a limit was reached, by the name of its setting."""


class ValueType(Struct, frozen=True):
    """How the text of a setting is read, and how the setting is treated."""

    parse: Callable[[str], object] | None  # None: a switch
    metavar: str
    watch: str = ""  # the metric that shows how near it is, or how often it was reached
    env: str = ""  # the variable that sets it if the flag does not
    reloads: bool = False  # whether it may change at run time: see `edge/config_reload.py`
    limits: bool = True  # whether a number bounds something
    repeats: bool = False  # given once per value; the setting is a tuple of them
    aliases: tuple[str, ...] = ()  # other names on the command line
    flag: str = ""  # its name there, if that is not the field's
    is_common: bool = False  # whether `--help` lists it, and not only `--help-all`

    def common(self) -> ValueType:
        """Return the same for a flag that many people need."""
        return replace(self, is_common=True)

    def called(self, flag: str) -> ValueType:
        """Return the same for a setting whose flag has another name than its field."""
        return replace(self, flag=flag)

    def also(self, *names: str) -> ValueType:
        """Return the same for a flag that other tools call by these names."""
        return replace(self, aliases=names)

    def live(self, watch: str = "", env: str = "", *, limit: bool = True) -> ValueType:
        """Return the same for a setting that may change at run time."""
        return replace(self, watch=watch, env=env, reloads=True, limits=limit)

    def static(self, watch: str = "", env: str = "", *, limit: bool = True) -> ValueType:
        """Return the same for a setting that only a restart changes."""
        return replace(self, watch=watch, env=env, limits=limit)


class Flag(Struct, frozen=True):
    """One setting of the table."""

    field: str  # of Settings; also its name in files, requests and select_service_limit
    type: ValueType
    help: str
    default: object  # NODEFAULT: it has to be given

    @property
    def name(self) -> str:
        """As typed on the command line, "--port"."""
        return self.type.flag or "--" + self.field.replace("_", "-")

    @property
    def is_required(self) -> bool:
        """Whether its command does not run without it."""
        return self.default is NODEFAULT

    @property
    def reloads(self) -> bool:
        """Whether it may change at run time."""
        return self.type.reloads

    @property
    def is_limit(self) -> bool:
        """Whether it bounds something: a number, shown in /metrics as select_service_limit."""
        return self.type.limits and type(self.default) in {int, float}

    @property
    def watch(self) -> str:
        """The metric that shows how near it is, or how often it was reached; empty: there is none.

        Of `HITS` it is the series of this setting.
        """
        watched = self.type.watch
        return f'{HITS}{{name="{self.field}"}}' if watched == HITS else watched

    @property
    def default_text(self) -> str:
        """The default as one would type it."""
        value = self.default
        if isinstance(value, Enum):
            return str(value.value)
        if isinstance(value, Struct):
            return "off"  # the flag changes members of it
        if value is NODEFAULT:
            return "required"
        if value is None or value is False or value in ((), [], {}, ""):
            return "off"
        if isinstance(value, tuple):
            return ",".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def flags_of(section: type[Struct], *, inherited: bool = False) -> tuple[Flag, ...]:
    """Return the rows that a section's class declares itself, in order; or all that it has.

    A field without a type and a help text is none.
    """
    rows: dict[str, Any] = {}
    for one in reversed(section.__mro__ if inherited else (section,)):
        rows |= inspect.get_annotations(one)
    flags: list[Flag] = []
    for field in fields(section):
        if hasattr(rows.get(field.name), "__metadata__"):
            value_type, text = rows[field.name].__metadata__
            made = field.default_factory
            default = field.default if made is NODEFAULT else made()
            flags.append(Flag(field.name, value_type, text, default))
    return tuple(flags)


def expect_values(section: Struct) -> None:
    """Refuse numbers and words that did not come by flags and that the rows would not read.

    Raises:
        ValueError: naming the first of them.
    """
    for flag in flags_of(type(section)):
        value = getattr(section, flag.field)
        if flag.type.parse is not None and type(value) in (int, float, str):
            try:
                flag.type.parse(str(value))
            except ValueError as error:
                raise ValueError(f"{flag.field}: {error}") from None
