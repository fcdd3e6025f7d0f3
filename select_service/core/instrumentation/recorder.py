"""The recorder: it notes what a service decides, plans, books and ends; references, no copies.

Placement, decision log, reservations and batches call it where there is one (`core/observers.py`).
`recording/notes.py` has the notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from select_service.core.recording.items import Gap, ReservationStep
from select_service.core.recording.notes import (
    BatchNote,
    BirthNote,
    ChangeNote,
    DecisionNote,
    SlotsNote,
    StepNote,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.types import Scope
    from select_service.core.admission.queue import Ticket
    from select_service.core.batches.batch_plan import BatchMember, BatchPlan, PlannedRank
    from select_service.core.columns import Rows
    from select_service.core.decisions.record import UnusualFacts
    from select_service.core.fleet.roles import Roles
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Seen
    from select_service.core.recording.notes import Note
    from select_service.types.admission import AdmissionSettings

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
        # another object means another fleet
        self._roles: dict[Scope, tuple[Partition, Roles]] = {}
        self._last: Roles | None = None  # the last one looked up, usually the same again
        self._columns = b""  # the last columns charged
        self.now = 0.0
        """When something was last noted."""

    def planned_ranks(self, partition: Partition) -> bool:
        """Note the fleet if it changed; False: there was no room for it."""
        roles = partition.fleet_slots.roles
        if roles is self._last:
            return True
        known = self._roles.get(partition.scope)
        if known is not None and known[1] is roles:
            self._last = roles
            return True
        workers = tuple(
            [
                (one.spec, tuple(one.slots.items()), one.drain)
                for one in partition.fleet_slots.present.values()
            ]
        )
        note = SlotsNote(partition.scope, partition.index.block_size, workers)
        if not self.sink.put(note, 256 + 64 * len(workers)):
            return False
        self._roles[partition.scope] = partition, roles
        self._last = roles
        if len(self._roles) % SCOPES_KEPT == 0:
            self._forget_closed()
        return True

    def _forget_closed(self) -> None:
        self._last = None
        self._roles = {
            scope: one for scope, one in self._roles.items() if one[0].fleet_slots.present
        }

    def draws(self) -> tuple[float | int, ...]:
        """Take the random draws since the last call."""
        draws = self.sink.draws
        if not draws:
            return ()
        taken = tuple(draws)
        draws.clear()
        return taken

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
        unusual: UnusualFacts | None,
    ) -> None:
        """Note a decision."""
        partition, request = ticket.partition, ticket.request
        self.now = now
        if not self.planned_ranks(partition):
            self.sink.leave_out()
            return
        couple = thresholds = None
        if (
            unusual is not None
            and unusual.plan is not None
            and unusual.plan.mode == "disaggregated"
        ):
            couple = unusual.plan.couple
        settings = self.settings
        if settings is not None and (settings.cache_hit_threshold or request.cache_hit_threshold):
            thresholds = (
                settings.cache_hit_threshold,
                settings.cache_hit_attempts_max,
                settings.cache_hit_basis,
                settings.cache_hit_scope,
            )
        columns = seen[0]
        size = 600 + len(ticket.prompt.block_hashes) + _pulls_bytes(seen)
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
            unusual,
            couple,
            thresholds,
            self.draws(),
            ticket.in_batch,
            ticket.in_session,
        )
        self.sink.put(note, size)

    def change(self, now: float, what: str, values: dict[str, object]) -> None:
        """Note settings put in force."""
        self.sink.put(ChangeNote(now, what, values), 512)

    # -- reservations ----------------------------------------------------------------------------

    def begun(
        self, what: str, partition: Partition, slot: int, facts: tuple[str, int, int], now: float
    ) -> None:
        """Note where a reservation begins, with its id, prefill tokens and length."""
        self.now = now
        if not self.planned_ranks(partition):
            self.sink.leave_out()
            return
        worker, dp_rank = partition.fleet_slots.rank_at(slot)
        begins = partition.scope, worker.worker_id, dp_rank
        self.sink.put(BirthNote(now, what, facts[0], *begins, *facts[1:]), LIFE_BYTES)

    def lived(
        self, what: str, name: str, now: float, amount: int = 0, fraction: float | None = None
    ) -> None:
        """Note a step in the life of a reservation."""
        self.sink.put(
            ReservationStep(now, what, name, amount=amount, fraction=fraction), LIFE_BYTES
        )

    # -- batches ---------------------------------------------------------------------------------

    def steps_of(self, plan: BatchPlan) -> Iterator[list[PlannedRank]]:
        """Yield the pieces of a plan; note the inputs of each, and the whole plan in the end."""
        partition, draws = plan.partition, self.sink.draws
        loads, roles = partition.ledger.loads, partition.fleet_slots.roles
        looked: list[tuple[int, Seen]] = []

        def note(member: BatchMember) -> None:
            present = partition.at_present(member.weights)
            seen = partition.see(member.prompt, request=member.request, weights=present)
            looked.append((member.number, seen))

        plan.prices = note
        taken, size = [], 0
        pieces = plan.planned_ranks()
        while True:
            draws.clear()
            looked = []
            columns, requests = loads.pack(), loads.requests.tobytes()
            piece = next(pieces, None)
            if piece is None:
                break
            if piece:
                attached = [
                    (planned_rank.member.number, planned_rank.slot) for planned_rank in piece
                ]
                taken.append(StepNote(columns, requests, looked, self.draws(), attached))
                size += len(columns) + len(requests) + 64 * len(attached)
            yield piece
        size += sum(160 + len(one.prompt.block_hashes) for one in plan.members)
        size += sum(_pulls_bytes(seen) for step in taken for _, seen in step.looked)
        members = [
            (one.number, one.prompt, one.request, one.weights, one.rows) for one in plan.members
        ]
        facts = partition.scope, plan.load_limit, plan.keep_together
        if roles is not partition.fleet_slots.roles:  # its slots may belong to others now
            self.sink.put(Gap(1, "workers"), LIFE_BYTES)
            return
        if not self.planned_ranks(partition):
            self.sink.leave_out()
            return
        counted = plan.now, partition.ledger.sequence_blocks
        self.sink.put(BatchNote(self.now, *facts, members, taken, *counted), size)


def _pulls_bytes(seen: Seen) -> int:
    """Return the bytes of what ranks could pull."""
    found = seen[1]
    return 0 if found is None or found.pulls is None else sum(one.nbytes for one in found.pulls)
