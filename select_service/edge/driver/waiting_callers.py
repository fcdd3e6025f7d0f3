"""Callers whose request waits for capacity: a future per caller, one timer for the next deadline.

The core keeps the queue and says which callers have an answer; this file delivers it. A caller that
disconnects is removed from the queue, and nothing stays booked for it unless a lease says so.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from select_service.errors import ServiceError, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.core.admission.queue import Ticket
    from select_service.edge.driver.core_calls import CallContext
    from select_service.types import Answer


class WaitingCallers:
    """The waiting callers of one driver."""

    def __init__(self, turn: CallContext, withdraw: Callable[[object, int], None]) -> None:
        """Start without callers.

        Args:
            turn: to refuse requests that have waited too long.
            withdraw: takes back what an answer says was booked; see `ReservationOperations`.
        """
        self._core, self._clock, self._carry_out = turn
        self._withdraw = withdraw
        self._futures: dict[Ticket, list[asyncio.Future[Answer]]] = {}
        self._deadline: tuple[float, asyncio.TimerHandle] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many requests wait here for an answer."""
        return len(self._futures)

    async def wait(self, ticket: Ticket) -> Answer:
        """Wait for a ticket's answer; cancelling the caller removes the ticket from the queue.

        Raises:
            ServiceError: the refusal that came instead.
        """
        if self._is_closed:
            self._core.waiting_requests.withdraw(ticket)
            raise ShuttingDown
        if isinstance(ticket.answer, ServiceError):  # answered before this caller began to wait
            raise ticket.answer
        if ticket.answer is not None:
            return ticket.answer
        self._wake_at(ticket.deadline)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(ticket, []).append(future)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(ticket, future)
            raise

    def answer(self, tickets: Iterable[Ticket]) -> None:
        """Deliver the answers that the core has put into these tickets."""
        for ticket in tickets:
            for future in self._futures.pop(ticket, ()):
                _resolve(future, ticket.answer)

    def close(self) -> None:
        """Dismiss all callers, now and from now on."""
        self._is_closed = True
        for futures in self._futures.values():
            for future in futures:
                _resolve(future, None)
        self._futures.clear()
        self._wake_at(math.inf)

    def _give_up(self, ticket: Ticket, future: asyncio.Future[Answer]) -> None:
        """Withdraw a disconnected caller, and what was booked for it."""
        futures = self._futures.get(ticket)
        if futures is not None:
            futures.remove(future)
            if not futures:
                del self._futures[ticket]
            self._core.waiting_requests.withdraw(ticket)
            return
        # the answer came in the same turn as the disconnection
        self._withdraw(ticket.answer, self._core.lifecycle.bookings.added)

    def _wake_at(self, at: float) -> None:
        """Set the one timer for all waiting requests to `at`, unless it is due earlier.

        Housekeeping handles deadlines set by another policy.
        """
        if self._deadline is not None:
            if self._deadline[0] <= at and not self._is_closed:
                return
            self._deadline[1].cancel()
            self._deadline = None
        if at != math.inf:
            delay = max(0.0, at - self._clock())
            loop = asyncio.get_running_loop()
            self._deadline = (at, loop.call_later(delay, self._refuse_late))

    def _refuse_late(self) -> None:
        self._deadline = None
        self._carry_out(self._core.refuse_late(self._clock()))
        self._wake_at(self._core.next_deadline())


def _resolve(future: asyncio.Future[Answer], answer: Answer | ServiceError | None) -> None:
    if future.done():
        return
    if answer is None or isinstance(answer, ServiceError):
        future.set_exception(answer or ShuttingDown())
    else:
        future.set_result(answer)
