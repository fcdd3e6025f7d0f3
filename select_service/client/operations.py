"""Plain operations of the clients: made out of the table of operations by `make twin`.

What is not just one request is in `verbs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.client import calls
from select_service.client.verb import Verb
from select_service.client.verbs import Verbs
from select_service.types.admission import WorkerMetrics, WorkerMetricsAnswer
from select_service.types.reservations import LeaseList
from select_service.types.workers import DrainStatus, WorkerPatch, WorkerRecord, WorkerSpec

if TYPE_CHECKING:
    from select_service.client.core.exchange import Run


class Operations(Verbs):
    """What can be asked of the service in one request."""

    @Verb
    def upsert_worker(self, spec: WorkerSpec) -> Run[WorkerRecord]:
        """POST /workers: register a worker, or replace its whole record."""
        return self._answered("POST", "/workers", calls.given(spec), kind=WorkerRecord)

    @Verb
    def patch_worker(self, worker_id: int, patch: WorkerPatch) -> Run[WorkerRecord]:
        """PATCH /workers/{id}: merge into a worker's record; null and absent change nothing.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self._answered(
            "PATCH", f"/workers/{worker_id}", calls.given(patch), kind=WorkerRecord
        )

    @Verb
    def delete_worker(self, worker_id: int) -> Run[WorkerRecord]:
        """DELETE /workers/{id}: remove a worker with its reservations and its index.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self._answered("DELETE", f"/workers/{worker_id}", kind=WorkerRecord)

    @Verb
    def undrain_worker(self, worker_id: int) -> Run[DrainStatus]:
        """DELETE /workers/{id}/drain: let a worker be chosen again. Repeatable.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self._answered("DELETE", f"/workers/{worker_id}/drain", kind=DrainStatus)

    @Verb
    def drain_status(self, worker_id: int) -> Run[DrainStatus]:
        """GET /workers/{id}/drain: return how far a worker is from being idle, draining or not.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self._answered("GET", f"/workers/{worker_id}/drain", kind=DrainStatus)

    @Verb
    def report(self, worker_id: int, metrics: WorkerMetrics) -> Run[WorkerMetricsAnswer]:
        """POST /workers/{id}/metrics: apply what a worker reports of its own load.

        Raises:
            WorkerNotFound: there is none with this id.
        """
        return self._answered(
            "POST", f"/workers/{worker_id}/metrics", calls.given(metrics), kind=WorkerMetricsAnswer
        )

    @Verb
    def leases(self, owner: str | None = None, limit: int = 100) -> Run[LeaseList]:
        """GET /leases.

        List open leases, oldest first (100 unless given), and how many there are.
        """
        return self._answered(
            "GET", "/leases" + calls.query(owner=owner, limit=limit), kind=LeaseList
        )
