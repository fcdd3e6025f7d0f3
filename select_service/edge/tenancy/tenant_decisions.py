"""Decisions for tokens bound to tenants: their own only, under the client's ids.

Takes the place of `DecisionReporter`; `tenant_ids.py` explains the kept ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from select_service.edge.decision_report import as_told
from select_service.errors import DecisionNotFound
from select_service.types.decisions import Decision

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from select_service.core.decisions.record import DecisionRecord
    from select_service.edge.decision_report import DecisionReporter, Wanted
    from select_service.errors import ServiceError
    from select_service.types import Answer, SelectRequest
    from select_service.types.decisions import Candidate


class TenantDecisions:
    """Renders the decisions of some tenants; others do not exist."""

    def __init__(
        self,
        decision_reports: DecisionReporter,
        tenants: frozenset[str],
        prefixes: Sequence[str],
        short: Callable[[str], str],
        note_foreign: Callable[[], None],
    ) -> None:
        """Render nothing yet.

        Args:
            decision_reports: renders all decisions.
            tenants: whose decisions are visible.
            prefixes: of the ids under which their bookings are kept.
            short: turns a kept id into the client's.
            note_foreign: called when another tenant's decision is named.
        """
        self._decision_reports = decision_reports
        self._tenants = tenants
        self._prefixes = prefixes
        self._short = short
        self._note_foreign = note_foreign

    def find(self, name: str) -> DecisionRecord:
        """Return the newest decision under an id.

        Raises:
            DecisionsOff, DecisionNotFound: as for everybody; another tenant's is not found.
        """
        aliases = frozenset(prefix + name for prefix in self._prefixes)
        try:
            return self._decision_reports.find(name, self._tenants, aliases)
        except DecisionNotFound:
            self._decision_reports.find(name)  # raises if nobody has such a decision
            self._note_foreign()
            raise

    async def matching(self, wanted: Wanted) -> list[DecisionRecord]:
        """Return the matching records, newest first."""
        if wanted.tenant_id is not None and wanted.tenant_id not in self._tenants:
            self._note_foreign()
        return await self._decision_reports.matching(
            msgspec.structs.replace(wanted, tenants=self._tenants)
        )

    async def each(
        self,
        records: list[DecisionRecord],
        *,
        candidates: bool,
        write: Callable[[Candidate], object] = as_told,
    ) -> AsyncIterator[Decision]:
        """Render one after another."""
        async for decision in self._decision_reports.each(
            records, candidates=candidates, write=write
        ):
            yield self._named_by_client(decision)

    async def tell(
        self, record: object, write: Callable[[Candidate], object] = as_told
    ) -> Decision:
        """Render a whole decision."""
        return self._named_by_client(await self._decision_reports.tell(record, write))

    async def finish(
        self,
        answer: Answer,
        request: SelectRequest,
        write: Callable[[Candidate], object] = as_told,
    ) -> Answer:
        """Return an answer as it goes out."""
        told = await self._decision_reports.finish(answer, request, write)
        if not isinstance(told.decision, Decision):
            return told
        decision = self._named_by_client(told.decision)
        return msgspec.structs.replace(told, decision=decision)

    async def finish_refusal(
        self, error: ServiceError, write: Callable[[Candidate], object] = as_told
    ) -> None:
        """Render the decision behind a refusal, if `explain` was set."""
        await self._decision_reports.finish_refusal(error, write)
        if isinstance(error.decision, Decision):
            error.decision = self._named_by_client(error.decision)

    def _named_by_client(self, decision: Decision) -> Decision:
        names = {
            field: self._short(name)
            for field in ("decision_id", "selection_id", "reservation_id")
            if isinstance(name := getattr(decision, field), str)
        }
        return msgspec.structs.replace(decision, **names)
