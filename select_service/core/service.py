"""Every public verb of the service, pure: typed request and `now` in, (answer, Effects) out.

One call is one step: nothing is awaited between a choice and its booking, which is why
select-and-reserve is atomic without a lock. The driver stands before it; catalog, membership,
bookings and partitions do the work behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import xxhash
from msgspec import UNSET

from indexer.core.hashing import unpack_i64, unpack_u64
from indexer.types import Scope
from select_service.core.bookings import Booking, Bookings
from select_service.core.catalog import Catalog, Worker
from select_service.core.effects import NOTHING, Answered, Effects
from select_service.core.eligibility import check_wishes
from select_service.core.membership import Membership
from select_service.core.partition import Partition, Placement, blocks_of
from select_service.core.policy import default_policy
from select_service.core.prompt import read_booking, read_prompt
from select_service.core.queue import Ticket
from select_service.core.replica_events import (
    AddRequest,
    AddRequestData,
    EventWorker,
    PrefillLoadHint,
    ReplicaEnvelope,
    ReplicaEvent,
)
from select_service.core.scoring import Weights, weights_in_force
from select_service.errors import (
    InvalidRequest,
    NoEligibleWorker,
    NoSchedulableWorker,
    RankNotFound,
    ReservationNotFound,
    ServiceError,
    WorkerNotFound,
    scope_text,
)
from select_service.types import (
    KvRankState,
    OverlapScores,
    Ready,
    ReservationAnswer,
    ScopeLoads,
    Selection,
    SharedCache,
)

if TYPE_CHECKING:
    import random

    from indexer.core.registry import Registry
    from select_service.core.columns import Slots
    from select_service.core.ledger import Reservation
    from select_service.core.policy import PolicyBook, PolicyError
    from select_service.core.prompt import Prompt
    from select_service.types import (
        LoadRow,
        OverlapScoresRequest,
        PotentialLoadsRequest,
        PromptFields,
        ReservationRequest,
        RouterConfig,
        SelectAndReserveRequest,
        SelectRequest,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )

Ending: TypeAlias = Literal["MarkPrefillCompleted", "Free"]

_BOOKING_FAILED = "failed to book scheduler state: "


@dataclass(slots=True, frozen=True)
class CoreLimits:
    """Bounds of the core's own memory and of one turn of housekeeping."""

    data_parallel_size_max: int = 1024
    freed_ids_max: int = 200_000
    reservation_ttl_s: float = 300.0  # since the last lifecycle call; 0 = never (D15)
    queue_recheck_s: float = 60.0
    expired_per_turn_max: int = 64
    swept_nodes_per_turn_max: int = 256


@dataclass(slots=True)
class Counters:
    """What happened since start; read at scrape time."""

    selections: int = 0
    selections_waited: int = 0
    selections_failed: dict[str, int] = field(default_factory=dict)  # by error code
    reservations_booked: int = 0
    reservations_repeated: int = 0
    reservations_conflicting: int = 0
    reservations_freed: int = 0
    reservations_expired: int = 0
    reservations_dropped: int = 0  # their rank or worker went


class SelectionCore:
    """The whole state of one process, and the verbs that change it."""

    def __init__(
        self,
        registry: Registry,
        config: RouterConfig,
        rng: random.Random,
        *,
        policies: PolicyBook | PolicyError | None = None,
        limits: CoreLimits | None = None,
        router_id: int = 0,
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
            trace_decisions: report every placement in `Effects.decided`.
        """
        self.registry = registry
        self.config = config
        self.limits = limits or CoreLimits()
        self.counters = Counters()
        self.catalog = Catalog(data_parallel_size_max=self.limits.data_parallel_size_max)
        self.bookings = Bookings(freed_ids_max=self.limits.freed_ids_max)
        self.membership = Membership(
            registry,
            policies or default_policy(config.queue_threshold),
            use_kv_events=config.use_kv_events,
        )
        self.router_id = router_id
        self.trace_decisions = trace_decisions
        self._rng = rng
        self._weights = weights_in_force(config, None)
        self._schedulable = 0
        self._rechecked_at: float | None = None

    @property
    def partitions(self) -> dict[Scope, Partition]:
        """Every scope that ever had a schedulable worker."""
        return self.membership.partitions

    # -- workers -------------------------------------------------------------------------------

    def upsert_worker(self, spec: WorkerSpec, now: float) -> tuple[WorkerRecord, Effects]:
        """Put a whole record into the catalog (contract 1.3)."""
        return self._replace(self.catalog.admit(spec), now)

    def patch_worker(
        self, worker_id: int, patch: WorkerPatch, now: float
    ) -> tuple[WorkerRecord, Effects]:
        """Merge a patch into a record (contract 1.3).

        Raises:
            WorkerNotFound: no such id.
        """
        return self._replace(self.catalog.patched(worker_id, patch), now)

    def delete_worker(self, worker_id: int, now: float) -> tuple[WorkerRecord, Effects]:
        """Remove a record; its load and its index go with it (D5).

        Raises:
            WorkerNotFound: no such id.
        """
        worker = self.catalog.get(worker_id)
        effects = Effects()
        self._drop(self.membership.replace(worker, None, effects), now)
        self.catalog.remove(worker_id)
        self._recount()
        worker.lifecycle, worker.reasons = "unschedulable", []
        return worker.record(), effects

    def _replace(self, worker: Worker, now: float) -> tuple[WorkerRecord, Effects]:
        effects = Effects()
        self.membership.judge(worker)
        old = self.catalog.find(worker.worker_id)
        self._drop(self.membership.replace(old, worker, effects), now)
        self.catalog.put(worker)
        self._recount()
        return self._record(worker), effects

    def _drop(self, reservations: list[Reservation], now: float) -> None:
        """Forget reservations whose rank is gone; peers drop them with their own catalog."""
        for reservation in reservations:
            self.bookings.forget(reservation, now)
        self.counters.reservations_dropped += len(reservations)

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
        self, request: SelectRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[Selection | Ticket, Effects]:
        """Choose a worker; a Ticket when the request has to wait (contract 3).

        Raises:
            ServiceError: as in contract 2 and 3.
        """
        del unknown
        partition, prompt, weights = self._read(request)
        number, rows = self._gate(partition, request, prompt, weights)
        if partition.must_wait(number, rows):
            ticket = Ticket(partition, request, prompt, weights, None, b"")
            partition.enqueue(number, ticket, rows, now)
            self.counters.selections_waited += 1
            return ticket, NOTHING
        placement = partition.place(request, prompt, rows, weights, self._rng)
        effects = self._decided(placement, NOTHING)
        return self._answer(partition, request, placement), effects

    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[Selection | Ticket, Effects]:
        """Choose a worker and book it in the same step; a Ticket when it has to wait.

        Args:
            request: as sent.
            now: monotonic seconds.
            unknown: canonical bytes of members nobody knows; part of what makes a repeat equal.

        Raises:
            ServiceError: as in contract 2 to 4.
        """
        partition, prompt, weights = self._read(request)
        fingerprint = b""
        if request.reservation_id is not None:
            fingerprint = _fingerprint(request, unknown)
            known = self._repeated(request.reservation_id, fingerprint)
            if known is not None:
                return known, NOTHING
        number, rows = self._gate(partition, request, prompt, weights)
        reservation_id = self._mint(request.reservation_id)
        if partition.must_wait(number, rows):
            ticket = Ticket(partition, request, prompt, weights, reservation_id, fingerprint)
            partition.enqueue(number, ticket, rows, now)
            self.bookings.wait(ticket)
            self.counters.selections_waited += 1
            return ticket, NOTHING
        placement = partition.place(request, prompt, rows, weights, self._rng)
        effects = Effects()
        answer = self._book_placement(
            partition, request, prompt, placement, reservation_id, fingerprint, now, effects
        )
        return answer, effects

    def _read(self, request: SelectRequest) -> tuple[Partition, Prompt, Weights]:
        partition = self._usable(request)
        prompt = read_prompt(
            request, block_size=partition.index.block_size, is_eagle=partition.index.is_eagle
        )
        check_wishes(request)
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
    ) -> tuple[int, Slots | slice]:
        number = partition.class_of(prompt, weights)
        try:
            return number, partition.candidates(request)
        except NoEligibleWorker:
            if partition.queues[number]:  # no overtaking, not even towards a refusal (3.6)
                return number, slice(0, 0)
            raise

    def _repeated(self, reservation_id: str, fingerprint: bytes) -> Selection | Ticket | None:
        """Return the first answer, or the ticket to share, when this request came before (D14)."""
        try:
            booking = self.bookings.repeated(reservation_id, fingerprint, _BOOKING_FAILED)
            ticket = self.bookings.join_waiting(reservation_id, fingerprint, _BOOKING_FAILED)
        except ServiceError:
            self.counters.reservations_conflicting += 1
            raise
        if booking is not None:
            self.counters.reservations_repeated += 1
            assert isinstance(booking.answer, Selection), "the fingerprint names the route"
            hashes = booking.partition.ledger.chain_of(booking.reservation)
            return msgspec.structs.replace(booking.answer, sequence_hashes=unpack_i64(hashes))
        return ticket

    def _mint(self, given: str | None) -> str:
        """Return the id given, which may be empty, or a new random UUIDv4."""
        if given is not None:
            return given
        bits = self._rng.getrandbits(128)
        bits = bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62)
        text = f"{bits:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def _book_placement(
        self,
        partition: Partition,
        request: SelectRequest,
        prompt: Prompt,
        placement: Placement,
        reservation_id: str,
        fingerprint: bytes,
        now: float,
        effects: Effects,
    ) -> Selection:
        track = placement.weights.track_prefill_tokens
        prefill = placement.effective_prefill_tokens if track else 0
        reservation = self._book(
            partition, placement.slot, reservation_id, prompt, prefill, now, fingerprint
        )
        answer = self._answer(partition, request, placement)
        answer.reservation_id = reservation_id
        answer.isl_tokens = prompt.isl_tokens
        answer.track_prefill_tokens = track
        answer.potential_decode_blocks = placement.potential_decode_blocks
        self._remember(partition, reservation, request, msgspec.structs.replace(answer))
        answer.sequence_hashes = unpack_i64(prompt.sequence_hashes)
        if self.router_id:
            hint = PrefillLoadHint(prefill) if track else None
            self._publish_booking(partition, reservation, prompt, track, hint, effects)
        self._decided(placement, effects)
        return answer

    def _answer(
        self, partition: Partition, request: SelectRequest, placement: Placement
    ) -> Selection:
        self.counters.selections += 1
        worker = placement.worker
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
        if effects is NOTHING:
            effects = Effects()
        effects.decided.append(placement)
        return effects

    def withdraw(self, ticket: Ticket) -> bool:
        """One caller of a waiting request went away; the last one takes the ticket with it.

        Returns:
            True when the ticket left the queue.
        """
        ticket.holders -= 1
        if ticket.holders > 0 or not ticket.partition.withdraw(ticket):
            return False
        self.bookings.waited(ticket)
        return True

    def _drain(self, partition: Partition, now: float, effects: Effects) -> None:
        """Admit waiting requests while their ranks are free; each is booked before the next."""
        while (ticket := partition.next_admissible()) is not None:
            self.bookings.waited(ticket)
            effects.answered.append(Answered(ticket, self._admit(ticket, now, effects)))

    def _admit(self, ticket: Ticket, now: float, effects: Effects) -> Selection | ServiceError:
        partition, request = ticket.partition, ticket.request
        try:
            rows = partition.candidates(request)
            if ticket.reservation_id is not None:
                self.bookings.repeated(ticket.reservation_id, b"", _BOOKING_FAILED)
            placement = partition.place(request, ticket.prompt, rows, ticket.weights, self._rng)
        except ServiceError as refusal:
            return refusal
        if ticket.reservation_id is None:
            self._decided(placement, effects)
            return self._answer(partition, request, placement)
        return self._book_placement(
            partition,
            request,
            ticket.prompt,
            placement,
            ticket.reservation_id,
            ticket.fingerprint,
            now,
            effects,
        )

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
        worker, dp_rank = self._rank_asked(partition, request)
        prefill, track = self._prefill_to_book(request, prompt)
        fingerprint = _fingerprint(request, unknown)
        try:
            known = self.bookings.repeated(request.reservation_id, fingerprint)
        except ServiceError:
            self.counters.reservations_conflicting += 1
            raise
        if known is not None:
            self.counters.reservations_repeated += 1
            assert isinstance(known.answer, ReservationAnswer), "the fingerprint names the route"
            return known.answer, NOTHING
        reservation = self._book(
            partition,
            worker.slots[dp_rank],
            request.reservation_id,
            prompt,
            prefill,
            now,
            fingerprint,
        )
        answer = ReservationAnswer(
            request.reservation_id,
            partition.scope.model_name,
            partition.scope.tenant_id,
            worker.worker_id,
            dp_rank,
            worker.spec.endpoint,
        )
        self._remember(partition, reservation, request, answer)
        if not self.router_id:
            return answer, NOTHING
        effects = Effects()
        given = request.effective_prefill_tokens is not None
        hint = PrefillLoadHint(prefill) if track or given else None
        self._publish_booking(partition, reservation, prompt, track or given, hint, effects)
        return answer, effects

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
        """Return the prefill tokens to book and whether tracking is on (table of contract 4.2)."""
        track = self._weights_for(request).track_prefill_tokens
        if request.track_prefill_tokens is not None:
            track = track and request.track_prefill_tokens
        given = request.effective_prefill_tokens
        if given is None:
            return (prompt.isl_tokens if track else 0), track
        if given > prompt.isl_tokens:
            raise InvalidRequest(
                f"effective_prefill_tokens ({given}) must not exceed "
                f"isl_tokens ({prompt.isl_tokens})",
                field="effective_prefill_tokens",
            )
        return given, track

    def _book(
        self,
        partition: Partition,
        slot: int,
        reservation_id: str,
        prompt: Prompt,
        prefill_tokens: int,
        now: float,
        fingerprint: bytes,
    ) -> Reservation:
        reservation = partition.ledger.book(
            reservation_id,
            slot,
            prompt.sequence_hashes,
            prefill_tokens,
            now,
            isl_tokens=prompt.isl_tokens,
            ttl_s=self.limits.reservation_ttl_s,
        )
        reservation.fingerprint = fingerprint
        self.counters.reservations_booked += 1
        return reservation

    def _remember(
        self,
        partition: Partition,
        reservation: Reservation,
        request: SelectRequest | ReservationRequest,
        answer: Selection | ReservationAnswer,
    ) -> None:
        reservation.selection_id = request.selection_id
        reservation.lora_name = request.lora_name
        reservation.expected_output_tokens = request.expected_output_tokens
        self.bookings.add(Booking(partition, reservation, answer))

    def prefill_complete(self, name: str, now: float) -> Effects:
        """The prompt is computed: its prefill tokens leave, its blocks stay. Repeatable.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        booking = self.bookings.get(name)
        booking.partition.ledger.prefill_complete(booking.reservation, now)
        effects = self._after_release(booking.partition, now)
        return self._publish(booking, "MarkPrefillCompleted", effects)

    def output_block(self, name: str, decay_fraction: float | None, now: float) -> Effects:
        """The request fills one more block; see contract 4.3 for the fraction.

        Raises:
            InvalidRequest: a fraction outside 0..1; checked before the id.
            ReservationNotFound: nothing live has that id.
        """
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise InvalidRequest(
                "decay_fraction must be between 0.0 and 1.0", field="decay_fraction"
            )
        booking = self.bookings.get(name)
        booking.partition.ledger.output_block(booking.reservation, decay_fraction, now)
        return NOTHING

    def free(self, name: str, now: float) -> Effects:
        """End a reservation; ending a recently freed one is no error (D4).

        Raises:
            ReservationNotFound: the id was never seen.
        """
        booking = self.bookings.find(name)
        if booking is None:
            if self.bookings.was_freed(name):
                return NOTHING
            raise ReservationNotFound(name)
        self._release(booking, now)
        self.counters.reservations_freed += 1
        effects = self._after_release(booking.partition, now)
        return self._publish(booking, "Free", effects)

    def _release(self, booking: Booking, now: float) -> None:
        booking.partition.ledger.free(booking.reservation)
        self.bookings.forget(booking.reservation, now)

    def _after_release(self, partition: Partition, now: float) -> Effects:
        if not partition.pending_count:
            return NOTHING
        effects = Effects()
        self._drain(partition, now, effects)
        return effects

    # -- what replicas are told ----------------------------------------------------------------

    def _publish_booking(
        self,
        partition: Partition,
        reservation: Reservation,
        prompt: Prompt,
        track: bool,  # noqa: FBT001 - a field of the wire, not a switch
        hint: PrefillLoadHint | None,
        effects: Effects,
    ) -> None:
        add = AddRequest(
            token_sequence=unpack_u64(prompt.sequence_hashes),
            track_prefill_tokens=track,
            expected_output_tokens=reservation.expected_output_tokens,
            prefill_load_hint=hint,
        )
        effects.published.append(self._envelope(partition, reservation, AddRequestData(add)))

    def _publish(self, booking: Booking, what: Ending, effects: Effects) -> Effects:
        if not self.router_id:
            return effects
        if effects is NOTHING:
            effects = Effects()
        envelope = self._envelope(booking.partition, booking.reservation, what)
        effects.published.insert(0, envelope)  # before bookings that it made room for
        return effects

    def _envelope(
        self, partition: Partition, reservation: Reservation, data: AddRequestData | Ending
    ) -> ReplicaEnvelope:
        worker, dp_rank = partition.rank_at(reservation.slot)
        return ReplicaEnvelope(
            model_name=partition.scope.model_name,
            tenant_id=partition.scope.tenant_id,
            routing_group=partition.scope.tenant_id,
            block_size=partition.index.block_size,
            event=ReplicaEvent(
                request_id=reservation.reservation_id,
                worker=EventWorker(worker.worker_id, dp_rank),
                data=data,
                router_id=self.router_id,
                lora_name=reservation.lora_name,
            ),
        )

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

    def _inspect(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        partition = self._usable(request)
        prompt = read_prompt(
            request, block_size=partition.index.block_size, is_eagle=partition.index.is_eagle
        )
        return partition, prompt, self._weights_for(request)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[bool, Effects]:
        """Do a bounded turn of housekeeping: expiry, index sweep, waiting requests, old ids.

        Returns:
            (more, effects): `more` when another turn is due at once.
        """
        effects = Effects()
        limits = self.limits
        more = self.registry.sweep(limits.swept_nodes_per_turn_max) > 0
        more |= self.bookings.purge_freed(now, limits.expired_per_turn_max) > 0
        for partition in self.partitions.values():
            expired = partition.ledger.expired(now, limits.expired_per_turn_max)
            more |= len(expired) == limits.expired_per_turn_max
            for reservation in expired:
                self._expire(partition, reservation, now, effects)
            if expired and partition.pending_count:
                self._drain(partition, now, effects)
        if self._rechecked_at is None:
            self._rechecked_at = now
        elif now - self._rechecked_at >= limits.queue_recheck_s:
            self._rechecked_at = now
            for partition in self.partitions.values():
                self._drain(partition, now, effects)
        return more, effects

    def _expire(
        self, partition: Partition, reservation: Reservation, now: float, effects: Effects
    ) -> None:
        """End a reservation nobody has touched for its TTL; only its own process says so (D15)."""
        booking = self.bookings.get(reservation.reservation_id)
        self._release(booking, now)
        self.counters.reservations_expired += 1
        if self.router_id and reservation.origin == "local":
            effects.published.append(self._envelope(partition, reservation, "Free"))

    def check(self) -> None:
        """State every promise of the whole service."""
        self.bookings.check()
        self.membership.check()
        live = sum(int(p.ledger.requests.sum()) for p in self.partitions.values())
        assert live == len(self.bookings), "every reservation has one id, every id one reservation"
        assert self._schedulable == sum(len(p.workers) for p in self.partitions.values())


def _fingerprint(request: msgspec.Struct, unknown: bytes) -> bytes:
    """Return 16 bytes that two requests share iff they are the same body on the same route."""
    route = type(request).__name__.encode()
    return xxhash.xxh3_128_digest(route + msgspec.msgpack.encode(request) + unknown)
