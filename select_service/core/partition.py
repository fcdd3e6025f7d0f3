"""One scope, (model_name, tenant_id): `place` is the whole decision on one screen.

A partition joins the index (who holds what), the ledger (who carries what) and the workers that
may be chosen. It books nothing and knows no reservation ids: `service.py` stands before it,
eligibility, projection, scoring and picking stand after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET, Struct

from indexer.compiled import usable
from select_service.core.admission.cache_hits import HitTally
from select_service.core.admission.drainage import Drainage
from select_service.core.admission.queue import PendingQueue, Ticket, order_key
from select_service.core.books.demand_tally import DemandTally
from select_service.core.books.ledger import Ledger
from select_service.core.columns import grown
from select_service.core.fleet.eligibility import eligible_slots, wants_everyone
from select_service.core.fleet.roles import Roles
from select_service.core.pricing.picking import pick
from select_service.core.pricing.projection import matched, project
from select_service.core.pricing.scoring import costs, prefer
from select_service.core.trust.trust import Trust
from select_service.errors import NoEligibleWorker, NoWorkerForRole, QueueFull, WorkerDraining
from select_service.types import (
    LoadRow,
    Overlap,
    OverlapRow,
    SelectPairRequest,
    TrustSettings,
    WorkerRank,
)

if not TYPE_CHECKING and usable("select_service.core._speed", 11):
    from select_service.core._speed import Pricer
else:
    from select_service.core.pricing.plain_pricer import Pricer

if TYPE_CHECKING:
    import random

    from indexer.core.index import KvIndex
    from indexer.core.tiers import Matches
    from indexer.types import Scope
    from select_service.core.admission.gatekeeping import Gatekeeper
    from select_service.core.columns import Floats, Rows, Slots
    from select_service.core.decisions.lookout import Lookout
    from select_service.core.decisions.record import Groups, Seen
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.roles import Legs
    from select_service.core.pricing.policy import PolicyClass, RoutingPolicy
    from select_service.core.pricing.projection import Overlap as OverlapColumns
    from select_service.core.pricing.projection import Projection
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.scoring import Weights
    from select_service.core.shadow.tally import ShadowTally
    from select_service.types import SelectRequest

_NEVER_BUSY = np.inf


class Placement(Struct, frozen=True):
    """The chosen rank and the facts that chose it."""

    worker: Worker
    dp_rank: int
    slot: int
    cost: float
    overlap: Overlap  # of the worker, in tokens
    device_blocks: float
    host_blocks: float  # extension
    disk_blocks: float  # extension
    effective_prefill_tokens: int
    potential_decode_blocks: int
    weights: Weights
    seen: Seen | None = None  # what decided it, when somebody keeps that


class Partition:
    """Index, ledger, workers and queue of one scope."""

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
        self.ledger = Ledger()
        self.trust = Trust(trust or TrustSettings())
        self.drainage = Drainage(self.ledger.work, prior_tokens_per_s=prefill_tokens_per_s)
        self.policy = policy
        self.workers: dict[int, Worker] = {}
        """Those who may be chosen."""
        self.seated: dict[int, Worker] = {}
        """With them those who drain: they keep load and index, and take nothing more."""
        self.queues = [PendingQueue() for _ in policy.classes]
        self._turn = 0  # whose class drains next, and how often before the next one does
        self._quantum_left = policy.classes[0].quantum
        self.roles = Roles((), 0)
        self.holds_to_cache = False
        """Whether requests that say nothing of it are held to a cache-hit threshold, too."""
        self._owner: list[Worker | None] = []  # by slot
        self._rank: list[int] = []  # by slot
        self._pricer = self._new_pricer()
        self._unmatched: dict[int, Overlap] = {}  # by worker, what it says when nothing matched
        self.everyone: Rows = slice(0, 0)
        self._ranks = 0  # how many that is
        self._busy_above: list[Floats] = [np.empty(0) for _ in policy.classes]
        self._can_be_busy = [False for _ in policy.classes]
        self.admission: Gatekeeper | None = None
        """Only where something is to be judged; see `admission/admitting.py`."""
        self.hit_tally = HitTally()
        self.demand = DemandTally()
        self.shadow_tally: ShadowTally | None = None
        """What another set of weights would have chosen, once one looks on; see `shadow.py`."""
        self.is_watched = False
        """Whether decisions are kept; see `decisions/decisions.py`."""
        self.lookout: Lookout | None = None

    # -- who is here ---------------------------------------------------------------------------

    def seat(self, worker: Worker) -> None:
        """Take a worker in, or follow a change of its record; ranks keep their slots.

        Ranks that are gone must have been unseated before.
        """
        self.seated[worker.worker_id] = worker
        if worker.drain is None:
            self.workers[worker.worker_id] = worker
        else:
            self.workers.pop(worker.worker_id, None)
        for rank in worker.ranks:
            slot = self.index.attach(WorkerRank(worker.worker_id, rank))
            worker.slots[rank] = slot
        self.make_room()
        self._note(worker)
        if self.admission is not None:
            if worker.drain is None:
                self.admission.seat(worker)
            else:
                self._rehouse(self.admission.unseat(worker.worker_id))
            self.admission.disregard(self._leaving)

    def _new_pricer(self) -> Pricer:
        ledger = self.ledger
        return Pricer(ledger.prefill, ledger.decode, ledger.churn, ledger.context)

    def make_room(self) -> None:
        """Let the columns follow the index, which may have got ranks of its own."""
        self.ledger.ensure(self.index.capacity)
        self.trust.ensure(self.index.capacity)
        self._pricer = self._new_pricer()
        self._reseat()

    def unseat(self, worker: Worker) -> None:
        """Let a worker go; its slots must be free of load."""
        self.workers.pop(worker.worker_id, None)
        self.seated.pop(worker.worker_id, None)
        self._reseat()
        self._note(worker)
        if self.admission is not None:
            self._rehouse(self.admission.unseat(worker.worker_id))
            self.admission.disregard(self._leaving)

    @property
    def _leaving(self) -> list[int]:
        """Slots of those who drain."""
        drains = (worker for worker in self.seated.values() if worker.drain is not None)
        return [slot for worker in drains for slot in worker.slots.values()]

    def _note(self, worker: Worker) -> None:
        if self.lookout is not None:
            self.lookout.note(worker.worker_id)

    def _rehouse(self, homeless: list[Ticket]) -> None:
        """Give who held a place with a worker that went a place with another, if there is one."""
        assert self.admission is not None
        for ticket in homeless:
            try:
                rows = self.candidates(ticket.request)
            except NoEligibleWorker:
                continue  # it is told when somebody looks
            ticket.place = self.admission.caps.take_place(rows)

    def open_gate(self, keeper: Gatekeeper) -> None:
        """From now on requests are judged."""
        self.admission = keeper
        for worker in self.workers.values():
            keeper.seat(worker)
        keeper.disregard(self._leaving)

    def _reseat(self) -> None:
        rows = self.index.capacity
        self._unmatched.clear()
        self.roles = Roles(self.workers.values(), rows)
        self._owner = [None] * rows
        self._rank = [0] * rows
        for worker in self.seated.values():
            for rank, slot in worker.slots.items():
                self._owner[slot] = worker
                self._rank[slot] = rank
        taken = sorted(slot for one in self.workers.values() for slot in one.slots.values())
        self._ranks = len(taken)
        dense = taken == list(range(len(taken)))
        self.everyone = slice(0, len(taken)) if dense else np.array(taken, dtype=np.int64)
        for number, one in enumerate(self.policy.classes):
            column = grown(np.empty(0), rows, _NEVER_BUSY)
            for slot in taken:
                owner = self._owner[slot]
                assert owner is not None
                column[slot] = _busy_above(one, owner.spec.max_num_batched_tokens)
            self._busy_above[number] = column
            self._can_be_busy[number] = bool((column != _NEVER_BUSY).any())

    def rank_at(self, slot: int) -> tuple[Worker, int]:
        """Return the worker and dp_rank that occupy a slot."""
        owner = self._owner[slot]
        assert owner is not None, "slot without a worker"
        return owner, self._rank[slot]

    def taints_at(self, slot: int) -> frozenset[str]:
        """Return the taints of who occupies a slot; a wave may have planned with who has gone."""
        owner = self._owner[slot]
        return frozenset() if owner is None else owner.taints

    # -- the decision --------------------------------------------------------------------------

    def candidates(self, request: SelectRequest) -> Rows:
        """Return the rows that may take the prompt.

        Raises:
            NoEligibleWorker: there is none.
        """
        if self.roles.given:
            return self._candidates_by_role(request)
        if wants_everyone(request) and self.workers:
            return self.everyone
        slots = eligible_slots(request, self.workers)
        if not slots:
            raise self._nobody(request) or NoEligibleWorker()
        return np.array(slots, dtype=np.int64)

    def _candidates_by_role(self, request: SelectRequest) -> Rows:
        try:
            if isinstance(request, SelectPairRequest):
                return self.roles.pair_rows(request, self.workers, self._open_rows)
            if_cached = self.holds_to_cache or request.cache_hit_threshold is not None
            return self.roles.whole_rows(request, self.workers, if_cached=if_cached)
        except NoWorkerForRole:
            raise
        except NoEligibleWorker as none:
            raise self._nobody(request) or none from None

    def _nobody(self, request: SelectRequest) -> WorkerDraining | None:
        """Say so where those who could serve a request drain."""
        leaving = {id_: one for id_, one in self.seated.items() if one.drain is not None}
        slots = eligible_slots(request, leaving) if leaving else []
        ids = dict.fromkeys(self.rank_at(slot)[0].worker_id for slot in slots)
        return WorkerDraining(ids) if ids else None

    def _open_rows(self, slots: Slots) -> Slots:
        """Return those that are neither busy nor full, as far as anybody judges that."""
        if self.admission is None or not len(slots):
            return slots
        if not self.admission.can_take(slots):
            return slots[:0]
        rows = self.admission.usable(slots)
        return slots[rows] if isinstance(rows, slice) else rows

    def legs(self, request: SelectRequest) -> Legs:
        """Return who may take a request, and who either part of it."""
        legs = self.roles.legs(request, self.workers)
        return legs._replace(decode=self._open_rows(legs.decode))

    def project(
        self, prompt: Prompt, rows: Rows, weights: Weights, matches: Matches | None = None
    ) -> Projection:
        """Return what each of the rows would carry with this prompt."""
        trust = self.trust.column
        return project(self.ledger, self.index, prompt, rows, weights, matches, trust)

    def at_present(self, weights: Weights) -> Weights:
        """Return what a decision made now multiplies with; see `Weights`."""
        ledger, ranks = self.ledger, max(1, self._ranks)
        return weights.at_present(ledger.prefilling / ranks, ledger.churned / ranks)

    def priced(
        self,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        matches: Matches,
    ) -> tuple[Projection, Floats]:
        """Return what each of the rows would carry with this prompt, and what it costs."""
        projection = self.project(prompt, rows, weights, matches)
        prices = costs(projection, self.at_present(weights))
        constraints = request.routing_constraints
        if (
            constraints is not UNSET
            and constraints.preferred_taints
            and request.pinned_worker is None
        ):
            taints = [self.rank_at(slot)[0].taints for slot in self._slots(rows)]
            prices = prefer(prices, constraints.preferred_taints, taints)
        return projection, prices

    def place(
        self,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        rng: random.Random,
        matches: Matches | None = None,
    ) -> Placement:
        """Choose a rank among the candidate rows: project, price, prefer, pick.

        What the index finds for the prompt is looked up unless somebody just did.
        """
        if matches is None:
            matches = self.index.find_matches(prompt.block_hashes)
        asked = weights
        if not weights.is_kv_cost:
            weights = self.at_present(weights)
        if not (matches.host or matches.disk) and is_plain(request, weights):
            watched = self.is_watched or request.explain
            return self._place_plain(prompt, rows, weights, rng, matches, watched)
        projection, prices = self.priced(request, prompt, rows, asked, matches)
        position = pick(prices, weights.temperature, rng)
        slot = position if isinstance(rows, slice) else int(rows[position])
        worker, dp_rank = self.rank_at(slot)
        isl_tokens, taken = prompt.isl_tokens, projection.overlap
        seen: Seen | None = None
        if self.is_watched or request.explain:
            seen = self.ledger.columns(), projection.matched, projection.shared, self._believed()
        cost, decode = float(prices[position]), int(projection.decode[position])
        if taken is None:
            overlap = self._no_overlap(worker)
            return Placement(
                *(worker, dp_rank, slot, cost, overlap, 0.0, 0.0, 0.0, isl_tokens, decode),
                weights,
                seen,
            )
        return Placement(
            *(worker, dp_rank, slot, cost),
            self.worker_overlap(worker, projection.matched),
            float(taken.device[position]),
            float(taken.host[position]),
            float(taken.disk[position]),
            max(0, isl_tokens - int(projection.cached_tokens[position])),
            decode,
            weights,
            seen,
        )

    def _place_plain(
        self,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        rng: random.Random,
        matches: Matches,
        watched: object,  # any true value: what decides is returned, too
    ) -> Placement:
        """The same without special wishes and where lower tiers take no part."""
        ledger, pricer = self.ledger, self._pricer
        matched = None
        if matches.groups:
            matched = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
        isl_tokens, size = prompt.isl_tokens, self.index.block_size
        shared, trust = None, self.trust.column
        if ledger.blocks.begins(prompt.first_hash):
            shared = ledger.shared_groups(prompt.sequence_hashes)
        # arguments by place and one by one: every selection pays for what puts them together
        slot, cost, decode = pricer.cheapest(
            rows.stop if isinstance(rows, slice) else rows,
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
            None if weights.is_kv_cost else weights.of_ours,
        )
        worker, dp_rank = self.rank_at(slot)
        device = 0
        if matched is None:
            overlap = self._no_overlap(worker)
        else:
            device = pricer.matched_at(slot)
            of_ranks = {
                str(rank): pricer.matched_at(at) * size for rank, at in worker.slots.items()
            }
            best = max(of_ranks.values())
            overlap = Overlap(best, best, of_ranks, best, best)
        left = max(0, isl_tokens - device * size)
        if trust is not None:  # what we believe will have to be computed
            left = max(0, isl_tokens - int(device * size * trust[slot]))
        seen: Seen | None = None
        if watched:
            believed = None if trust is None else trust.tobytes()
            packed = ledger.packed
            if not packed:
                packed = ledger.packed = pricer.packed(ledger.prefilling, ledger.churned)
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
            decode,
            weights,
            seen,
        )

    def quote(
        self,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        device: Groups | None,
        shared: Groups | None,
    ) -> tuple[int, float, int]:
        """Return (slot, cost, decode blocks) of the cheapest rank, the first of equals.

        Where nothing but the formula decides (`is_plain`) and lower tiers take no part.

        Args:
            prompt: what is to be placed.
            rows: the candidates.
            weights: plain ones.
            device: blocks of it on devices, as `see` returns them.
            shared: and in active chains.
        """
        return self._pricer.cheapest(
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
        )

    def believed_tokens(self, slot: int) -> int:
        """Tokens that a rank is believed to have on its device, by what was quoted last."""
        tokens, trust = self._pricer.matched_at(slot) * self.index.block_size, self.trust.column
        return tokens if trust is None else int(tokens * trust[slot])

    def see(self, prompt: Prompt, matches: Matches | None = None) -> Seen:
        """Return what decides where a prompt goes, for who does not place it by `place`."""
        if matches is None:
            matches = self.index.find_matches(prompt.block_hashes)
        shared = None
        if self.ledger.blocks.begins(prompt.first_hash):
            shared = self.ledger.shared_groups(prompt.sequence_hashes)
        if matches.host or matches.disk:
            overlap = matched(self.index, matches)[0]
            return self.ledger.columns(), overlap, shared, self._believed()
        groups = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
        return self.ledger.columns(), groups or None, shared, self._believed()

    def _believed(self) -> bytes | None:
        trust = self.trust.column
        return None if trust is None else trust.tobytes()

    def _no_overlap(self, worker: Worker) -> Overlap:
        """Return what a worker says of which nothing matched."""
        known = self._unmatched.get(worker.worker_id)
        if known is None:
            known = self._unmatched[worker.worker_id] = self.worker_overlap(worker, None)
        return known

    def _slots(self, rows: Rows) -> list[int]:
        return list(range(rows.stop)) if isinstance(rows, slice) else [int(slot) for slot in rows]

    def worker_overlap(self, worker: Worker, columns: OverlapColumns | None) -> Overlap:
        """Matched tokens of the whole worker: cumulative per rank, best rank per tier."""
        if columns is None:
            return Overlap(0, 0, {str(rank): 0 for rank in worker.slots}, 0, 0)
        gpu = cpu = disk = 0
        per_rank: dict[str, int] = {}
        size = self.index.block_size
        for rank, slot in worker.slots.items():
            device = int(columns.device[slot])
            host = device + int(columns.host[slot])
            last = host + int(columns.disk[slot])
            per_rank[str(rank)] = device * size
            gpu, cpu, disk = max(gpu, device), max(cpu, host), max(disk, last)
        return Overlap(disk * size, gpu * size, per_rank, cpu * size, disk * size)

    # -- waiting -------------------------------------------------------------------------------

    def must_wait(self, number: int, rows: Rows) -> bool:
        """Tell whether a new request waits: others of its class do, or all its ranks are busy."""
        return self.queues[number].pending > 0 or self.all_busy(number, rows)

    def all_busy(self, number: int, rows: Rows) -> bool:
        """Tell whether every candidate carries more prefill than its threshold (strictly)."""
        if not self._can_be_busy[number]:
            return False
        prefill, busy_above = self.ledger.prefill, self._busy_above[number]
        first = 0 if isinstance(rows, slice) else rows[0]
        if prefill.item(first) <= busy_above.item(first):
            return False  # nearly always, at a tenth of the price of looking at everyone
        return bool((prefill[rows] > busy_above[rows]).all())

    def class_of(self, prompt: Prompt, weights: Weights) -> int:
        """Return the position of the policy class of a prompt, by its uncached length."""
        if len(self.policy.classes) == 1:
            return 0
        best = self.best_cached_tokens(prompt, self.everyone, weights)
        return self.policy.class_for(max(0, prompt.isl_tokens - best))

    def best_cached_tokens(
        self, prompt: Prompt, rows: Rows, weights: Weights, matches: Matches | None = None
    ) -> int:
        """Return the most tokens any candidate has cached, tier-weighted."""
        if matches is None:
            matches = self.index.find_matches(prompt.block_hashes)
        if matches.empty:
            return 0
        is_plain = not (matches.host or matches.disk) and self.trust.column is None
        if is_plain and isinstance(rows, slice):
            held = [
                blocks for blocks, mask in matches.groups if (matches.slots(mask) < rows.stop).any()
            ]
            return max(held, default=0) * self.index.block_size
        projection = self.project(prompt, rows, weights, matches)
        return int(projection.cached_tokens.max(initial=0.0))

    def enqueue(
        self, number: int, ticket: Ticket, rows: Rows, now: float, *, is_known: bool = False
    ) -> None:
        """Let a ticket wait in its class; one that waited before is not held to its limits.

        Raises:
            QueueFull: a limit of the class is reached.
        """
        one, queue = self.policy.classes[number], self.queues[number]
        ticket.cached_tokens = self.best_cached_tokens(ticket.prompt, rows, ticket.weights)
        waiting = (
            ("requests", one.request_queue_limit_per_worker, len(queue)),
            ("raw_isl_tokens", one.raw_isl_token_queue_limit_per_worker, queue.pending_isl_tokens),
            (
                "cached_tokens",
                one.cached_token_queue_limit_per_worker,
                queue.pending_cached_tokens,
            ),
        )
        for kind, per_worker, current in waiting:
            if (
                not is_known
                and per_worker is not None
                and current >= per_worker * len(self.workers)
            ):
                full = _queue_full(one.name, kind, current, per_worker * len(self.workers))
                full.retry_after_s = self.return_s(now)
                raise full
        ticket.key = order_key(one.queue_policy, ticket, now, one.overtaking_s)
        queue.push(ticket)

    def return_s(self, now: float) -> float:
        """Return when who was refused for those who wait in the queues should ask again.

        One place is free when one of them has gone, which takes what a request has to compute on
        average; whatever class it is of, the same ranks compute it.
        """
        work = self.ledger.prefill_backlog
        work += sum(queue.pending_isl_tokens - queue.pending_cached_tokens for queue in self.queues)
        requests = self.ledger.prefilling + sum(map(len, self.queues))
        ranks = sum(len(worker.slots) for worker in self.workers.values())
        return self.drainage.return_s(work / max(1, requests), work, ranks, now)

    def next_admissible(self) -> Ticket | None:
        """Take the next waiting ticket that has a free rank, or that nobody may serve any more.

        Classes take turns, each for up to its quantum; a head that must wait blocks its own class
        only. The caller places (and books) it before asking again.
        """
        for step in range(len(self.queues)):
            number = (self._turn + step) % len(self.queues)
            ticket = self.queues[number].head()
            if ticket is None:
                continue
            try:
                rows = self.candidates(ticket.request)
            except NoEligibleWorker:
                rows = None
            if rows is None or self._may_take(number, rows):
                self.queues[number].remove(ticket)
                self._spend_turn(number)
                return ticket
        return None

    def _may_take(self, number: int, rows: Rows) -> bool:
        if self.admission is None:
            return not self.all_busy(number, rows)
        if not self.admission.can_take(rows):
            return False
        return not self.all_busy(number, self.admission.usable(rows))

    def next_at_gate(self) -> Ticket | None:
        """Return who of those at the gate has a worker now, or never will; it stays where it is."""
        keeper = self.admission
        if keeper is None or not keeper.waiting:
            return None
        if not self.workers:  # a policy lets nobody go then; nobody need wait to hear that
            return next(iter(keeper.waiting))
        for ticket in keeper.in_order():
            try:
                rows = self.candidates(ticket.request)
            except NoEligibleWorker:
                return ticket
            if keeper.can_take(rows):
                return ticket
        return None

    def _spend_turn(self, number: int) -> None:
        if number != self._turn:
            self._turn, self._quantum_left = number, self.policy.classes[number].quantum
        self._quantum_left -= 1
        if self._quantum_left <= 0:
            self._turn = (number + 1) % len(self.queues)
            self._quantum_left = self.policy.classes[self._turn].quantum

    def tickets(self) -> list[Ticket]:
        """Return everybody who waits, but for those who are to be judged again."""
        waiting = [] if self.admission is None else [*self.admission.waiting]
        return [*waiting, *(ticket for queue in self.queues for ticket in queue.tickets())]

    def withdraw(self, ticket: Ticket) -> bool:
        """Take a ticket out of whichever queue it waits in."""
        return any(queue.remove(ticket) for queue in self.queues)

    @property
    def pending_count(self) -> int:
        """How many requests wait."""
        keeper = self.admission
        waiting = 0 if keeper is None else len(keeper.waiting) + len(keeper.displaced)
        for queue in self.queues:
            waiting += queue.pending
        return waiting

    @property
    def pending_isl_tokens(self) -> int:
        """The sum of their prompt lengths, in tokens."""
        waiting = 0 if self.admission is None else self.admission.waiting_isl_tokens
        return waiting + sum(queue.pending_isl_tokens for queue in self.queues)

    # -- inspection ----------------------------------------------------------------------------

    def seats(self) -> list[tuple[WorkerRank, int]]:
        """Return every rank with its slot, by worker id and rank; also of those who drain."""
        return [
            (WorkerRank(worker_id, rank), slot)
            for worker_id in sorted(self.seated)
            for rank, slot in self.seated[worker_id].slots.items()
        ]

    def open_seats(self) -> list[tuple[WorkerRank, int]]:
        """Return those of them that may be chosen."""
        return [seat for seat in self.seats() if seat[0].worker_id in self.workers]

    def loads(self) -> list[LoadRow]:
        """Return the present load of every rank."""
        ledger = self.ledger
        return [
            LoadRow(
                rank.worker_id,
                rank.dp_rank,
                ledger.prefill_tokens(slot),
                int(ledger.decode[slot]),
                int(ledger.requests[slot]),
            )
            for rank, slot in self.seats()
        ]

    def potential_loads(self, prompt: Prompt, weights: Weights) -> list[LoadRow]:
        """Return the load every rank would carry with this prompt (contract 5.2)."""
        seats = self.open_seats()
        rows = np.array([slot for _, slot in seats], dtype=np.int64)
        projection = self.project(prompt, rows, weights)
        added = [
            max(0, prompt.isl_tokens - int(cached)) if weights.track_prefill_tokens else 0
            for cached in projection.cached_tokens
        ]
        return [
            LoadRow(
                rank.worker_id,
                rank.dp_rank,
                self.ledger.prefill_tokens(slot) + added[row],
                int(projection.decode[row]),
                int(self.ledger.requests[slot]),
            )
            for row, (rank, slot) in enumerate(seats)
        ]

    def overlap_rows(self, prompt: Prompt, weights: Weights) -> list[OverlapRow]:
        """Return the matched blocks of every rank (contract 5.3)."""
        columns, _ = matched(self.index, self.index.find_matches(prompt.block_hashes))
        rows = []
        for rank, slot in self.open_seats():
            device = host = disk = 0
            if columns is not None:
                device, host, disk = (int(column[slot]) for column in columns)
            credit = (
                weights.overlap_score_credit * device
                + weights.host_cache_hit_weight * host
                + weights.disk_cache_hit_weight * disk
            )
            rows.append(
                OverlapRow(
                    worker_id=rank.worker_id,
                    dp_rank=rank.dp_rank,
                    device_blocks=device,
                    host_pinned_blocks=device + host,
                    disk_blocks=device + host + disk,
                    host_pinned_extension_blocks=host,
                    disk_extension_blocks=disk,
                    shared_beyond_device_blocks=None,
                    router_credit_blocks=credit,
                )
            )
        return rows

    def check(self) -> None:
        """State every promise of the partition."""
        self.index.check()
        self.ledger.check()
        self.trust.check()
        for queue in self.queues:
            queue.check()
        assert self.workers == {i: one for i, one in self.seated.items() if one.drain is None}
        for worker in self.seated.values():
            assert worker.lifecycle == ("schedulable" if worker.drain is None else "draining")
            assert set(worker.slots) == set(worker.ranks), "a seat per rank"
            for rank, slot in worker.slots.items():
                assert self.rank_at(slot) == (worker, rank)
                assert self.index.rank_of(slot) == WorkerRank(worker.worker_id, rank)
        owned = {slot for worker in self.seated.values() for slot in worker.slots.values()}
        if self.admission is not None:
            self.admission.check()
        for slot, requests in enumerate(self.ledger.requests):
            assert slot in owned or requests == 0, "no load without a worker"
            assert slot in owned or self.trust.factor(slot) == 1.0, "nor an opinion"


def is_plain(request: SelectRequest, weights: Weights) -> bool:
    """Tell whether nothing but the formula decides, without its rarer terms."""
    constraints = request.routing_constraints
    return (
        weights.temperature == 0.0
        and weights.overlap_score_credit_decay <= 0.0
        and (constraints is UNSET or not constraints.preferred_taints)
    )


def _busy_above(one: PolicyClass, max_num_batched_tokens: int | None) -> float:
    """Prefill tokens above which a rank is busy (contract 3.6); D1: no capacity, never busy."""
    limits = []
    if one.prefill_busy_threshold is not None:
        limits.append(one.prefill_busy_threshold)
    fraction = one.prefill_busy_threshold_frac
    if fraction is not None and fraction != np.inf and max_num_batched_tokens is not None:
        limits.append(fraction * max_num_batched_tokens)  # a capacity of 0 makes inf a nan
    return min(limits, default=_NEVER_BUSY)


def _queue_full(name: str, kind: str, current: int, limit: int) -> QueueFull:
    return QueueFull(
        f'router policy class "{name}" queue {kind} limit reached '
        f"(current={current}, limit={limit})",
        details={"policy_class": name, "limit_kind": kind, "current": current, "limit": limit},
    )
