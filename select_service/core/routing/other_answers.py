"""Answers without a new choice: of a repeat, of too few cached tokens, and a refusal.

`place.py` gives them instead of a rank. Where decisions are kept, these are, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from select_service.core.admission.queue import Ticket
from select_service.core.decisions.decision_log import unusual_facts_of
from select_service.core.decisions.record import DecisionRecord
from select_service.core.routing.read import fingerprint_of
from select_service.errors import NoSchedulableWorker, WouldWait

if TYPE_CHECKING:
    from indexer.core.tiers import Matches
    from select_service.core.admission.cache_hits import ThresholdCandidates as CacheHitRows
    from select_service.core.admission.queue import BatchSample
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.decisions.decision_log import DecisionLog
    from select_service.core.observers import Tracer
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.errors import ServiceError
    from select_service.types import (
        Answer,
        CacheThreshold,
        PairSelection,
        SelectAndReserveRequest,
        Selection,
    )
    from select_service.types.decisions import Decision


class OtherAnswers:
    """Answers requests that get no new rank."""

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        decisions: DecisionLog,
        counters: Counters,
        tracer: Tracer | None,
    ) -> None:
        self._lifecycle = lifecycle
        self._decisions = decisions
        self._counters = counters
        self._tracer = tracer

    def booked_before(
        self, request: SelectAndReserveRequest, refusal: ServiceError, unknown: bytes
    ) -> Selection | PairSelection | Ticket | None:
        """Return the first answer if this is a repeat that comes where no worker can be chosen.

        All drain, or they are at another replica only.
        """
        name, repeats = request.reservation_id, self._lifecycle.repeats
        if name is None or not isinstance(refusal, NoSchedulableWorker):
            return None
        if not repeats.is_known(name):
            return None
        return repeats.selection(
            name, fingerprint_of(request, unknown), self._lifecycle.show_hashes
        )

    def again(
        self,
        request: SelectAndReserveRequest,
        known: Selection | PairSelection | Ticket,
        sample: BatchSample | None,
        now: float,
    ) -> Answer | Ticket:
        """Return the earlier answer, or the ticket of the request that still waits.

        Raises:
            WouldWait: it still waits, and a batch does not wait with it.
        """
        answer: Answer | Ticket = known
        if isinstance(known, Ticket):
            if sample is not None:
                known.holders -= 1
                raise WouldWait(known.partition.queues.retry_after_s(now))
        elif request.explain:
            # the ring is scanned only then: repeats come under load
            record = self._decisions.explained(request.reservation_id or "")
            if record is not None:
                answer = replace(known)
                explain(answer, record)
        if self._tracer is not None and sample is None:
            self._tracer.answered(answer)
        return answer

    def too_few_hits(
        self, ticket: Ticket, rows: Rows, matches: Matches, found: CacheHitRows, now: float
    ) -> CacheThreshold:
        """Answer that too few tokens are cached on any candidate; this is recorded, too."""
        refused = found.refused
        assert refused is not None
        if self._tracer is not None:
            self._tracer.end()
        if self._decisions.is_wanted or ticket.request.explain:
            unusual = unusual_facts_of(ticket)
            unusual.is_threshold = True
            seen = ticket.partition.see(ticket.prompt, matches)
            record = self._decisions.keep(ticket, seen, rows, -1, now, unusual, found.facts)
            if record is not None:
                explain(refused, record)
        return refused

    def refuse(self, ticket: Ticket | None, refusal: ServiceError, now: float) -> None:
        """Count a refused selection; without a ticket it never reached a partition."""
        if self._tracer is not None:
            self._tracer.end()
        failed = self._counters.selections_failed
        failed[refusal.code] = failed.get(refusal.code, 0) + 1
        if ticket is not None:
            ticket.partition.demand.refused += 1
        if ticket is not None and (self._decisions.is_wanted or ticket.request.explain):
            record = self._decisions.refused(ticket, refusal, now)
            if record is not None:
                refusal.decision = DecisionRecord._make(record)


def explain(answer: Answer, record: DecisionRecord) -> None:
    """Store the record as the answer's decision, which is read when the answer is sent.

    Requests without `explain` thus pay nothing, and a fleet of a thousand ranks is sent in slices.
    """
    answer.decision = cast("Decision", DecisionRecord._make(record))
