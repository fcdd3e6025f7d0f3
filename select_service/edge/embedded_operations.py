"""Plain operations of an embedded service: made out of the table of operations by `make twin`.

`http/routes.py` has the table; what is not just one call of the driver is in `embedded.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from select_service.edge.arguments import taken
from select_service.edge.driver.driver import Driver
from select_service.edge.embedded_operation import operation
from select_service.types.admission import WorkerMetrics, WorkerMetricsAnswer
from select_service.types.inspection import LoadRow, OverlapScores
from select_service.types.requests import OverlapScoresRequest, PotentialLoadsRequest
from select_service.types.reservations import LeaseList, LeaseRecord, LeaseRequest
from select_service.types.workers import DrainStatus, WorkerPatch, WorkerRecord, WorkerSpec


class EmbeddedOperations:
    """What an embedded service does as a route does it, without more."""

    driver: Driver

    @operation
    async def upsert_worker(self, spec: WorkerSpec | Mapping[str, Any]) -> WorkerRecord:
        """Register a worker, or replace its whole record.

        POST /workers.
        """
        return self.driver.upsert_worker(taken("spec", spec, WorkerSpec))

    @operation
    async def patch_worker(
        self, worker_id: int, patch: WorkerPatch | Mapping[str, Any]
    ) -> WorkerRecord:
        """Merge into a worker's record; null and absent change nothing.

        PATCH /workers/{id}.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self.driver.patch_worker(worker_id, taken("patch", patch, WorkerPatch))

    @operation
    async def delete_worker(self, worker_id: int) -> WorkerRecord:
        """Remove a worker with its reservations and its index.

        DELETE /workers/{id}.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self.driver.delete_worker(worker_id)

    @operation
    async def undrain_worker(self, worker_id: int) -> DrainStatus:
        """Let a worker be chosen again. Repeatable.

        DELETE /workers/{id}/drain.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self.driver.undrain_worker(worker_id)

    @operation
    async def drain_status(self, worker_id: int) -> DrainStatus:
        """Return how far a worker is from being idle, draining or not.

        GET /workers/{id}/drain.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self.driver.drain_status(worker_id)

    @operation
    async def report(
        self, worker_id: int, metrics: WorkerMetrics | Mapping[str, Any]
    ) -> WorkerMetricsAnswer:
        """Apply what a worker reports of its own load.

        POST /workers/{id}/metrics.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self.driver.report(worker_id, taken("metrics", metrics, WorkerMetrics))

    @operation
    async def open_lease(self, request: LeaseRequest | Mapping[str, Any]) -> LeaseRecord:
        """Open a lease, or renew one's own under the same id.

        POST /leases.
        """
        return self.driver.open_lease(taken("request", request, LeaseRequest))

    @operation
    async def leases(self, owner: str | None = None, limit: int = 100) -> LeaseList:
        """List open leases, oldest first (100 unless given), and how many there are.

        GET /leases.
        """
        return self.driver.leases(owner=owner, limit=limit)

    @operation
    async def potential_loads(
        self, request: PotentialLoadsRequest | Mapping[str, Any]
    ) -> list[LoadRow]:
        """Return what every rank would carry with this prompt.

        POST /potential_loads.
        """
        return self.driver.potential_loads(taken("request", request, PotentialLoadsRequest))

    @operation
    async def overlap_scores(
        self, request: OverlapScoresRequest | Mapping[str, Any]
    ) -> OverlapScores:
        """Return what every rank holds of this prompt.

        POST /overlap_scores.
        """
        return self.driver.overlap_scores(taken("request", request, OverlapScoresRequest))
