"""Renders recorded decisions on request, in slices: large fleets must not hold the loop.

`core/decisions/explain.py` computes the numbers; handlers and `embedded.py` call this.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, cast

import msgspec
from msgspec import UNSET

from select_service.core.decisions.decision_log import is_of, only_scope, outcome_of
from select_service.core.decisions.record import DecisionRecord
from select_service.edge.cooperative import TimeSlices
from select_service.errors import DecisionNotFound, DecisionsOff
from select_service.types.decisions import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from select_service.core.decisions.decision_log import DecisionLog
    from select_service.core.decisions.explain import ExplainedRecord
    from select_service.errors import ServiceError
    from select_service.types import Answer, SelectRequest
    from select_service.types.decisions import Candidate, Decision

SLICE: Final = 16
"""Ranks rendered in one go, and encoded if wanted: some 40 µs."""

LISTED: Final = 50
LISTED_MAX: Final = 1000
"""Decisions in one answer: the default of `limit`, and its maximum; sent as a stream."""

_WALL_MOVED_S: Final = 0.005
"""Reading the two clocks may differ by this much on a busy machine; beyond it the wall clock was
set."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which decisions to return."""

    worker_id: int | None = None  # that they chose
    model_name: str | None = None
    tenant_id: str | None = None
    outcome: Outcome | None = None
    tenants: frozenset[str] | None = None  # visible to the caller; None: all
    limit: int = LISTED
    candidates: bool = False  # include every rank


def unencoded(candidate: Candidate) -> Candidate:
    """Leave a rank unencoded, for a reader in the same process."""
    return candidate


class DecisionReporter:
    """Finds records and renders them with wall-clock times."""

    def __init__(
        self, decisions: DecisionLog, clock: Callable[[], float], transfer_cost: float
    ) -> None:
        self.sources = decisions, clock, transfer_cost
        self._decisions, self._clock, self._transfer_cost = self.sources
        self._wall_ahead = 0.0  # of our clock; kept, so that repeated answers show the same times

    def explain(self, record: DecisionRecord) -> ExplainedRecord:
        """Return a renderer of a record."""
        from select_service.core.decisions.explain import ExplainedRecord  # loaded on first use

        ahead = time.time() - self._clock()  # noqa: TID251 - for people
        if abs(ahead - self._wall_ahead) > _WALL_MOVED_S:
            self._wall_ahead = ahead
        withdrawn = self._decisions.is_withdrawn(record)
        return ExplainedRecord(
            record, self._wall_ahead, self._transfer_cost, is_withdrawn=withdrawn
        )

    def decision_of(self, explained: ExplainedRecord) -> Decision:
        """Return a decision without its candidates, under the ids that the caller knows."""
        return explained.decision()

    def find(
        self,
        name: str,
        tenants: frozenset[str] | None = None,
        aliases: frozenset[str] = frozenset(),
    ) -> DecisionRecord:
        """Return the newest decision under an id.

        Args:
            name: the id.
            tenants: whose it must be; None: anybody's.
            aliases: names with the same meaning.

        Raises:
            DecisionsOff: no decisions are kept.
            DecisionNotFound: none has this id.
        """
        if not self._decisions.is_on:
            raise DecisionsOff
        record = self._decisions.find(name, tenants, aliases)
        if record is None:
            raise DecisionNotFound(name, self._decisions.count_max)
        return record

    async def report(
        self, record: object, write: Callable[[Candidate], object] = unencoded
    ) -> Decision:
        """Render a whole decision, yielding to the loop every fraction of a millisecond.

        Args:
            record: of the decision.
            write: converts each candidate. HTTP encodes them here: encoding a thousand at once
                would take as long as rendering them.
        """
        if not isinstance(
            record, DecisionRecord
        ):  # already rendered: callers may wait for one answer
            return cast("Decision", record)
        explained = self.explain(record)
        decision = self.decision_of(explained)
        some: list[object] = []
        slices = TimeSlices()
        decision.candidates = cast("list[Candidate]", some)
        for start in range(0, len(explained), SLICE):
            some += map(write, explained.candidates(start, start + SLICE))
            await slices.yield_if_due()
        return decision

    async def finish(
        self,
        answer: Answer,
        request: SelectRequest,
        write: Callable[[Candidate], object] = unencoded,
    ) -> Answer:
        """Return an answer as it goes out: with its decision rendered if `explain` was set.

        Duplicate requests that waited together share one answer, but each sets `explain` for
        itself.
        """
        record: object = answer.decision
        if not request.explain:
            return answer if record is UNSET else msgspec.structs.replace(answer, decision=UNSET)
        if record is UNSET:
            record = self._decisions.explained(request.reservation_id or "")
            if record is None:
                return answer
        return msgspec.structs.replace(answer, decision=await self.report(record, write))

    async def finish_refusal(
        self, error: ServiceError, write: Callable[[Candidate], object] = unencoded
    ) -> None:
        """Render the decision behind a refusal, if `explain` was set."""
        if error.decision is not None:
            error.decision = await self.report(error.decision, write)

    async def matching(self, wanted: Wanted) -> list[DecisionRecord]:
        """Return the matching records, newest first.

        Raises:
            DecisionsOff: no decisions are kept.
        """
        if not self._decisions.is_on:
            raise DecisionsOff
        found: list[DecisionRecord] = []
        slices = TimeSlices()
        for record in self._decisions.newest_first():
            if (
                is_of(record, wanted.tenants)
                and only_scope(record, wanted.model_name, wanted.tenant_id, wanted.worker_id)
                and wanted.outcome in {None, outcome_of(record)}
            ):
                found.append(record)
                if len(found) >= wanted.limit:
                    break
            await slices.yield_if_due()
        return found

    async def each(
        self,
        records: list[DecisionRecord],
        *,
        candidates: bool,
        write: Callable[[Candidate], object] = unencoded,
    ) -> AsyncIterator[Decision]:
        """Render one after another, yielding to the loop in between."""
        slices = TimeSlices()
        for record in records:
            yield (
                await self.report(record, write)
                if candidates
                else self.decision_of(self.explain(record))
            )
            await slices.yield_if_due()
