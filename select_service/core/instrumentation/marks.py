"""The times at which the steps of a request began, for tracing.

The clock is passed in with the marks, as the core has none. Selection, placement and booking call
the `MarkRecorder`, where there is one; `edge/tracing/spans.py` reads the marks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.core.admission.queue import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from indexer.core.tiers import Matches
    from select_service.core.fleet.catalog import Worker
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Placement
    from select_service.types import Answer

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

    __slots__ = ("_caller", "_placing", "current", "waiting")

    def __init__(self) -> None:
        self.current: Marks | None = None
        self._placing = False
        self._caller: Marks | None = None  # those of the call, while a request is placed
        self.waiting: dict[Ticket, Marks] = {}
        """Marks of waiting requests; their reader removes them with `forget`."""

    # -- what the core reports ------------------------------------------------------------------

    def admitted(self, ticket: Ticket) -> None:
        """A new request is about to be judged."""
        marks = self.current
        if marks is not None:
            marks.ticket = ticket
            marks.enter(ADMISSION)

    def begin(self, ticket: Ticket, matches: Matches | None) -> Matches | None:
        """A request is about to be placed; return its matches, looked up here if it is traced."""
        self._placing, self._caller = True, self.current
        if self._caller is None and not self.waiting:
            return matches
        # not the caller's, whose call may have let others in
        marks = self.current = self.of(ticket)
        if marks is not None:
            if matches is None:  # otherwise the gate has looked them up
                marks.enter(MATCH)
                matches = ticket.partition.match(ticket.prompt)
            marks.enter(PICK)
        return matches

    def chosen(self, placement: Placement) -> None:
        """The rank of the request is chosen."""
        if self.current is not None:
            self.current.placement = placement

    def booking(self, partition: Partition, slot: int, name: str, isl_tokens: int) -> None:
        """A reservation is about to be booked: of the request, or one whose rank is given."""
        marks = self.current
        if marks is None:
            return
        marks.enter(BOOK)
        if marks.ticket is None:
            worker, dp_rank = partition.fleet_slots.rank_at(slot)
            marks.booked = Booked(*partition.scope, worker, dp_rank, name, isl_tokens)

    def end(self) -> None:
        """The request is placed or refused; nothing happens if none was being placed."""
        if not self._placing:
            return
        if self.current is not None:
            self.current.leave()
        self._placing, self.current, self._caller = False, self._caller, None

    def answered(self, answer: Answer | Ticket) -> None:
        """The call's request is answered, or waits."""
        marks = self.current
        if marks is None:
            return
        if not isinstance(answer, Ticket):
            marks.answer = answer
            marks.leave()
            return
        marks.ticket = answer  # perhaps that of an earlier caller with the same request
        marks.enter(WAIT)
        self.waiting.setdefault(answer, marks)

    # -- for its reader -------------------------------------------------------------------------

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
