"""The course of a recording: when its decisions fell, in as many parts as a plot can show.

How long a recording is turns out at its end, and it is read once: parts begin short and are joined
in pairs whenever there would be too many of them. Two machines' clocks do not begin alike either,
so that what stands in files of several lives of a service is brought behind one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.core.tape.reading import BadRecording

if TYPE_CHECKING:
    from select_service.core.tape.items import Header

__all__ = ["Clock", "Course", "Part"]

PARTS_MAX: Final = 120
"""More would be closer to one another than a plot has dots."""

_SHORTEST_S: Final = 2.0**-10
_LONGEST_S: Final = 1e10
"""Three centuries: no clock tells of more between two decisions, a damaged file may."""


class Part(Struct):
    """What was decided in some seconds.

    Attributes:
        at_s: When they begin, in seconds since the first decision.
        length_s: How many they are.
        decided: How many, by what came of them.
        compared: Placed one by one: the others are no matter of other weights.
        changed: Of these, how many go elsewhere with other weights.
        prompt_tokens: Of those compared.
        prefill_tokens_recorded: They had to compute.
        prefill_tokens: They have to, with other weights.
    """

    at_s: float
    length_s: float
    decided: dict[str, int] = {}
    compared: int = 0
    changed: int = 0
    prompt_tokens: int = 0
    prefill_tokens_recorded: int = 0
    prefill_tokens: int = 0

    def join(self, other: Part) -> None:
        """Take what the part behind it has."""
        for kind, count in other.decided.items():
            self.decided[kind] = self.decided.get(kind, 0) + count
        self.compared += other.compared
        self.changed += other.changed
        self.prompt_tokens += other.prompt_tokens
        self.prefill_tokens_recorded += other.prefill_tokens_recorded
        self.prefill_tokens += other.prefill_tokens


class Course:
    """Parts of one length, but for the last."""

    def __init__(self) -> None:
        self._length_s = _SHORTEST_S
        self._parts: dict[int, Part] = {}

    def at(self, seconds: float) -> Part:
        """Return the part that a moment falls into, of those a Clock tells."""
        while seconds >= PARTS_MAX * self._length_s:
            self._length_s *= 2.0
            before, self._parts = self._parts, {}
            for part in before.values():
                self._part(part.at_s).join(part)
        return self._part(seconds)

    def _part(self, seconds: float) -> Part:
        number = int(seconds / self._length_s)
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = Part(number * self._length_s, self._length_s)
        return part

    def parts(self, until: float) -> list[Part]:
        """Return all until the last moment that was asked for, which ends the last part.

        That takes what is behind it if it is less than half of one: a rate over a moment would be
        anything. Nothing can be asked for afterwards.
        """
        length = self._length_s
        count = max(self._parts, default=-1) + 1
        parts = [self._parts.get(at) or Part(at * length, length) for at in range(count)]
        if count > 1 and until - parts[-1].at_s < length / 2:
            short = parts.pop()
            parts[-1].join(short)
        if parts:
            parts[-1].length_s = until - parts[-1].at_s
        return parts


class Clock:
    """Seconds since the first decision, over all files.

    Files of one life share its monotonic clock; from one life to the next the time of day tells
    what lay between them, and a time of day that went back tells nothing.

    Attributes:
        latest: Of the moments that were asked for.
    """

    def __init__(self) -> None:
        self.latest = 0.0
        self._begin: float | None = None  # in the clock of the file that is open
        self._begin_wall_s = 0.0
        self._opened: Header | None = None

    def open(self, header: Header) -> None:
        """Go on in another file."""
        before, self._opened = self._opened, header
        is_other_life = before is not None and before.recording != header.recording
        if is_other_life and self._begin is not None:
            passed_s = max(self.latest, header.wall_s - self._begin_wall_s)
            self._begin = header.at - passed_s

    def since(self, at: float) -> float:
        """Return when a moment of the open file was; nothing is before the first one.

        Raises:
            BadRecording: no clock has told that.
        """
        if self._begin is None:
            assert self._opened is not None
            self._begin = at
            self._begin_wall_s = self._opened.wall_s + at - self._opened.at
        seconds = at - self._begin
        if not abs(seconds) <= _LONGEST_S:
            raise BadRecording(f"{seconds:g} s after the first decision")
        self.latest = max(self.latest, seconds)
        return max(0.0, seconds)
