"""One scope, (model_name, tenant_id): `place` is the whole decision on one screen.

A partition joins the index (which rank holds what), the ledger (which rank carries what), the
seating (who may be chosen) and the queues (who waits). It books nothing and knows no reservation
ids: `service.py` comes before it; eligibility, projection, scoring and picking come after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from indexer.compiled import usable
from indexer.types import WorkerRank
from select_service.core.admission.class_queues import ClassQueues
from select_service.core.admission.drainage import Drainage
from select_service.core.admission.hit_tally import HitTally
from select_service.core.books.demand_tally import DemandTally
from select_service.core.books.ledger import Ledger
from select_service.core.books.loads import worked_off
from select_service.core.fleet.eligibility import eligible_slots, wants_everyone
from select_service.core.fleet.seating import Seating
from select_service.core.pricing.picking import pick
from select_service.core.pricing.placement import (
    Placement,
    device_overlap,
    forgone_tokens,
    worker_overlap,
)
from select_service.core.pricing.projection import matched, project
from select_service.core.pricing.scoring import costs, is_plain, prefer
from select_service.core.pricing.weights import SEQUENCE_TOKENS, wait_blocks
from select_service.core.trust.factors import Trust
from select_service.errors import NoEligibleWorker, NoWorkerForRole
from select_service.types import Overlap, SelectPairRequest, TrustSettings

if not TYPE_CHECKING and usable("select_service.core._pricer", 2):
    from select_service.core._pricer import Pricer
else:
    from select_service.core.pricing.plain_pricer import Pricer

if TYPE_CHECKING:
    import random

    from indexer.core.index import KvIndex
    from indexer.core.tiers import Matches
    from indexer.types import Scope
    from select_service.core.admission.gatekeeping import Gatekeeper
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Floats, Groups, Rows, Slots
    from select_service.core.decisions.lookout import Lookout
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.roles import Legs
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.policy import RoutingPolicy
    from select_service.core.pricing.projection import Overlap as OverlapColumns
    from select_service.core.pricing.projection import Projection
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.regrets import ShadowTally
    from select_service.core.pricing.weights import Weights
    from select_service.types import SelectRequest


class Partition:
    """Index, ledger, seating and queues of one scope."""

    def __init__(
        self,
        scope: Scope,
        index: KvIndex,
        policy: RoutingPolicy,
        *,
        prefill_tokens_per_s: float,
        trust: TrustSettings | None = None,
    ) -> None:
        self.scope = scope
        self.index = index
        self.ledger = Ledger(
            prior_tokens_per_s=prefill_tokens_per_s,
            sequence_blocks=round(SEQUENCE_TOKENS / index.block_size),
        )
        self.seating = Seating()
        self.trust = Trust(trust or TrustSettings())
        self.drainage = Drainage(self.ledger.loads.work, prior_tokens_per_s=prefill_tokens_per_s)
        self.policy = policy
        self._weights: Weights | None = None  # of the last decision
        self._is_kv_cost = True  # whether they are nothing but the contract's formula
        self.queues = ClassQueues(policy, self.seating, self.ledger.loads, self.drainage)
        self.holds_to_cache = False
        """Whether a cache-hit threshold also applies to requests without one of their own."""
        self.pricer = self._new_pricer()
        self._unmatched: dict[int, Overlap] = {}  # by worker, its overlap if nothing matched
        self.admission: Gatekeeper | None = None
        """Only if something is to be judged; see `admission/admitting.py`."""
        self.hit_tally = HitTally()
        self.demand = DemandTally()
        self.shadow_tally: ShadowTally | None = None
        """What another set of weights would have chosen; see `shadow/onlooker.py`."""
        self.is_watched = False
        """Whether decisions are kept; see `decisions/keeping.py`."""
        self.lookout: Lookout | None = None

    # -- the decision --------------------------------------------------------------------------

    def candidates(self, request: SelectRequest) -> Rows:
        """Return the rows that may take the prompt.

        Raises:
            NoEligibleWorker: there is none.
        """
        seating = self.seating
        if seating.roles.given:
            return self._candidates_by_role(request)
        if wants_everyone(request) and seating.workers:
            return seating.everyone
        slots = eligible_slots(request, seating.workers)
        if not slots:
            raise seating.only_draining(request) or NoEligibleWorker()
        return np.array(slots, dtype=np.int64)

    def _candidates_by_role(self, request: SelectRequest) -> Rows:
        workers, roles = self.seating.workers, self.seating.roles
        try:
            if isinstance(request, SelectPairRequest):
                return roles.pair_rows(request, workers, self._open_rows)
            if_cached = self.holds_to_cache or request.cache_hit_threshold is not None
            return roles.whole_rows(request, workers, if_cached=if_cached)
        except NoWorkerForRole:
            raise
        except NoEligibleWorker as none:
            raise self.seating.only_draining(request) or none from None

    def place(  # noqa: PLR0917 - every selection pays for names
        self,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        rng: random.Random,
        now: float,
        matches: Matches | None = None,
    ) -> Placement:
        """Choose a rank among the candidate rows: project, price, prefer, pick.

        The prompt is looked up in the index unless `matches` is given.
        """
        if matches is None:
            matches = self.index.find_matches(prompt.block_hashes)
        watched = self.is_watched or request.explain
        if weights is not self._weights:
            self._weights, self._is_kv_cost = weights, weights.is_kv_cost
        present = weights if self._is_kv_cost else self.at_present(weights)
        if not (matches.host or matches.disk) and is_plain(request, present):
            return self._place_plain(prompt, rows, present, rng, now, matches, watched)
        projection, prices = self.priced(request, prompt, rows, weights, now, matches)
        position = pick(prices, weights.temperature, rng)
        slot = position if isinstance(rows, slice) else int(rows[position])
        worker, dp_rank = self.seating.rank_at(slot)
        taken = projection.overlap
        if taken is None:
            overlap, device, host, disk = self.no_overlap(worker), 0.0, 0.0, 0.0
        else:
            overlap = worker_overlap(worker, projection.matched, self.index.block_size)
            device, host = float(taken.device[position]), float(taken.host[position])
            disk = float(taken.disk[position])
        cached = projection.cached_tokens
        left = max(0, prompt.isl_tokens - int(cached[position]))
        forgone = left - max(0, min(left, prompt.isl_tokens - int(cached.max())))
        seen: Seen | None = None
        if watched:
            held: Groups | OverlapColumns | None = projection.matched
            # in the same form as the other paths
            if held is not None and not projection.has_lower_tiers:
                held = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
            seen = self.ledger.loads.pack(), held, projection.shared, self._believed()
        return Placement(
            worker,
            dp_rank,
            slot,
            float(prices[position]),
            overlap,
            device,
            host,
            disk,
            left,
            forgone,
            int(projection.decode[position]),
            present,
            seen,
        )

    def _place_plain(  # noqa: PLR0917 - as above
        self,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        rng: random.Random,
        now: float,
        matches: Matches,
        watched: object,  # if true, the inputs of the decision are returned, too
    ) -> Placement:
        """The fast path: no special constraints, and no lower tiers involved."""
        ledger, pricer = self.ledger, self.pricer
        matched = None
        if matches.groups:
            matched = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
        isl_tokens, size = prompt.isl_tokens, self.index.block_size
        shared, trust = None, self.trust.column
        if ledger.blocks.begins(prompt.first_hash):
            shared = ledger.shared_groups(prompt.sequence_hashes)
        # positional and inline, because every selection pays for building arguments
        slot, cost, decode = pricer.cheapest(
            rows.stop if type(rows) is slice else rows,
            isl_tokens,
            size,
            prompt.blocks,
            weights.prefill_load_scale,
            weights.overlap_score_credit,
            weights.track_prefill_tokens,
            matched,
            shared,
            rng.random,
            trust,
            None if self._is_kv_cost else weights.of_ours,
            now,
        )
        worker, dp_rank = self.seating.rank_at(slot)
        device = 0
        if matched is None:
            overlap = self.no_overlap(worker)
        else:
            device = pricer.matched_at(slot)
            overlap = device_overlap(worker, pricer, size, device)
        cached = device * size
        if trust is not None:  # trusted tokens need not be computed
            cached = int(cached * trust[slot])
        left = isl_tokens - cached if cached < isl_tokens else 0
        forgone = 0
        if matched is not None and left:
            forgone = forgone_tokens(matched, rows, isl_tokens, size, left, trust)
        seen: Seen | None = None
        if watched:
            believed = None if trust is None else trust.tobytes()
            loads = ledger.loads
            packed = loads.packed
            if not packed:
                recent = loads.recent
                pace = recent.pace if loads.follows_queues else None
                packed = pricer.packed(loads.prefilling, recent.turnover, pace)
                loads.packed = packed
            seen = packed, matched, shared, believed
        return Placement(
            worker,
            dp_rank,
            slot,
            cost,
            overlap,
            float(device),
            0.0,
            0.0,
            left,
            forgone,
            decode,
            weights,
            seen,
        )

    def priced(
        self,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        now: float,
        matches: Matches,
    ) -> tuple[Projection, Floats]:
        """Return what each of the rows would carry with this prompt, and what it costs."""
        projection = self.project(prompt, rows, weights, matches)
        prices = self.costs(projection, rows, weights, now)
        constraints = request.routing_constraints
        if (
            constraints is not UNSET
            and constraints.preferred_taints
            and request.pinned_worker is None
        ):
            taints = [self.seating.rank_at(slot)[0].taints for slot in self._slots(rows)]
            prices = prefer(prices, constraints.preferred_taints, taints)
        return projection, prices

    # -- the parts of a decision, for callers that do not place -----------------------------------

    def project(
        self, prompt: Prompt, rows: Rows, weights: Weights, matches: Matches | None = None
    ) -> Projection:
        """Return what each of the rows would carry with this prompt."""
        trust = self.trust.column
        return project(self.ledger, self.index, prompt, rows, weights, matches, trust)

    def at_present(self, weights: Weights) -> Weights:
        """Return the weights that apply to a decision made now; see `Weights`."""
        loads, ranks = self.ledger.loads, max(1, self.seating.ranks)
        recent = loads.recent
        return weights.at_present(loads.prefilling / ranks, recent.turnover / ranks, recent.pace)

    def costs(self, projection: Projection, rows: Rows, weights: Weights, now: float) -> Floats:
        """Return what each of the rows costs, without preferences."""
        present = self.at_present(weights)
        if present.pace:
            loads = self.ledger.loads
            worked = worked_off(loads.heard[rows], loads.ahead[rows], present.pace, now)
            projection = projection._replace(worked=worked)
        return costs(projection, present)

    def quote(
        self,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        now: float,
        device: Groups | None,
        shared: Groups | None,
    ) -> tuple[int, float, int]:
        """Return (slot, cost, decode blocks) of the cheapest rank, the first of equals.

        Only if nothing but the formula decides (`is_plain`) and no lower tiers are involved.

        Args:
            prompt: what is to be placed.
            rows: the candidates.
            weights: plain ones.
            now: monotonic seconds.
            device: matched blocks on devices, as `see` returns them.
            shared: matched blocks in active chains.
        """
        return self.pricer.cheapest(
            rows.stop if isinstance(rows, slice) else rows,
            prompt.isl_tokens,
            self.index.block_size,
            prompt.blocks,
            weights.prefill_load_scale,
            weights.overlap_score_credit,
            weights.track_prefill_tokens,
            device,
            shared,
            lambda: 0.0,
            self.trust.column,
            None if weights.is_kv_cost else self.at_present(weights).of_ours,
            now,
        )

    def believed_tokens(self, slot: int) -> int:
        """Tokens that a rank is trusted to have on its device, according to the last quote."""
        tokens, trust = self.pricer.matched_at(slot) * self.index.block_size, self.trust.column
        return tokens if trust is None else int(tokens * trust[slot])

    def see(self, prompt: Prompt, matches: Matches | None = None) -> Seen:
        """Return the inputs of a decision, for callers that do not use `place`."""
        if matches is None:
            matches = self.index.find_matches(prompt.block_hashes)
        shared = None
        if self.ledger.blocks.begins(prompt.first_hash):
            shared = self.ledger.shared_groups(prompt.sequence_hashes)
        if matches.host or matches.disk:
            overlap = matched(self.index, matches)[0]
            return self.ledger.loads.pack(), overlap, shared, self._believed()
        groups = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
        return self.ledger.loads.pack(), groups or None, shared, self._believed()

    def _believed(self) -> bytes | None:
        trust = self.trust.column
        return None if trust is None else trust.tobytes()

    def no_overlap(self, worker: Worker) -> Overlap:
        """Return a worker's overlap when nothing matched."""
        known = self._unmatched.get(worker.worker_id)
        if known is None:
            known = self._unmatched[worker.worker_id] = worker_overlap(
                worker, None, self.index.block_size
            )
        return known

    def _slots(self, rows: Rows) -> list[int]:
        return list(range(rows.stop)) if isinstance(rows, slice) else [int(slot) for slot in rows]

    def class_of(self, prompt: Prompt, weights: Weights) -> int:
        """Return the position of a prompt's policy class, by its uncached length."""
        if len(self.policy.classes) == 1:
            return 0
        best = self.best_cached_tokens(prompt, self.seating.everyone, weights)
        return self.policy.class_for(max(0, prompt.isl_tokens - best))

    def best_cached_tokens(
        self, prompt: Prompt, rows: Rows, weights: Weights, matches: Matches | None = None
    ) -> int:
        """Return the most tokens that any candidate has cached, tier-weighted."""
        if matches is None:
            matches = self.index.find_matches(prompt.block_hashes)
        if matches.empty:
            return 0
        on_device = not (matches.host or matches.disk) and self.trust.column is None
        if on_device and isinstance(rows, slice):
            held = [
                blocks for blocks, mask in matches.groups if (matches.slots(mask) < rows.stop).any()
            ]
            return max(held, default=0) * self.index.block_size
        projection = self.project(prompt, rows, weights, matches)
        return int(projection.cached_tokens.max(initial=0.0))

    # -- who may take part of it --------------------------------------------------------------

    def legs(self, request: SelectRequest) -> Legs:
        """Return the candidates for a request by role, decode ranks only if open."""
        legs = self.seating.roles.legs(request, self.seating.workers)
        return legs._replace(decode=self._open_rows(legs.decode))

    def _open_rows(self, slots: Slots) -> Slots:
        """Return the slots that are neither busy nor full, according to the gate, if any."""
        if self.admission is None or not len(slots):
            return slots
        if not self.admission.can_take(slots):
            return slots[:0]
        rows = self.admission.usable(slots)
        return slots[rows] if isinstance(rows, slice) else rows

    # -- who is here ---------------------------------------------------------------------------

    def seat(self, worker: Worker) -> None:
        """Seat a worker, or follow a change of its record; ranks keep their slots.

        Ranks that are gone must have been unseated before.
        """
        for rank in worker.ranks:
            slot = self.index.attach(WorkerRank(worker.worker_id, rank))
            worker.slots[rank] = slot
        self.make_room()
        self.sit(worker)
        loads, seats = self.ledger.loads, worker.spec.max_num_seqs
        wait = 0 if seats is None else wait_blocks(seats, self.index.block_size)
        for slot in worker.slots.values():
            loads.limit_step(slot, worker.spec.max_num_batched_tokens)
            loads.limit_seats(slot, seats, wait)
        self._note(worker)
        if self.admission is not None:
            if worker.drain is None:
                self.admission.seat(worker)
            else:
                self._rehouse(self.admission.unseat(worker.worker_id))
            self.admission.disregard(self.seating.leaving())

    def sit(self, worker: Worker) -> None:
        """Update the selectable ranks for a worker that has its slots; O(its ranks)."""
        self._leave(worker.worker_id, self.seating.take(worker))
        if worker.drain is None:
            self.queues.seat(worker)

    def _leave(self, worker_id: int, slots: list[int]) -> None:
        """Forget what was known about the previous occupants of these slots."""
        self.queues.leave(slots)
        self._unmatched.pop(worker_id, None)

    def _new_pricer(self) -> Pricer:
        loads = self.ledger.loads
        columns = loads.prefill, loads.decode, loads.churn, loads.context
        return Pricer(*columns, loads.heard, loads.ahead)

    def make_room(self) -> None:
        """Grow the columns with the index, which may have gained ranks of its own."""
        self.ledger.ensure(self.index.capacity)
        self.trust.ensure(self.index.capacity)
        self.seating.ensure(self.index.capacity)
        self.queues.ensure(self.index.capacity)
        self.pricer = self._new_pricer()

    def unseat(self, worker: Worker) -> None:
        """Remove a worker; its slots must be free of load."""
        self._leave(worker.worker_id, self.seating.let_go(worker))
        self.demand.leave(worker.worker_id)
        self._note(worker)
        if self.admission is not None:
            self._rehouse(self.admission.unseat(worker.worker_id))
            self.admission.disregard(self.seating.leaving())

    def _note(self, worker: Worker) -> None:
        if self.lookout is not None:
            self.lookout.note(worker.worker_id)

    def _rehouse(self, homeless: list[Ticket]) -> None:
        """Give tickets that held a place with a removed worker another place, if there is one."""
        assert self.admission is not None
        for ticket in homeless:
            try:
                rows = self.candidates(ticket.request)
            except NoEligibleWorker:
                continue  # it is refused at the next check
            ticket.place = self.admission.caps.take_place(rows)

    def open_gate(self, keeper: Gatekeeper) -> None:
        """Judge requests from now on."""
        self.admission = keeper
        for worker in self.seating.workers.values():
            keeper.seat(worker)
        keeper.disregard(self.seating.leaving())

    # -- waiting -------------------------------------------------------------------------------

    def enqueue(
        self, number: int, ticket: Ticket, rows: Rows, now: float, *, is_known: bool = False
    ) -> None:
        """Let a ticket wait in its class; limits do not apply to one that waited before.

        Raises:
            QueueFull: a limit of the class is reached.
        """
        ticket.cached_tokens = self.best_cached_tokens(ticket.prompt, rows, ticket.weights)
        self.queues.enter(number, ticket, now, is_known=is_known)

    def tickets(self) -> list[Ticket]:
        """Return all waiting tickets, except those that are to be judged again."""
        waiting = [] if self.admission is None else [*self.admission.waiting]
        return [*waiting, *self.queues.tickets()]

    @property
    def pending_count(self) -> int:
        """How many requests wait."""
        keeper = self.admission
        waiting = 0 if keeper is None else len(keeper.waiting) + len(keeper.displaced)
        return waiting + self.queues.pending

    @property
    def pending_isl_tokens(self) -> int:
        """The sum of their prompt lengths, in tokens."""
        waiting = 0 if self.admission is None else self.admission.waiting_isl_tokens
        return waiting + self.queues.pending_isl_tokens

    def check(self) -> None:
        """Assert all invariants of the partition."""
        self.index.check()
        self.ledger.check()
        self.trust.check()
        self.queues.check()
        self.seating.check()
        for rank, slot in self.seating.seats():
            assert self.index.rank_of(slot) == rank
        if self.admission is not None:
            self.admission.check()
        owned = {slot for _, slot in self.seating.seats()}
        for slot, requests in enumerate(self.ledger.loads.requests):
            assert slot in owned or requests == 0, "no load without a worker"
            assert slot in owned or self.trust.factor(slot) == 1.0, "nor an opinion"
