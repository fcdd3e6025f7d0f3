"""The verbs that only look: load, overlap, trust, shadow, the index. They change nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from select_service.core.shadow.telling import ShadowTelling

if TYPE_CHECKING:
    from select_service.core.trust.trusting import TrustSeat
    from select_service.edge.driving.turn import Turn
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

__all__ = ["SHADOW_SCOPES_LISTED", "Inspecting"]

SHADOW_SCOPES_LISTED = 100
SHADOW_SLICE = 32
"""Scopes of GET /shadow looked at in one go: some 10 µs each."""


class Inspecting:
    """What is told of the state."""

    def __init__(self, turn: Turn) -> None:
        self._core, self._clock, _ = turn

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads."""
        return self._core.loads(model_name, tenant_id)

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """POST /potential_loads."""
        return self._core.potential_loads(request)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """POST /overlap_scores."""
        return self._core.overlap_scores(request)

    def trust(self, model_name: str | None = None, tenant_id: str | None = None) -> TrustTable:
        """GET /trust, all at once."""
        return self._core.trust(model_name, tenant_id)

    def trust_seats(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[TrustSeat]:
        """GET /trust: whom to tell of, each in its turn by `trust_row`."""
        return self._core.trusting.seats(model_name, tenant_id)

    def trust_row(self, seat: TrustSeat) -> RankTrustRow:
        """GET /trust: one of them."""
        return self._core.trusting.row(*seat)

    async def shadow(
        self,
        model_name: str | None = None,
        tenant_id: str | None = None,
        limit: int = SHADOW_SCOPES_LISTED,
        tenants: frozenset[str] | None = None,
    ) -> ShadowStatus:
        """GET /shadow; others have their turn every so many scopes.

        Args:
            model_name: of this one alone.
            tenant_id: of this one alone.
            limit: scopes told singly.
            tenants: whose; None: all, and what it costs the process.
        """
        telling = ShadowTelling(self._core.shadowing, limit)
        for number, partition in enumerate(list(self._core.partitions.values()), 1):
            scope = partition.scope
            if (
                model_name in {None, scope.model_name}
                and tenant_id in {None, scope.tenant_id}
                and (tenants is None or scope.tenant_id in tenants)
            ):
                telling.add(scope, partition.shadow_tally)
            if not number % SHADOW_SLICE:
                await asyncio.sleep(0)
        return telling.status(self._clock(), with_cost=tenants is None)
