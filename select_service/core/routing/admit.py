"""A new request at the gate: admitted with the ranks that may take it, refused, or left waiting.

`place.py` calls it where a partition has a gate (`admission/gate.py`). The decision is settled in
the same step; of an admitted request that is up to `place.py`, once it has a rank.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from msgspec.structs import replace

from select_service.core.admission.gate import AT_CAPACITY, AdmissionDecision
from select_service.core.admission.partition_admission import WAITS_FOR_PREFILL
from select_service.core.admission.policy_api import ADMIT
from select_service.core.effects import NOTHING
from select_service.errors import NoEligibleWorker, QueueFull, WouldWait

if TYPE_CHECKING:
    from indexer.core.tiers import Matches
    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Rows
    from select_service.core.effects import Effects


class WaitingPlaces(Protocol):
    """Keeps waiting requests; see `operations/waiting_requests.py`."""

    def wait_at_gate(self, ticket: Ticket, now: float) -> Ticket:
        """Let a ticket wait in the policy's queue, or for a worker."""

    def wait_for_class(self, ticket: Ticket, now: float) -> Ticket:
        """Let a ticket wait in the policy file's queue."""

    def give_way(
        self, ask: AdmissionRequest, admission: PartitionAdmission, rows: Rows, now: float
    ) -> Effects:
        """Refuse the request whose waiting place a more important one needs, if there is one."""


class Judged(NamedTuple):
    """The gate's decision about a request it did not refuse."""

    ask: AdmissionRequest  # the request as the gate saw it
    rows: Rows  # the ranks to choose from
    matches: Matches | None  # what the index has of it, if the gate needed that
    effects: Effects  # of a request that gave way to it
    waits: Ticket | None = None  # the request, if it waits


class Admitter:
    """Takes new requests to the gate of their partition."""

    def __init__(self, controller: AdmissionController) -> None:
        self._controller = controller
        self.waiting_requests: WaitingPlaces  # set by the service, as they need the placer in turn

    def judge(  # noqa: C901, PLR0912, PLR0915 - straight on: all pay for it
        self, ticket: Ticket, admission: PartitionAdmission, now: float
    ) -> Judged:
        """Let the gate judge a request, and settle its decision unless it is admitted.

        A sample of a batch is judged like any other, except that none gives way to it, and it never
        waits: the caller starts nothing before the whole batch is answered, so whatever it would
        wait for might come after it.

        Raises:
            ServiceError: the gate refuses it, or no rank may take it.
            WouldWait: it is of a batch, and would have to wait.
        """
        partition, changes, gate, gone = (
            ticket.partition,
            admission.changes,
            admission.gate,
            NOTHING,
        )
        admission.now = now
        if changes.look:
            admission.refresh(now)
        ask = self._controller.ask(ticket)
        try:
            number = partition.class_of(ticket.prompt, ticket.weights)
            rows = partition.candidates(ticket.request, number)
        except NoEligibleWorker as none:
            refused = admission.refuse(ask, "unavailable", str(none), none.code, now)
            none.retry_after_s = refused.retry_after_s
            raise
        matches = verdict = None
        if gate.queue is not None and not ticket.in_batch:
            # its predictions need the tokens left to compute
            matches = partition.match(ticket.prompt)
            if matches.groups or matches.host or matches.disk:
                ask = _measured(ticket, ask, rows, matches)
        if not (changes.look or gate.returns.size):
            verdict = gate.policy.judge(ask, gate.pool, now)  # usually no other gate needs a look
        if verdict is ADMIT:
            ticket.asked, ticket.gate_decision = ask, gate.admitted
        else:
            ask, decision = admission.judge(ticket, ask, rows, now, verdict)
            if decision.code == AT_CAPACITY.code and not ticket.in_batch:
                gone = self.waiting_requests.give_way(ask, admission, rows, now)
                if gone is not NOTHING:
                    ask, decision = admission.judge(ticket, ask, rows, now)
            if decision.outcome == "refuse":
                admission.settle(decision, ask, now, ticket.endpoint)
                raise self._controller.refusal(partition, decision, rows)
            if decision is not gate.admitted:
                if ticket.in_batch:
                    _refuse_to_wait(admission, ask, now)
                admission.settle(decision, ask, now)
                if matches is None and ask.target_s != inf:  # its deadline needs them, too
                    ask = _measured(ticket, ask, rows, partition.match(ticket.prompt))
                admission.wait(ticket, ask, rows, now)
                return Judged(
                    ask, rows, matches, gone, self.waiting_requests.wait_at_gate(ticket, now)
                )
            rows = admission.usable(rows)
        if gate.queue is None and partition.queues.must_wait(number, rows):
            if ticket.in_batch:
                _refuse_to_wait(admission, ask, now)
            _enter_class_queue(ticket, admission, ask, number, rows, now)
            return Judged(
                ask, rows, matches, gone, self.waiting_requests.wait_for_class(ticket, now)
            )
        return Judged(ask, rows, matches, gone)


def _enter_class_queue(
    ticket: Ticket,
    admission: PartitionAdmission,
    ask: AdmissionRequest,
    number: int,
    rows: Rows,
    now: float,
) -> None:
    """Let a request wait in the policy file's queue, whose limits may refuse it."""
    try:
        ticket.partition.enqueue(number, ticket, rows, now)
    except QueueFull as full:
        refused = admission.refuse(ask, "waiting", str(full), full.code, now)
        full.retry_after_s = refused.retry_after_s
        raise
    admission.keep_for(ticket, ask, now)
    waits = AdmissionDecision("wait", "", WAITS_FOR_PREFILL, admission.gate.policy.name, "waiting")
    admission.settle(waits, ask, now)


def _refuse_to_wait(admission: PartitionAdmission, ask: AdmissionRequest, now: float) -> NoReturn:
    refusal = WouldWait(0.0)
    refused = admission.refuse(ask, "waiting", str(refusal), refusal.code, now)
    refusal.retry_after_s = refused.retry_after_s
    raise refusal


def _measured(
    ticket: Ticket, ask: AdmissionRequest, rows: Rows, matches: Matches
) -> AdmissionRequest:
    """Return the request with the tokens its best candidate would still have to compute."""
    cached = ticket.partition.best_cached_tokens(ticket.prompt, rows, ticket.weights, matches)
    return replace(ask, prefill_tokens=max(0, ask.tokens - cached))
