"""The driver's operations that select workers, and the wait of callers while all are busy.

Each has two forms: `…_now` goes as far as it can without waiting and may return a `Ticket` for
`wait` (HTTP uses these: most requests need no task of their own); the awaitable form is for callers
in this process.
"""

from __future__ import annotations

from array import array
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import UNSET

from select_service.core.admission.queue import Ticket
from select_service.core.effects import NOTHING
from select_service.edge.decision_report import DecisionReporter
from select_service.edge.driver.core_calls import CoreCalls
from select_service.edge.withdrawal import ids_in, withdrawn_if_lost
from select_service.errors import ServiceError
from select_service.types import Selection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from indexer.types import PackedHashes
    from select_service.core.batches.batch_selection import Item
    from select_service.core.effects import Effects
    from select_service.edge.batch_runner import BatchRunner
    from select_service.edge.driver.waiting_callers import WaitingCallers
    from select_service.types import (
        Answer,
        SelectAndReserveRequest,
        SelectPairRequest,
        SelectRequest,
    )
    from select_service.types.batches import SelectBatchAnswer, SelectBatchRequest

_WITHDRAWN_AT_ONCE: Final = 16
"""Bookings of one answer taken back in one turn, some 10 µs each."""

S = TypeVar("S", bound="SelectRequest")


class SelectionOperations(CoreCalls):
    """Selections, and the wait for one."""

    _waiting: WaitingCallers
    _batch_runner: BatchRunner

    def select_now(self, request: SelectRequest, unknown: bytes = b"") -> Answer | Ticket:
        """POST /select up to the point of waiting; pass a returned Ticket to `wait`."""
        answer, effects = self.core.selection.select(request, self._clock())
        if effects is not NOTHING or self.keeper is not None:  # otherwise there is nothing to do
            self._carry_out(effects)
        return answer

    def select_and_reserve_now(
        self, request: SelectAndReserveRequest, unknown: bytes = b""
    ) -> Answer | Ticket:
        """POST /select_and_reserve up to the point of waiting; pass a returned Ticket to `wait`."""
        answer, effects = self.core.selection.select_and_reserve(
            request, self._clock(), unknown=unknown
        )
        if effects is not NOTHING or self.keeper is not None:  # otherwise there is nothing to do
            self._carry_out(effects)
        return answer

    def select_pair_now(self, request: SelectPairRequest, unknown: bytes = b"") -> Answer | Ticket:
        """POST /select_pair up to the point of waiting; pass a returned Ticket to `wait`."""
        answer, effects = self.core.selection.select_and_reserve(
            request, self._clock(), unknown=unknown
        )
        self._carry_out(effects)
        return answer

    def wait(self, ticket: Ticket) -> Awaitable[Answer]:
        """Wait for a ticket's answer; cancelling the caller removes it from the queue."""
        return self._waiting.wait(ticket)

    async def select_batch(
        self, request: SelectBatchRequest, items: Sequence[Item]
    ) -> SelectBatchAnswer:
        """POST /select_batch; if the caller is cancelled, nothing stays booked.

        Args:
            request: options of the batch; its `requests` are ignored.
            items: the parsed items, each with the canonical bytes of its unknown members, or the
                error that made it unreadable.

        Raises:
            ServiceError: as `BatchSelection.begin`, and if all or none was requested.
        """
        return await self._batch_runner.run(self.core.batch_selection.begin(request, items))

    def withdraw(self, answer: object, added: int) -> None:
        """Take back what an answer says was booked: it could not be given. A lease decides itself.

        Args:
            answer: of a selection, a pair, a batch or a reservation; others carry no booking.
            added: `bookings.added` when it was made.
        """
        self.withdraw_named(ids_in(answer), added)

    def withdraw_named(self, names: list[str], added: int) -> None:
        """Do so for the ids in an answer; those of a large batch in slices."""
        if len(names) > _WITHDRAWN_AT_ONCE:
            self._batch_runner.finish(self._withdrawals(names, added))
            return
        for name in names:
            effects = self.core.reservations.withdraw(name, added, self._clock())
            if effects is not NOTHING or self.keeper is not None:  # as above
                self._carry_out(effects)

    def _withdrawals(self, names: list[str], added: int) -> Generator[Effects, float, None]:
        now = self._clock()
        for name in names:
            now = yield self.core.reservations.withdraw(name, added, now)

    async def select(self, request: SelectRequest) -> Answer:
        """POST /select, waiting while every eligible rank is busy; cancelling withdraws."""
        return await self._given(self.select_now, request)

    async def select_and_reserve(
        self, request: SelectAndReserveRequest, unknown: bytes = b""
    ) -> Answer:
        """POST /select_and_reserve, waiting likewise; cancelling withdraws, nothing is booked."""
        verb = partial(self.select_and_reserve_now, unknown=unknown)
        return _legible(await self._given(verb, request))

    async def select_pair(self, request: SelectPairRequest, unknown: bytes = b"") -> Answer:
        """POST /select_pair, waiting likewise; cancelling withdraws, nothing is booked."""
        return await self._given(partial(self.select_pair_now, unknown=unknown), request)

    async def _given(self, verb: Callable[[S], Answer | Ticket], request: S) -> Answer:
        """Wait if necessary, and render the decision if `explain` was set."""
        try:
            answer = verb(request)
            given = await self._waiting.wait(answer) if isinstance(answer, Ticket) else answer
        except ServiceError as error:
            await self.decision_reports.finish_refusal(error)
            raise
        if not request.explain and given.decision is UNSET:
            return given
        with withdrawn_if_lost(self, given):
            return await self.decision_reports.finish(given, request)

    @cached_property
    def decision_reports(self) -> DecisionReporter:
        """Renders recorded decisions."""
        transfer_cost = self.core.reader.config.kv_transfer_cost_per_block
        return DecisionReporter(self.core.decisions, self._clock, transfer_cost)

    def show_hashes_with(self, show_hashes: Callable[[PackedHashes], list[int]]) -> None:
        """Set how hashes appear in answers sent over HTTP.

        This affects the verbs whose name ends in `_now`, and `wait`.
        """
        self.core.lifecycle.show_hashes = show_hashes


def _legible(answer: Answer) -> Answer:
    """Decode the hashes of an answer for a caller in this process."""
    shown: object = answer.sequence_hashes if isinstance(answer, Selection) else None
    if not isinstance(shown, array):
        return answer
    return msgspec.structs.replace(answer, sequence_hashes=shown.tolist())
