"""Plain operations of an `AsyncClient`: made out of the table of operations by `make twin`.

What is not just one request is in `asynchronous_calls.py`.
"""

from __future__ import annotations

from select_service.client import calls
from select_service.client.asynchronous_calls import AsyncCalls
from select_service.types.admission import WorkerMetrics, WorkerMetricsAnswer
from select_service.types.reservations import LeaseList
from select_service.types.workers import DrainStatus, WorkerPatch, WorkerRecord, WorkerSpec


class AsyncOperations(AsyncCalls):
    """What can be asked of the service in one request."""

    async def upsert_worker(self, spec: WorkerSpec) -> WorkerRecord:
        """POST /workers: register a worker, or replace its whole record."""
        return await self.call("POST", "/workers", calls.given(spec), kind=WorkerRecord)

    async def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """PATCH /workers/{id}: merge into a worker's record; null and absent change nothing.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return await self.call(
            "PATCH", f"/workers/{worker_id}", calls.given(patch), kind=WorkerRecord
        )

    async def delete_worker(self, worker_id: int) -> WorkerRecord:
        """DELETE /workers/{id}: remove a worker with its reservations and its index.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return await self.call("DELETE", f"/workers/{worker_id}", kind=WorkerRecord)

    async def undrain_worker(self, worker_id: int) -> DrainStatus:
        """DELETE /workers/{id}/drain: let a worker be chosen again. Repeatable.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return await self.call("DELETE", f"/workers/{worker_id}/drain", kind=DrainStatus)

    async def drain_status(self, worker_id: int) -> DrainStatus:
        """GET /workers/{id}/drain: tell how far a worker is from being idle, draining or not.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return await self.call("GET", f"/workers/{worker_id}/drain", kind=DrainStatus)

    async def report(self, worker_id: int, metrics: WorkerMetrics) -> WorkerMetricsAnswer:
        """POST /workers/{id}/metrics: take in what a worker says of its own load.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return await self.call(
            "POST", f"/workers/{worker_id}/metrics", calls.given(metrics), kind=WorkerMetricsAnswer
        )

    async def leases(self, owner: str | None = None, limit: int = 100) -> LeaseList:
        """GET /leases: list open leases, oldest first (100 unless told), and how many there are."""
        return await self.call(
            "GET", "/leases" + calls.query(owner=owner, limit=limit), kind=LeaseList
        )
