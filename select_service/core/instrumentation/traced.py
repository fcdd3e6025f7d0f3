"""The traced kinds of the rooms a request passes through.

Each does what its base does, and marks the time. A service without tracing has the plain rooms and
pays nothing; here a request that is not traced pays for one look at `MarkRecorder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from select_service.core.admission.queue import Ticket
from select_service.core.instrumentation.marks import ADMISSION, BOOK, MATCH, PICK, WAIT, Booked
from select_service.core.operations.selection import SelectionCalls
from select_service.core.reservations.lifecycle import Lifecycle
from select_service.core.routing.place import Placer

if TYPE_CHECKING:
    from indexer.core.tiers import Matches
    from select_service.core.columns import Rows
    from select_service.core.effects import Effects
    from select_service.core.instrumentation.marks import MarkRecorder, Marks
    from select_service.core.ledger.reservation import Reservation
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Placement
    from select_service.core.reservations.lifecycle import BookingSpec
    from select_service.types import Answer, SelectAndReserveRequest, Selection, SelectRequest

__all__ = ["rooms_for"]


def rooms_for(recorder: MarkRecorder) -> tuple[type[Lifecycle], type[Placer], type[SelectionCalls]]:
    """Return the kinds of rooms whose marks go to this recorder."""

    class OfDesk(RecordingDesk):
        pass

    class OfPlacing(RecordingPlacing):
        pass

    class OfSelecting(RecordingSelecting):
        pass

    OfDesk.recorder = OfPlacing.recorder = OfSelecting.recorder = recorder
    return OfDesk, OfPlacing, OfSelecting


class RecordingSelecting(SelectionCalls):
    """Marks when a request is judged, and when it begins to wait."""

    recorder: MarkRecorder

    @override
    def select(self, request: SelectRequest, now: float) -> tuple[Answer | Ticket, Effects]:
        answer, effects = super().select(request, now)
        marks = self.recorder.current
        if marks is not None:
            self._note(marks, answer)
        return answer, effects

    @override
    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[Answer | Ticket, Effects]:
        answer, effects = super().select_and_reserve(request, now, unknown=unknown)
        marks = self.recorder.current
        if marks is not None:
            self._note(marks, answer)
        return answer, effects

    def _note(self, marks: Marks, answer: Answer | Ticket) -> None:
        if not isinstance(answer, Ticket):
            marks.answer = answer
            marks.leave()
            return
        marks.ticket = answer  # perhaps that of an earlier caller with the same request
        marks.enter(WAIT)
        self.recorder.waiting.setdefault(answer, marks)

    @override
    def _enter(self, ticket: Ticket, now: float) -> tuple[Answer | Ticket, Effects]:
        marks = self.recorder.current
        if marks is not None:
            marks.ticket = ticket
            marks.enter(ADMISSION)
        return super()._enter(ticket, now)


class RecordingPlacing(Placer):
    """Marks when a rank is chosen, for new requests and for those that waited."""

    recorder: MarkRecorder

    @override
    def place(
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        matches: Matches | None = None,
    ) -> tuple[Answer, Effects]:
        recorder = self.recorder
        caller = recorder.current
        if caller is None and not recorder.waiting:
            return super().place(ticket, rows, now, effects, matches)
        marks = recorder.of(ticket)
        recorder.current = marks  # not the caller's, whose call may have let others in
        try:
            if marks is not None:
                if matches is None:  # otherwise the gate has looked them up
                    marks.enter(MATCH)
                    matches = ticket.partition.index.find_matches(ticket.prompt.block_hashes)
                marks.enter(PICK)
            return super().place(ticket, rows, now, effects, matches)
        finally:
            if marks is not None:
                marks.leave()
            recorder.current = caller

    @override
    def _answer(self, ticket: Ticket, placement: Placement) -> Selection:
        marks = self.recorder.current
        if marks is not None:
            marks.placement = placement
        return super()._answer(ticket, placement)


class RecordingDesk(Lifecycle):
    """Marks when a booking begins."""

    recorder: MarkRecorder

    @override
    def book(self, partition: Partition, slot: int, order: BookingSpec, now: float) -> Reservation:
        marks = self.recorder.current
        if marks is not None:
            marks.enter(BOOK)
            if marks.ticket is None:
                name, tokens = order.reservation_id, order.prompt.isl_tokens
                marks.booked = Booked(
                    *partition.scope, *partition.seating.rank_at(slot), name, tokens
                )
        return super().book(partition, slot, order, now)
