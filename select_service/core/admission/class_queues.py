"""The queues of one scope, one per class of its policy: which requests wait, and which is next.

`queue.py` keeps one class in order. A request waits for the ledger's prefill load to drop below the
threshold of its class; the caller decides whether a waiting one may go.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Final

import numpy as np

from select_service.core.admission.queue import PendingQueue, order_key
from select_service.core.columns import grown
from select_service.errors import QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.core.admission.drain_rate import DrainRate
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Floats, Rows
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.slots import FleetSlots
    from select_service.core.ledger.slot_loads import SlotLoads
    from select_service.core.pricing.policy import PolicyClass, RoutingPolicy

_NEVER_BUSY = np.inf
_ENDLESS: Final = 1 << 200
"""Tokens no rank can carry; an int, as ints compare in a tenth of the time."""


class ClassQueues:
    """All requests waiting for a rank; classes take turns, each for up to its quantum."""

    def __init__(
        self, policy: RoutingPolicy, fleet_slots: FleetSlots, loads: SlotLoads, drainage: DrainRate
    ) -> None:
        self.of_class = [PendingQueue() for _ in policy.classes]
        self._classes = policy.classes
        self._fleet_slots = fleet_slots
        self._loads = loads
        self._drainage = drainage
        self._turn = 0  # the class that drains next, and its remaining quantum
        self._quantum_left = policy.classes[0].quantum
        self._busy_above: list[Floats] = [np.empty(0) for _ in policy.classes]
        self.busy_above_of: list[list[int]] = [[] for _ in policy.classes]
        """By class and slot, the prefill tokens above which a slot is busy, as whole numbers."""
        self.bounded = [0 for _ in policy.classes]
        """By class, the slots that may be busy."""

    def ensure(self, slots: int) -> None:
        """Make room for this many slots; the new ones are never busy."""
        for number, known in enumerate(self.busy_above_of):
            known.extend([_ENDLESS] * (slots - len(known)))
            self._busy_above[number] = grown(self._busy_above[number], slots, _NEVER_BUSY)

    def attach(self, worker: Worker) -> None:
        """Add a schedulable worker: set the load above which its ranks are busy."""
        slots = worker.slots.values()
        self.ensure(max(slots, default=-1) + 1)
        for number, one in enumerate(self._classes):
            most = _busy_above(one, worker.spec.max_num_batched_tokens)
            for slot in slots:
                self._bound(number, slot, most)

    def leave(self, slots: Iterable[int]) -> None:
        """Clear the bounds of slots that no schedulable worker has any more."""
        for number in range(len(self._classes)):
            for slot in slots:
                self._bound(number, slot, _NEVER_BUSY)

    def _bound(self, number: int, slot: int, most: float) -> None:
        column = self._busy_above[number]
        self.bounded[number] += (most != _NEVER_BUSY) - bool(column[slot] != _NEVER_BUSY)
        column[slot] = most
        self.busy_above_of[number][slot] = _ENDLESS if most == _NEVER_BUSY else floor(most)

    # -- waiting -------------------------------------------------------------------------------

    def must_wait(self, number: int, rows: Rows, *, is_new: bool = True) -> bool:
        """Tell whether a request waits: all its ranks are busy, or others of its class are ahead.

        A rank is busy if it carries more prefill than its threshold (strictly).

        `is_new`: those of its class that wait are ahead of it.
        """
        if is_new and self.of_class[number].pending:
            return True
        if not self.bounded[number]:
            return False
        first = 0 if type(rows) is slice else rows[0]
        if self._loads.prefill_left[first] <= self.busy_above_of[number][first]:
            return False  # nearly always, at a tenth of the cost of comparing all
        return bool((self._loads.prefill[rows] > self._busy_above[number][rows]).all())

    def enter(self, number: int, ticket: Ticket, now: float, *, is_known: bool) -> None:
        """Add a ticket to its class; one that waited before is not held to the limits.

        Its cached tokens must already be set.

        Raises:
            QueueFull: a limit of the class is reached.
        """
        one, queue = self._classes[number], self.of_class[number]
        waiting = (
            ("requests", one.request_queue_limit_per_worker, len(queue)),
            ("raw_isl_tokens", one.raw_isl_token_queue_limit_per_worker, queue.pending_isl_tokens),
            (
                "cached_tokens",
                one.cached_token_queue_limit_per_worker,
                queue.pending_cached_tokens,
            ),
        )
        workers = len(self._fleet_slots.workers)
        for kind, per_worker, current in waiting:
            if not is_known and per_worker is not None and current >= per_worker * workers:
                full = _queue_full(one.name, kind, current, per_worker * workers)
                full.retry_after_s = self.retry_after_s(now)
                raise full
        overtaking_s = one.overtaking.after(_waited_s(queue.head(), now))
        ticket.key = order_key(one.queue_policy, ticket, now, overtaking_s)
        queue.push(ticket)

    def retry_after_s(self, now: float) -> float:
        """Return when a request refused for these queues should ask again.

        A place is free when one waiting request has gone, which takes the average work of a
        request; all classes are computed by the same ranks.
        """
        work = self._loads.prefill_backlog
        work += sum(
            queue.pending_isl_tokens - queue.pending_cached_tokens for queue in self.of_class
        )
        requests = self._loads.prefilling + sum(map(len, self.of_class))
        return self._drainage.retry_after_s(
            work / max(1, requests), work, self._fleet_slots.ranks, now
        )

    # -- turns ---------------------------------------------------------------------------------

    def take_next(self, may_go: Callable[[int, Ticket], bool]) -> Ticket | None:
        """Take the first ticket in turn that may go, from the heads of all classes.

        A head that must wait blocks its own class only. The caller places (and books) it before
        asking again.
        """
        for step in range(len(self.of_class)):
            number = (self._turn + step) % len(self.of_class)
            ticket = self.of_class[number].head()
            if ticket is not None and may_go(number, ticket):
                self.of_class[number].remove(ticket)
                self._spend_turn(number)
                return ticket
        return None

    def _spend_turn(self, number: int) -> None:
        if number != self._turn:
            self._turn, self._quantum_left = number, self._classes[number].quantum
        self._quantum_left -= 1
        if self._quantum_left <= 0:
            self._turn = (number + 1) % len(self.of_class)
            self._quantum_left = self._classes[self._turn].quantum

    def withdraw(self, ticket: Ticket) -> bool:
        """Remove a ticket from whichever queue it waits in."""
        return any(queue.remove(ticket) for queue in self.of_class)

    # -- reading -------------------------------------------------------------------------------

    def tickets(self) -> list[Ticket]:
        """Return all waiting tickets, class by class, in order."""
        return [ticket for queue in self.of_class for ticket in queue.tickets()]

    @property
    def pending(self) -> int:
        """Their number."""
        pending = 0
        for queue in self.of_class:
            pending += queue.pending
        return pending

    @property
    def pending_isl_tokens(self) -> int:
        """The sum of their prompt lengths, in tokens."""
        return sum(queue.pending_isl_tokens for queue in self.of_class)

    def check(self) -> None:
        """Assert all invariants of the queues."""
        workers = self._fleet_slots.workers.values()
        open_slots = {slot: one for one in workers for slot in one.slots.values()}
        for number, policy_class in enumerate(self._classes):
            column, whole = self._busy_above[number], self.busy_above_of[number]
            assert self.bounded[number] == (column != _NEVER_BUSY).sum()
            for slot, most in enumerate(column.tolist()):
                worker = open_slots.get(slot)
                most_batched = None if worker is None else worker.spec.max_num_batched_tokens
                bound = _NEVER_BUSY if worker is None else _busy_above(policy_class, most_batched)
                assert most == bound, "bounded are the ranks that may be chosen"
                if slot < len(whole):
                    assert whole[slot] == (_ENDLESS if bound == _NEVER_BUSY else floor(bound))
        for queue in self.of_class:
            queue.check()


def _waited_s(head: Ticket | None, now: float) -> float:
    """Return the current wait: that of the head of the line, 0 if there is none.

    A long request that was overtaken counts as if it had not been, and one moved ahead of others
    by its actual wait, so that neither makes the line look longer than it is.
    """
    return 0.0 if head is None else max(0.0, min(now - head.since, now - head.key[1]))


def _busy_above(one: PolicyClass, max_num_batched_tokens: int | None) -> float:
    """Prefill tokens above which a rank is busy; never if its capacity is unknown."""
    limits = []
    if one.prefill_busy_threshold is not None:
        limits.append(one.prefill_busy_threshold)
    fraction = one.prefill_busy_threshold_frac
    if fraction is not None and fraction != np.inf and max_num_batched_tokens is not None:
        limits.append(fraction * max_num_batched_tokens)  # a capacity of 0 makes inf a nan
    return min(limits, default=_NEVER_BUSY)


def _queue_full(name: str, kind: str, current: int, limit: int) -> QueueFull:
    return QueueFull(
        f'router policy class "{name}" queue {kind} limit reached '
        f"(current={current}, limit={limit})",
        details={"policy_class": name, "limit_kind": kind, "current": current, "limit": limit},
    )
