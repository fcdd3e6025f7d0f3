"""The read-only operations of the driver: load, overlap, trust, shadow, the ledger's audit."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from select_service.core.decisions.shadow import ShadowReport
from select_service.core.ledger.audit import audit
from select_service.edge.cooperative import TimeSlices
from select_service.edge.driver.core_calls import CoreCalls
from select_service.types import Consistency, LoadDifference

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.core.decisions.trust_monitor import TrustedRank
    from select_service.core.ledger.audit import LedgerDifference
    from select_service.core.partition import Partition
    from select_service.types import (
        LoadRow,
        OverlapScores,
        OverlapScoresRequest,
        PotentialLoadsRequest,
        RankTrustRow,
        ScopeLoads,
        TrustTable,
    )
    from select_service.types.shadow import ShadowStatus

_log = logging.getLogger("select_service")

DIFFERENCES_LISTED = 100
"""Differences listed by GET /debug/consistency; all are counted."""

SHADOW_SCOPES_LISTED = 100


class QueryOperations(CoreCalls):
    """Read-only views of the state.

    Attributes:
        consistency_checks: outcomes of GET /debug/consistency.
    """

    consistency_checks: Counter[str]

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads, all at once."""
        return self.core.queries.loads(model_name, tenant_id)

    def load_scopes(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[Scope]:
        """GET /loads: the scopes to report, each by one call of `load_of`."""
        return self.core.queries.load_scopes(model_name, tenant_id)

    def load_of(self, scope: Scope) -> ScopeLoads | None:
        """GET /loads: one scope; None: it is gone by now."""
        return self.core.queries.load_of(scope)

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """Return what every rank would carry with this prompt."""
        return self.core.queries.potential_loads(request)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """Return what every rank holds of this prompt."""
        return self.core.queries.overlap_scores(request)

    def trust(self, model_name: str | None = None, tenant_id: str | None = None) -> TrustTable:
        """GET /trust, all at once."""
        return self.core.trust_monitor.table(model_name, tenant_id)

    async def trusted_ranks(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[TrustedRank]:
        """GET /trust: the ranks to report, each by one call of `trust_row`; collected in slices.

        Ranks of one scope are from one moment; ranks registered later are left out.
        """
        return await TimeSlices().through(
            self.core.trust_monitor.ranks_in_steps(model_name, tenant_id)
        )

    def trust_row(self, trusted_rank: TrustedRank) -> RankTrustRow:
        """GET /trust: one rank."""
        return self.core.trust_monitor.row(*trusted_rank)

    async def shadow(
        self,
        model_name: str | None = None,
        tenant_id: str | None = None,
        limit: int = SHADOW_SCOPES_LISTED,
        tenants: frozenset[str] | None = None,
    ) -> ShadowStatus:
        """GET /shadow; yields to the loop every fraction of a millisecond.

        Args:
            model_name: only this model.
            tenant_id: only this tenant.
            limit: scopes listed one by one.
            tenants: visible to the caller; None: all, plus the cost to the process.
        """
        report, slices = ShadowReport(self.core.shadow_control, limit), TimeSlices()
        for partition in list(self.core.partitions.values()):
            scope = partition.scope
            if (
                model_name in {None, scope.model_name}
                and tenant_id in {None, scope.tenant_id}
                and (tenants is None or scope.tenant_id in tenants)
            ):
                report.add(scope, partition.shadow_tally)
            await slices.yield_if_due()
        return report.status(self._clock(), with_cost=tenants is None)

    async def consistency(self) -> Consistency:
        """Compute every rank's load anew from its reservations; return where the ledger differs."""
        began, slices = self._clock(), TimeSlices()
        found: list[LoadDifference] = []
        partitions = list(self.core.partitions.values())
        ranks = reservations = count = 0
        for partition in partitions:
            ranks += sum(len(one.slots) for one in partition.fleet_slots.present.values())
            reservations += partition.ledger.live
            for one in audit(partition.ledger):
                if one is not None:
                    count += 1
                    if len(found) < DIFFERENCES_LISTED:
                        found.append(_difference(partition, one))
                await slices.yield_if_due()
        self.consistency_checks["different" if count else "consistent"] += 1
        if count:
            _log.error("the ledger differs from its reservations in %d places: %s", count, found[0])
        return Consistency(
            consistent=not count,
            scopes=len(partitions),
            ranks=ranks,
            reservations=reservations,
            seconds=self._clock() - began,
            differences_total=count,
            differences=found,
        )


def _difference(partition: Partition, one: LedgerDifference) -> LoadDifference:
    scope = partition.scope
    rank = None if one.slot is None else partition.fleet_slots.occupant(one.slot)
    return LoadDifference(
        model_name=scope.model_name,
        tenant_id=scope.tenant_id,
        worker_id=None if rank is None else rank.worker_id,
        dp_rank=None if rank is None else rank.dp_rank,
        what=one.what,
        carried=one.carried,
        recomputed=one.recomputed,
    )
