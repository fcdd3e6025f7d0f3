"""Decisions for tokens bound to tenants: their own only, under the client's ids.

Takes the place of `DecisionReporter`; `tenant_ids.py` explains the kept ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from select_service.edge.decision_report import DecisionReporter
from select_service.errors import DecisionNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.decisions.explain import ExplainedRecord
    from select_service.core.decisions.record import DecisionRecord
    from select_service.edge.decision_report import Wanted
    from select_service.edge.tenancy.tenant_ids import TenantIds
    from select_service.types.decisions import Decision


class TenantDecisions(DecisionReporter):
    """Renders the decisions of some tenants; others do not exist."""

    def __init__(
        self,
        decision_reports: DecisionReporter,
        tenants: frozenset[str],
        names: TenantIds,
        note_foreign: Callable[[], None],
    ) -> None:
        """Render nothing yet.

        Args:
            decision_reports: renders all decisions.
            tenants: whose decisions are visible.
            names: the ids under which their bookings are kept.
            note_foreign: called when another tenant's decision is named.
        """
        super().__init__(*decision_reports.sources)
        self._tenants = tenants
        self._names = names
        self._note_foreign = note_foreign

    @override
    def find(
        self,
        name: str,
        tenants: frozenset[str] | None = None,
        aliases: frozenset[str] = frozenset(),
    ) -> DecisionRecord:
        aliases = frozenset(prefix + name for prefix in self._names.prefixes)
        try:
            return super().find(name, self._tenants, aliases)
        except DecisionNotFound:
            super().find(name)  # raises if nobody has such a decision
            self._note_foreign()
            raise

    @override
    async def matching(self, wanted: Wanted) -> list[DecisionRecord]:
        if wanted.tenant_id is not None and wanted.tenant_id not in self._tenants:
            self._note_foreign()
        return await super().matching(msgspec.structs.replace(wanted, tenants=self._tenants))

    @override
    def decision_of(self, explained: ExplainedRecord) -> Decision:
        decision = super().decision_of(explained)
        names = {
            field: self._names.short(name)
            for field in ("decision_id", "selection_id", "reservation_id")
            if isinstance(name := getattr(decision, field), str)
        }
        return msgspec.structs.replace(decision, **names)
