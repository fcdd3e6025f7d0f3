"""When the steps of one request began: what somebody who traces it wants to know besides its end.

The clock is handed in with the marks, for there is none in here. `recording.py` makes the marks
while it serves a request; who reads them is `edge/tracing/spans.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.core.admission.queue import Ticket
    from select_service.core.fleet.catalog import Worker
    from select_service.core.pricing.placement import Placement
    from select_service.types import Answer

__all__ = ["ADMISSION", "BOOK", "MATCH", "PICK", "WAIT", "Booked", "Marks", "Recorder"]

ADMISSION: Final = "admission"
WAIT: Final = "wait"
MATCH: Final = "match"
PICK: Final = "pick"
BOOK: Final = "book"


class Booked(NamedTuple):
    """What was booked for who had chosen the rank himself."""

    model_name: str
    tenant_id: str
    worker: Worker
    dp_rank: int
    reservation_id: str
    isl_tokens: int


class Marks:
    """The steps of one request, and what it led to."""

    __slots__ = ("_clock", "answer", "booked", "ids", "placement", "steps", "ticket")

    def __init__(self, clock: Callable[[], int], ids: Mapping[str, str]) -> None:
        """Begin without any.

        Args:
            clock: nanoseconds, from whenever.
            ids: what the request is called in logs.
        """
        self._clock = clock
        self.ids = ids
        self.steps: list[tuple[str, int]] = []
        """Each with when it began; the next one ends it. One without a name is none."""
        self.ticket: Ticket | None = None
        self.placement: Placement | None = None
        self.answer: Answer | None = None  # given at once
        self.booked: Booked | None = None

    def enter(self, step: str) -> None:
        """A step begins, and ends the one before; one that goes on does not begin again."""
        if not self.steps or self.steps[-1][0] != step:
            self.steps.append((step, self._clock()))

    def leave(self) -> None:
        """The last step has ended."""
        if self.steps:
            self.enter("")


class Recorder:
    """Whose marks are to be made: the caller sets `current` for as long as one call takes."""

    __slots__ = ("current", "waiting")

    def __init__(self) -> None:
        self.current: Marks | None = None
        self.waiting: dict[Ticket, Marks] = {}
        """Of requests that wait; who reads them takes them out with `forget`."""

    def forget(self, marks: Marks) -> None:
        """It waits no longer."""
        ticket = marks.ticket
        if ticket is not None and self.waiting.get(ticket) is marks:
            del self.waiting[ticket]

    def of(self, ticket: Ticket) -> Marks | None:
        """Return whose ticket it is, if anybody wants its marks."""
        current = self.current
        if current is not None and current.ticket is ticket:
            return current
        return self.waiting.get(ticket)
