"""SLO classes: names, priorities, and the bands they fall into.

A band is one distinct priority; bands are numbered from the most important, 0. A negative priority
means sheddable, as in the Gateway API inference extension. Load and time are not considered here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIORITY_MIN: Final = -100
PRIORITY_MAX: Final = 100
"""The bounds of a class's priority; the five defaults lie well within."""

CLASSES_MAX: Final = 64
"""Configurable class names: each is a metric label."""
NAME_CHARS_MAX: Final = 64
"""Characters of a class name, for the same reason."""


STANDARD: Final = "standard"
UNNAMED: Final = "unnamed"
UNNAMED_PRIORITY: Final = 3
"""Priority of requests without a class or with an unknown one, whatever `standard` is set to."""
DEFAULT_PRIORITIES: Final[Mapping[str, int]] = MappingProxyType(
    {"critical": 4, STANDARD: UNNAMED_PRIORITY, "batch": -1, "sheddable": -2, "background": -3}
)


class SloClasses:
    """The configured classes; an empty or unknown name falls into the `usual` class.

    That is `standard`, or an additional class `unnamed` if the priority of `standard` is not 3.

    `overrides` (name → priority) come on top of the five defaults, and may add names.

    Raises:
        ValueError: a priority outside -100..100, a name that is empty or too long, too many.
    """

    def __init__(self, overrides: Mapping[str, int] | None = None) -> None:
        priorities = dict(DEFAULT_PRIORITIES)
        for name, priority in (overrides or {}).items():
            if not name or len(name) > NAME_CHARS_MAX:
                raise ValueError(f"SLO class name must have 1 to {NAME_CHARS_MAX} characters")
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise ValueError(f"priority of SLO class {name!r} must be a whole number")  # noqa: TRY004 - a refusal of values
            if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
                raise ValueError(
                    f"priority of SLO class {name!r} must be in {PRIORITY_MIN}..{PRIORITY_MAX},"
                    f" got {priority}"
                )
            priorities[name] = priority
        if len(priorities) > CLASSES_MAX:
            raise ValueError(f"at most {CLASSES_MAX} SLO classes")
        self.usual = STANDARD if priorities[STANDARD] == UNNAMED_PRIORITY else UNNAMED
        """The class of requests that name none."""
        priorities.setdefault(self.usual, UNNAMED_PRIORITY)
        self.priorities: Mapping[str, int] = MappingProxyType(priorities)
        self.bands: tuple[int, ...] = tuple(sorted(set(priorities.values()), reverse=True))
        """The priority of each band, descending."""
        self._band_of = {priority: band for band, priority in enumerate(self.bands)}
        self._usual_priority = priorities[self.usual]
        self._places = {name: (name, self._band_of[at]) for name, at in priorities.items()}
        self._usual_place = self._places[self.usual]
        self.names: tuple[str, ...] = tuple(
            sorted(priorities, key=lambda name: (-priorities[name], name))
        )
        """By descending priority."""

    def known(self, name: str) -> str:
        """Return the name a class is counted under: itself, or the usual class."""
        return self._places.get(name, self._usual_place)[0]

    def priority(self, name: str) -> int:
        """Return the priority of a class name as sent."""
        return self.priorities.get(name, self._usual_priority)

    def band(self, name: str) -> int:
        """Return the band of a class name as sent."""
        return self._places.get(name, self._usual_place)[1]

    def place(self, name: str) -> tuple[str, int]:
        """Return `known` and `band` in one lookup."""
        return self._places.get(name, self._usual_place)

    def is_sheddable(self, band: int) -> bool:
        """Tell whether requests of a band may be refused for load alone."""
        return self.bands[band] < 0

    def name_of(self, band: int) -> str:
        """Return one name of the band, for display."""
        priority = self.bands[band]
        return next(name for name in self.names if self.priorities[name] == priority)
