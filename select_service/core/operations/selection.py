"""The verbs of selection: choose a worker, book it in the same step, or let the request wait.

One call is one step: nothing is awaited between a choice and its booking, so select-and-reserve is
atomic without a lock. In the same step the gate, where there is one, decides on admission
(`admission/`); then `routing/place.py` chooses and books, or the request waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from select_service.core.admission.gate import AT_CAPACITY, Decision
from select_service.core.admission.partition_admission import WAITS_FOR_PREFILL
from select_service.core.admission.policy_api import ADMIT
from select_service.core.admission.queue import Ticket
from select_service.core.effects import NOTHING, Effects
from select_service.core.operations.waiting_requests import endpoint_of
from select_service.core.reservations.fingerprints import fingerprint_of
from select_service.errors import (
    NoEligibleWorker,
    NoSchedulableWorker,
    QueueFull,
    ServiceError,
    WorkerDraining,
)
from select_service.types import Answer, CacheThreshold, SelectAndReserveRequest

if TYPE_CHECKING:
    import random

    from indexer.core.tiers import Matches
    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.admission.policy_api import Ask
    from select_service.core.columns import Rows
    from select_service.core.observers import Tracer
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.routing.place import Placer
    from select_service.core.routing.read import RequestReader
    from select_service.types import PairSelection, Selection, SelectRequest

_SELECT: Final = "select"
_BOOK: Final = "select_and_reserve"


class SelectionCalls:
    """Answers requests for a worker."""

    def __init__(
        self,
        reader: RequestReader,
        desk: Lifecycle,
        admitting: AdmissionController,
        placing: Placer,
        room: WaitingRequests,
        rng: random.Random,
        *,
        tracing: Tracer | None = None,
    ) -> None:
        self._reader = reader
        self._desk = desk
        self._admitting = admitting
        self._placing = placing
        self._room = room
        self._rng = rng
        self._tracing = tracing

    def select(self, request: SelectRequest, now: float) -> tuple[Answer | Ticket, Effects]:
        """Choose a worker; returns a Ticket if the request has to wait.

        Raises:
            ServiceError: of the prompt (`read.py`), for want of a worker, or by the gate.
        """
        ticket = None
        try:
            partition, prompt, weights = self._reader.selection(request)
            ticket = Ticket(partition, request, prompt, weights, None, b"")
            answer, effects = self._enter(ticket, now)
        except ServiceError as refusal:
            self._placing.refuse(ticket, refusal, now)
            raise
        if self._tracing is not None:
            self._tracing.answered(answer)
        return answer, effects

    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[Answer | Ticket, Effects]:
        """Choose a worker and book it in the same step; returns a Ticket if it has to wait.

        Args:
            request: as sent.
            now: monotonic seconds.
            unknown: canonical bytes of the unknown members; they are part of the fingerprint.

        Raises:
            ServiceError: as of `select`, or of the id (`core/reservations/lifecycle.py`).
        """
        ticket = None
        try:
            partition, prompt, weights = self._reader.selection(request)
            fingerprint = b""
            if request.reservation_id is not None:
                fingerprint = fingerprint_of(request, unknown)
                known = self._desk.repeated_selection(request.reservation_id, fingerprint)
                if known is not None:
                    return self._again(request, known), NOTHING
            self._desk.check_room(request)
            if request.fairness_id is not None:
                self._admitting.check_fairness_id(request.fairness_id)
            if request.lease_id is not None or request.ttl_s is not None:
                self._desk.terms(request)
            name = self.new_id() if request.reservation_id is None else request.reservation_id
            ticket = Ticket(partition, request, prompt, weights, name, fingerprint)
            answer, effects = self._enter(ticket, now)
        except ServiceError as refusal:
            known = self._booked_before(request, refusal, unknown)
            if known is not None:
                return self._again(request, known), NOTHING
            self._placing.refuse(ticket, refusal, now)
            raise
        if self._tracing is not None:
            self._tracing.answered(answer)
        return answer, effects

    def _booked_before(
        self, request: SelectAndReserveRequest, refusal: ServiceError, unknown: bytes
    ) -> Selection | PairSelection | Ticket | None:
        """Return the first answer if this is a repeat that comes where no worker can be chosen.

        All drain, or they are at another replica only.
        """
        name = request.reservation_id
        if name is None or not isinstance(refusal, NoSchedulableWorker):
            return None
        if not self._desk.repeats.is_known(name):
            return None
        return self._desk.repeated_selection(name, fingerprint_of(request, unknown))

    def _again(
        self, request: SelectAndReserveRequest, known: Selection | PairSelection | Ticket
    ) -> Answer | Ticket:
        """Return the earlier answer, or the ticket of the request that still waits."""
        answer: Answer | Ticket = known
        if request.explain and not isinstance(known, Ticket):
            answer = self._placing.repeated(request, known)
        if self._tracing is not None:
            self._tracing.answered(answer)
        return answer

    def _enter(self, ticket: Ticket, now: float) -> tuple[Answer | Ticket, Effects]:
        """Place a request or let it wait; the gate, if there is one, decides first."""
        partition, request = ticket.partition, ticket.request
        if self._tracing is not None:
            self._tracing.admitted(ticket)
        if request.priority is not None:
            self._admitting.class_of(request)  # raises if the request contradicts itself
        if partition.admission is not None:
            return self._ask_gate(ticket, partition.admission, now)
        number, rows = self._candidates(ticket)
        if partition.queues.must_wait(number, rows):
            partition.enqueue(number, ticket, rows, now)
            return self._room.waits_in_file(ticket, now), NOTHING
        return self._placing.place(ticket, rows, now, NOTHING)

    def _candidates(self, ticket: Ticket) -> tuple[int, Rows]:
        """Return the request's policy class and the rows that may take it."""
        partition = ticket.partition
        number = 0
        if len(partition.policy.classes) > 1:
            number = partition.class_of(ticket.prompt, ticket.weights)
        try:
            return number, partition.candidates(ticket.request)
        except WorkerDraining:
            raise  # requests ahead of it use other workers
        except NoEligibleWorker:
            if partition.queues.of_class[number]:  # no overtaking, not even towards a refusal (3.6)
                return number, slice(0, 0)
            raise

    # -- the gate ------------------------------------------------------------------------------

    def _ask_gate(  # noqa: C901, PLR0912 - in one frame and straight on: all pay for it
        self, ticket: Ticket, keeper: PartitionAdmission, now: float
    ) -> tuple[Answer | Ticket, Effects]:
        """Let the gate judge, and settle its decision in the same step."""
        changes, gate, gone = keeper.changes, keeper.gate, NOTHING
        keeper.now = now
        if changes.look:
            keeper.refresh(now)
        ask = self._admitting.ask(ticket)
        try:
            number, rows = self._candidates(ticket)
        except NoEligibleWorker as none:
            refused = keeper.refuse(ask, "unavailable", str(none), none.code, now)
            none.retry_after_s = refused.retry_after_s
            raise
        matches = verdict = None
        if gate.queue is not None:  # its predictions need the tokens left to compute
            matches = ticket.partition.index.find_matches(ticket.prompt.block_hashes)
            if matches.groups or matches.host or matches.disk:
                ask = _measured(ticket, ask, rows, matches)
        if not (changes.look or gate.returns.size):
            verdict = gate.policy.judge(ask, gate.pool, now)  # usually no other gate needs a look
        if verdict is ADMIT:
            ticket.asked, ticket.said = ask, gate.admitted
        else:
            ask, decision = keeper.judge(ticket, ask, rows, now, verdict)
            if decision.code == AT_CAPACITY.code:
                gone = self._room.give_way(ask, keeper, rows, now)
                if gone is not NOTHING:
                    ask, decision = keeper.judge(ticket, ask, rows, now)
            if decision is not gate.admitted:
                return self._turn_back(ticket, decision, ask, rows, now), gone
            rows = keeper.usable(rows)
        if gate.queue is None and ticket.partition.queues.must_wait(number, rows):
            self._wait_in_file(ticket, ask, number, rows, now)
            return self._room.waits_in_file(ticket, now), NOTHING
        answer, effects = self._placing.place(ticket, rows, now, gone, matches)
        if type(answer) is CacheThreshold:
            gate.too_few_hits(ask, now)
        else:
            gate.admit(ask, now)
        return answer, effects

    def _turn_back(
        self, ticket: Ticket, decision: Decision, ask: Ask, rows: Rows, now: float
    ) -> Ticket:
        """Let a request wait at the gate, or refuse it."""
        keeper = ticket.partition.admission
        assert keeper is not None
        if decision.outcome == "refuse":
            keeper.settle(decision, ask, now, endpoint_of(ticket))
            raise self._admitting.refusal(ticket.partition, decision, rows)
        keeper.settle(decision, ask, now)
        keeper.wait(ticket, ask, rows, now)
        return self._room.waits_at_gate(ticket, now)

    def _wait_in_file(self, ticket: Ticket, ask: Ask, number: int, rows: Rows, now: float) -> None:
        """Let a request wait in the policy file's queue, whose limits may refuse it."""
        keeper = ticket.partition.admission
        assert keeper is not None
        try:
            ticket.partition.enqueue(number, ticket, rows, now)
        except QueueFull as full:
            full.retry_after_s = keeper.refuse(
                ask, "waiting", str(full), full.code, now
            ).retry_after_s
            raise
        keeper.keep_for(ticket, ask, now)
        waits = Decision("wait", "", WAITS_FOR_PREFILL, keeper.gate.policy.name, "waiting")
        keeper.settle(waits, ask, now)

    def new_id(self) -> str:
        """Return a random UUIDv4."""
        bits = self._rng.getrandbits(128)
        bits = bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62)
        text = f"{bits:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _measured(ticket: Ticket, ask: Ask, rows: Rows, matches: Matches) -> Ask:
    """Return the request with the tokens its best candidate would still have to compute."""
    cached = ticket.partition.best_cached_tokens(ticket.prompt, rows, ticket.weights, matches)
    return replace(ask, prefill_tokens=max(0, ask.tokens - cached))
