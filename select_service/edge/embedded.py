"""The same service for a caller in the same process: async verbs, listeners included, no HTTP.

A Ray actor holds one `SelectionService` and awaits its methods. They mirror the HTTP routes one
to one and raise the errors of `select_service.errors` in place of statuses.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from indexer.types import EventLossPolicy
from select_service.edge.driver import Driver
from select_service.types import BatchAnswer, LeaseRenewal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from select_service.types import (
        BatchRequest,
        CoreLimits,
        LeaseList,
        LeaseRecord,
        LeaseRequest,
        LoadRow,
        OverlapScores,
        OverlapScoresRequest,
        PotentialLoadsRequest,
        Ready,
        ReservationAnswer,
        ReservationRequest,
        RouterConfig,
        ScopeLoads,
        SelectAndReserveRequest,
        Selection,
        SelectRequest,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )


class SelectionService:
    """`async with SelectionService() as service:` — then the verbs of the API.

    All methods must be awaited on the event loop that entered the context.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        limits: CoreLimits | None = None,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        replica_sync_port: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Build the service; sockets open when the context is entered.

        Args:
            config: weights and switches; None: the reference's defaults.
            limits: bounds of memory, and the TTL of reservations.
            on_event_loss: what becomes of a rank's blocks when lost events cannot be recovered.
            replica_sync_port: where bookings are published to replicas; None: nowhere.
            seed: for ties and temperatures; None: from the system.
        """
        self.driver = Driver(
            config,
            limits=limits,
            on_event_loss=on_event_loss,
            replica_sync_port=replica_sync_port,
            seed=seed,
        )

    async def __aenter__(self) -> Self:
        await self.driver.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.driver.close()

    async def upsert_worker(self, spec: WorkerSpec) -> WorkerRecord:
        """Put a whole worker record into the catalog; POST /workers."""
        return self.driver.upsert_worker(spec)

    async def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """Merge a patch into a record; PATCH /workers/{id}. Raises WorkerNotFound."""
        return self.driver.patch_worker(worker_id, patch)

    async def delete_worker(self, worker_id: int) -> WorkerRecord:
        """Remove a worker with its load and index; DELETE /workers/{id}. Raises WorkerNotFound."""
        return self.driver.delete_worker(worker_id)

    async def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """Return records by ascending id; GET /workers."""
        return self.driver.workers(model_name, tenant_id)

    async def ready(self) -> Ready:
        """Return whether anything can be scheduled; GET /ready."""
        return self.driver.ready()

    async def select(self, request: SelectRequest) -> Selection:
        """Choose a worker; waits while all are busy. POST /select."""
        return await self.driver.select(request)

    async def select_and_reserve(self, request: SelectAndReserveRequest) -> Selection:
        """Choose and book in one step; waits while all are busy. POST /select_and_reserve."""
        return await self.driver.select_and_reserve(request)

    async def reserve(self, request: ReservationRequest) -> ReservationAnswer:
        """Book a rank of the caller's choice; POST /reservations."""
        return self.driver.reserve(request)

    async def prefill_complete(self, reservation_id: str) -> None:
        """The prompt is computed; POST /reservations/{id}/prefill_complete."""
        self.driver.prefill_complete(reservation_id)

    async def output_block(self, reservation_id: str, decay_fraction: float | None = None) -> None:
        """One more block is filled; POST /reservations/{id}/output_block."""
        self.driver.output_block(reservation_id, decay_fraction)

    async def free(self, reservation_id: str) -> None:
        """End a reservation; DELETE /reservations/{id}. Repeatable."""
        self.driver.free(reservation_id)

    async def batch(self, request: BatchRequest) -> BatchAnswer:
        """Carry out many lifecycle calls in order, each for itself; POST /reservations/batch."""
        answer = self.driver.batch_now(request)
        return answer if isinstance(answer, BatchAnswer) else await asyncio.shield(answer)

    async def open_lease(self, request: LeaseRequest) -> LeaseRecord:
        """Open a lease, or renew one's own; POST /leases."""
        return self.driver.open_lease(request)

    async def renew_lease(self, lease_id: str, ttl_s: float | None = None) -> LeaseRecord:
        """Renew all that lives under a lease; POST /leases/{id}/renew. Raises LeaseNotFound."""
        return self.driver.renew_lease(lease_id, LeaseRenewal(ttl_s=ttl_s))

    async def close_lease(self, lease_id: str) -> None:
        """End a lease and free all under it; DELETE /leases/{id}. Repeatable."""
        lease = self.driver.close_lease_now(lease_id)
        if lease is not None:
            await self.driver.clear_lease(lease)

    async def leases(self, owner: str | None = None, limit: int = 100) -> LeaseList:
        """Return open leases, oldest first; GET /leases."""
        return self.driver.leases(owner, limit)

    async def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """Return the load of every rank, by scope; GET /loads."""
        return self.driver.loads(model_name, tenant_id)

    async def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """Return what every rank would carry with this prompt; POST /potential_loads."""
        return self.driver.potential_loads(request)

    async def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """Return what every rank holds of this prompt; POST /overlap_scores."""
        return self.driver.overlap_scores(request)

    def dump(self) -> AsyncIterator[bytes]:
        """Return the index as pieces of JSON; GET /dump."""
        return self.driver.dump()
