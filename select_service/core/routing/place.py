"""Placer: choose a rank for a request and book it, in one uninterrupted step.

`partition.py` chooses the rank, `cache_hits.py` applies the cache-hit threshold, `desk.py` books.
`selecting.py` calls this for new requests, `waiting_room.py` for those that waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from select_service.core.decisions.decision_log import odds_of
from select_service.core.decisions.record import Record
from select_service.core.effects import NOTHING, Effects
from select_service.core.reservations.lifecycle import BookingSpec
from select_service.types import (
    Answer,
    CacheHit,
    CacheThreshold,
    SelectAndReserveRequest,
    Selection,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from indexer.core.tiers import Matches
    from select_service.core.admission.cache_hits import CacheHits, Found
    from select_service.core.admission.queue import Planned, Ticket
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.decisions.decision_log import DecisionLog
    from select_service.core.decisions.shadow import Shadow
    from select_service.core.diagnostics.prompt_sample import Sampler
    from select_service.core.fleet.catalog import Worker
    from select_service.core.operations.pair_selection import PairSelector
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Placement
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.reservations.sessions import Sessions
    from select_service.errors import ServiceError
    from select_service.types import Overlap
    from select_service.types.decisions import Decision


class Placer:
    """Places requests."""

    def __init__(
        self,
        desk: Lifecycle,
        cache_hits: CacheHits,
        matchmaker: PairSelector,
        decisions: DecisionLog,
        counters: Counters,
        rng: random.Random,
        *,
        trace_decisions: bool,
    ) -> None:
        self._desk = desk
        self._cache_hits = cache_hits
        self._matchmaker = matchmaker
        self.decisions = decisions
        self._keep_usual = decisions.keep_usual
        self._counters = counters
        self._rng = rng
        self._trace_decisions = trace_decisions
        self.sampler: Sampler | None = None  # set once an examiner samples the fleet
        self.sessions: Sessions | None = None  # set where requests may name their session
        self.shadow: Shadow | None = None  # set while other weights run in shadow
        # adds expected matches to the present ones
        self.expects: Callable[[Matches], Matches] | None = None

    def place(  # noqa: C901, PLR0912, PLR0915 - straight on: all pay for it
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        matches: Matches | None = None,
    ) -> tuple[Answer, Effects]:
        """Choose a rank, or a pair, and book it; nothing has changed if this raises.

        The prompt is looked up in the index unless the caller passes its `matches`.
        """
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        if request.is_pair:
            return self._place_pair(ticket, rows, now, effects)
        found: Found | None = None
        hit: CacheHit | None = None
        hits = self._cache_hits
        if request.cache_hit_threshold is not None or hits.settings.cache_hit_threshold > 0.0:
            if matches is None:
                matches = partition.index.find_matches(prompt.block_hashes)
            hit = hits.at_once(partition, request, prompt, matches)
            if hit is None:
                found = hits.filter(partition, request, prompt, rows, matches)
                if found.refused is not None:
                    return self._refuse_threshold(ticket, rows, matches, found, now), effects
                rows, hit = found.rows, found.facts
            if self.expects is not None:
                matches = self.expects(matches)
        if request.session_id is not None:
            rows = self._seated(ticket, request.session_id, rows, now)
        sighting = watch = None
        if self.shadow is not None:
            watch = self.shadow.watch(ticket, rows, matches, now, self._rng)
            matches = matches if watch is None else watch.matches
        placement = partition.place(request, prompt, rows, ticket.weights, self._rng, now, matches)
        if watch is not None:  # before anything is booked
            sighting = watch.score(placement)
        if request.session_id is not None:
            self._note_session(ticket, request.session_id, placement.slot, now)
        if self.sampler is not None and self.sampler.left:
            self.sampler.take(partition.scope, request, prompt, placement, now)
        answer = self._answer(ticket, placement)
        if partition.seating.roles.given:
            answer.advice = self._matchmaker.advise(ticket)
        if hit is not None:
            answer.cache_hit = hit
            if found is not None and found.needs_prefill:
                answer.needs_prefill = True
        if ticket.reservation_id is not None:
            effects = self._book(ticket, placement, answer, now, effects)
        lookout = partition.lookout
        if placement.seen is not None and (
            lookout is None
            or sighting is not None
            or not self._keep_usual(ticket, placement, rows, now, hit, lookout)
        ):
            odds = None
            if sighting is not None:
                odds = odds_of(ticket)
                odds.shadow = sighting
            record = self.decisions.keep(
                ticket, placement.seen, rows, placement.slot, now, odds, hit, placement.weights
            )
            if record is not None:
                _explain(answer, record)
                self.decisions.note_explained(ticket, record)
        if self._trace_decisions:
            effects = Effects() if effects is NOTHING else effects
            effects.decided.append((placement, ticket))
        return answer, effects

    def _seated(self, ticket: Ticket, session_id: str, rows: Rows, now: float) -> Rows:
        """Return only the rank of the request's session if it stays there; else all rows.

        A wave decides for all its requests together, so sessions do not apply to them.
        """
        if self.sessions is None or not self.sessions.is_on or ticket.in_wave:
            return rows
        isl_tokens = ticket.prompt.isl_tokens
        alone = self.sessions.rows(ticket.partition, session_id, rows, isl_tokens, now)
        ticket.in_session = alone is not None
        return rows if alone is None else alone

    def _note_session(self, ticket: Ticket, session_id: str, slot: int, now: float) -> None:
        if self.sessions is not None and not ticket.in_wave:
            self.sessions.note(ticket.partition, session_id, slot, now)

    def _refuse_threshold(
        self, ticket: Ticket, rows: Rows, matches: Matches, found: Found, now: float
    ) -> CacheThreshold:
        """Answer that too few tokens are cached on any candidate; this is recorded, too."""
        refused = found.refused
        assert refused is not None
        refused.advice = self._matchmaker.advise(ticket)
        if self.decisions.is_wanted or ticket.request.explain:
            odds = odds_of(ticket)
            odds.is_threshold = True
            seen = ticket.partition.see(ticket.prompt, matches)
            record = self.decisions.keep(ticket, seen, rows, -1, now, odds, found.facts)
            if record is not None:
                _explain(refused, record)
        return refused

    def _place_pair(
        self, ticket: Ticket, rows: Rows, now: float, effects: Effects
    ) -> tuple[Answer, Effects]:
        request = ticket.request
        if self.shadow is not None:
            self.shadow.skip(ticket, "pair")
        if not (self.decisions.is_wanted or request.explain):
            return self._matchmaker.serve(ticket, rows, now, effects)[:2]
        seen = ticket.partition.see(ticket.prompt)  # before anything is booked
        answer, effects, match = self._matchmaker.serve(ticket, rows, now, effects)
        record = self.decisions.paired(ticket, seen, match, now)
        if record is not None:  # the confirmed answer is kept unchanged for repeats
            answer = replace(answer)
            _explain(answer, record)
            self.decisions.note_explained(ticket, record)
        return answer, effects

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
        lease, ttl_s = self._desk.terms(request)
        order = BookingSpec(
            ticket.reservation_id,
            ticket.fingerprint,
            prompt,
            placement.effective_prefill_tokens if track else 0,
            track,
            lease,
            ttl_s,
            partition.scope.tenant_id if fairness_id is None else fairness_id,
            wave=_shared(ticket.planned, placement.slot),
        )
        reservation = self._desk.book(partition, placement.slot, order, now)
        answer.reservation_id = ticket.reservation_id
        answer.isl_tokens = prompt.isl_tokens
        answer.track_prefill_tokens = track
        answer.potential_decode_blocks = placement.potential_decode_blocks
        kept = replace(answer)  # without the hashes, which the ledger has
        effects = self._desk.confirm(partition, reservation, request, kept, effects)
        answer.sequence_hashes = self._desk.show_hashes(prompt.sequence_hashes)
        return effects

    def _answer(self, ticket: Ticket, placement: Placement) -> Selection:
        counters = self._counters
        counters.selections += 1
        counters.selected_isl_tokens += ticket.prompt.isl_tokens
        counters.selected_prefill_tokens += placement.effective_prefill_tokens
        if placement.forgone_tokens:
            counters.selected_forgone_tokens += placement.forgone_tokens
            counters.selections_forgoing += 1
        partition, worker = ticket.partition, placement.worker
        computed = placement.effective_prefill_tokens
        partition.demand.place(worker.worker_id, ticket.prompt.isl_tokens, computed)
        answer = _selection(partition, worker, placement.dp_rank, placement.overlap, computed)
        if ticket.request.selection_id is not None:
            answer.selection_id = ticket.request.selection_id
        return answer

    def refuse(self, ticket: Ticket | None, refusal: ServiceError, now: float) -> None:
        """Count a refused selection; without a ticket it never reached a partition."""
        failed = self._counters.selections_failed
        failed[refusal.code] = failed.get(refusal.code, 0) + 1
        if ticket is not None:
            ticket.partition.demand.refused += 1
        if ticket is not None and (self.decisions.is_wanted or ticket.request.explain):
            record = self.decisions.refused(ticket, refusal, now)
            if record is not None:
                refusal.decision = Record._make(record)

    def repeated(self, request: SelectAndReserveRequest, known: Answer) -> Answer:
        """Attach the explanation to a repeated answer, if its record still exists."""
        if not request.explain or isinstance(known, CacheThreshold):
            return known  # do not scan the ring: repeats come under load
        record = self.decisions.explained(request.reservation_id or "")
        if record is not None:
            known = replace(known)
            _explain(known, record)
        return known


def _shared(planned: Planned | None, slot: int) -> tuple[int, int] | None:
    """Return a request's group in its wave, and what it shares with others where it has gone."""
    if planned is None:
        return None
    return planned.group, planned.shared_tokens if slot == planned.slot else 0


def _selection(
    partition: Partition, worker: Worker, dp_rank: int, overlap: Overlap, prefill_tokens: int
) -> Selection:
    scope = partition.scope
    return Selection(
        model_name=scope.model_name,
        tenant_id=scope.tenant_id,
        worker_id=worker.worker_id,
        dp_rank=dp_rank,
        endpoint=worker.spec.endpoint,
        block_size=partition.index.block_size,
        overlap=overlap,
        effective_prefill_tokens=prefill_tokens,
    )


def _explain(answer: Answer, record: Record) -> None:
    """Store the record as the answer's decision; whoever sends the answer reads it then.

    Requests without `explain` thus pay nothing, and a fleet of a thousand ranks is sent in slices.
    """
    answer.decision = cast("Decision", Record._make(record))
