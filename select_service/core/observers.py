"""What the line of a request reports to those that look on: a tracer, and a recorder.

Placement, reservations and batches call them where there are any, so that observed requests run
the same lines as all others. `instrumentation/` has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.tiers import Matches
    from select_service.core.admission.queue import Ticket
    from select_service.core.batches.batch_plan import BatchPlan, PlannedRank
    from select_service.core.columns import Rows
    from select_service.core.decisions.record import UnusualFacts
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Placement, Seen
    from select_service.types import Answer


class Tracer(Protocol):
    """Marks when the steps of a request begin."""

    def admitted(self, ticket: Ticket) -> None:
        """A new request is about to be judged."""

    def begin(self, ticket: Ticket, matches: Matches | None) -> Matches | None:
        """A request is about to be placed; return its matches, looked up here if it is traced."""

    def chosen(self, placement: Placement) -> None:
        """The rank of the request is chosen."""

    def booking(self, partition: Partition, slot: int, name: str, isl_tokens: int) -> None:
        """A reservation is about to be booked: of the request, or one whose rank is given."""

    def end(self) -> None:
        """The request is placed or refused; nothing happens if none was being placed."""

    def answered(self, answer: Answer | Ticket) -> None:
        """The call's request is answered, or waits."""


class DecisionRecorder(Protocol):
    """Notes decisions with their inputs."""

    def begin(self) -> None:
        """A decision begins; what a failed one before it has drawn is discarded."""

    def decision(
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        unusual: UnusualFacts | None,
    ) -> None:
        """Note a decision; its arguments are those of `DecisionLog.keep`."""


class ReservationRecorder(Protocol):
    """Notes the lives of reservations."""

    def begun(
        self, what: str, partition: Partition, slot: int, facts: tuple[str, int, int], now: float
    ) -> None:
        """A reservation is about to begin on a slot; its id, prefill tokens and length are facts.

        It is "booked" here, or "learnt" from a replica.
        """

    def lived(
        self, what: str, name: str, now: float, amount: int = 0, fraction: float | None = None
    ) -> None:
        """A step in the life of a reservation, or its end; `recording/items.py` has the kinds."""


class BatchRecorder(Protocol):
    """Notes the plans of batches."""

    def steps_of(self, plan: BatchPlan) -> Iterator[list[PlannedRank]]:
        """Return the pieces of a plan as it yields them, and note them with their inputs."""
