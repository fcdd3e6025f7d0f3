"""One scope, (model_name, tenant_id): its index, ledger, ranks and queues, and which may be chosen.

A partition joins the index (which rank holds what), the ledger (which rank carries what), the
slots (the ranks that may be chosen) and the queues. It decides nothing and knows no reservation
ids: `routing/place.py` decides with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from indexer.compiled import usable
from indexer.types import WorkerRank
from select_service.core.admission.class_queues import ClassQueues
from select_service.core.admission.drain_rate import DrainRate
from select_service.core.admission.tallies import HitTally
from select_service.core.decisions.trust_factors import Trust
from select_service.core.fleet.eligibility import eligible_slots, wants_everyone
from select_service.core.fleet.outliers import Outliers, OutlierTally
from select_service.core.fleet.roles import transfer_costs
from select_service.core.fleet.slots import FleetSlots
from select_service.core.ledger.cache_estimate import CacheEstimate
from select_service.core.ledger.demand_tally import DemandTally
from select_service.core.ledger.ledger import Ledger
from select_service.core.pricing.cost import (
    Size,
    TierMatches,
    delays,
    preferences,
    terms_of,
    tier_matches,
)
from select_service.core.pricing.estimated_matches import estimated
from select_service.core.pricing.kv_sources import KvSources
from select_service.core.pricing.placement import worker_overlap
from select_service.core.pricing.plain_pricer import Pricer as PlainPricer
from select_service.core.pricing.weights import sequence_blocks, wait_blocks
from select_service.errors import NoEligibleWorker, NoWorkerForRole, WorkerDraining
from select_service.types import (
    CoreLimits,
    Overlap,
    RouterConfig,
    SelectPairRequest,
    TrustSettings,
)

if not TYPE_CHECKING and usable("select_service.core._pricer", 6):
    from select_service.core._pricer import Pricer
else:
    Pricer = PlainPricer

if TYPE_CHECKING:
    from indexer.core.index import KvIndex
    from indexer.core.tiers import Matches
    from indexer.types import Scope
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Floats, Groups, Rows, Slots
    from select_service.core.decisions.fleet_snapshot import FleetSnapshot
    from select_service.core.decisions.shadow_regret import ShadowTally
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.roles import Legs
    from select_service.core.ledger.pull_speeds import PullPath
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.pricing.cost import Terms
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.policy import RoutingPolicy
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.types import PulledBlocks, SelectRequest


class Partition:
    """Index, ledger, fleet and queues of one scope."""

    def __init__(
        self,
        scope: Scope,
        index: KvIndex,
        policy: RoutingPolicy,
        *,
        prefill_tokens_per_s: float,
        trust: TrustSettings | None = None,
        limits: CoreLimits | None = None,
        outliers: OutlierTally | None = None,
        estimate: CacheEstimate | None = None,
        config: RouterConfig | None = None,
    ) -> None:
        self.scope = scope
        self.index = index
        self.estimate = estimate or CacheEstimate()
        """What ranks without KV events probably hold."""
        index.on_clear = self.estimate.clear  # its engine has reported so, or is another one
        self.ledger = Ledger(
            prior_tokens_per_s=prefill_tokens_per_s,
            sequence_blocks=sequence_blocks(index.block_size),
            estimate=self.estimate,
        )
        costs = transfer_costs(config or RouterConfig())
        self.fleet_slots = FleetSlots(costs)
        self.kv_sources: KvSources | None = None
        """Where ranks may pull blocks from; None: they may not."""
        if config is not None and config.kv_pull:
            self.kv_sources = KvSources(
                self.fleet_slots, costs, self.ledger.loads.pull_speeds, self.index.block_size
            )
        self.outliers = Outliers(limits or CoreLimits(), outliers or OutlierTally())
        self.trust = Trust(trust or TrustSettings())
        self.drainage = DrainRate(self.ledger.loads, prior_tokens_per_s=prefill_tokens_per_s)
        self.policy = policy
        self.weights: Weights | None = None  # of the last decision
        self.is_kv_cost = True  # whether they are nothing but the contract's formula
        self.queues = ClassQueues(policy, self.fleet_slots, self.ledger.loads, self.drainage)
        self.holds_to_cache = False
        """Whether a cache-hit threshold also applies to requests without one of their own."""
        self.pricer = self._new_pricer(Pricer)
        self.pull_pricer = self._new_pricer(PlainPricer)
        """Prices what may be pulled, too."""
        self.unmatched: dict[int, Overlap] = {}  # by worker, its overlap if nothing matched
        self.admission: PartitionAdmission | None = None
        """Only if something is to be judged; see `admission/controller.py`."""
        self.hit_tally = HitTally()
        self.demand = DemandTally()
        self.shadow_tally: ShadowTally | None = None
        """What another set of weights would have chosen; see `decisions/shadow.py`."""
        self.is_watched = False
        """Whether decisions are kept; see `decisions/decision_log.py`."""
        self.fleet_snapshot: FleetSnapshot | None = None

    # -- the decision --------------------------------------------------------------------------

    def candidates(self, request: SelectRequest, number: int | None = None) -> Rows:
        """Return the rows that may take the prompt; without ejected ones, if others are left.

        `number` is that of its policy class. If requests of that class wait, having no
        candidate is no error: no overtaking, not even towards a refusal. None: nobody is
        overtaken.

        Raises:
            NoEligibleWorker: there is none.
        """
        fleet_slots = self.fleet_slots
        if (
            request.allowed_worker_ids is None
            and request.pinned_worker is None
            and request.routing_constraints is UNSET
            and not fleet_slots.roles.given
            and fleet_slots.workers
        ):
            rows = fleet_slots.everyone
            return self.outliers.among(rows) if self.outliers.ejected else rows  # nearly always
        try:
            if fleet_slots.roles.given:
                return self.outliers.among(self._candidates_by_role(request))
            if wants_everyone(request) and fleet_slots.workers:
                return self.outliers.among(fleet_slots.everyone)
            slots = eligible_slots(request, fleet_slots.workers)
            if not slots:
                raise fleet_slots.only_draining(request) or NoEligibleWorker()
            return self.outliers.among(np.array(slots, dtype=np.int64))
        except WorkerDraining:
            raise  # requests ahead of it use other workers
        except NoEligibleWorker:
            if number is not None and self.queues.of_class[number]:
                return slice(0, 0)
            raise

    def _candidates_by_role(self, request: SelectRequest) -> Rows:
        workers, roles = self.fleet_slots.workers, self.fleet_slots.roles
        try:
            if isinstance(request, SelectPairRequest):
                return roles.pair_rows(request, workers, self._open_rows)
            if_cached = self.holds_to_cache or request.cache_hit_threshold is not None
            return roles.whole_rows(request, workers, if_cached=if_cached)
        except NoWorkerForRole:
            raise
        except NoEligibleWorker as none:
            raise self.fleet_slots.only_draining(request) or none from None

    # -- the parts of a decision, for callers that do not place -----------------------------------

    def terms(
        self, prompt: Prompt, rows: Rows, weights: Weights, now: float, found: TierMatches | None
    ) -> Terms:
        """Return the terms of each row's cost with this prompt, without preferences."""
        loads, shared = self.ledger.loads, self.booked(prompt)
        size = Size(prompt.isl_tokens, prompt.blocks, self.index.block_size)
        present, trust = self.at_present(weights), self.believed(found)
        return terms_of(loads, rows, size, present, found, shared, trust, now)

    def booked(self, prompt: Prompt) -> Groups | None:
        """Return blocks of the prompt in active chains, and the slots; None: there are none."""
        if prompt.first_hash not in self.ledger.first_blocks:
            return None
        return self.ledger.shared_groups(prompt.sequence_hashes)

    def match(self, prompt: Prompt) -> Matches:
        """Return what ranks hold of a prompt, by their KV events or an estimate."""
        index, estimate = self.index, self.estimate
        matches = index.find_matches(prompt.block_hashes, prompt.isl_tokens)
        if estimate.in_force and prompt.first_hash in estimate.first_blocks:
            likely = estimate.find(prompt.sequence_hashes)
            return estimated(matches, likely, index.capacity, self.trust.stale())
        return matches

    def found(self, prompt: Prompt, matches: Matches | None = None) -> TierMatches | None:
        """Return what ranks hold of a prompt; None: nothing."""
        if matches is None:
            matches = self.match(prompt)
        return None if matches.empty else tier_matches(matches)

    def with_pulls(
        self, request: SelectRequest, found: TierMatches, shared: Groups | None, weights: Weights
    ) -> TierMatches:
        """Return the matches with what ranks could pull from others."""
        assert self.kv_sources is not None
        loads, trust = self.ledger.loads, self.trust.column
        barred = [*self.outliers.suspected()]
        if request.allowed_worker_ids is not None:  # a worker that is left out may be out of reach
            allowed = set(request.allowed_worker_ids)
            for worker_id, worker in self.fleet_slots.workers.items():
                if worker_id not in allowed:
                    barred += worker.slots.values()
        if found.estimated is not None:
            barred += found.estimated.tolist()
        if trust is not None:
            barred += np.flatnonzero(trust[: len(loads.prefill)] < 1.0).tolist()
        booked = None
        if weights.expects_booked and shared is not None:
            booked = np.zeros(len(loads.prefill))
            for blocks, slots in shared:
                booked[slots] = blocks
        worth = 1.0 + delays(loads.churn, loads.requests, weights)
        worth *= min(1.0, weights.overlap_score_credit)
        pulls = self.kv_sources.pulls(found, booked, weights, barred, loads.prefill, worth)
        return found if pulls is None else found._replace(pulls=pulls)

    def note_pull(self, reservation: LedgerReservation, pulled: PulledBlocks | None) -> None:
        """Note on a reservation what it pulls, and through what."""
        if pulled is not None:
            reservation.pulled = pulled
            reservation.pulled_tokens = pulled.blocks * self.index.block_size
            reservation.pull_path = self.pull_path(reservation.slot, pulled)

    def pull_path(self, slot: int, pulled: PulledBlocks) -> PullPath | None:
        """Return what the blocks that a rank pulls move through; None: it is not known here."""
        return None if self.kv_sources is None else self.kv_sources.path(slot, pulled)

    def pulling(
        self, request: SelectRequest, found: TierMatches | None, prompt: Prompt, weights: Weights
    ) -> TierMatches | None:
        """Return the same for callers that do not use `place`: where ranks may pull at all."""
        if found is None or self.kv_sources is None:
            return found
        return self.with_pulls(request, found, self.booked(prompt), weights)

    def preference(self, request: SelectRequest, rows: Rows) -> Floats | None:
        """Return the factor of preferred taints on each row's cost; None: none are preferred."""
        constraints = request.routing_constraints
        if (
            constraints is UNSET
            or not constraints.preferred_taints
            or request.pinned_worker is not None
        ):
            return None
        slots = range(rows.stop) if isinstance(rows, slice) else rows.tolist()
        taints = [self.fleet_slots.taints_at(slot) for slot in slots]
        return preferences(constraints.preferred_taints, taints)

    def at_present(self, weights: Weights) -> Weights:
        """Return the factors of a decision made now; see `Weights`."""
        loads, ranks = self.ledger.loads, max(1, self.fleet_slots.ranks)
        recent = loads.recent
        return weights.at_present(loads.prefilling / ranks, recent.turnover / ranks, recent.pace)

    def see(
        self,
        prompt: Prompt,
        matches: Matches | None = None,
        *,
        request: SelectRequest | None = None,
        weights: Weights | None = None,
    ) -> Seen:
        """Return the inputs of a decision, for callers that do not use `place`.

        With its request and `weights`, as they apply now, what ranks could pull is among them.
        """
        found, shared = self.found(prompt, matches), self.booked(prompt)
        if request is not None and weights is not None:
            found = self.pulling(request, found, prompt, weights)
        trust = self.believed(found)
        return self.ledger.loads.pack(), found, shared, None if trust is None else trust.tobytes()

    def believed(self, found: TierMatches | None) -> Floats | None:
        """Return the factor on what each slot holds; None: full trust.

        How fresh a rank's events are does not matter where they are not what matched.
        """
        if self.trust.column is None or found is None or found.estimated is None:
            return self.trust.column
        return self.trust.without_freshness(found.estimated)

    def no_overlap(self, worker: Worker) -> Overlap:
        """Return a worker's overlap when nothing matched, and keep it."""
        none = worker_overlap(worker, lambda _: (0, 0, 0), self.index.block_size)
        self.unmatched[worker.worker_id] = none
        return none

    def class_of(self, prompt: Prompt, weights: Weights) -> int:
        """Return the position of a prompt's policy class, by its uncached length."""
        if len(self.policy.classes) == 1:
            return 0
        best = self.best_cached_tokens(prompt, self.fleet_slots.everyone, weights)
        return self.policy.class_for(max(0, prompt.isl_tokens - best))

    def best_cached_tokens(
        self, prompt: Prompt, rows: Rows, weights: Weights, matches: Matches | None = None
    ) -> int:
        """Return the most tokens that any candidate has cached, tier-weighted."""
        found = self.found(prompt, matches)
        if found is None:
            return 0
        cached = self.terms(prompt, rows, weights.kv_cost(), 0.0, found).cached_tokens
        return int(cached.max(initial=0.0))

    # -- ranks that may take part of it ----------------------------------------------------------

    def legs(self, request: SelectRequest) -> Legs:
        """Return the candidates for a request by role, decode ranks only if open."""
        legs = self.fleet_slots.roles.legs(request, self.fleet_slots.workers)
        among = self.outliers.among
        return legs._replace(
            whole=among(legs.whole),
            prefill=among(legs.prefill),
            decode=self._open_rows(legs.decode),
        )

    def _open_rows(self, slots: Slots) -> Slots:
        """Return the slots neither ejected nor, according to the gate, if any, busy or full."""
        slots = self.outliers.among(slots)
        if self.admission is None or not len(slots):
            return slots
        if not self.admission.can_take(slots):
            return slots[:0]
        rows = self.admission.usable(slots)
        return slots[rows] if isinstance(rows, slice) else rows

    # -- workers that are here -------------------------------------------------------------------

    def attach(self, worker: Worker) -> None:
        """Attach a worker, or follow a change of its record; ranks keep their slots.

        Ranks that are gone must have been detached before.
        """
        for rank in worker.ranks:
            slot = self.index.attach(WorkerRank(worker.worker_id, rank))
            worker.slots[rank] = slot
        self.ensure_columns()
        self.update_selectable(worker)
        self._estimate(worker)
        loads, max_num_seqs = self.ledger.loads, worker.spec.max_num_seqs
        wait = 0 if max_num_seqs is None else wait_blocks(max_num_seqs, self.index.block_size)
        for slot in worker.slots.values():
            loads.limit_step(slot, worker.spec.max_num_batched_tokens)
            loads.limit_running_requests(slot, max_num_seqs, wait)
        self._note(worker)
        if self.admission is not None:
            if worker.drain is None:
                self.admission.attach(worker)
            else:
                self._give_other_places(self.admission.detach(worker.worker_id))
            self.admission.disregard(self.fleet_slots.leaving())

    def _estimate(self, worker: Worker) -> None:
        """Estimate the ranks of a worker that sends no KV events.

        Whether those of one that should send some are estimated, `trust_monitor.py` decides.
        """
        for slot in worker.slots.values():
            if worker.kv_events == "predicted":
                self.estimate.follow(slot, worker.spec.total_kv_blocks, in_force=True)
            elif worker.kv_events == "none":
                self.estimate.drop(slot)

    def update_selectable(self, worker: Worker) -> None:
        """Update the selectable ranks for a worker that has its slots; O(its ranks)."""
        self._leave(worker.worker_id, self.fleet_slots.take(worker))
        if worker.drain is None:
            self.queues.attach(worker)

    def _leave(self, worker_id: int, slots: list[int]) -> None:
        """Forget what was known about the previous occupants of these slots."""
        self.queues.leave(slots)
        self.unmatched.pop(worker_id, None)

    def _new_pricer(self, kind: type[Pricer]) -> Pricer:
        loads = self.ledger.loads
        columns = loads.prefill, loads.decode, loads.churn, loads.context
        return kind(*columns, loads.queue_updated_at, loads.ahead, loads.requests, loads.slowness)

    def replace_engine(self, slot: int, now: float) -> None:
        """Forget what was learnt of a rank's engine: its worker has another endpoint from now on.

        Events are of their source, at an endpoint of its own, and so is distrust of them.
        """
        if slot in self.estimate.followed:
            self.trust.forget(slot)
        self.ledger.replace_engine(slot, now)
        self.outliers.forget(slot)

    def ensure_columns(self) -> None:
        """Grow the columns with the index, which may have gained ranks of its own."""
        self.ledger.ensure(self.index.capacity)
        self.trust.ensure(self.index.capacity)
        self.fleet_slots.ensure(self.index.capacity)
        self.queues.ensure(self.index.capacity)
        self.pricer = self._new_pricer(Pricer)
        self.pull_pricer = self._new_pricer(PlainPricer)

    def detach(self, worker: Worker) -> None:
        """Remove a worker; its slots must be free of load."""
        self._leave(worker.worker_id, self.fleet_slots.let_go(worker))
        self.demand.leave(worker.worker_id)
        self._note(worker)
        if self.admission is not None:
            self._give_other_places(self.admission.detach(worker.worker_id))
            self.admission.disregard(self.fleet_slots.leaving())

    def _note(self, worker: Worker) -> None:
        if self.fleet_snapshot is not None:
            self.fleet_snapshot.note(worker.worker_id)

    def _give_other_places(self, displaced: list[Ticket]) -> None:
        """Give tickets that held a place with a removed worker another place, if there is one."""
        assert self.admission is not None
        for ticket in displaced:
            try:
                rows = self.candidates(ticket.request)
            except NoEligibleWorker:
                continue  # it is refused at the next check
            ticket.place = self.admission.caps.take_place(rows)

    def open_gate(self, admission: PartitionAdmission) -> None:
        """Judge requests from now on."""
        self.admission = admission
        for worker in self.fleet_slots.workers.values():
            admission.attach(worker)
        admission.disregard(self.fleet_slots.leaving())

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
        admission = self.admission
        waiting = 0 if admission is None else len(admission.waiting) + len(admission.displaced)
        return waiting + self.queues.pending

    @property
    def pending_isl_tokens(self) -> int:
        """The sum of their prompt lengths, in tokens."""
        waiting = 0 if self.admission is None else self.admission.waiting_isl_tokens
        return waiting + self.queues.pending_isl_tokens

    def check(self) -> None:
        """Assert all invariants of the partition."""
        self.index.check()
        self.estimate.check()
        self.ledger.check()
        self.trust.check()
        self.queues.check()
        self.fleet_slots.check()
        self.outliers.check()
        for rank, slot in self.fleet_slots.ranks_and_slots():
            assert self.index.rank_of(slot) == rank
        if self.admission is not None:
            self.admission.check()
        owned = {slot for _, slot in self.fleet_slots.ranks_and_slots()}
        for slot, requests in enumerate(self.ledger.loads.requests):
            assert slot in owned or requests == 0, "no load without a worker"
            assert slot in owned or self.trust.factor(slot) == 1.0, "nor an opinion"
