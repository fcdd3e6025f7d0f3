"""Requests that wait: each is placed, refused, expired, withdrawn, or judged again.

Its position in line is kept by its partition: in the policy file's queues (`partition.py`) or at
the gate (`partition_admission.py`). This module handles the five ways a ticket leaves, and counts
each once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from select_service.core.admission.gate import EXPIRED_WAITING, AdmissionDecision
from select_service.core.admission.partition_admission import WAITS_FOR_PREFILL
from select_service.core.admission.queue import Ticket, TicketDeadlines
from select_service.core.effects import NOTHING, Effects
from select_service.errors import NoEligibleWorker, ServiceError
from select_service.types import (
    Answer,
    CoreLimits,
    PairSelection,
    SelectAndReserveRequest,
    Selection,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.partition import Partition
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.routing.place import Placer


class WaitingRequests:
    """All waiting requests, in whichever queue."""

    def __init__(
        self,
        placer: Placer,
        lifecycle: Lifecycle,
        controller: AdmissionController,
        counters: Counters,
        limits: CoreLimits,
    ) -> None:
        self._placer = placer
        self._lifecycle = lifecycle
        self._controller = controller
        self._counters = counters
        self._limits = limits
        self._deadlines = TicketDeadlines()
        self._waiting = 0  # tickets in all queues
        self._crowded: dict[Partition, None] = {}
        self._looked_per_turn_max = limits.judged_per_turn_max
        self._to_look_at: dict[Partition, deque[Ticket]] = {}

    def wait_at_gate(self, ticket: Ticket, now: float) -> Ticket:
        """Let a ticket wait in the policy's queue, which has its own deadlines, or for a worker."""
        given = self._controller.deadline_s(ticket, for_worker=ticket.waiting is None)
        return self._waits(ticket, now, given)

    def wait_for_class(self, ticket: Ticket, now: float) -> Ticket:
        """Let a ticket wait in the policy file's queue; without a configured deadline, for ever."""
        return self._waits(ticket, now, self._controller.deadline_s(ticket, for_worker=False))

    def _waits(self, ticket: Ticket, now: float, deadline_s: float) -> Ticket:
        ticket.since, ticket.until = now, now + deadline_s
        self._deadlines.watch(ticket)
        self._waiting += 1
        self._lifecycle.bookings.wait(ticket)
        self._counters.selections_waited += 1
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """Note that one caller of a waiting request left; the ticket leaves with its last caller.

        Returns:
            True when the ticket left the queue.
        """
        ticket.holders -= 1
        if ticket.holders > 0 or ticket.answer is not None:
            return False
        if not ticket.partition.queues.withdraw(ticket) and ticket.ask is None:
            return False
        if ticket.ask is not None:
            assert ticket.partition.admission is not None
            ticket.partition.admission.withdraw(ticket)
            ticket.ask = None
        self._stops_waiting(ticket)
        self._counters.selections_withdrawn += 1
        return True

    def _stops_waiting(self, ticket: Ticket) -> None:
        self._deadlines.forget(ticket)
        self._waiting -= 1
        self._lifecycle.bookings.waited(ticket)

    def relieve(self, partition: Partition, now: float, effects: Effects) -> Effects:
        """Let in requests that waited for load to drop, booking each before the next.

        A turn of the event loop lets in a bounded number; housekeeping continues at once with the
        rest.
        """
        if not self._waiting or not partition.pending_count:
            return effects
        admission = partition.admission
        for _ in range(self._limits.let_in_per_turn_max):
            if admission is not None:
                admission.refresh(now)  # the one before may have taken the last place
            ticket = next_at_gate(partition) or _take_next(partition)
            if ticket is None:
                return effects
            effects = self._finish(ticket, now, effects)
        self.relieve_later(partition)
        effects.more = True
        return effects

    def relieve_later(self, partition: Partition) -> None:
        """Let `relieve` be called at the scope's next turn of housekeeping."""
        if partition.pending_count:
            self._crowded[partition] = None

    def go_on(self, partition: Partition) -> bool:
        """Tell whether `relieve` left requests it did not look at; this resets it."""
        is_crowded = partition in self._crowded
        self._crowded.pop(partition, None)
        return is_crowded

    @property
    def unfinished(self) -> list[Partition]:
        """Partitions for which `relieve` or `look_on` has to be called again."""
        return [*self._crowded, *self._to_look_at]

    def forget(self, partition: Partition) -> None:
        """Its scope was closed: no request waits there."""
        self._crowded.pop(partition, None)
        self._to_look_at.pop(partition, None)

    # -- requests that no worker can serve any more ------------------------------------------------

    def look_again(self, partition: Partition, now: float, effects: Effects) -> None:
        """A drain began or ended: refuse what no other can serve, let in what may go.

        They are refused wherever they stand in line: waiting for the requests ahead would not help.
        """
        if partition.pending_count:
            self._to_look_at[partition] = deque(partition.tickets())
            self.look_on(partition, now, effects)

    def look_on(self, partition: Partition, now: float, effects: Effects) -> None:
        """Continue `look_again` for one turn; housekeeping calls until all tickets are visited."""
        tickets = self._to_look_at.get(partition)
        if tickets is None:
            return
        for _ in range(min(len(tickets), self._looked_per_turn_max)):
            ticket = tickets.popleft()
            if ticket.answer is None and ticket.holders > 0 and not _may_be_served(ticket):
                partition.queues.withdraw(ticket)
                self._finish(ticket, now, effects)
        if not tickets:
            del self._to_look_at[partition]
        effects.more |= partition in self._to_look_at
        self.relieve(partition, now, effects)

    def _finish(self, ticket: Ticket, now: float, effects: Effects) -> Effects:
        """Place a request that waited, or answer it with the refusal."""
        effects = Effects() if effects is NOTHING else effects
        self._stops_waiting(ticket)
        answer = self._admit(ticket, now, effects)
        admission = ticket.partition.admission
        if ticket.ask is not None and admission is not None:
            if isinstance(answer, Selection | PairSelection):
                charge = admission.charge_of(ticket)
                if charge is not None and ticket.reservation_id is not None:
                    self._lifecycle.note_charge(ticket.reservation_id, charge)
                admission.placed(ticket, now)
            else:
                code = answer.code if isinstance(answer, ServiceError) else answer.finish_reason
                admission.turned_away(ticket, code, now)
        if ticket.holders > 1 and ticket.reservation_id is not None:
            self._lifecycle.bookings.share(ticket.reservation_id, ticket.holders - 1)
        ticket.answer = answer
        effects.answered.append(ticket)
        return effects

    def _admit(self, ticket: Ticket, now: float, effects: Effects) -> Answer | ServiceError:
        partition, request = ticket.partition, ticket.request
        try:
            # was it booked in the meantime: explicitly, or by its repeat at another replica?
            if ticket.reservation_id is not None:
                known = self._lifecycle.repeats.selection(
                    ticket.reservation_id, ticket.fingerprint, self._lifecycle.show_hashes
                )
                if known is not None:
                    assert not isinstance(known, Ticket), "it waits no longer"
                    return known
            rows = partition.candidates(request)
            if partition.admission is not None:
                rows = partition.admission.usable(rows)
            if ticket.reservation_id is not None:
                assert isinstance(request, SelectAndReserveRequest)
                self._lifecycle.terms(request)  # has its lease ended in the meantime?
            return self._placer.place(ticket, rows, now, effects)[0]
        except ServiceError as refusal:
            self._placer.other_answers.refuse(ticket, refusal, now)
            return refusal

    def check(self, partitions: Iterable[Partition]) -> None:
        """Assert that each waiting request stands in one place and its deadline is watched."""
        everybody: list[Ticket] = []
        for one in partitions:
            everybody += one.tickets()
            everybody += [] if one.admission is None else one.admission.displaced
        assert self._waiting == len(everybody)
        self._deadlines.check(everybody)

    # -- deadlines -----------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """Return when the first waiting request expires; infinity if none will."""
        return self._deadlines.next()

    def refuse_late(self, now: float, limit: int, effects: Effects) -> Effects:
        """Refuse up to `limit` expired requests, first come first; not charged.

        All of them leave their queues before any learns when to return, so none delays another.
        """
        late = self._deadlines.due(now, limit)
        for ticket in late:
            partition = ticket.partition
            partition.queues.withdraw(ticket)
            if partition.admission is not None:
                partition.admission.leave_queue(ticket, now)
        for ticket in late:
            effects = self._refuse(ticket, self._too_late(ticket, now), now, effects)
        return effects

    def _too_late(self, ticket: Ticket, now: float) -> AdmissionDecision:
        partition = ticket.partition
        if ticket.ask is not None and partition.admission is not None:
            return partition.admission.refuse_late(ticket, now)
        verdict = EXPIRED_WAITING
        again_s = partition.queues.retry_after_s(now)
        return AdmissionDecision("refuse", verdict.reason, verdict.code, "", "waiting", again_s)

    def _refuse(
        self,
        ticket: Ticket,
        decision: AdmissionDecision,
        now: float,
        effects: Effects,
        rows: Rows = slice(0, 0),
    ) -> Effects:
        effects = Effects() if effects is NOTHING else effects
        self._stops_waiting(ticket)
        refusal = self._controller.refusal(ticket.partition, decision, rows)
        self._placer.other_answers.refuse(ticket, refusal, now)
        admission = ticket.partition.admission
        if admission is not None:
            endpoint = ticket.endpoint
            admission.rejections[endpoint] = admission.rejections.get(endpoint, 0) + 1
        ticket.answer = refusal
        effects.answered.append(ticket)
        return effects

    def give_way(
        self, ask: AdmissionRequest, admission: PartitionAdmission, rows: Rows, now: float
    ) -> Effects:
        """Refuse the request whose waiting place a more important one needs, if there is one."""
        ticket = admission.outranked(ask, rows, now)
        if ticket is None:
            return NOTHING
        return self._refuse(ticket, admission.give_way(ticket, now), now, NOTHING)

    # -- another policy ------------------------------------------------------------------------

    def gather(self, partition: Partition, now: float, *, to_judge: bool) -> None:
        """After a gate opened or changed policy: hand it the requests in the policy file's queues.

        They count as offered. After a change of policy they are judged again, like those waiting at
        the gate.
        """
        admission = partition.admission
        assert admission is not None
        for queue in partition.queues.of_class:
            for ticket in queue.tickets():
                if ticket.ask is None:
                    ticket.ask = self._controller.ask(ticket)
                    name = admission.gate.policy.name
                    waits = AdmissionDecision("wait", "", WAITS_FOR_PREFILL, name, "waiting")
                    admission.settle(waits, ticket.ask, now)
                if to_judge:
                    queue.remove(ticket)
                    admission.displace(ticket)

    def judge_again(
        self, partition: Partition, now: float, limit: int, effects: Effects
    ) -> Effects:
        """Judge up to `limit` of the requests that waited under the previous policy."""
        admission = partition.admission
        assert admission is not None
        admission.refresh(now)
        for _ in range(limit):
            ticket = next(iter(admission.displaced), None)
            if ticket is None:
                break
            effects = self._judge_again(ticket, admission, now, effects)
            admission.refresh(now)
        return self.relieve(partition, now, effects)

    def _judge_again(
        self, ticket: Ticket, admission: PartitionAdmission, now: float, effects: Effects
    ) -> Effects:
        admission.recall(ticket)
        assert ticket.ask is not None
        try:
            rows = ticket.partition.candidates(ticket.request)
        except NoEligibleWorker:
            return self._finish(ticket, now, effects)
        ask, decision = admission.judge(ticket, ticket.ask, rows, now)
        if decision.outcome == "refuse":
            admission.turned_away(ticket, decision.code, now)
            return self._refuse(ticket, decision, now, effects, rows)
        if decision.outcome == "wait" or not admission.can_take(rows):
            admission.wait(ticket, ask, rows, now)
            self._deadlines.watch(ticket)
            return effects
        if admission.gate.queue is None and self._waits_for_class(
            ticket, admission.usable(rows), now
        ):
            admission.keep_for(ticket, ask, now)
            return effects
        return self._finish(ticket, now, effects)

    def _waits_for_class(self, ticket: Ticket, rows: Rows, now: float) -> bool:
        """Let a request go on waiting in the policy file's queue, even if that is full."""
        partition = ticket.partition
        number = partition.class_of(ticket.prompt, ticket.weights)
        if not partition.queues.must_wait(number, rows):
            return False
        partition.enqueue(number, ticket, rows, now, is_known=True)
        return True


def next_at_gate(partition: Partition) -> Ticket | None:
    """Return the request at the gate that has a worker now, or never will; it keeps its place."""
    admission = partition.admission
    if admission is None or not admission.waiting:
        return None
    # no policy lets any go then; they need not wait for a refusal
    if not partition.fleet_slots.workers:
        return next(iter(admission.waiting))
    for ticket in admission.in_order():
        try:
            rows = partition.candidates(ticket.request)
        except NoEligibleWorker:
            return ticket
        if admission.can_take(rows):
            return ticket
    return None


def _take_next(partition: Partition) -> Ticket | None:
    """Take the next in the queues that has a free rank, or that no worker may serve any more."""
    admission, queues = partition.admission, partition.queues

    def may_go(number: int, ticket: Ticket) -> bool:
        try:
            rows = partition.candidates(ticket.request)
        except NoEligibleWorker:
            return True
        if admission is not None:
            if not admission.can_take(rows):
                return False
            rows = admission.usable(rows)
        return not queues.must_wait(number, rows, is_new=False)

    return queues.take_next(may_go)


def _may_be_served(ticket: Ticket) -> bool:
    try:
        ticket.partition.candidates(ticket.request)
    except NoEligibleWorker:
        return False
    return True
