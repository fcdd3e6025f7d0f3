"""The course of a recording: its decisions over time, in as many parts as a plot can show.

The length of a recording is known only at its end, and it is read once: parts begin short and are
joined in pairs whenever there are too many. The monotonic clocks of several lives of a service have
different origins, so their files are placed one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.core.recording.decoder import BadRecording

if TYPE_CHECKING:
    from select_service.core.recording.items import Header

PARTS_MAX: Final = 120
"""More would be closer together than a plot can show."""

_SHORTEST_S: Final = 2.0**-10
_LONGEST_S: Final = 1e10
"""Three centuries: no real clock has more between two decisions, a damaged file may."""


class Part(Struct):
    """The decisions of a stretch of time.

    Attributes:
        at_s: Its begin, in seconds since the first decision.
        length_s: Its length.
        decided: Number of decisions, by outcome.
        compared: Decisions placed one by one; others are not compared with other weights.
        changed: Of those, the number that go elsewhere with other weights.
        prompt_tokens: Of those compared.
        prefill_tokens_recorded: To be computed, as recorded.
        prefill_tokens: To be computed with other weights.
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
        """Add the following part to this one."""
        for kind, count in other.decided.items():
            self.decided[kind] = self.decided.get(kind, 0) + count
        self.compared += other.compared
        self.changed += other.changed
        self.prompt_tokens += other.prompt_tokens
        self.prefill_tokens_recorded += other.prefill_tokens_recorded
        self.prefill_tokens += other.prefill_tokens


class TimeSeries:
    """Parts of equal length, except the last."""

    def __init__(self) -> None:
        self._length_s = _SHORTEST_S
        self._parts: dict[int, Part] = {}

    def at(self, seconds: float) -> Part:
        """Return the part of a moment, in the seconds of a Clock."""
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
        """Return all parts until the last requested moment, which ends the last part.

        A last part shorter than half of one is joined to the part before: a rate over a moment
        would be meaningless. Nothing can be requested afterwards.
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
    """Seconds since the first decision, across all files.

    Files of one life share its monotonic clock; the gap between two lives is taken from the time of
    day, unless that went back.

    Attributes:
        latest: Of the requested moments.
    """

    def __init__(self) -> None:
        self.latest = 0.0
        self._begin: float | None = None  # in the clock of the open file
        self._begin_wall_s = 0.0
        self._opened: Header | None = None

    def open(self, header: Header) -> None:
        """Continue in another file."""
        before, self._opened = self._opened, header
        is_other_life = before is not None and before.recording != header.recording
        if is_other_life and self._begin is not None:
            passed_s = max(self.latest, header.wall_s - self._begin_wall_s)
            self._begin = header.at - passed_s

    def since(self, at: float) -> float:
        """Return the time of a moment of the open file; none is before the first decision.

        Raises:
            BadRecording: no clock could have produced it.
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
