"""The verbs of selection: choose a worker, book it in the same step, or let the request wait.

One call is one step: nothing is awaited between a choice and its booking, which is why
select-and-reserve is atomic without a lock. `partition.py` decides, `desk.py` books; who is let in
at all is judged by a gate, where there is one (`gatekeeping.py`), in the same step. Who waits is
let in by `relieve`, which everybody calls who took load away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET

from indexer.core.hashing import unpack_i64
from select_service.core.admission.gate import EXPIRED_WAITING, Decision
from select_service.core.desk import Order, fingerprint_of
from select_service.core.effects import NOTHING, Effects
from select_service.core.gatekeeping import WAITS_FOR_PREFILL
from select_service.core.queue import Patience, Ticket
from select_service.errors import NoEligibleWorker, QueueFull, ServiceError
from select_service.types import (
    CacheThreshold,
    PairSelection,
    SelectAndReserveRequest,
    Selection,
    SelectPairRequest,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from select_service.core.admission.asks import Ask
    from select_service.core.admitting import Admitting
    from select_service.core.cache_hits import CacheHits, Found
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.desk import Desk
    from select_service.core.gatekeeping import Gatekeeper
    from select_service.core.matchmaking import Matchmaker
    from select_service.core.partition import Partition, Placement
    from select_service.core.projection import Projection
    from select_service.core.reading import Reader
    from select_service.types import Answer, SelectRequest

_SELECT: Final = "select"
_BOOK: Final = "select_and_reserve"
_PAIR: Final = "select_pair"


class Selecting:
    """Chooses, books, and keeps the waiting."""

    def __init__(  # noqa: PLR0913, PLR0917 - the rooms a selection passes through
        self,
        reader: Reader,
        desk: Desk,
        admitting: Admitting,
        cache_hits: CacheHits,
        counters: Counters,
        rng: random.Random,
        matchmaker: Matchmaker,
        *,
        trace_decisions: bool,
    ) -> None:
        self._reader = reader
        self._desk = desk
        self._admitting = admitting
        self._cache_hits = cache_hits
        self._counters = counters
        self._rng = rng
        self._matchmaker = matchmaker
        self._patience = Patience()
        self.trace_decisions = trace_decisions

    def select(self, request: SelectRequest, now: float) -> tuple[Answer | Ticket, Effects]:
        """Choose a worker; a Ticket when the request has to wait (contract 3).

        Raises:
            ServiceError: as in contract 2 and 3, and what the gate refuses.
        """
        try:
            partition, prompt, weights = self._reader.selection(request)
            return self._enter(Ticket(partition, request, prompt, weights, None, b""), now)
        except ServiceError as refusal:
            self._count(refusal)
            raise

    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[Answer | Ticket, Effects]:
        """Choose a worker and book it in the same step; a Ticket when it has to wait.

        Args:
            request: as sent.
            now: monotonic seconds.
            unknown: canonical bytes of members nobody knows; part of what makes a repeat equal.

        Raises:
            ServiceError: as in contract 2 to 4, and what the gate refuses.
        """
        try:
            return self._select_and_reserve(request, now, unknown)
        except ServiceError as refusal:
            self._count(refusal)
            raise

    def _count(self, refusal: ServiceError) -> None:
        failed = self._counters.selections_failed
        failed[refusal.code] = failed.get(refusal.code, 0) + 1

    def _select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, unknown: bytes
    ) -> tuple[Answer | Ticket, Effects]:
        partition, prompt, weights = self._reader.selection(request)
        fingerprint = b""
        if request.reservation_id is not None:
            fingerprint = fingerprint_of(request, unknown)
            known = self._desk.repeated_selection(request.reservation_id, fingerprint)
            if known is not None:
                return known, NOTHING
        self._desk.terms(request)
        name = self._id_for(request)
        return self._enter(Ticket(partition, request, prompt, weights, name, fingerprint), now)

    def _enter(self, ticket: Ticket, now: float) -> tuple[Answer | Ticket, Effects]:
        """Place a request, or let it wait; where there is a gate, it is asked first."""
        partition, request = ticket.partition, ticket.request
        if request.priority is not None:
            self._admitting.class_of(request)  # does it contradict itself?
        if partition.admission is not None:
            return self._ask_gate(ticket, partition.admission, now)
        number, rows = self._candidates(ticket)
        if partition.must_wait(number, rows):
            partition.enqueue(number, ticket, rows, now)
            return self._waits(ticket, now, self._admitting.deadline_s(for_worker=False)), NOTHING
        return self._place(ticket, rows, now, NOTHING)

    def _candidates(self, ticket: Ticket) -> tuple[int, Rows]:
        """Return the request's policy class and the rows that may take it."""
        partition = ticket.partition
        number = partition.class_of(ticket.prompt, ticket.weights)
        try:
            return number, partition.candidates(ticket.request)
        except NoEligibleWorker:
            if partition.queues[number]:  # no overtaking, not even towards a refusal (3.6)
                return number, slice(0, 0)
            raise

    # -- the gate ------------------------------------------------------------------------------

    def _ask_gate(
        self, ticket: Ticket, keeper: Gatekeeper, now: float
    ) -> tuple[Answer | Ticket, Effects]:
        """Let the gate judge; what it decides is settled in the step that does it."""
        keeper.refresh(now)
        ask = self._admitting.ask(ticket)
        try:
            number, rows = self._candidates(ticket)
        except NoEligibleWorker as none:
            refused = keeper.refuse(ask, "unavailable", str(none), none.code, now)
            none.retry_after_s = refused.retry_after_s
            raise
        projection = None
        if keeper.gate.queue is not None:  # it wants to know what is left to compute
            ask, projection = _measured(ticket, ask, rows)
        ask, decision = keeper.judge(ticket, ask, rows, now)
        if decision.outcome == "refuse":
            keeper.settle(decision, ask, now, _endpoint(ticket))
            raise self._admitting.refusal(ticket.partition, decision, rows)
        if decision.outcome == "wait":
            keeper.settle(decision, ask, now)
            keeper.wait(ticket, ask, decision, rows, now)
            return self._waits_at_gate(ticket, now), NOTHING
        usable = keeper.usable(rows)
        if keeper.gate.queue is None and ticket.partition.must_wait(number, usable):
            self._wait_in_file(ticket, ask, number, usable, now)
            return self._waits(ticket, now, self._admitting.deadline_s(for_worker=False)), NOTHING
        if usable is not rows:
            projection = None
        answer, effects = self._place(ticket, usable, now, NOTHING, projection)
        if isinstance(answer, CacheThreshold):
            decision = _cache_refusal(decision)
        keeper.settle(decision, ask, now)
        return answer, effects

    def _wait_in_file(self, ticket: Ticket, ask: Ask, number: int, rows: Rows, now: float) -> None:
        """Let one wait in the policy file's queue, whose limits may refuse it."""
        keeper = ticket.partition.admission
        assert keeper is not None
        try:
            ticket.partition.enqueue(number, ticket, rows, now)
        except QueueFull as full:
            full.retry_after_s = keeper.refuse(
                ask, "waiting", str(full), full.code, now
            ).retry_after_s
            raise
        ticket.ask = ask
        waits = Decision("wait", "", WAITS_FOR_PREFILL, keeper.gate.policy.name, "waiting")
        keeper.settle(waits, ask, now)

    # -- placing -------------------------------------------------------------------------------

    def _place(
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        projection: Projection | None = None,
    ) -> tuple[Answer, Effects]:
        """Choose a rank, or a pair, and book it; nothing has changed if this raises."""
        if isinstance(ticket.request, SelectPairRequest):
            return self._matchmaker.serve(ticket, rows, now, effects)
        return self._place_one(ticket, rows, now, effects, projection)

    def _place_one(
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        projection: Projection | None,
    ) -> tuple[Answer, Effects]:
        partition, request = ticket.partition, ticket.request
        found: Found | None = None
        if self._cache_hits.concerns(request):
            if projection is None:
                projection = partition.project(ticket.prompt, rows, ticket.weights)
            found = self._cache_hits.filter(partition, request, rows, projection)
            if found.refused is not None:
                found.refused.advice = self._matchmaker.advise(ticket)
                return found.refused, effects
            rows, projection = found.rows, found.projection
        placement = partition.place(
            request, ticket.prompt, rows, ticket.weights, self._rng, projection
        )
        answer = self._answer(ticket, placement)
        answer.advice = self._matchmaker.advise(ticket)
        if found is not None:
            answer.cache_hit = found.facts
            if found.needs_prefill:
                answer.needs_prefill = True
        if ticket.reservation_id is not None:
            effects = self._book(ticket, placement, answer, now, effects)
        return answer, self._decided(placement, effects)

    def _id_for(self, request: SelectAndReserveRequest) -> str:
        """Return the id given, which may be empty, or a new one."""
        return self.new_id() if request.reservation_id is None else request.reservation_id

    def new_id(self) -> str:
        """Return a random UUIDv4."""
        bits = self._rng.getrandbits(128)
        bits = bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62)
        text = f"{bits:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def _book(
        self,
        ticket: Ticket,
        placement: Placement,
        answer: Selection,
        now: float,
        effects: Effects,
    ) -> Effects:
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        assert ticket.reservation_id is not None
        assert isinstance(request, SelectAndReserveRequest)
        track = placement.weights.track_prefill_tokens
        fairness_id = request.fairness_id
        order = Order(
            ticket.reservation_id,
            ticket.fingerprint,
            prompt,
            placement.effective_prefill_tokens if track else 0,
            track,
            *self._desk.terms(request),
            partition.scope.tenant_id if fairness_id is None else fairness_id,
        )
        reservation = self._desk.book(partition, placement.slot, order, now)
        answer.reservation_id = ticket.reservation_id
        answer.isl_tokens = prompt.isl_tokens
        answer.track_prefill_tokens = track
        answer.potential_decode_blocks = placement.potential_decode_blocks
        kept = msgspec.structs.replace(answer)  # without the hashes: the ledger has them
        effects = self._desk.confirm(partition, reservation, request, kept, effects)
        answer.sequence_hashes = unpack_i64(prompt.sequence_hashes)
        return effects

    def _answer(self, ticket: Ticket, placement: Placement) -> Selection:
        self._counters.selections += 1
        partition, request, worker = ticket.partition, ticket.request, placement.worker
        return Selection(
            selection_id=UNSET if request.selection_id is None else request.selection_id,
            model_name=partition.scope.model_name,
            tenant_id=partition.scope.tenant_id,
            worker_id=worker.worker_id,
            dp_rank=placement.dp_rank,
            endpoint=worker.spec.endpoint,
            block_size=partition.index.block_size,
            overlap=placement.overlap,
            effective_prefill_tokens=placement.effective_prefill_tokens,
        )

    def _decided(self, placement: Placement, effects: Effects) -> Effects:
        if not self.trace_decisions:
            return effects
        effects = Effects() if effects is NOTHING else effects
        effects.decided.append(placement)
        return effects

    # -- waiting -------------------------------------------------------------------------------

    def _waits_at_gate(self, ticket: Ticket, now: float) -> Ticket:
        """It waits in the policy's queue, which has its own deadlines, or for a worker."""
        given = self._admitting.deadline_s(for_worker=ticket.waiting is None)
        return self._waits(ticket, now, given)

    def _waits(self, ticket: Ticket, now: float, deadline_s: float) -> Ticket:
        ticket.since, ticket.until = now, now + deadline_s
        self._patience.watch(ticket)
        self._desk.bookings.wait(ticket)
        self._counters.selections_waited += 1
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """One caller of a waiting request went away; the last one takes the ticket with it.

        Returns:
            True when the ticket left the queue.
        """
        ticket.holders -= 1
        if ticket.holders > 0 or ticket.answer is not None:
            return False
        if not ticket.partition.withdraw(ticket) and ticket.ask is None:
            return False
        if ticket.ask is not None:
            assert ticket.partition.admission is not None
            ticket.partition.admission.withdraw(ticket)
            ticket.ask = None
        self._stops_waiting(ticket)
        self._counters.selections_withdrawn += 1
        return True

    def _stops_waiting(self, ticket: Ticket) -> None:
        self._patience.forget(ticket)
        self._desk.bookings.waited(ticket)

    def relieve(self, partition: Partition, now: float, effects: Effects) -> Effects:
        """Load has become less: let in who waited for that, each booked before the next."""
        keeper = partition.admission
        if keeper is not None and partition.pending_count:
            keeper.refresh(now)
            if keeper.waiting:
                effects = self._drain_gate(partition, keeper, now, effects)
        if not partition.pending_count:
            return effects
        while (ticket := partition.next_admissible()) is not None:
            effects = self._finish(ticket, now, effects)
        return effects

    def _drain_gate(
        self, partition: Partition, keeper: Gatekeeper, now: float, effects: Effects
    ) -> Effects:
        while (ticket := partition.next_at_gate()) is not None:
            effects = self._finish(ticket, now, effects)
            keeper.refresh(now)
        return effects

    def _finish(self, ticket: Ticket, now: float, effects: Effects) -> Effects:
        """Place one that waited, or tell it why not."""
        effects = Effects() if effects is NOTHING else effects
        self._stops_waiting(ticket)
        answer = self._admit(ticket, now, effects)
        keeper = ticket.partition.admission
        if ticket.ask is not None and keeper is not None:
            if isinstance(answer, Selection | PairSelection):
                keeper.placed(ticket, now)
            else:
                code = answer.code if isinstance(answer, ServiceError) else answer.finish_reason
                keeper.turned_away(ticket, code, now)
        ticket.answer = answer
        effects.answered.append(ticket)
        return effects

    def _admit(self, ticket: Ticket, now: float, effects: Effects) -> Answer | ServiceError:
        partition, request = ticket.partition, ticket.request
        try:
            rows = partition.candidates(request)
            if partition.admission is not None:
                rows = partition.admission.usable(rows)
            if ticket.reservation_id is not None:  # taken by an explicit booking meanwhile?
                self._desk.repeated_selection(ticket.reservation_id, b"")
                assert isinstance(request, SelectAndReserveRequest)
                self._desk.terms(request)  # has its lease ended meanwhile?
            return self._place(ticket, rows, now, effects)[0]
        except ServiceError as refusal:
            self._count(refusal)
            return refusal

    # -- whose time is up ----------------------------------------------------------------------

    def next_deadline(self, partitions: Iterable[Partition]) -> float:
        """When the first waiting request will have waited too long; infinity: none will."""
        first = self._patience.next()
        for partition in partitions:
            keeper = partition.admission
            if keeper is not None and keeper.gate.queue is not None:
                first = min(first, keeper.gate.queue.next_expiry())
        return first

    def refuse_late(
        self, partitions: Iterable[Partition], now: float, limit: int, effects: Effects
    ) -> Effects:
        """Refuse up to `limit` that have waited too long; charged to nobody."""
        for ticket in self._patience.due(now, limit):
            partition, limit = ticket.partition, limit - 1
            partition.withdraw(ticket)
            keeper = partition.admission
            if ticket.ask is not None and keeper is not None:
                decision = keeper.refuse_late(ticket, now)
            else:
                verdict = EXPIRED_WAITING
                decision = Decision("refuse", verdict.reason, verdict.code, "", "waiting", 1.0)
            effects = self._refuse(ticket, decision, effects)
        for partition in partitions:
            if limit > 0 and partition.admission is not None:
                for ticket, decision in partition.admission.expired(now, limit):
                    limit -= 1
                    effects = self._refuse(ticket, decision, effects)
        return effects

    def _refuse(self, ticket: Ticket, decision: Decision, effects: Effects) -> Effects:
        effects = Effects() if effects is NOTHING else effects
        self._stops_waiting(ticket)
        refusal = self._admitting.refusal(ticket.partition, decision, slice(0, 0))
        self._count(refusal)
        keeper = ticket.partition.admission
        if keeper is not None:
            endpoint = _endpoint(ticket)
            keeper.rejections[endpoint] = keeper.rejections.get(endpoint, 0) + 1
        ticket.answer = refusal
        effects.answered.append(ticket)
        return effects

    # -- another policy ------------------------------------------------------------------------

    def gather(self, partition: Partition, now: float) -> None:
        """A gate was opened or changed: who waits in the policy file's queues belongs to it now.

        They count as offered, and are to be judged again like those who wait at the gate.
        """
        keeper = partition.admission
        assert keeper is not None
        for queue in partition.queues:
            for ticket in queue.tickets():
                if ticket.ask is None:
                    ticket.ask = self._admitting.ask(ticket)
                    name = keeper.gate.policy.name
                    waits = Decision("wait", "", WAITS_FOR_PREFILL, name, "waiting")
                    keeper.settle(waits, ticket.ask, now)
                queue.remove(ticket)
                keeper.displace(ticket)

    def judge_again(
        self, partition: Partition, now: float, limit: int, effects: Effects
    ) -> Effects:
        """Judge up to `limit` of those who waited under another policy."""
        keeper = partition.admission
        assert keeper is not None
        keeper.refresh(now)
        for _ in range(limit):
            ticket = next(iter(keeper.displaced), None)
            if ticket is None:
                break
            effects = self._judge_again(ticket, keeper, now, effects)
            keeper.refresh(now)
        return self.relieve(partition, now, effects)

    def _judge_again(
        self, ticket: Ticket, keeper: Gatekeeper, now: float, effects: Effects
    ) -> Effects:
        keeper.recall(ticket)
        assert ticket.ask is not None
        try:
            rows = ticket.partition.candidates(ticket.request)
        except NoEligibleWorker:
            return self._finish(ticket, now, effects)
        ask, decision = keeper.judge(ticket, ticket.ask, rows, now)
        if decision.outcome == "refuse":
            keeper.turned_away(ticket, decision.code, now)
            return self._refuse(ticket, decision, effects)
        if decision.outcome == "wait" or not keeper.can_take(rows):
            keeper.wait(ticket, ask, decision, rows, now)
            return effects
        if keeper.gate.queue is None and self._in_file_again(ticket, keeper.usable(rows), now):
            return effects
        return self._finish(ticket, now, effects)

    def _in_file_again(self, ticket: Ticket, rows: Rows, now: float) -> bool:
        """Let one wait on in the policy file's queue; what is full there has no say any more."""
        partition = ticket.partition
        number = partition.class_of(ticket.prompt, ticket.weights)
        if not partition.must_wait(number, rows):
            return False
        partition.enqueue(number, ticket, rows, now, is_known=True)
        return True


def _measured(ticket: Ticket, ask: Ask, rows: Rows) -> tuple[Ask, Projection]:
    """Say what the best candidate would still have to compute."""
    projection = ticket.partition.project(ticket.prompt, rows, ticket.weights)
    cached = int(projection.cached_tokens.max(initial=0.0))
    return ask._replace(prefill_tokens=max(0, ask.tokens - cached)), projection


def _endpoint(ticket: Ticket) -> str:
    if isinstance(ticket.request, SelectPairRequest):
        return _PAIR
    return _SELECT if ticket.reservation_id is None else _BOOK


def _cache_refusal(decision: Decision) -> Decision:
    return decision._replace(outcome="refuse", code="cache_threshold", gate="cache_hit")
