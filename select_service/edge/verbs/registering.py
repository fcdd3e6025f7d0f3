"""The catalog's verbs: workers come, change, drain and go, by the API or by discovery."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from select_service.core.fleet.discovery import API
from select_service.types.drains import HIT_RATE_LOSS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection

    from select_service.core.effects import Effects
    from select_service.edge.driving.turn import Turn
    from select_service.types import Role, WorkerPatch, WorkerRecord, WorkerSpec
    from select_service.types.drains import DrainRequest, DrainStatus, ScaleDownCandidate

__all__ = ["Registering"]

CANDIDATES_SLICE_S = 0.0003
"""How long the look for workers that are cheap to lose may hold the loop."""


class Registering:
    """What is done to the catalog."""

    def __init__(self, turn: Turn) -> None:
        self._core, self._clock, self._carry_out = turn

    def upsert_worker(self, spec: WorkerSpec, source: str = API) -> WorkerRecord:
        """POST /workers, or a source names it."""
        record, effects = self._core.upsert_worker(spec, self._clock(), source)
        return self._listened(record, effects)

    def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """PATCH /workers/{id}."""
        record, effects = self._core.patch_worker(worker_id, patch, self._clock())
        return self._listened(record, effects)

    def _listened(self, record: WorkerRecord, effects: Effects) -> WorkerRecord:
        """Follow the worker's event sources; a source ZMQ will not connect to puts it out again."""
        self._carry_out(effects)
        if effects.listen:
            record = self._core.worker(record.worker_id)
        return record

    def delete_worker(self, worker_id: int, source: str = API) -> WorkerRecord:
        """DELETE /workers/{id}, or a source names it no longer."""
        record, effects = self._core.delete_worker(worker_id, self._clock(), source)
        self._carry_out(effects)
        return record

    def drain_worker(self, worker_id: int, request: DrainRequest) -> DrainStatus:
        """POST /workers/{id}/drain."""
        return self._drain_told(*self._core.drain(worker_id, request, self._clock()))

    def undrain_worker(self, worker_id: int) -> DrainStatus:
        """DELETE /workers/{id}/drain."""
        return self._drain_told(*self._core.undrain(worker_id, self._clock()))

    def _drain_told(self, status: DrainStatus, effects: Effects) -> DrainStatus:
        self._carry_out(effects)
        return self._core.drain_status(status.worker_id) if effects.listen else status

    def drain_status(self, worker_id: int) -> DrainStatus:
        """GET /workers/{id}/drain."""
        return self._core.drain_status(worker_id)

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
        """GET /scale_down_candidates, of one tenant, some or all, and of one role or all.

        The loop is let go every few hundred microseconds.
        """
        tenant_ids = among if tenant_id is None else (tenant_id,)
        asked = self._core.scale_down_candidates(
            count, model_name, tenant_ids, role, hit_rate_loss_max
        )
        until = self._clock() + CANDIDATES_SLICE_S
        while True:
            try:
                next(asked)
            except StopIteration as told:
                found: list[ScaleDownCandidate] = told.value
                return found
            if self._clock() >= until:
                await asyncio.sleep(0)
                until = self._clock() + CANDIDATES_SLICE_S

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers."""
        return self._core.workers(model_name, tenant_id)

    def worker_ids(self, model_name: str | None = None, tenant_id: str | None = None) -> list[int]:
        """GET /workers: whom to tell of, each in its turn by `worker_record`."""
        return self._core.worker_ids(model_name, tenant_id)

    def worker_record(self, worker_id: int) -> WorkerRecord | None:
        """GET /workers: one of them; None: it has gone since."""
        known = self._core.catalog.find(worker_id)
        return None if known is None else self._core.worker(worker_id)
