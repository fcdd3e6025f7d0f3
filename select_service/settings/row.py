"""One row of the table of settings: what a setting is called, accepts, defaults to and means.

A row is one field of a section's class: `name: Annotated[type, value_type, help] = default`.
`Flag` is that row as the command line, files, requests and the reference page read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["Flag", "ValueType", "flags_of"]


class ValueType(Struct, frozen=True):
    """How the text of a setting is read, and how the setting is treated."""

    parse: Callable[[str], object] | None  # None: a switch
    metavar: str
    watch: str = ""  # the metric that shows how near it is, or how often it was reached
    env: str = ""  # the variable that sets it if the flag does not
    reloads: bool = False  # whether it may change at run time: see `edge/config_reload.py`
    limits: bool = True  # whether a number bounds something

    def live(self, watch: str = "", env: str = "", *, limit: bool = True) -> ValueType:
        """Return the same for a setting that may change at run time."""
        return replace(self, watch=watch, env=env, reloads=True, limits=limit)

    def watched(self, watch: str = "", env: str = "", *, limit: bool = True) -> ValueType:
        """Return the same for a setting that only a restart changes."""
        return replace(self, watch=watch, env=env, limits=limit)


class Flag(Struct, frozen=True):
    """One setting of the table."""

    field: str  # of Settings; also its name in files, requests and select_service_limit
    type: ValueType
    help: str
    default: object

    @property
    def name(self) -> str:
        """As typed on the command line, "--port"."""
        return "--" + self.field.replace("_", "-")

    @property
    def reloads(self) -> bool:
        """Whether it may change at run time."""
        return self.type.reloads

    @property
    def is_limit(self) -> bool:
        """Whether it bounds something: a number, shown in /metrics as select_service_limit."""
        return self.type.limits and type(self.default) in {int, float}

    @property
    def default_text(self) -> str:
        """The default as one would type it."""
        value = self.default
        if isinstance(value, Enum):
            return str(value.value)
        if value is None or value is False or value in ((), {}):
            return "off"
        if isinstance(value, tuple):
            return ",".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def flags_of(section: type[Struct]) -> tuple[Flag, ...]:
    """Return the rows that a section's class declares itself, in order."""
    defaults = section()
    flags: list[Flag] = []
    for name, row in inspect.get_annotations(section).items():
        value_type, text = row.__metadata__
        flags.append(Flag(name, value_type, text, getattr(defaults, name)))
    return tuple(flags)
