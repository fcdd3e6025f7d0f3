"""The decision: match a prompt, price the candidates, pick one and book it, in one step.

`operations/selection.py` calls `Placer.place` for new requests, `waiting_requests.py` for those
that waited, `batches/` for samples. `choose` is match, price and pick alone, which replays use too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec import UNSET
from msgspec.structs import replace

from select_service.core.decisions.decision_log import odds_of
from select_service.core.decisions.record import Record
from select_service.core.effects import NOTHING, Effects
from select_service.core.pricing.cost import Found
from select_service.core.pricing.placement import Match, Placement, worker_overlap
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
    from select_service.core.admission.cache_hits import CacheHits
    from select_service.core.admission.cache_hits import Found as CacheHitRows
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.decisions.decision_log import DecisionLog
    from select_service.core.decisions.shadow import Shadow
    from select_service.core.diagnostics.prompt_sample import Sampler
    from select_service.core.observers import DecisionRecorder, Tracer
    from select_service.core.operations.pair_selection import PairSelector
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.reservations.sessions import Sessions
    from select_service.errors import ServiceError
    from select_service.types import PairSelection, SelectRequest
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
        tracing: Tracer | None = None,
        recorder: DecisionRecorder | None = None,
    ) -> None:
        self._desk = desk
        self._cache_hits = cache_hits
        self._matchmaker = matchmaker
        self.decisions = decisions
        self._counters = counters
        self._rng = rng
        self._trace_decisions = trace_decisions
        self._tracing = tracing
        self._recorder = recorder
        self.sampler: Sampler | None = None  # set once an examiner samples the fleet
        self.sessions: Sessions | None = None  # set where requests may name their session
        self.shadow: Shadow | None = None  # set while other weights run in shadow
        # adds expected matches to the present ones
        self.expects: Callable[[Matches], Matches] | None = None

    def place(  # noqa: C901, PLR0912, PLR0915 - the decision, from top to bottom
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        matches: Matches | None = None,
    ) -> tuple[Answer, Effects]:
        """Choose a rank, or a pair, and book it; nothing has changed if this raises.

        Callers pass a refusal on to `refuse`.

        Args:
            ticket: the request, its prompt and its weights.
            rows: the candidates; at least one.
            now: monotonic seconds.
            effects: to add to.
            matches: what the index has of the prompt; None: it is looked up.
        """
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        tracing, desk, counters = self._tracing, self._desk, self._counters
        if self._recorder is not None:
            self._recorder.begin()
        if tracing is not None:
            matches = tracing.begin(ticket, matches)
        if request.is_pair:
            return self._place_pair(ticket, rows, now, effects)
        # match
        found: CacheHitRows | None = None
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
        # price and pick
        placement = choose(
            partition, request, prompt, rows, ticket.weights, self._rng, now, matches
        )
        if watch is not None:  # before anything is booked
            sighting = watch.score(placement)
        if request.session_id is not None:
            self._note_session(ticket, request.session_id, placement.slot, now)
        if self.sampler is not None and self.sampler.left:
            self.sampler.take(partition.scope, request, prompt, placement, now)
        if tracing is not None:
            tracing.chosen(placement)
        # answer
        worker, scope, isl_tokens = placement.worker, partition.scope, prompt.isl_tokens
        computed = placement.effective_prefill_tokens
        counters.selections += 1
        counters.selected_isl_tokens += isl_tokens
        counters.selected_prefill_tokens += computed
        if placement.forgone_tokens:
            counters.selected_forgone_tokens += placement.forgone_tokens
            counters.selections_forgoing += 1
        partition.demand.place(worker.worker_id, isl_tokens, computed)
        answer = Selection(
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            worker_id=worker.worker_id,
            dp_rank=placement.dp_rank,
            endpoint=worker.spec.endpoint,
            block_size=partition.index.block_size,
            overlap=placement.overlap,
            effective_prefill_tokens=computed,
        )
        if request.selection_id is not None:
            answer.selection_id = request.selection_id
        if partition.seating.roles.given:
            answer.advice = self._matchmaker.advise(ticket)
        if hit is not None:
            answer.cache_hit = hit
            if found is not None and found.needs_prefill:
                answer.needs_prefill = True
        # book
        name = ticket.reservation_id
        if name is not None:
            assert isinstance(request, SelectAndReserveRequest)
            lease, ttl_s = None, desk.ttl_s
            if request.lease_id is not None or request.ttl_s is not None:
                lease, ttl_s = desk.terms(request)
            fairness_id = request.fairness_id
            track, planned, wave = placement.weights.track_prefill_tokens, ticket.planned, None
            if planned is not None:
                shared = planned.shared_tokens if placement.slot == planned.slot else 0
                wave = planned.group, shared
            spec = BookingSpec(
                reservation_id=name,
                fingerprint=ticket.fingerprint,
                prompt=prompt,
                prefill_tokens=computed if track else 0,
                track_prefill_tokens=track,
                lease=lease,
                ttl_s=ttl_s,
                fairness_id=scope.tenant_id if fairness_id is None else fairness_id,
                wave=wave,
            )
            reservation = desk.book(partition, placement.slot, spec, now)
            answer.reservation_id = name
            answer.isl_tokens = isl_tokens
            answer.track_prefill_tokens = track
            answer.potential_decode_blocks = placement.potential_decode_blocks
            kept = replace(answer)  # without the hashes, which the ledger has
            effects = desk.confirm(partition, reservation, request, kept, effects)
            answer.sequence_hashes = desk.show_hashes(prompt.sequence_hashes)
        # record
        seen = placement.seen
        if seen is not None and (
            partition.lookout is None
            or sighting is not None
            or not self.decisions.keep_usual(ticket, placement, rows, now, hit, partition.lookout)
        ):
            odds = None
            if sighting is not None:
                odds = odds_of(ticket)
                odds.shadow = sighting
            record = self.decisions.keep(
                ticket, seen, rows, placement.slot, now, odds, hit, placement.weights
            )
            if record is not None:
                _explain(answer, record)
                self.decisions.note_explained(ticket, record)
        if self._trace_decisions:
            effects = Effects() if effects is NOTHING else effects
            effects.decided.append((placement, ticket))
        if tracing is not None:
            tracing.end()
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
        self, ticket: Ticket, rows: Rows, matches: Matches, found: CacheHitRows, now: float
    ) -> CacheThreshold:
        """Answer that too few tokens are cached on any candidate; this is recorded, too."""
        refused = found.refused
        assert refused is not None
        refused.advice = self._matchmaker.advise(ticket)
        if self._tracing is not None:
            self._tracing.end()
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
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        if self.shadow is not None:
            self.shadow.skip(ticket, "pair")
        seen = placement = None
        if self.decisions.is_wanted or request.explain:
            seen = partition.see(prompt)  # before anything is booked
        answer: PairSelection
        legs, plan = self._matchmaker.find(ticket, rows)
        if plan.mode == "disaggregated":
            answer, effects = self._matchmaker.pairs.book(ticket, plan, now, effects)
        else:
            placement = choose(
                partition, request, prompt, plan.whole, ticket.weights, self._rng, now
            )
            answer, effects = self._matchmaker.pairs.book_one(ticket, plan, placement, now, effects)
        if seen is not None:
            record = self.decisions.paired(ticket, seen, Match(legs, plan, placement), now)
            if record is not None:  # the confirmed answer is kept unchanged for repeats
                answer = replace(answer)
                _explain(answer, record)
                self.decisions.note_explained(ticket, record)
        if self._tracing is not None:
            self._tracing.end()
        return answer, effects

    def refuse(self, ticket: Ticket | None, refusal: ServiceError, now: float) -> None:
        """Count a refused selection; without a ticket it never reached a partition."""
        if self._tracing is not None:
            self._tracing.end()
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


def choose(  # noqa: PLR0917 - every selection pays for names
    partition: Partition,
    request: SelectRequest,
    prompt: Prompt,
    rows: Rows,
    weights: Weights,
    rng: random.Random,
    now: float,
    matches: Matches | None = None,
) -> Placement:
    """Choose a rank among the candidate rows: match, price, prefer, pick. Nothing is booked.

    The prompt is looked up in the index unless `matches` is given.
    """
    index, ledger, seating, pricer = (
        partition.index,
        partition.ledger,
        partition.seating,
        partition.pricer,
    )
    size, trust, found, shared = index.block_size, partition.trust.column, None, None
    if matches is None:
        matches = index.find_matches(prompt.block_hashes)
    if matches.groups or matches.host or matches.disk:
        found = Found(*matches.by_slot())
    if ledger.blocks.begins(prompt.first_hash):
        shared = ledger.shared_groups(prompt.sequence_hashes)
    if weights is not partition.weights:
        partition.weights, partition.is_kv_cost = weights, weights.is_kv_cost
    present = weights if partition.is_kv_cost else partition.at_present(weights)
    preference = None
    if request.routing_constraints is not UNSET:
        preference = partition.preference(request, rows)
    isl_tokens = prompt.isl_tokens
    # positional, because every selection pays for building arguments
    slot, cost, decode, cached, most_cached = pricer.choose(
        rows.stop if type(rows) is slice else rows,
        isl_tokens,
        size,
        prompt.blocks,
        present,
        found,
        shared,
        trust,
        preference,
        now,
        rng,
    )
    worker, dp_rank = seating.rank_at(slot)
    left, held = max(0, isl_tokens - cached), (0, 0, 0)
    if found is None:
        overlap = partition.unmatched.get(worker.worker_id) or partition.no_overlap(worker)
    else:
        overlap, held = worker_overlap(worker, pricer.held_at, size), pricer.held_at(slot)
    seen: Seen | None = None
    if partition.is_watched or request.explain:
        loads = ledger.loads
        seen = (
            loads.packed or loads.pack(),
            found,
            shared,
            None if trust is None else trust.tobytes(),
        )
    return Placement(
        worker,
        dp_rank,
        slot,
        cost,
        overlap,
        held,
        left,
        left - max(0, isl_tokens - most_cached) if left else 0,
        decode,
        present,
        seen,
    )


def _explain(answer: Answer, record: Record) -> None:
    """Store the record as the answer's decision; whoever sends the answer reads it then.

    Requests without `explain` thus pay nothing, and a fleet of a thousand ranks is sent in slices.
    """
    answer.decision = cast("Decision", Record._make(record))
