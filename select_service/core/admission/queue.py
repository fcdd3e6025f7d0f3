"""Waiting requests in order: which one is next, and whose deadline is next.

`class_queues.py` decides when a request waits: while every rank it may use is busy. The driver
keeps one future per Ticket.
"""

from __future__ import annotations

import math
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, final

from msgspec import Struct
from sortedcontainers import SortedKeyList

from select_service.types.admission import ChargedRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.core.admission.fair_queue import Waiting
    from select_service.core.admission.gate import AdmissionDecision
    from select_service.core.admission.policy_api import AdmissionRequest, HeldAllowance
    from select_service.core.partition import Partition
    from select_service.core.pricing.policy import QueuePolicy
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.errors import ServiceError
    from select_service.types import Answer, SelectRequest

_LOOK_MAX: Final = 64
"""Stale tickets repositioned in one call of `next`; 2 µs each."""

_LAST: Final = 1 << 64
"""Greater than the identity of any ticket."""


class Planned(NamedTuple):
    """Where its batch wants a request."""

    slot: int
    group: int  # the number of its group in the batch
    shared_tokens: int  # of its prompt, computed on that slot by another of the batch

    def booked_on(self, slot: int) -> tuple[int, int]:
        """Return the group and shared tokens of a booking on a slot, as planned or not."""
        return self.group, self.shared_tokens if slot == self.slot else 0


class BatchSample(NamedTuple):
    """What a batch knows of a request before it is placed."""

    read: tuple[Partition, Prompt, Weights] | None  # None: its prompt is not read yet
    planned: Planned | None  # None: it may go anywhere


@final
class Ticket(Struct, eq=False):
    """One waiting request; compared by identity."""

    partition: Partition
    request: SelectRequest
    prompt: Prompt
    weights: Weights
    reservation_id: str | None  # None: a plain selection, nothing will be booked
    fingerprint: bytes
    holders: int = 1  # callers waiting for this one answer (a repeated request shares it)
    key: tuple[int, float] = (0, 0.0)
    cached_tokens: int = 0
    answer: Answer | ServiceError | None = None
    """Set once it has stopped waiting."""
    since: float = -1.0  # when it began to wait; below 0: it did not wait
    until: float = math.inf  # its deadline
    ask: AdmissionRequest | None = None  # the request as the gate saw it, if it waits there
    asked: AdmissionRequest | None = None  # the request as a gate last saw it, whatever the outcome
    gate_decision: AdmissionDecision | None = None
    waiting: Waiting[Ticket] | None = None  # its place in a policy's own queue
    place: int | None = None  # the full worker whose waiting place it holds
    held: HeldAllowance | None = None  # allowance held for it since the policy admitted it
    in_batch: bool = False  # it follows the plan of its batch; see `batch_plan.py`
    planned: Planned | None = None  # where its batch wants it
    in_session: bool = False  # it follows its session; see `reservations/sessions.py`
    watched: float = math.inf  # its key in `TicketDeadlines`: never later than its deadline

    @property
    def deadline(self) -> float:
        """When it expires, by its own deadline or that of a policy's queue."""
        return self.until if self.waiting is None else min(self.until, self.waiting.deadline)

    @property
    def charged(self) -> ChargedRequest | None:
        """What its tenant is charged for, as replicas receive it; None: no policy charges."""
        ask, admission = self.ask or self.asked, self.partition.admission
        if ask is None or admission is None or admission.gate.queue is None:
            return None
        target_s = None if ask.target_s == math.inf else ask.target_s
        return ChargedRequest(ask.slo_class, ask.work, target_s)

    @property
    def endpoint(self) -> str:
        """The route of the request."""
        if self.request.is_pair:
            return "select_pair"
        return "select" if self.reservation_id is None else "select_and_reserve"


def order_key(
    policy: QueuePolicy, ticket: Ticket, now: float, overtaking_s: float = 0.0
) -> tuple[int, float]:
    """Return the ticket's rank in the queue, smallest first.

    fcfs: max(priority_jump, 0) - arrival seconds. wspt: (1 + max(priority_jump, 0)) divided by the
    tokens still to prefill on the best eligible rank. strict_priority goes before either.

    An extension of the contract: `overtaking_s` moves a ticket back by that many seconds for each
    1,000 tokens still to prefill, so that a short request overtakes longer ones which arrived at
    most that much earlier.
    """
    request = ticket.request
    jump = max(request.priority_jump or 0.0, 0.0)
    left = max(1, ticket.prompt.isl_tokens - ticket.cached_tokens)
    if policy == "fcfs":
        score = jump - now
        if overtaking_s:
            score -= overtaking_s * left / 1_000
    else:
        score = (1.0 + jump) / left
    return (-(request.strict_priority or 0), -score)


class PendingQueue:
    """Waiting tickets in order; ties leave in order of arrival. O(log n) to enter and leave."""

    def __init__(self) -> None:
        self._order: SortedKeyList[Ticket, tuple[int, float]] = SortedKeyList(
            key=lambda ticket: ticket.key
        )
        self.pending = 0  # tickets; a plain number, as every request reads it
        self.pending_isl_tokens = 0
        self.pending_cached_tokens = 0

    def __len__(self) -> int:
        return self.pending

    def push(self, ticket: Ticket) -> None:
        """Add a ticket with its key set; equal keys keep their order of arrival."""
        self._order.add(ticket)
        self.pending += 1
        self.pending_isl_tokens += ticket.prompt.isl_tokens
        self.pending_cached_tokens += ticket.cached_tokens

    def head(self) -> Ticket | None:
        """Return the next ticket without removing it."""
        return self._order[0] if self._order else None

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket from anywhere in the queue; False if it is not waiting."""
        try:
            self._order.remove(ticket)
        except ValueError:
            return False
        self.pending -= 1
        self.pending_isl_tokens -= ticket.prompt.isl_tokens
        self.pending_cached_tokens -= ticket.cached_tokens
        return True

    def tickets(self) -> list[Ticket]:
        """Return all waiting tickets in order."""
        return list(self._order)

    def check(self) -> None:
        """Assert all invariants of the queue."""
        tickets = self.tickets()
        assert self.pending == len(tickets)
        assert self.pending_isl_tokens == sum(t.prompt.isl_tokens for t in tickets)
        assert self.pending_cached_tokens == sum(t.cached_tokens for t in tickets)
        assert all(before.key <= after.key for before, after in pairwise(tickets))


class TicketDeadlines:
    """Waiting tickets of all scopes that can expire, by deadline. O(log n) to enter and leave.

    A ticket is filed under its deadline as last seen. The deadline may since have moved later, when
    another policy lets it wait longer, but never earlier. A ticket filed too early is moved when
    its turn comes, so a change of policy need not visit every ticket.
    """

    def __init__(self) -> None:
        self._order: SortedKeyList[Ticket, tuple[float, int]] = SortedKeyList(
            key=lambda ticket: (ticket.watched, id(ticket))
        )

    def __len__(self) -> int:
        return len(self._order)

    def watch(self, ticket: Ticket) -> None:
        """Watch a ticket's deadline, if it has one; call again if that has moved earlier."""
        self.forget(ticket)
        ticket.watched = ticket.deadline
        if ticket.watched != math.inf:
            self._order.add(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Stop watching a ticket."""
        if ticket.watched != math.inf:
            self._order.discard(ticket)
            ticket.watched = math.inf

    def next(self) -> float:
        """Return the earliest deadline (rarely, an earlier time); infinity if there is none."""
        for _ in range(_LOOK_MAX):
            if not self._order or self._settle_first():
                break
        return self._order[0].watched if self._order else math.inf

    def _settle_first(self) -> bool:
        """Refile the first ticket; True if it was filed correctly."""
        first = self._order[0]
        if first.watched == first.deadline:
            return True
        self.watch(first)
        return False

    def due(self, now: float, limit: int) -> list[Ticket]:
        """Return up to `limit` expired tickets; they stay until they are forgotten.

        Looks at no more than that; `next() <= now` shows that there are more to look at.
        """
        first = list(islice(self._order.irange_key(max_key=(now, _LAST)), limit))
        due = [ticket for ticket in first if ticket.deadline <= now]
        for ticket in first:
            if ticket.deadline > now:
                self.watch(ticket)
        return due

    def check(self, waiting: Iterable[Ticket]) -> None:
        """Assert all invariants, given all waiting tickets."""
        watched = {id(ticket) for ticket in self._order}
        assert len(watched) == len(self._order), "no ticket is in it twice"
        assert watched == {id(one) for one in waiting if one.watched != math.inf}
        for ticket in waiting:
            assert ticket.watched <= ticket.deadline, "no ticket is checked too late"
