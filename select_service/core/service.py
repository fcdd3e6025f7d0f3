"""Every public verb of the service, pure: typed request and `now` in, (answer, Effects) out.

One call is one step: nothing is awaited between a choice and its booking, which is why
select-and-reserve is atomic without a lock. The driver stands before it; catalog, membership,
partitions and the booking desk do the work behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, UnsetType

from indexer.core.hashing import unpack_i64
from select_service.core.catalog import Catalog, reconciliation_failed
from select_service.core.changes import LEASE, PEER, RESERVATION, WORKER, Changes
from select_service.core.counters import Counters
from select_service.core.desk import Desk, Order, fingerprint_of
from select_service.core.discovery import API
from select_service.core.effects import NOTHING, Effects, Pull
from select_service.core.eligibility import check_wishes
from select_service.core.matchmaking import Matchmaker
from select_service.core.membership import Membership
from select_service.core.pairs import Pairs
from select_service.core.partition import blocks_of
from select_service.core.policy import default_policy
from select_service.core.prompt import read_booking, read_prompt
from select_service.core.queue import Ticket
from select_service.core.recovered import RecoveredRanks
from select_service.core.replicas import Replicas
from select_service.core.scoring import weights_in_force
from select_service.core.state import LeaseRoom, PeerEndpoints, Reservations, State, Workers
from select_service.errors import (
    InvalidField,
    InvalidRequest,
    NoEligibleWorker,
    NoSchedulableWorker,
    RankNotFound,
    ServiceError,
    WorkerConflict,
    WorkerNotFound,
    scope_text,
)
from select_service.pair_types import PairSelection, SelectPairRequest
from select_service.types import (
    Advice,
    BatchFree,
    BatchPrefillComplete,
    CoreLimits,
    KvRankState,
    OperationResult,
    OverlapScores,
    Ready,
    ReplicaStatus,
    ReservationAnswer,
    ScopeLoads,
    SelectAndReserveRequest,
    Selection,
    SharedCache,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

    from indexer.core.registry import Registry
    from indexer.types import Scope, WorkerRank
    from select_service.core.catalog import Worker
    from select_service.core.columns import Rows
    from select_service.core.leases import Lease
    from select_service.core.partition import Partition, Placement
    from select_service.core.policy import PolicyBook, PolicyError
    from select_service.core.prompt import Prompt
    from select_service.core.replica_messages import ReplicaMessage, SnapshotHead, SnapshotPart
    from select_service.core.scoring import Weights
    from select_service.types import (
        BatchRequest,
        LeaseList,
        LeaseRecord,
        LeaseRenewal,
        LeaseRequest,
        LoadRow,
        Operation,
        OverlapScoresRequest,
        PotentialLoadsRequest,
        PromptFields,
        ReservationRequest,
        RouterConfig,
        SelectRequest,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )


_OPERATED: Final = OperationResult(200)


class SelectionCore:
    """The whole state of one process, and the verbs that change it."""

    def __init__(  # noqa: PLR0913 - settings, keyword only
        self,
        registry: Registry,
        config: RouterConfig,
        rng: random.Random,
        *,
        policies: PolicyBook | PolicyError | None = None,
        limits: CoreLimits | None = None,
        router_id: int = 0,
        epoch: int = 1,
        trace_decisions: bool = False,
    ) -> None:
        """Start empty.

        Args:
            registry: the index side; its streams feed the partitions opened here.
            config: weights and switches.
            rng: draws ties, temperatures and reservation ids.
            policies: parsed policy file, or why it cannot be used; None: one fcfs class.
            limits: bounds.
            router_id: non-zero when a replica plane is on; then bookings are published.
            epoch: which life of this router id this is, from 1.
            trace_decisions: report every placement in `Effects.decided`.
        """
        self.registry = registry
        self.config = config
        self.limits = limits or CoreLimits()
        self.counters = Counters()
        self.catalog = Catalog(data_parallel_size_max=self.limits.data_parallel_size_max)
        self.desk = Desk(self.limits, self.counters, router_id, epoch)
        self.membership = Membership(
            registry,
            policies or default_policy(config.queue_threshold),
            use_kv_events=config.use_kv_events,
        )
        self.replicas = Replicas(
            self.limits, self.desk.announcer.claims, self.desk, self.membership
        )
        self.peer_endpoints = PeerEndpoints(NOTHING)
        self.state = State(
            {
                WORKER: Workers(self.catalog, self._restore_worker),
                LEASE: LeaseRoom(self.desk.leases, NOTHING),
                PEER: self.peer_endpoints,
                RESERVATION: Reservations(self.desk, self.catalog, self.partitions, NOTHING),
            }
        )
        self.recovered = RecoveredRanks(
            registry, self.partitions, unclaimed_s=self.limits.recovery_unclaimed_s
        )
        self.sources: set[str] = set()
        """Sources of workers that are at work; only they may change what they registered."""
        self.trace_decisions = trace_decisions
        self._rng = rng
        self.pairs = Pairs(self.desk, self.counters)
        self.matchmaker = Matchmaker(
            self.pairs, self.counters, rng, transfer_cost=config.kv_transfer_cost_per_block
        )
        self._weights = weights_in_force(config, None)
        self._schedulable = 0
        self._rechecked_at: float | None = None

    @property
    def partitions(self) -> dict[Scope, Partition]:
        """Every scope that ever had a schedulable worker."""
        return self.membership.partitions

    # -- workers -------------------------------------------------------------------------------

    def upsert_worker(
        self, spec: WorkerSpec, now: float, source: str = API
    ) -> tuple[WorkerRecord, Effects]:
        """Put a whole record into the catalog (contract 1.3).

        Raises:
            WorkerConflict: another source keeps this worker.
        """
        self._check_source(spec.worker_id, source)
        return self._replace(self.catalog.admit(spec, source), now)

    def note_recovered(self, ranks: Mapping[Scope, list[WorkerRank]], now: float) -> None:
        """A dump was loaded into the indexes: its ranks wait to be claimed by workers."""
        for scope, some in ranks.items():
            self.recovered.note(scope, some, now)

    def make_room(self, scope: Scope) -> None:
        """An index got ranks that no worker has brought: the columns must be as long."""
        partition = self.partitions.get(scope)
        if partition is not None:
            partition.make_room()

    def _restore_worker(self, spec: WorkerSpec, now: float, source: str) -> Effects:
        return self.upsert_worker(spec, now, source)[1]

    def _check_source(self, worker_id: int, source: str) -> None:
        known = self.catalog.find(worker_id)
        if known is None or known.source == source:
            return
        if source != API or known.source in self.sources:
            raise WorkerConflict(worker_id, known.source)

    def patch_worker(
        self, worker_id: int, patch: WorkerPatch, now: float
    ) -> tuple[WorkerRecord, Effects]:
        """Merge a patch into a record (contract 1.3).

        Raises:
            WorkerNotFound: no such id.
            WorkerConflict: another source keeps this worker.
        """
        self._check_source(worker_id, API)
        return self._replace(self.catalog.patched(worker_id, patch), now)

    def delete_worker(
        self, worker_id: int, now: float, source: str = API
    ) -> tuple[WorkerRecord, Effects]:
        """Remove a record; its load and its index go with it (D5).

        Raises:
            WorkerNotFound: no such id.
            WorkerConflict: another source keeps this worker.
        """
        self._check_source(worker_id, source)
        worker = self.catalog.get(worker_id)
        effects = Effects()
        self._reseat(worker, None, effects, now)
        self.catalog.remove(worker_id)
        self._recount()
        worker.lifecycle, worker.reasons = "unschedulable", []
        return worker.record(), effects

    def _replace(self, worker: Worker, now: float) -> tuple[WorkerRecord, Effects]:
        effects = Effects()
        self.membership.judge(worker)
        self._reseat(self.catalog.find(worker.worker_id), worker, effects, now)
        self.catalog.put(worker)
        self._recount()
        return self._record(worker), effects

    def _reseat(self, old: Worker | None, new: Worker | None, effects: Effects, now: float) -> None:
        """Let ranks go and come; of the load that goes, the first slice is cleared away at once."""
        self.desk.dropped(self.membership.replace(old, new, effects))
        partition = None if old is None else self.partitions.get(old.scope)
        if partition is not None:
            self.desk.sweep(partition, self.limits.dropped_per_turn_max, now)
        if new is not None:
            self.replicas.resolver.worker_came(new.scope, new.worker_id)

    def refuse_source(self, rank: WorkerRank, why: str, now: float) -> Effects:
        """Put a worker out of service whose event source cannot be listened to.

        Args:
            rank: whose source it is.
            why: what the socket said.
            now: monotonic seconds.
        """
        effects = Effects()
        old = self.catalog.get(rank.worker_id)
        worker = self.catalog.admit(old.spec, old.source)
        where = f"worker {rank.worker_id} dp_rank {rank.dp_rank}"
        worker.reasons = [reconciliation_failed(f"event source of {where}: {why}")]
        self._reseat(old, worker, effects, now)
        self.catalog.put(worker)
        self._recount()
        return effects

    def worker(self, worker_id: int) -> WorkerRecord:
        """Return one record.

        Raises:
            WorkerNotFound: no such id.
        """
        return self._record(self.catalog.get(worker_id))

    def _recount(self) -> None:
        self._schedulable = sum(worker.lifecycle == "schedulable" for worker in self.catalog)

    def _record(self, worker: Worker) -> WorkerRecord:
        doubtful = [
            KvRankState(stream.rank.dp_rank, "uncertain", stream.lost_batches)
            for stream in self.membership.streams_of(worker)
            if stream.kv_state == "uncertain"
        ]
        return worker.record(doubtful)

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """Return records by ascending id, filtered exactly."""
        return [
            self._record(worker)
            for worker in self.catalog
            if (model_name is None or worker.scope.model_name == model_name)
            and (tenant_id is None or worker.scope.tenant_id == tenant_id)
        ]

    def ready(self) -> Ready:
        """Return whether at least one worker can be scheduled, with all records."""
        return Ready(self._schedulable > 0, self._schedulable, self.workers())

    # -- selection -----------------------------------------------------------------------------

    def select(
        self, request: SelectRequest, now: float
    ) -> tuple[Selection | PairSelection | Ticket, Effects]:
        """Choose a worker; a Ticket when the request has to wait (contract 3).

        Raises:
            ServiceError: as in contract 2 and 3.
        """
        try:
            return self._select(request, now)
        except ServiceError as refusal:
            self._count(refusal)
            raise

    def _select(
        self, request: SelectRequest, now: float
    ) -> tuple[Selection | PairSelection | Ticket, Effects]:
        partition, prompt, weights = self._read(request)
        number, rows = self._gate(partition, request, prompt, weights)
        if partition.must_wait(number, rows):
            ticket = Ticket(partition, request, prompt, weights, None, b"")
            return self._wait(ticket, number, rows, now), NOTHING
        placement = partition.place(request, prompt, rows, weights, self._rng)
        return self._answer(partition, request, prompt, placement), self._decided(
            placement, NOTHING
        )

    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[Selection | PairSelection | Ticket, Effects]:
        """Choose a worker and book it in the same step; a Ticket when it has to wait.

        Args:
            request: as sent.
            now: monotonic seconds.
            unknown: canonical bytes of members nobody knows; part of what makes a repeat equal.

        Raises:
            ServiceError: as in contract 2 to 4.
        """
        try:
            return self._select_and_reserve(request, now, unknown)
        except ServiceError as refusal:
            self._count(refusal)
            raise

    def select_pair(
        self, request: SelectPairRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[PairSelection | Ticket, Effects]:
        """Book a prefill and a decode rank in the same step, or one that does both if better.

        Raises:
            ServiceError: as `select_and_reserve`, or naming the role that nobody has.
        """
        answer, effects = self.select_and_reserve(request, now, unknown=unknown)
        assert not isinstance(answer, Selection)
        return answer, effects

    def _count(self, refusal: ServiceError) -> None:
        failed = self.counters.selections_failed
        failed[refusal.code] = failed.get(refusal.code, 0) + 1

    def _select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, unknown: bytes
    ) -> tuple[Selection | PairSelection | Ticket, Effects]:
        partition, prompt, weights = self._read(request)
        fingerprint = b""
        if request.reservation_id is not None:
            fingerprint = fingerprint_of(request, unknown)
            known = self.desk.repeated_selection(request.reservation_id, fingerprint)
            if known is not None:
                return known, NOTHING
        self.desk.terms(request)
        number, rows = self._gate(partition, request, prompt, weights)
        ticket = Ticket(partition, request, prompt, weights, self._id_for(request), fingerprint)
        if partition.must_wait(number, rows):
            return self._wait(ticket, number, rows, now), NOTHING
        if isinstance(request, SelectPairRequest):
            return self.matchmaker.serve(ticket, rows, None, now, NOTHING)
        placement = partition.place(request, prompt, rows, weights, self._rng)
        return self._book_placement(ticket, placement, now, NOTHING)

    def _read(self, request: SelectRequest) -> tuple[Partition, Prompt, Weights]:
        read = self._inspect(request)
        check_wishes(request)
        return read

    def _inspect(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        partition = self._usable(request)
        index = partition.index
        prompt = read_prompt(request, block_size=index.block_size, is_eagle=index.is_eagle)
        return partition, prompt, self._weights_for(request)

    def _usable(self, request: PromptFields) -> Partition:
        if not self._schedulable:
            raise NoSchedulableWorker.anywhere()
        scope = request.scope
        partition = self.partitions.get(scope)
        if partition is None or not partition.workers:
            raise NoSchedulableWorker.in_scope(scope)
        return partition

    def _weights_for(self, request: PromptFields) -> Weights:
        override = request.router_config_override
        return self._weights if override is None else weights_in_force(self.config, override)

    def _gate(
        self, partition: Partition, request: SelectRequest, prompt: Prompt, weights: Weights
    ) -> tuple[int, Rows]:
        """Return the request's policy class and the rows that may take it."""
        number = partition.class_of(prompt, weights)
        try:
            return number, partition.candidates(request)
        except NoEligibleWorker:
            if partition.queues[number]:  # no overtaking, not even towards a refusal (3.6)
                return number, slice(0, 0)
            raise

    def _id_for(self, request: SelectAndReserveRequest) -> str:
        """Return the id given, which may be empty, or a new one."""
        return self._new_id() if request.reservation_id is None else request.reservation_id

    def _new_id(self) -> str:
        """Return a random UUIDv4."""
        bits = self._rng.getrandbits(128)
        bits = bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62)
        text = f"{bits:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def _book_placement(
        self, ticket: Ticket, placement: Placement, now: float, effects: Effects
    ) -> tuple[Selection, Effects]:
        partition, request, prompt = ticket.partition, ticket.request, ticket.prompt
        assert ticket.reservation_id is not None
        assert isinstance(request, SelectAndReserveRequest)
        track = placement.weights.track_prefill_tokens
        order = Order(
            ticket.reservation_id,
            ticket.fingerprint,
            prompt,
            placement.effective_prefill_tokens if track else 0,
            track,
            *self.desk.terms(request),
        )
        reservation = self.desk.book(partition, placement.slot, order, now)
        answer = self._answer(partition, request, prompt, placement)
        answer.reservation_id = ticket.reservation_id
        answer.isl_tokens = prompt.isl_tokens
        answer.track_prefill_tokens = track
        answer.potential_decode_blocks = placement.potential_decode_blocks
        kept = msgspec.structs.replace(answer)  # without the hashes: the ledger has them
        effects = self.desk.confirm(partition, reservation, request, kept, effects)
        answer.sequence_hashes = unpack_i64(prompt.sequence_hashes)
        return answer, self._decided(placement, effects)

    def _answer(
        self, partition: Partition, request: SelectRequest, prompt: Prompt, placement: Placement
    ) -> Selection:
        self.counters.selections += 1
        worker = placement.worker
        advice: Advice | UnsetType = UNSET
        if partition.roles.given:
            advice = self.matchmaker.advise(partition, request, prompt, placement.weights, None)
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
            advice=advice,
        )

    def _decided(self, placement: Placement, effects: Effects) -> Effects:
        if not self.trace_decisions:
            return effects
        effects = Effects() if effects is NOTHING else effects
        effects.decided.append(placement)
        return effects

    # -- waiting -------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket, number: int, rows: Rows, now: float) -> Ticket:
        ticket.partition.enqueue(number, ticket, rows, now)
        self.desk.bookings.wait(ticket)
        self.counters.selections_waited += 1
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """One caller of a waiting request went away; the last one takes the ticket with it.

        Returns:
            True when the ticket left the queue.
        """
        ticket.holders -= 1
        if ticket.holders > 0 or not ticket.partition.withdraw(ticket):
            return False
        self.desk.bookings.waited(ticket)
        self.counters.selections_withdrawn += 1
        return True

    def _drain(self, partition: Partition, now: float, effects: Effects) -> Effects:
        """Admit waiting requests while their ranks are free; each is booked before the next."""
        while (ticket := partition.next_admissible()) is not None:
            effects = Effects() if effects is NOTHING else effects
            self.desk.bookings.waited(ticket)
            ticket.answer = self._admit(ticket, now, effects)
            effects.answered.append(ticket)
        return effects

    def _admit(
        self, ticket: Ticket, now: float, effects: Effects
    ) -> Selection | PairSelection | ServiceError:
        partition, request = ticket.partition, ticket.request
        try:
            rows = partition.candidates(request)
            if ticket.reservation_id is not None:  # taken by an explicit booking meanwhile?
                self.desk.repeated_selection(ticket.reservation_id, b"")
                assert isinstance(request, SelectAndReserveRequest)
                self.desk.terms(request)  # has its lease ended meanwhile?
            if isinstance(request, SelectPairRequest):
                return self.matchmaker.serve(ticket, rows, None, now, effects)[0]
            placement = partition.place(request, ticket.prompt, rows, ticket.weights, self._rng)
        except ServiceError as refusal:
            self._count(refusal)
            return refusal
        if ticket.reservation_id is None:
            self._decided(placement, effects)
            return self._answer(partition, request, ticket.prompt, placement)
        return self._book_placement(ticket, placement, now, effects)[0]

    # -- reservations --------------------------------------------------------------------------

    def reserve(
        self, request: ReservationRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[ReservationAnswer, Effects]:
        """Book a rank the caller has chosen (contract 4.2). Never waits.

        Raises:
            ServiceError: as in contract 2 and 4.
        """
        partition = self._usable(request)
        index = partition.index
        prompt = read_booking(request, block_size=index.block_size, is_eagle=index.is_eagle)
        prefill, track = self._prefill_to_book(request, prompt)
        worker, dp_rank = self._rank_asked(partition, request)
        fingerprint = fingerprint_of(request, unknown)
        known = self.desk.repeated_reservation(request.reservation_id, fingerprint)
        if known is not None:
            return known, NOTHING
        terms = self.desk.terms(request)
        order = Order(request.reservation_id, fingerprint, prompt, prefill, track, *terms)
        reservation = self.desk.book(partition, worker.slots[dp_rank], order, now)
        answer = ReservationAnswer(
            request.reservation_id,
            partition.scope.model_name,
            partition.scope.tenant_id,
            worker.worker_id,
            dp_rank,
            worker.spec.endpoint,
        )
        return answer, self.desk.confirm(partition, reservation, request, answer, NOTHING)

    def _rank_asked(self, partition: Partition, request: ReservationRequest) -> tuple[Worker, int]:
        worker = partition.workers.get(request.worker_id)
        if worker is None:
            raise WorkerNotFound(
                f"schedulable worker {request.worker_id} not found for "
                f"{scope_text(partition.scope)}",
                field="worker_id",
            )
        dp_rank = request.dp_rank or 0
        if dp_rank not in worker.slots:
            raise RankNotFound(
                f"worker {request.worker_id} has no dp_rank {dp_rank}", field="dp_rank"
            )
        return worker, dp_rank

    def _prefill_to_book(self, request: ReservationRequest, prompt: Prompt) -> tuple[int, bool]:
        """Return the prefill tokens to book and whether they are tracked (table of contract 4.2).

        An explicit number beats every switch.
        """
        given = request.effective_prefill_tokens
        if given is not None:
            if given > prompt.isl_tokens:
                raise InvalidRequest(
                    f"effective_prefill_tokens ({given}) must not exceed "
                    f"isl_tokens ({prompt.isl_tokens})",
                    field="effective_prefill_tokens",
                )
            return given, True
        track = self._weights_for(request).track_prefill_tokens
        if request.track_prefill_tokens is not None:
            track = track and request.track_prefill_tokens
        return (prompt.isl_tokens if track else 0), track

    def prefill_complete(self, name: str, now: float) -> Effects:
        """The prompt is computed: its prefill tokens leave, its blocks stay. Repeatable.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        of_pair = self.pairs.prefill_complete(name, now)
        partition, effects = of_pair or self.desk.prefill_complete(name, now)
        if partition is None:
            return effects
        return self._drain(partition, now, effects) if partition.pending_count else effects

    def output_block(
        self, name: str, decay_fraction: float | None, now: float, count: int = 1
    ) -> Effects:
        """The request fills so many more blocks; see contract 4.3 for the fraction.

        Raises:
            InvalidRequest: a fraction outside 0..1; checked before the id.
            ReservationNotFound: nothing live has that id.
        """
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise InvalidRequest(
                "decay_fraction must be between 0.0 and 1.0", field="decay_fraction"
            )
        if not self.pairs.output_block(name, decay_fraction, now, count):
            self.desk.output_block(name, decay_fraction, now, count)
        return NOTHING

    def free(self, name: str, now: float) -> Effects:
        """End a reservation; ending a recently freed one is no error (D4).

        Raises:
            ReservationNotFound: the id was never seen.
        """
        partition, effects = self.pairs.free(name, now) or self.desk.free(name, now)
        if partition is None or not partition.pending_count:
            return effects
        return self._drain(partition, now, effects)

    def check_batch(self, request: BatchRequest) -> None:
        """Refuse more operations than may come at once; then `operate` each in turn.

        Raises:
            InvalidField: too many.
        """
        most = self.limits.batch_operations_max
        if len(request.operations) > most:
            raise InvalidField(f"operations must be at most {most}", field="operations")

    def operate(self, operation: Operation, now: float) -> tuple[OperationResult, Effects]:
        """Carry out one lifecycle call of a batch; a refusal is a result like any other."""
        name = operation.reservation_id
        try:
            if isinstance(operation, BatchFree):
                effects = self.free(name, now)
            elif isinstance(operation, BatchPrefillComplete):
                effects = self.prefill_complete(name, now)
            else:
                effects = self.output_block(name, operation.decay_fraction, now, operation.count)
        except ServiceError as refusal:
            field = UNSET if refusal.field is None else refusal.field
            return OperationResult(refusal.status, str(refusal), refusal.code, field), NOTHING
        return _OPERATED, effects

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: LeaseRequest, now: float) -> tuple[LeaseRecord, Effects]:
        """Open a lease, or renew the one its owner has under this id.

        Raises:
            ServiceError: as `Leases.open`.
        """
        lease_id = self._new_id() if request.lease_id is None else request.lease_id
        return self.replicas.leases.open(lease_id, request.owner, request.ttl_s, now), NOTHING

    def renew_lease(
        self, lease_id: str, request: LeaseRenewal, now: float
    ) -> tuple[LeaseRecord, Effects]:
        """Renew everything under a lease, whichever replica has it open.

        Raises:
            ServiceError: as `SharedLeases.renew`.
        """
        return self.replicas.leases.renew(lease_id, request.ttl_s, now), NOTHING

    def close_lease(self, lease_id: str, now: float) -> tuple[Lease | None, Effects]:
        """End a lease and the first of what is under it; the lease, when there was one to end.

        `clear_lease` goes on while `lease.reservations` says so; housekeeping does too.

        Raises:
            LeaseNotFound: it was never open, as far as anybody remembers.
        """
        lease = self.replicas.leases.close(lease_id, now)
        return lease, NOTHING if lease is None else self.clear_lease(lease, now)

    def clear_lease(self, lease: Lease, now: float) -> Effects:
        """End a turn's worth of what an ended lease left behind."""
        effects = Effects()
        limit = self.limits.expired_per_turn_max
        for partition in self.desk.clear_leases(limit, now, effects, lease)[1]:
            if partition.pending_count:
                self._drain(partition, now, effects)
        return effects

    def leases(self, now: float, owner: str | None, limit: int) -> LeaseList:
        """Describe open leases, oldest first, then those known through replicas."""
        return self.replicas.leases.listed(owner, limit, now)

    # -- inspection ----------------------------------------------------------------------------

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """Return the load of every rank, by scope (contract 5.1)."""
        return [
            ScopeLoads(
                *scope, partition.loads(), partition.pending_count, partition.pending_isl_tokens
            )
            for scope, partition in sorted(self.partitions.items())
            if (model_name is None or scope.model_name == model_name)
            and (tenant_id is None or scope.tenant_id == tenant_id)
        ]

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """Return what every rank would carry with this prompt (contract 5.2).

        Raises:
            ServiceError: as in contract 2.
        """
        partition, prompt, weights = self._inspect(request)
        return partition.potential_loads(prompt, weights)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """Return what every rank holds of this prompt (contract 5.3).

        Raises:
            ServiceError: as in contract 2.
        """
        partition, prompt, weights = self._inspect(request)
        return OverlapScores(
            partition.index.block_size,
            blocks_of(prompt),
            partition.overlap_rows(prompt, weights),
            SharedCache(),
        )

    # -- replicas ------------------------------------------------------------------------------

    def replica_announce(self, http_port: int, url: str | None = None) -> None:
        """Tell where our snapshot can be had; heartbeats carry it."""
        self.replicas.http_port, self.replicas.url = http_port, url

    def replica_heard(self, peer: str, message: ReplicaMessage, now: float) -> Effects:
        """Take in one decoded message that came from this peer endpoint (contract 6.4)."""
        self.replicas.heard(peer, message, now)
        return self._relieved(now, NOTHING)

    def replica_tick(self, now: float) -> tuple[bool, Effects]:
        """Do a bounded turn: what is to be said, heartbeats, who is gone, what must be resolved.

        Call it every 100 ms or so.

        Returns:
            (more, effects): `more` when another turn is due at once.
        """
        effects = Effects()
        more = self.replicas.tick(now, effects)
        return more, self._relieved(now, effects)

    def replica_snapshot(self, now: float) -> Iterator[SnapshotPart]:
        """Yield what we know, from head to end; anything may happen between two parts."""
        return self.replicas.snapshot(now)

    def replica_snapshot_begin(self, pull: Pull, head: SnapshotHead, now: float) -> bool:
        """A pulled snapshot arrives; False when it is not who was asked: read no further."""
        return self.replicas.begin(pull.router_id, head, now)

    def replica_snapshot_part(self, router_id: int, part: SnapshotPart, now: float) -> Effects:
        """Take in one part; a few at a time between two turns of the loop."""
        self.replicas.part(router_id, part, now)
        return self._relieved(now, NOTHING)

    def replica_snapshot_end(self, router_id: int, now: float, *, complete: bool) -> Effects:
        """It is all there; or the pull failed at any point after `Effects.pulls` asked for it."""
        self.replicas.end(router_id, now, complete=complete)
        return self._relieved(now, NOTHING)

    def replica_status(self, now: float) -> list[ReplicaStatus]:
        """Return every publisher heard of, by router id."""
        return self.replicas.status(now)

    def _relieved(self, now: float, effects: Effects) -> Effects:
        """Admit who waited for what replicas have freed."""
        touched = self.replicas.resolver.touched
        while touched:
            partition, _ = touched.popitem()
            if partition.pending_count:
                effects = self._drain(partition, now, effects)
        return effects

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[bool, Effects]:
        """Do a bounded turn of housekeeping: what was dropped or has expired, old ids, the queue.

        Returns:
            (more, effects): `more` when another turn is due at once.
        """
        effects = Effects()
        limits = self.limits
        more = self.registry.sweep(limits.swept_nodes_per_turn_max) > 0
        more |= self.desk.bookings.purge_freed(now, limits.expired_per_turn_max) > 0
        more |= self.recovered.age(now, limits.dropped_per_turn_max)
        may_drop, may_expire = limits.dropped_per_turn_max, limits.expired_per_turn_max
        leases = self.desk.leases
        leases.expire(now, may_expire)
        steps, lighter = self.desk.clear_leases(may_expire, now, effects)
        may_expire -= steps
        more |= leases.purge_ended(now, limits.expired_per_turn_max) > 0
        more |= steps > 0 or leases.next_expiry() <= now
        recheck = self._recheck_due(now)
        for partition in self.partitions.values():
            may_drop -= self.desk.sweep(partition, may_drop, now)
            expired = self.desk.expire(partition, may_expire, now, effects)
            may_expire -= expired
            more |= not partition.ledger.is_swept or partition.ledger.next_expiry() <= now
            if partition.pending_count and (expired or recheck or partition in lighter):
                self._drain(partition, now, effects)
        return more, effects

    def _recheck_due(self, now: float) -> bool:
        """Waiting requests are looked at again every so often, whatever did not happen."""
        last = now if self._rechecked_at is None else self._rechecked_at
        due = now - last >= self.limits.queue_recheck_s
        self._rechecked_at = now if due else last
        return due

    # -- what outlives the process -------------------------------------------------------------

    def keep_changes(self) -> Changes:
        """From now on note what changes, for somebody to write down; see `core/state.py`."""
        changes = Changes()
        self.catalog.changes = self.desk.bookings.changes = changes
        self.desk.leases.changes = self.peer_endpoints.changes = changes
        return changes

    def check(self) -> None:
        """State every promise of the whole service."""
        self.desk.bookings.check()
        self.desk.leases.check()
        self.membership.check()
        self.replicas.check()
        live = sum(int(p.ledger.requests.sum()) for p in self.partitions.values())
        assert live == len(self.desk.bookings), "every reservation has one id, and every id one"
        assert self._schedulable == sum(len(p.workers) for p in self.partitions.values())
