"""The times at which the steps of a request began, for tracing.

The clock is passed in with the marks, as the core has none. `traced.py` makes the marks while it
serves a request; `edge/tracing/spans.py` reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.core.admission.queue import Ticket
    from select_service.core.fleet.catalog import Worker
    from select_service.core.pricing.placement import Placement
    from select_service.types import Answer

__all__ = ["ADMISSION", "BOOK", "MATCH", "PICK", "WAIT", "Booked", "MarkRecorder", "Marks"]

ADMISSION: Final = "admission"
WAIT: Final = "wait"
MATCH: Final = "match"
PICK: Final = "pick"
BOOK: Final = "book"


class Booked(NamedTuple):
    """A booking whose rank the caller chose."""

    model_name: str
    tenant_id: str
    worker: Worker
    dp_rank: int
    reservation_id: str
    isl_tokens: int


class Marks:
    """The steps of one request, and its results."""

    __slots__ = ("_clock", "answer", "booked", "ids", "placement", "steps", "ticket")

    def __init__(self, clock: Callable[[], int], ids: Mapping[str, str]) -> None:
        """Start without steps.

        Args:
            clock: nanoseconds, with any origin.
            ids: the request's ids in logs.
        """
        self._clock = clock
        self.ids = ids
        self.steps: list[tuple[str, int]] = []
        """Each with its start; the next one ends it. An empty name is no step."""
        self.ticket: Ticket | None = None
        self.placement: Placement | None = None
        self.answer: Answer | None = None  # if answered at once
        self.booked: Booked | None = None

    def enter(self, step: str) -> None:
        """Begin a step and end the one before; a step already in progress does not begin again."""
        if not self.steps or self.steps[-1][0] != step:
            self.steps.append((step, self._clock()))

    def leave(self) -> None:
        """End the last step."""
        if self.steps:
            self.enter("")


class MarkRecorder:
    """Where marks go: the caller sets `current` for the duration of one call."""

    __slots__ = ("current", "waiting")

    def __init__(self) -> None:
        self.current: Marks | None = None
        self.waiting: dict[Ticket, Marks] = {}
        """Marks of waiting requests; their reader removes them with `forget`."""

    def forget(self, marks: Marks) -> None:
        """Remove the marks of a request that no longer waits."""
        ticket = marks.ticket
        if ticket is not None and self.waiting.get(ticket) is marks:
            del self.waiting[ticket]

    def of(self, ticket: Ticket) -> Marks | None:
        """Return the marks of a ticket, if it is traced."""
        current = self.current
        if current is not None and current.ticket is ticket:
            return current
        return self.waiting.get(ticket)
