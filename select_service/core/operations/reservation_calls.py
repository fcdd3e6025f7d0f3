"""The verbs of a reservation's life: booked by the caller's choice, progressing, ended, leased.

`Lifecycle` does the booking (`reservations/lifecycle.py`); whatever frees load lets waiting
requests in (`waiting_requests.py`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import UNSET

from select_service.core.effects import NOTHING, Effects
from select_service.core.reservations.lifecycle import BookingSpec
from select_service.core.routing.read import fingerprint_of, read_booking
from select_service.errors import (
    InvalidField,
    InvalidRequest,
    NoSchedulableWorker,
    RankNotFound,
    ReservationNotFound,
    ServiceError,
    WorkerDraining,
    WorkerNotFound,
    scope_text,
)
from select_service.types import (
    OUTCOMES,
    BatchFree,
    BatchPrefillComplete,
    OperationResult,
    ReservationAnswer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.admission.controller import AdmissionController
    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.decisions.cached_tokens import CachedTokenReports
    from select_service.core.decisions.decision_log import DecisionLog
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.outliers import OutlierTally
    from select_service.core.ledger.reservation import Lease
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.replication.shared_leases import SharedLeases
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.reservations.pairs import Pairs
    from select_service.core.routing.read import RequestReader
    from select_service.types import (
        BatchRequest,
        CoreLimits,
        LeaseList,
        LeaseRecord,
        LeaseRenewal,
        LeaseRequest,
        Operation,
        Outcome,
        ReservationRequest,
    )

_OPERATED: Final = OperationResult(200)
_OUTCOMES: Final = ", ".join(OUTCOMES)


def _is_cared_for(booking: LiveReservation) -> bool:
    """Tell whether a lease, or a client that knows its id, looks after a booking."""
    one = booking.reservation
    return (
        one.lease is not None
        or one.touched > one.created
        or one.prefill_done
        or one.output_blocks > 0
    )


def _only(slot: int) -> Rows:
    return np.array([slot], dtype=np.int64)


class ReservationCalls:
    """Books ranks that callers have chosen, and follows every reservation to its end."""

    def __init__(  # noqa: PLR0917 - the rooms a reservation passes through
        self,
        reader: RequestReader,
        lifecycle: Lifecycle,
        waiting_requests: WaitingRequests,
        leases: SharedLeases,
        limits: CoreLimits,
        controller: AdmissionController,
        pairs: Pairs,
        cached_tokens: CachedTokenReports,
        outliers: OutlierTally,
        counters: Counters,
        decisions: DecisionLog,
        new_id: Callable[[], str],
    ) -> None:
        self._reader = reader
        self._lifecycle = lifecycle
        self._waiting_requests = waiting_requests
        self._leases = leases
        self._limits = limits
        self._controller = controller
        self._pairs = pairs
        self._cached_tokens = cached_tokens
        self._outliers = outliers
        self._outcomes = counters.outcomes
        self._decisions = decisions
        self._new_id = new_id

    def reserve(
        self, request: ReservationRequest, now: float, *, unknown: bytes = b""
    ) -> tuple[ReservationAnswer, Effects]:
        """Book a rank the caller has chosen. Never waits.

        Raises:
            ServiceError: of the prompt, the rank, the lease or the id.
        """
        try:
            partition = self._reader.attached(request)
        except NoSchedulableWorker:
            known = self._booked_before(request, unknown)
            if known is not None:
                return known, NOTHING
            raise
        index = partition.index
        prompt = read_booking(
            request,
            block_size=index.block_size,
            is_eagle=index.is_eagle,
            tokens_max=self._limits.tokens_per_request_max,
        )
        prompt = self._reader.set_apart(request, prompt)
        prefill, track = self._prefill_to_book(request, prompt)
        known = self._booked_before(request, unknown)
        if known is not None:
            return known, NOTHING
        worker, dp_rank = self._rank_asked(partition, request)
        self._lifecycle.check_room(request)
        self._lifecycle.terms(request)
        if worker.drain is not None:
            raise WorkerDraining([worker.worker_id])
        slot = worker.slots[dp_rank]
        self._check_cap(partition, slot, now)
        order = BookingSpec(
            request.reservation_id, fingerprint_of(request, unknown), prompt, prefill, track
        )
        answer = ReservationAnswer(
            request.reservation_id,
            partition.scope.model_name,
            partition.scope.tenant_id,
            worker.worker_id,
            dp_rank,
            worker.spec.endpoint or "",
        )
        return answer, self._lifecycle.book(partition, slot, order, request, answer, NOTHING, now)

    def _booked_before(
        self, request: ReservationRequest, unknown: bytes
    ) -> ReservationAnswer | None:
        """Return the first answer of a repeat; its rank may have to be at another replica only.

        Raises:
            ReservationConflict: the id is taken by something else.
        """
        name, repeats = request.reservation_id, self._lifecycle.repeats
        if not repeats.is_known(name):
            return None
        return repeats.reservation(name, fingerprint_of(request, unknown))

    def _check_cap(self, partition: Partition, slot: int, now: float) -> None:
        """Enforce N for explicit bookings, too; policies apply to selections only.

        Raises:
            AdmissionRefused: the worker has as many requests as it may.
        """
        admission = partition.admission
        if admission is None:
            return
        admission.refresh(now)
        if admission.is_full(slot):
            admission.rejections["reservations"] = admission.rejections.get("reservations", 0) + 1
            raise self._controller.refusal(partition, admission.full(now), _only(slot))

    def _rank_asked(self, partition: Partition, request: ReservationRequest) -> tuple[Worker, int]:
        worker = partition.fleet_slots.present.get(request.worker_id)
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
        """Return the prefill tokens to book and whether they are tracked.

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
        track = self._reader.weights_for(request).track_prefill_tokens
        if request.track_prefill_tokens is not None:
            track = track and request.track_prefill_tokens
        return (prompt.isl_tokens if track else 0), track

    def prefill_complete(self, name: str, now: float, cached_tokens: int | None = None) -> Effects:
        """The prompt is computed: release its prefill tokens, keep its blocks. Repeatable.

        `name` is a reservation_id or selection_id, or a pair's; `cached_tokens` is what the
        engine reported as cached.

        Raises:
            InvalidField: more than the prompt is long.
            ReservationNotFound: nothing live has that id.
        """
        if cached_tokens is not None:
            self._cached_tokens.report(name, cached_tokens, now)
        if self._outliers.ranks:
            self._note_life(name)
        lifecycle = self._lifecycle
        of_pair = None
        if lifecycle.bookings.pairs or lifecycle.announcer.is_on:  # else no id is a pair's
            of_pair = self._pairs.prefill_complete(name, now, cached_tokens)
        partition, effects = of_pair or lifecycle.prefill_complete(name, now, cached_tokens)
        if partition is None:
            return effects
        return self._waiting_requests.relieve(partition, now, effects)

    def output_block(
        self, name: str, decay_fraction: float | None, now: float, count: int = 1
    ) -> Effects:
        """Add `count` output blocks; a fraction reweights all blocks that only this one holds.

        Raises:
            InvalidRequest: a fraction outside 0..1; checked before the id.
            ReservationNotFound: nothing live has that id.
        """
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise InvalidRequest(
                "decay_fraction must be between 0.0 and 1.0", field="decay_fraction"
            )
        if not self._pairs.output_block(name, decay_fraction, now, count):
            self._lifecycle.output_block(name, decay_fraction, now, count)
        if self._outliers.ranks:
            self._note_life(name)
        return NOTHING

    def free(
        self,
        name: str,
        now: float,
        cached_tokens: int | None = None,
        outcome: Outcome | None = None,
        *,
        is_taken_back: bool = False,
    ) -> Effects:
        """End a reservation; ending a recently freed one is no error.

        Args:
            name: its reservation_id or selection_id, or a pair's.
            now: monotonic seconds.
            cached_tokens: how much of its prompt the engine found cached, if reported; in a repeat
                as well.
            outcome: how it ended; None: not said, which is `completed` without anybody's word. In a
                repeat it says nothing more.
            is_taken_back: as in `Lifecycle.free`.

        Raises:
            InvalidField: more than the prompt is long, or no such outcome; nothing has ended.
            ReservationNotFound: the id was never seen.
        """
        lifecycle = self._lifecycle
        if outcome is not None and outcome not in OUTCOMES:  # embedding calls without a codec
            raise InvalidField(f"outcome must be one of {_OUTCOMES}", field="outcome")
        if cached_tokens is not None:
            self._cached_tokens.report(name, cached_tokens, now)
        if outcome is not None or self._outliers.ranks:
            self._note_outcome(name, outcome, now)
        of_pair, is_computed = None, outcome in {None, "completed"}
        if lifecycle.bookings.pairs or lifecycle.announcer.is_on:  # as above
            of_pair = self._pairs.free(name, now, is_computed=is_computed)
        partition, effects = of_pair or lifecycle.free(
            name, now, is_computed=is_computed, is_taken_back=is_taken_back
        )
        if partition is None:
            return effects
        return self._waiting_requests.relieve(partition, now, effects)

    def _note_outcome(self, name: str, outcome: Outcome | None, now: float) -> None:
        """Judge the rank of a reservation that ends; of a pair, the leg whose turn it was."""
        live = self._live(name)
        if outcome is not None and live:
            self._outcomes[outcome] += 1
        if outcome == "failed":
            for one in live[:1]:  # the prefill leg goes first, and ends when it has done its part
                if one.is_current:
                    one.partition.outliers.failed(one.reservation.slot, now)
        elif outcome != "cancelled":
            if outcome is not None:
                self._note_life(name)
            for one in live:
                if one.is_current:
                    one.partition.outliers.succeeded(one.reservation.slot, one.reservation.created)

    def _note_life(self, name: str) -> None:
        """Note that the engine of a reservation answers."""
        for one in filter(attrgetter("is_current"), self._live(name)):
            one.partition.outliers.answered(one.reservation.slot, one.reservation.created)

    def _live(self, name: str) -> list[LiveReservation]:
        """Return the live reservation of an id, or the legs of a pair, as far as booked here."""
        bookings = self._lifecycle.bookings
        legs = bookings.legs(name) if bookings.pairs else []
        one = None if legs else bookings.find(name)
        return legs if one is None else [one]

    def withdraw(self, name: str, added: int, now: float) -> Effects:
        """Note that the answer to a booking could not be given; perhaps end that.

        It stays if another answer for it was or may yet be given (to a repeat of the request), if a
        lifecycle call has come for it (its caller knows the id), and under a lease, whose owner
        decides.

        `name` is a reservation_id, or the id of a pair; `added` was `ReservationIds.added`
        when the answer was made: a younger booking of the same id is another one.
        """
        lifecycle = self._lifecycle
        bookings = [one for one in lifecycle.bookings.booked_as(name) if one.number <= added]
        for one in bookings:
            one.holders -= 1
        if not bookings or any(one.holders > 0 or _is_cared_for(one) for one in bookings):
            return NOTHING
        for one in bookings:
            self._decisions.note_withdrawn(name, one.reservation.created)
        of_pair = None
        if lifecycle.bookings.pairs:
            of_pair = self._pairs.free(name, now, is_withdrawn=True)
        partition, effects = of_pair or lifecycle.free(name, now, is_withdrawn=True)
        if partition is None:
            return effects
        return self._waiting_requests.relieve(partition, now, effects)

    def check_batch(self, request: BatchRequest) -> None:
        """Refuse a batch of too many operations; then call `operate` for each in turn.

        Raises:
            InvalidField: too many.
        """
        most = self._limits.batch_operations_max
        if len(request.operations) > most:
            why = f"operations must be at most {most}"
            raise InvalidField(why, field="operations", limit="batch_operations_max")

    def operate(self, operation: Operation, now: float) -> tuple[OperationResult, Effects]:
        """Carry out one lifecycle call of a batch; a refusal is a result like any other."""
        name = operation.reservation_id
        try:
            if isinstance(operation, BatchFree):
                effects = self.free(name, now, operation.cached_tokens, operation.outcome)
            elif isinstance(operation, BatchPrefillComplete):
                effects = self.prefill_complete(name, now, operation.cached_tokens)
            else:
                count = operation.count
                if operation.total is not None:
                    count = max(0, operation.total - self._outputs(name))
                effects = self.output_block(name, operation.decay_fraction, now, count)
        except ServiceError as refusal:
            field = UNSET if refusal.field is None else refusal.field
            is_unknown = isinstance(refusal, ReservationNotFound)
            is_over = is_unknown and self._lifecycle.bookings.was_freed(name)
            result = OperationResult(
                refusal.status, str(refusal), refusal.code, field, ended=is_over or UNSET
            )
            return result, NOTHING
        return _OPERATED, effects

    def _outputs(self, name: str) -> int:
        outputs = self._pairs.outputs(name)
        return self._lifecycle.outputs(name) if outputs is None else outputs

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: LeaseRequest, now: float) -> tuple[LeaseRecord, Effects]:
        """Open a lease, or renew it if its owner has it open under this id.

        Raises:
            ServiceError: as `Leases.open`.
        """
        lease_id = self._new_id() if request.lease_id is None else request.lease_id
        return self._leases.open(lease_id, request.owner, request.ttl_s, now), NOTHING

    def renew_lease(
        self, lease_id: str, request: LeaseRenewal, now: float
    ) -> tuple[LeaseRecord, Effects]:
        """Renew everything under a lease, whichever replica has it open.

        Raises:
            ServiceError: as `SharedLeases.renew`.
        """
        return self._leases.renew(lease_id, request.ttl_s, now), NOTHING

    def close_lease(self, lease_id: str, now: float) -> tuple[Lease | None, Effects]:
        """End a lease and the first of its reservations; return the lease if there was one to end.

        `clear_lease` continues while `lease.reservations` is not empty; housekeeping does, too.

        Raises:
            LeaseNotFound: it was never open, as far as anybody remembers.
        """
        lease = self._leases.close(lease_id, now)
        return lease, NOTHING if lease is None else self.clear_lease(lease, now)

    def clear_lease(self, lease: Lease, now: float) -> Effects:
        """End one turn's worth of the reservations an ended lease left behind."""
        effects = Effects()
        limit = self._limits.expired_per_turn_max
        for partition in self._lifecycle.clear_leases(limit, now, effects, lease)[1]:
            self._waiting_requests.relieve(partition, now, effects)
        return effects

    def leases(
        self,
        now: float,
        owner: str | None,
        limit: int,
        prefixes: tuple[str, ...] | None = None,
    ) -> LeaseList:
        """Describe open leases, oldest first, then those known through replicas."""
        return self._leases.listed(owner, limit, now, prefixes)
