"""The recorder: it notes what a service decides, books and ends; references, no copies.

Placement and decision log call it where there is one; reservations and plans have recorded kinds.
`recording/notes.py` has the notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, cast

from typing_extensions import override

from select_service.core.batches.batch_plan import BatchPlan
from select_service.core.recording.items import Gap, Life
from select_service.core.recording.notes import (
    BirthNote,
    ChangeNote,
    DecisionNote,
    SeatsNote,
    StepNote,
    WaveNote,
)
from select_service.core.reservations.lifecycle import Lifecycle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.types import Scope
    from select_service.core.admission.queue import Ticket
    from select_service.core.batches.batch_plan import Member, PlannedRank
    from select_service.core.columns import Floats, Rows
    from select_service.core.decisions.record import Odds
    from select_service.core.effects import Effects
    from select_service.core.fleet.roles import Roles
    from select_service.core.ledger.reservation import Lease, Reservation
    from select_service.core.ledger.reservation_ids import Booking
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Seen
    from select_service.core.recording.notes import Note
    from select_service.core.replication.messages import ClaimRecord
    from select_service.core.reservations.lifecycle import BookingSpec
    from select_service.types.admission import AdmissionSettings

__all__ = ["Recorder", "Sink", "kinds_for"]

LIFE_BYTES: Final = 256
"""Bytes charged for a note of a reservation."""

SCOPES_KEPT: Final = 64
"""Closed scopes are forgotten after this many new ones."""


class Sink(Protocol):
    """Takes the notes.

    Attributes:
        draws: random draws are appended here as they are made.
    """

    draws: list[float | int]

    def put(self, note: Note, size: int) -> bool:
        """Take a note of about this many bytes; False: there is no room, and it is counted."""

    def leave_out(self) -> None:
        """Count a note omitted because a note it depends on found no room."""


class Recorder:
    """Notes the events of one service, in order."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.settings: AdmissionSettings | None = None  # in force; set by the service
        # another object means another seating
        self._roles: dict[Scope, tuple[Partition, Roles]] = {}
        self._last: Roles | None = None  # the last one looked up, usually the same again
        self._columns = b""  # the last columns charged
        self.now = 0.0
        """When something was last noted."""

    def seats(self, partition: Partition) -> bool:
        """Note the seating if it changed; False: there was no room for it."""
        roles = partition.seating.roles
        if roles is self._last:
            return True
        known = self._roles.get(partition.scope)
        if known is not None and known[1] is roles:
            self._last = roles
            return True
        workers = tuple(
            [
                (one.spec, tuple(one.slots.items()), one.drain)
                for one in partition.seating.present.values()
            ]
        )
        note = SeatsNote(partition.scope, partition.index.block_size, workers)
        if not self.sink.put(note, 256 + 64 * len(workers)):
            return False
        self._roles[partition.scope] = partition, roles
        self._last = roles
        if len(self._roles) % SCOPES_KEPT == 0:
            self._forget_closed()
        return True

    def _forget_closed(self) -> None:
        self._last = None
        self._roles = {scope: one for scope, one in self._roles.items() if one[0].seating.present}

    def draws(self) -> tuple[float | int, ...]:
        """Take the random draws since the last call."""
        draws = self.sink.draws
        if not draws:
            return ()
        said = tuple(draws)
        draws.clear()
        return said

    def begin(self) -> None:
        """Discard the draws of a decision that failed."""
        self.sink.draws.clear()

    def decision(
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        odds: Odds | None,
    ) -> None:
        """Note a decision."""
        partition, request = ticket.partition, ticket.request
        self.now = now
        if not self.seats(partition):
            self.sink.leave_out()
            return
        couple = thresholds = None
        if odds is not None and odds.plan is not None and odds.plan.mode == "disaggregated":
            couple = odds.plan.couple
        settings = self.settings
        if settings is not None and (settings.cache_hit_threshold or request.cache_hit_threshold):
            thresholds = (
                settings.cache_hit_threshold,
                settings.cache_hit_attempts_max,
                settings.cache_hit_basis,
                settings.cache_hit_scope,
            )
        columns = seen[0]
        size = 600 + len(ticket.prompt.block_hashes)
        if columns is not self._columns:
            self._columns = columns
            size += len(columns)
        note = DecisionNote(
            now,
            ticket.since,
            partition.scope,
            rows,
            seen,
            ticket.prompt,
            ticket.weights,
            slot,
            request,
            ticket.reservation_id,
            odds,
            couple,
            thresholds,
            self.draws(),
            ticket.in_wave,
            ticket.in_session,
        )
        self.sink.put(note, size)

    def change(self, now: float, what: str, values: dict[str, object]) -> None:
        """Note settings put in force."""
        self.sink.put(ChangeNote(now, what, values), 512)


def kinds_for(witness: Recorder) -> tuple[type[Lifecycle], type[BatchPlan]]:
    """Return the kinds of lifecycle and plan whose events this recorder notes."""
    told = {"witness": witness}
    return (
        cast("type[Lifecycle]", type("RecordedLifecycle", (_Desk,), told)),
        cast("type[BatchPlan]", type("RecordedBatchPlan", (_WavePlan,), told)),
    )


class _Desk(Lifecycle):
    """Notes the lives of reservations."""

    witness: Recorder
    _why = "told"  # the reason of an end in progress; by a replica, unless set below

    def _begun(
        self, what: str, partition: Partition, slot: int, facts: tuple[str, int, int], now: float
    ) -> None:
        """Note where a reservation begins, with its id, prefill tokens and length."""
        witness = self.witness
        witness.now = now
        if not witness.seats(partition):
            witness.sink.leave_out()
            return
        worker, dp_rank = partition.seating.rank_at(slot)
        begins = partition.scope, worker.worker_id, dp_rank
        witness.sink.put(BirthNote(now, what, facts[0], *begins, *facts[1:]), LIFE_BYTES)

    @override
    def book(self, partition: Partition, slot: int, order: BookingSpec, now: float) -> Reservation:
        facts = order.reservation_id, order.prefill_tokens, order.prompt.isl_tokens
        self._begun("booked", partition, slot, facts, now)
        return super().book(partition, slot, order, now)

    @override
    def learn(
        self,
        partition: Partition,
        slot: int,
        record: ClaimRecord,
        hashes: bytes,
        origin: str | int,
        now: float,
        *,
        watched: bool = False,
    ) -> Reservation:
        facts = record.reservation_id, record.prefill_tokens, record.isl_tokens
        self._begun("learnt", partition, slot, facts, now)
        return super().learn(partition, slot, record, hashes, origin, now, watched=watched)

    @override
    def prefill_complete(self, name: str, now: float) -> tuple[Partition | None, Effects]:
        done = super().prefill_complete(name, now)
        if done[0] is None:  # its worker is not here, nor is its beginning in the recording
            return done
        self.witness.sink.put(Life(now, "prefill_complete", name), LIFE_BYTES)
        return done

    @override
    def output_block(
        self, name: str, decay_fraction: float | None, now: float, count: int = 1
    ) -> None:
        super().output_block(name, decay_fraction, now, count)
        note = Life(now, "output_block", name, amount=count, fraction=decay_fraction)
        self.witness.sink.put(note, LIFE_BYTES)

    @override
    def free(self, name: str, now: float) -> tuple[Partition | None, Effects]:
        self._why = "freed"
        try:
            return super().free(name, now)
        finally:
            self._why = "told"

    @override
    def expire(self, partition: Partition, limit: int, now: float, effects: Effects) -> int:
        self._why = "expired"
        try:
            return super().expire(partition, limit, now, effects)
        finally:
            self._why = "told"

    @override
    def clear_leases(
        self, limit: int, now: float, effects: Effects, lease: Lease | None = None
    ) -> tuple[int, set[Partition]]:
        self._why = "lease_ended"
        try:
            return super().clear_leases(limit, now, effects, lease)
        finally:
            self._why = "told"

    @override
    def _forget_dropped(self, reservation: Reservation, now: float) -> None:
        self.witness.sink.put(Life(now, "dropped", reservation.reservation_id), LIFE_BYTES)
        super()._forget_dropped(reservation, now)

    @override
    def release(self, booking: Booking, now: float) -> None:
        reservation = booking.reservation
        blocks = reservation.whole_outputs + reservation.faded_outputs
        note = Life(now, self._why, reservation.reservation_id, amount=blocks)
        self.witness.sink.put(note, LIFE_BYTES)
        super().release(booking, now)


class _WavePlan(BatchPlan):
    """Notes the inputs of each step of a plan, and the whole plan once it is made."""

    witness: Recorder
    _looked: list[tuple[int, Seen]]
    _roles: Roles  # the seating when it was begun

    @override
    def seats(self) -> Iterator[list[PlannedRank]]:
        witness, partition = self.witness, self._partition
        loads, draws = partition.ledger.loads, witness.sink.draws
        self._roles = partition.seating.roles
        taken, size = [], 0
        plan = super().seats()
        while True:
            draws.clear()
            self._looked = []
            columns, requests = loads.pack(), loads.requests.tobytes()
            piece = next(plan, None)
            if piece is None:
                break
            if piece:
                seated = [(seat.member.number, seat.slot) for seat in piece]
                taken.append(StepNote(columns, requests, self._looked, witness.draws(), seated))
                size += len(columns) + len(requests) + 64 * len(seated)
            yield piece
        size += sum(160 + len(one.prompt.block_hashes) for one in self._members)
        members = [
            (one.number, one.prompt, one.request, one.weights, one.rows) for one in self._members
        ]
        facts = partition.scope, self._load_limit, self._keep_together
        if self._roles is not partition.seating.roles:  # its slots may belong to others now
            witness.sink.put(Gap(1, "seats"), LIFE_BYTES)
            return
        if not witness.seats(partition):
            witness.sink.leave_out()
            return
        counted = self._now, partition.ledger.sequence_blocks
        witness.sink.put(WaveNote(witness.now, *facts, members, taken, *counted), size)

    @override
    def _price(self, member: Member) -> tuple[Floats, Floats]:
        self._looked.append((member.number, self._partition.see(member.prompt)))
        return super()._price(member)
