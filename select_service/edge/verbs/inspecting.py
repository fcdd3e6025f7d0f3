"""The verbs that only look: load, overlap, trust, shadow, the index. They change nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from select_service.core.books.audit import audit
from select_service.core.shadow.telling import ShadowTelling
from select_service.edge.slices import Slices
from select_service.types import Consistency, LoadDifference

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.core.books.audit import Difference
    from select_service.core.partition import Partition
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

__all__ = ["DIFFERENCES_LISTED", "SHADOW_SCOPES_LISTED", "Inspecting"]

_log = logging.getLogger("select_service")

DIFFERENCES_LISTED = 100
"""Told of singly by GET /debug/consistency; all are counted."""

SHADOW_SCOPES_LISTED = 100
SHADOW_SLICE = 32
"""Scopes of GET /shadow looked at in one go: some 10 µs each."""


class Inspecting:
    """What is told of the state."""

    def __init__(self, turn: Turn) -> None:
        self._core, self._clock, _ = turn
        self.checks = Counter(consistent=0, different=0)
        """What GET /debug/consistency found."""

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads, all at once."""
        return self._core.loads(model_name, tenant_id)

    def load_scopes(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[Scope]:
        """GET /loads: of which scopes, each in its turn by `load_of`."""
        return self._core.load_scopes(model_name, tenant_id)

    def load_of(self, scope: Scope) -> ScopeLoads | None:
        """GET /loads: one of them; None: it was given up meanwhile."""
        return self._core.load_of(scope)

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """POST /potential_loads."""
        return self._core.potential_loads(request)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """POST /overlap_scores."""
        return self._core.overlap_scores(request)

    def trust(self, model_name: str | None = None, tenant_id: str | None = None) -> TrustTable:
        """GET /trust, all at once."""
        return self._core.trust(model_name, tenant_id)

    async def trust_seats(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[TrustSeat]:
        """GET /trust: whom to tell of, each in its turn by `trust_row`; found in slices.

        Those of a scope are of one moment; who comes in later is left out.
        """
        return await Slices().through(self._core.trusting.seats_in_steps(model_name, tenant_id))

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

    async def consistency(self) -> Consistency:
        """GET /debug/consistency; others have their turn every fraction of a millisecond."""
        began, slices = self._clock(), Slices()
        found: list[LoadDifference] = []
        partitions = list(self._core.partitions.values())
        ranks = reservations = count = 0
        for partition in partitions:
            ranks += sum(len(one.slots) for one in partition.seating.present.values())
            reservations += partition.ledger.live
            for one in audit(partition.ledger):
                if one is not None:
                    count += 1
                    if len(found) < DIFFERENCES_LISTED:
                        found.append(_told(partition, one))
                await slices.breathe()
        self.checks["different" if count else "consistent"] += 1
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


def _told(partition: Partition, one: Difference) -> LoadDifference:
    scope = partition.scope
    rank = None if one.slot is None else partition.seating.occupant(one.slot)
    return LoadDifference(
        model_name=scope.model_name,
        tenant_id=scope.tenant_id,
        worker_id=None if rank is None else rank.worker_id,
        dp_rank=None if rank is None else rank.dp_rank,
        what=one.what,
        carried=one.carried,
        recomputed=one.recomputed,
    )
