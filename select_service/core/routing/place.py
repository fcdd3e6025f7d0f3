"""The decision: read → candidates → gate → match → price → pick → book → record, in one step.

`Placer.select_and_reserve` takes every new request: plain, of a pair, or a sample of a batch. Those
that waited come back to `place`, which has the second half. `choose` is match, price and pick
alone, which replays use too. Nothing is awaited between a choice and its booking, so
select-and-reserve is atomic without a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from select_service.core.admission.queue import BatchSample, Ticket
from select_service.core.decisions.decision_log import unusual_facts_of
from select_service.core.effects import NOTHING, Effects
from select_service.core.pricing.cost import tier_matches
from select_service.core.pricing.kv_sources import kv_source
from select_service.core.pricing.placement import PairMatch, Placement, worker_overlap
from select_service.core.reservations.lifecycle import BookingSpec
from select_service.core.routing.admit import Admitter
from select_service.core.routing.filters import Filters, planned_rows
from select_service.core.routing.other_answers import OtherAnswers, explain
from select_service.core.routing.read import fingerprint_of
from select_service.errors import ServiceError, WouldWait
from select_service.types import (
    Answer,
    CacheHit,
    CacheThreshold,
    SelectAndReserveRequest,
    Selection,
)

if TYPE_CHECKING:
    import random

    from indexer.core.tiers import Matches
    from select_service.core.admission.cache_hits import CacheHits
    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.decisions.decision_log import DecisionLog
    from select_service.core.decisions.shadow_regret import Sighting
    from select_service.core.diagnostics.prompt_sample import PromptSampler
    from select_service.core.observers import DecisionRecorder, Tracer
    from select_service.core.operations.pair_selection import PairSelector
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.routing.filters import Filtered
    from select_service.core.routing.read import RequestReader
    from select_service.types import PairSelection, SelectRequest


class Placer:
    """Chooses a worker for each request, books it in the same step, or lets the request wait."""

    def __init__(
        self,
        *,
        reader: RequestReader,
        controller: AdmissionController,
        lifecycle: Lifecycle,
        cache_hits: CacheHits,
        pair_selector: PairSelector,
        decisions: DecisionLog,
        counters: Counters,
        rng: random.Random,
        trace_decisions: bool,
        tracer: Tracer | None = None,
        recorder: DecisionRecorder | None = None,
    ) -> None:
        self._reader = reader
        self._controller = controller
        self.admitter = Admitter(controller)
        """Knows where requests wait."""
        self.other_answers = OtherAnswers(
            lifecycle=lifecycle,
            decisions=decisions,
            counters=counters,
            tracer=tracer,
        )
        self.filters = Filters(
            cache_hits=cache_hits,
            advise=pair_selector.advise,
            other_answers=self.other_answers,
            rng=rng,
        )
        self._lifecycle = lifecycle
        self._pair_selector = pair_selector
        self.decisions = decisions
        self._counters = counters
        self._rng = rng
        self._trace_decisions = trace_decisions
        self._tracer = tracer
        self._recorder = recorder
        self.sampler: PromptSampler | None = None  # set once an examiner samples the fleet

    def select(
        self, request: SelectRequest, now: float, *, sample: BatchSample | None = None
    ) -> tuple[Answer | Ticket, Effects]:
        """Choose a worker; as `select_and_reserve`, but nothing is booked."""
        return self.select_and_reserve(
            request,  # type: ignore[arg-type] # `cast` is a call, which every selection would pay for
            now,
            sample=sample,
            reserve=False,
        )

    def select_and_reserve(  # noqa: C901, PLR0912, PLR0915 - the decision, from top to bottom
        self,
        request: SelectAndReserveRequest,
        now: float,
        *,
        unknown: bytes = b"",
        sample: BatchSample | None = None,
        reserve: bool = True,
    ) -> tuple[Answer | Ticket, Effects]:
        """Choose a worker and book it in the same step; returns a Ticket if it has to wait.

        `unknown`, the canonical bytes of the unknown members, are part of the fingerprint.
        A `sample` of a batch never waits. Without `reserve`, the request may be a plain
        `SelectRequest`.

        Raises:
            ServiceError: of prompt, worker, gate or id; `WouldWait` for a sample of a batch.
        """
        lifecycle, ticket, name, fingerprint = self._lifecycle, None, None, b""
        tracer = self._tracer if sample is None else None  # a batch is traced as a whole
        try:
            # read
            read = None if sample is None else sample.read
            partition, prompt, weights = read or self._reader.selection(request)
            # booked before, or room for it
            if reserve:
                name = request.reservation_id
                if name is not None:
                    fingerprint = fingerprint_of(request, unknown)
                    bookings, claims = lifecycle.bookings, lifecycle.announcer.claims
                    is_known = name in bookings.by_id or bookings.waiting or bookings.pairs
                    # else it is certainly unused: nearly always
                    if is_known or name in claims.of_id or name in claims.names.by_key:
                        known = lifecycle.repeats.selection(
                            name, fingerprint, lifecycle.show_hashes
                        )
                        if known is not None:
                            return self.other_answers.again(request, known, sample, now), NOTHING
                lifecycle.check_room(request)
                if request.fairness_id is not None:
                    self._controller.check_fairness_id(request.fairness_id)
                if request.lease_id is not None or request.ttl_s is not None:
                    lifecycle.terms(request)
                if name is None:
                    name = self.new_id()
            ticket = Ticket(partition, request, prompt, weights, name, fingerprint)
            if sample is not None:
                ticket.in_batch, ticket.planned = True, sample.planned
            if tracer is not None:
                tracer.admitted(ticket)
            if request.priority is not None:
                self._controller.class_of(request)  # raises if the request contradicts itself
            # candidates, or wait
            admission = partition.admission
            if admission is not None:
                answer, effects = self._pass(ticket, admission, now)
            else:
                queues = partition.queues
                number = partition.class_of(prompt, weights) if len(queues.of_class) > 1 else 0
                rows = partition.candidates(request, number)
                if not queues.must_wait(number, rows):
                    answer, effects = self.place(ticket, rows, now, NOTHING)
                elif sample is not None:
                    raise WouldWait(queues.retry_after_s(now))
                else:
                    partition.enqueue(number, ticket, rows, now)
                    answer = self.admitter.waiting_requests.wait_for_class(ticket, now)
                    effects = NOTHING
        except ServiceError as refusal:
            known = self.other_answers.booked_before(request, refusal, unknown) if reserve else None
            if known is not None:
                return self.other_answers.again(request, known, sample, now), NOTHING
            self.other_answers.refuse(ticket, refusal, now)
            raise
        if tracer is not None:
            tracer.answered(answer)
        return answer, effects

    def _pass(
        self, ticket: Ticket, admission: PartitionAdmission, now: float
    ) -> tuple[Answer | Ticket, Effects]:
        """Let the gate judge a request, and place it where it is admitted."""
        judged = self.admitter.judge(ticket, admission, now)
        if judged.waits is not None:
            return judged.waits, judged.effects
        answer, effects = self.place(ticket, judged.rows, now, judged.effects, judged.matches)
        if type(answer) is CacheThreshold:
            admission.gate.too_few_hits(judged.ask, now)
        else:
            admission.gate.admit(judged.ask, now)
            if ticket.reservation_id is not None and (charge := admission.charge_of(ticket)):
                self._lifecycle.note_charge(ticket.reservation_id, charge)
        return answer, effects

    def new_id(self) -> str:
        """Return a random UUIDv4."""
        bits = self._rng.getrandbits(128)
        bits = bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62)
        text = f"{bits:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def place(  # noqa: C901, PLR0912, PLR0915 - the decision, from top to bottom
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        matches: Matches | None = None,
    ) -> tuple[Answer, Effects]:
        """Choose a rank, or a pair, and book it; nothing has changed if this raises.

        Callers pass a refusal on to `other_answers`. Without `matches`, the prompt is looked up.
        """
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        tracer, filters, filtered, hit, sighting = self._tracer, self.filters, None, None, None
        if self._recorder is not None:
            self._recorder.begin()
        if tracer is not None:
            matches = tracer.begin(ticket, matches)
        if request.is_pair:
            return self._place_pair(ticket, rows, now, effects)
        # filter the candidates, where that is asked for
        if (
            ticket.planned is not None
            or request.session_id is not None
            or request.cache_hit_threshold is not None
            or filters.cache_hits.settings.cache_hit_threshold > 0.0
            or filters.shadow is not None
        ):
            filtered = filters.apply(ticket, rows, matches, now)
            if filtered.refused is not None:
                return filtered.refused, effects
            rows, matches, hit = filtered.rows, filtered.matches, filtered.hit
        # match, price and pick
        placement = choose(
            partition, request, prompt, rows, ticket.weights, self._rng, now, matches
        )
        if filtered is not None:
            sighting = filters.follow_up(ticket, filtered, placement, now)
        if tracer is not None:
            tracer.chosen(placement)
        answer = self._answer(ticket, placement, filtered, now)
        # book
        name, slot = ticket.reservation_id, placement.slot
        if name is not None:
            assert isinstance(request, SelectAndReserveRequest)
            track, tokens = placement.weights.track_prefill_tokens, answer.effective_prefill_tokens
            fair, mark, source = request.fairness_id, ticket.fingerprint, placement.kv_source
            charged = ticket.charged if ticket.ask or ticket.asked else None
            spec = BookingSpec(name, mark, prompt, tokens, track, fair, source, charged)
            if ticket.planned is not None:
                spec = replace(spec, batch=ticket.planned.booked_on(slot))
            if request.session_id is not None:
                spec = replace(spec, session_id=filters.session_of(ticket))
            kept = replace(answer)  # without the hashes, which the ledger has
            effects = self._lifecycle.book(partition, slot, spec, request, kept, effects, now)
            answer.sequence_hashes = self._lifecycle.show_hashes(prompt.sequence_hashes)
        if partition.outliers.ranks:
            partition.outliers.chosen(slot, now)
        # record
        if placement.seen is not None and (
            (ring := self.decisions.common) is None
            or sighting is not None
            or partition.fleet_snapshot is None
            or not ring.keep_usual(ticket, placement, rows, now, hit, partition.fleet_snapshot)
        ):
            self._record(ticket, placement, rows, answer, now, hit, sighting)
        if self._trace_decisions:
            effects = Effects() if effects is NOTHING else effects
            effects.decided.append((placement, ticket))
        if tracer is not None:
            tracer.end()
        return answer, effects

    def _answer(
        self, ticket: Ticket, placement: Placement, filtered: Filtered | None, now: float
    ) -> Selection:
        """Return what the caller gets to know of its rank, and count that it was chosen."""
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        if self.sampler is not None and self.sampler.left:
            self.sampler.take(partition.scope, request, prompt, placement, now)
        worker, scope, counters = placement.worker, partition.scope, self._counters
        computed = placement.effective_prefill_tokens
        if placement.forgone_tokens:
            counters.selected_forgone_tokens += placement.forgone_tokens
            counters.selections_forgoing += 1
        partition.demand.place(
            worker.worker_id, placement.dp_rank, prompt.isl_tokens, computed, counters
        )
        answer = Selection(
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            worker_id=worker.worker_id,
            dp_rank=placement.dp_rank,
            endpoint=worker.spec.endpoint or "",
            block_size=partition.index.block_size,
            overlap=placement.overlap,
            effective_prefill_tokens=computed,
        )
        if request.selection_id is not None:
            answer.selection_id = request.selection_id
        if partition.estimate.in_force and partition.estimate.is_in_force(placement.slot):
            answer.overlap_estimated = True
        if placement.kv_source is not None:
            answer.kv_source = placement.kv_source
            counters.pull(placement.kv_source.blocks * partition.index.block_size)
        if partition.fleet_slots.roles.given:
            answer.advice = self._pair_selector.advise(ticket, now)
        ledger = partition.ledger
        if ledger.loads.speeds.by_slot:
            blocks, size = (prompt.blocks or 1) + ledger.sequence_blocks, partition.index.block_size
            answer.predicted_ttft_ms, answer.predicted_itl_ms = ledger.loads.predicted_ms(
                (placement.slot, placement.slot), computed, blocks, size, placement.pull_tokens
            )
        if filtered is not None and filtered.hit is not None:
            answer.cache_hit = filtered.hit
            answer.needs_prefill = filtered.needs_prefill or UNSET
        if ticket.reservation_id is not None:
            answer.reservation_id, answer.isl_tokens = ticket.reservation_id, prompt.isl_tokens
            answer.track_prefill_tokens = placement.weights.track_prefill_tokens
            answer.potential_decode_blocks = placement.potential_decode_blocks
        return answer

    def _record(  # noqa: PLR0917 - all pay for names
        self,
        ticket: Ticket,
        placement: Placement,
        rows: Rows,
        answer: Selection,
        now: float,
        hit: CacheHit | None,
        sighting: Sighting | None,
    ) -> None:
        """Keep the record of a decision that has something unusual, or whose tenant has a ring."""
        decisions, partition, seen = self.decisions, ticket.partition, placement.seen
        assert seen is not None
        unusual = None
        if sighting is not None:
            unusual = unusual_facts_of(ticket)
            unusual.shadow = sighting
        elif decisions.common is None and partition.fleet_snapshot is not None:
            ring = decisions.ring_of(partition.scope.tenant_id)
            if ring is not None and ring.keep_usual(
                ticket, placement, rows, now, hit, partition.fleet_snapshot
            ):
                return
        record = decisions.keep(
            ticket, seen, rows, placement.slot, now, unusual, hit, placement.weights
        )
        if record is not None:
            explain(answer, record)
            decisions.note_explained(ticket, record)

    def _place_pair(
        self, ticket: Ticket, rows: Rows, now: float, effects: Effects
    ) -> tuple[Answer, Effects]:
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        if ticket.planned is not None:
            rows = planned_rows(partition, ticket.planned.slot, rows)
        if self.filters.shadow is not None:
            self.filters.shadow.skip(ticket, "pair")
        seen = placement = None
        if self.decisions.is_wanted or request.explain:
            present = partition.at_present(ticket.weights)
            seen = partition.see(prompt, request=request, weights=present)  # before it is booked
        answer: PairSelection
        legs, plan = self._pair_selector.find(ticket, rows, now)
        if plan.mode == "disaggregated":
            answer, effects = self._pair_selector.pairs.book(ticket, plan, now, effects)
            if partition.outliers.ranks and plan.couple is not None:
                partition.outliers.chosen(plan.couple.prefill_slot, now)
                partition.outliers.chosen(plan.couple.decode_slot, now)
        else:
            placement = choose(
                partition, request, prompt, plan.whole, ticket.weights, self._rng, now
            )
            answer, effects = self._pair_selector.pairs.book_one(
                ticket, plan, placement, now, effects
            )
            partition.outliers.chosen(placement.slot, now)
        if seen is not None:
            record = self.decisions.paired(ticket, seen, PairMatch(legs, plan, placement), now)
            if record is not None:  # the confirmed answer is kept unchanged for repeats
                answer = replace(answer)
                explain(answer, record)
                self.decisions.note_explained(ticket, record)
        if self._tracer is not None:
            self._tracer.end()
        return answer, effects


def choose(  # noqa: C901, PLR0912, PLR0917 - every selection pays for names and calls
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
    index, ledger = partition.index, partition.ledger
    fleet_slots, pricer = partition.fleet_slots, partition.pricer
    size, trust, isl_tokens = index.block_size, partition.trust.column, prompt.isl_tokens
    found = shared = preference = None
    if matches is None and not partition.estimate.in_force:  # nearly always
        matches = index.find_matches(prompt.block_hashes, prompt.isl_tokens)
    elif matches is None:
        matches = partition.match(prompt)
    if matches.groups or matches.host or matches.disk:
        found = tier_matches(matches)
        if trust is not None:
            trust = partition.believed(found)
    if prompt.first_hash in ledger.first_blocks:
        shared = ledger.shared_groups(prompt.sequence_hashes)
    if weights is not partition.weights:
        partition.weights, partition.is_kv_cost = weights, weights.is_kv_cost
    present = weights if partition.is_kv_cost else partition.at_present(weights)
    if partition.kv_sources is not None and found is not None:
        found = partition.with_pulls(request, found, shared, present)
        if found.pulls is not None:
            pricer = partition.pull_pricer
    if request.routing_constraints is not UNSET:
        preference = partition.preference(request, rows)
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
    occupant = fleet_slots.occupants[slot]
    assert occupant is not None, "slot without a worker"
    worker, dp_rank = occupant
    left, held, source, pull_tokens = max(0, isl_tokens - cached), (0, 0, 0), None, 0
    if found is None:
        overlap = partition.unmatched.get(worker.worker_id) or partition.no_overlap(worker)
    else:
        overlap, held = worker_overlap(worker, pricer.held_at, size), pricer.held_at(slot)
    seen: Seen | None = None
    if found is not None and found.pulls is not None and pricer.pulled:
        source, pull_tokens = kv_source(fleet_slots, found.pulls, slot), pricer.pull_tokens
    if partition.is_watched or request.explain:
        loads, trusted = ledger.loads, None if trust is None else trust.tobytes()
        seen = loads.packed or loads.pack(), found, shared, trusted
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
        source,
        pull_tokens,
    )
