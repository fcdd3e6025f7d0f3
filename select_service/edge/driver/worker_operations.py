"""The driver's operations on workers, which come and go through the API or discovery."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.fleet.roster import API
from select_service.edge.cooperative import TimeSlices
from select_service.edge.driver.core_calls import CoreCalls
from select_service.types.workers import HIT_RATE_LOSS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection

    from select_service.core.effects import Effects
    from select_service.types import Role, WorkerPatch, WorkerRecord, WorkerSpec
    from select_service.types.workers import DrainRequest, DrainStatus, ScaleDownCandidate


class WorkerOperations(CoreCalls):
    """Changes to the catalog."""

    def upsert_worker(self, spec: WorkerSpec, source: str = API) -> WorkerRecord:
        """Register a worker, or replace its whole record."""
        record, effects = self.core.workers.upsert_worker(spec, self._clock(), source)
        return self._listened(record, effects)

    def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """Merge into a worker's record; null and absent change nothing."""
        record, effects = self.core.workers.patch_worker(worker_id, patch, self._clock())
        return self._listened(record, effects)

    def _listened(self, record: WorkerRecord, effects: Effects) -> WorkerRecord:
        """Follow the worker's event sources; if ZMQ refuses one, the worker is out of service."""
        self._carry_out(effects)
        if effects.listen:
            record = self.core.workers.worker(record.worker_id)
        return record

    def delete_worker(self, worker_id: int, source: str = API) -> WorkerRecord:
        """Remove a worker with its reservations and its index."""
        record, effects = self.core.workers.delete_worker(worker_id, self._clock(), source)
        self._carry_out(effects)
        return record

    def drain_worker(self, worker_id: int, request: DrainRequest) -> DrainStatus:
        """Give a worker no more work; what it has goes on. Repeatable. The body may be empty."""
        return self._drain_status(*self.core.drains.drain(worker_id, request, self._clock()))

    def undrain_worker(self, worker_id: int) -> DrainStatus:
        """Let a worker be chosen again. Repeatable."""
        return self._drain_status(*self.core.drains.undrain(worker_id, self._clock()))

    def hold_worker_back(self, worker_id: int, source: str, why: str | None) -> None:
        """Discovery says why a worker takes no new work; None: it takes work again."""
        self._carry_out(self.core.drains.hold_back(worker_id, source, why, self._clock()))

    def _drain_status(self, status: DrainStatus, effects: Effects) -> DrainStatus:
        self._carry_out(effects)
        return self.core.drains.status(status.worker_id) if effects.listen else status

    def drain_status(self, worker_id: int) -> DrainStatus:
        """Return how far a worker is from being idle, draining or not."""
        return self.core.drains.status(worker_id)

    async def scale_down_candidates(
        self,
        count: int,
        model_name: str | None = None,
        tenant_id: str | None = None,
        role: Role | None = None,
        hit_rate_loss_max: float = HIT_RATE_LOSS_MAX,
        *,
        among: Collection[str] | None = None,
    ) -> list[ScaleDownCandidate]:
        """GET /scale_down_candidates, optionally of some tenants and of one role.

        Yields to the loop every few hundred microseconds.
        """
        tenant_ids = among if tenant_id is None else (tenant_id,)
        return await TimeSlices().through(
            self.core.scale_down.candidates(count, model_name, tenant_ids, role, hit_rate_loss_max)
        )

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers."""
        return self.core.workers.workers(model_name, tenant_id)

    def worker_ids(self, model_name: str | None = None, tenant_id: str | None = None) -> list[int]:
        """GET /workers: the ids to report, each by one call of `worker_record`."""
        return self.core.workers.worker_ids(model_name, tenant_id)

    def worker_record(self, worker_id: int) -> WorkerRecord | None:
        """GET /workers: one record; None: deleted by now."""
        known = self.core.catalog.find(worker_id)
        return None if known is None else self.core.workers.worker(worker_id)
