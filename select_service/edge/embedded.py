"""The same service for a caller in the same process: async verbs, listeners included, no HTTP.

A Ray actor holds one `SelectionService` and awaits its methods. They mirror the HTTP routes one to
one and raise the errors of `select_service.errors` instead of returning statuses. Where a struct is
wanted, a mapping with its members does as well; it is judged as the body of the route.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from indexer.types import EventLossPolicy, SnapshotLimits
from select_service.edge.arguments import (
    taken,
    taken_batch,
    taken_or_none,
)
from select_service.edge.batch_runner import explained
from select_service.edge.decision_report import Wanted, unencoded
from select_service.edge.driver.driver import Driver
from select_service.edge.driver.driver_options import DriverOptions, EdgeLimits
from select_service.edge.embedded_operation import operation
from select_service.edge.embedded_operations import EmbeddedOperations
from select_service.edge.state.keeper import Keeper
from select_service.edge.withdrawal import withdrawn_if_lost
from select_service.types import (
    BatchAnswer,
    BatchRequest,
    CoreLimits,
    LeaseRenewal,
    PairSelection,
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    SelectPairRequest,
    SelectRequest,
    TrustSettings,
)
from select_service.types.admission import AdmissionSettings
from select_service.types.shadow import ShadowSettings
from select_service.types.workers import DrainRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from select_service.types import (
        Answer,
        LeaseRecord,
        Outcome,
        Ready,
        ReservationAnswer,
        ScopeLoads,
        TrustTable,
        WorkerRecord,
    )
    from select_service.types.batches import SelectBatchAnswer, SelectBatchRequest
    from select_service.types.decisions import Decision
    from select_service.types.shadow import ShadowStatus
    from select_service.types.workers import DrainStatus


class SelectionService(EmbeddedOperations):
    """`async with SelectionService() as service:` — then the verbs of the API.

    All methods must be awaited on the event loop that entered the context.
    """

    def __init__(
        self,
        config: RouterConfig | Mapping[str, Any] | None = None,
        *,
        limits: CoreLimits | Mapping[str, Any] | None = None,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        replica_sync_port: int | None = None,
        state_dir: str | Path | None = None,
        strict: bool = True,
        admission: AdmissionSettings | Mapping[str, Any] | None = None,
        trust: TrustSettings | Mapping[str, Any] | None = None,
        shadow: ShadowSettings | Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        """Build the service; sockets open when the context is entered.

        Where a struct is wanted, a mapping with its members does as well.

        Args:
            config: weights and switches; None: the reference's defaults.
            limits: bounds of memory, and the TTL of reservations.
            on_event_loss: what becomes of a rank's blocks when lost events cannot be recovered.
            replica_sync_port: where bookings are published to replicas; None: nowhere.
            state_dir: where workers, reservations, leases and the index are kept; None: nowhere.
                Locked at once, released when the context is left.
            strict: a verb that changes something returns only once the change is on disk.
            admission: which requests are admitted; None: all.
            trust: when an index counts for less; None: the defaults of the flags.
            shadow: weights evaluated alongside without effect; None: none.
            seed: for ties and temperatures; None: from the system.

        Raises:
            StateDirUnusable: the directory cannot be used, or another process holds it.
            TypeError: an argument is neither a struct nor a mapping.
            InvalidField, UnknownField: a member of a mapping is invalid, or unknown.
            ValueError: settings are inconsistent.
        """
        config = taken_or_none("config", config, RouterConfig)  # before the directory is locked
        limits = taken_or_none("limits", limits, CoreLimits)
        admission = taken_or_none("admission", admission, AdmissionSettings)
        trust = taken_or_none("trust", trust, TrustSettings)
        shadow = taken_or_none("shadow", shadow, ShadowSettings)
        keeper = None if state_dir is None else Keeper(Path(state_dir), strict=strict)
        self.driver = Driver(
            config,
            limits=limits,
            edge_limits=EdgeLimits(snapshot=SnapshotLimits()),
            options=DriverOptions(keeper=keeper),
            admission=admission,
            trust=trust,
            shadow=shadow,
            on_event_loss=on_event_loss,
            replica_sync_port=replica_sync_port,
            seed=seed,
        )

    async def __aenter__(self) -> Self:
        try:
            await self.driver.start()
        except BaseException:
            await self.driver.close()  # __aexit__ will not run for a context that was not entered
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.driver.close()

    @operation
    async def drain_worker(self, worker_id: int, reason: str | None = None) -> DrainStatus:
        """Send a worker no new requests; POST /workers/{id}/drain. Raises WorkerNotFound."""
        request = DrainRequest(reason=reason)
        return self.driver.drain_worker(worker_id, request)

    @operation
    async def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """Return records by ascending id; GET /workers."""
        return self.driver.workers(model_name, tenant_id)

    @operation
    async def ready(self) -> Ready:
        """Return whether anything can be scheduled; GET /ready."""
        return self.driver.ready()

    @operation
    async def select(self, request: SelectRequest | Mapping[str, Any]) -> Answer:
        """Choose a worker; waits while all are busy. POST /select."""
        request = taken("request", request, SelectRequest)
        return await self.driver.select(request)

    @operation
    async def select_and_reserve(
        self, request: SelectAndReserveRequest | Mapping[str, Any]
    ) -> Answer:
        """Choose and book in one step; waits while all are busy. POST /select_and_reserve."""
        request = taken("request", request, SelectAndReserveRequest)
        return await self.driver.select_and_reserve(request)

    @operation
    async def select_pair(self, request: SelectPairRequest | Mapping[str, Any]) -> PairSelection:
        """Book a prefill and a decode rank in one step, or one for both. POST /select_pair."""
        request = taken("request", request, SelectPairRequest)
        answer = await self.driver.select_pair(request)
        assert isinstance(answer, PairSelection), "no threshold refuses what may take a pair"
        return answer

    @operation
    async def select_batch(
        self, request: SelectBatchRequest | Mapping[str, Any]
    ) -> SelectBatchAnswer:
        """Place a batch of prompts together; POST /select_batch."""
        request = taken_batch("request", request)
        items = [(one, b"") for one in request.requests]
        answer = await self.driver.select_batch(request, items)
        with withdrawn_if_lost(self.driver, answer):
            return await explained(answer, self.driver.decision_reports, unencoded)

    @operation
    async def reserve(self, request: ReservationRequest | Mapping[str, Any]) -> ReservationAnswer:
        """Book a rank the caller has chosen; POST /reservations."""
        request = taken("request", request, ReservationRequest)
        return self.driver.reserve(request)

    @operation
    async def prefill_complete(self, reservation_id: str, cached_tokens: int | None = None) -> None:
        """Report the prompt as computed, with so many tokens cached; POST …/prefill_complete."""
        self.driver.prefill_complete(reservation_id, cached_tokens)

    @operation
    async def output_block(self, reservation_id: str, decay_fraction: float | None = None) -> None:
        """Report one more filled block; POST /reservations/{id}/output_block."""
        self.driver.output_block(reservation_id, decay_fraction)

    @operation
    async def free(
        self,
        reservation_id: str,
        cached_tokens: int | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """End a reservation, with so many tokens cached; DELETE /reservations/{id}. Repeatable."""
        self.driver.free(reservation_id, cached_tokens, outcome)

    @operation
    async def batch(self, request: BatchRequest | Mapping[str, Any]) -> BatchAnswer:
        """Carry out many lifecycle calls in order, independently; POST /reservations/batch."""
        request = taken("request", request, BatchRequest)
        answer = self.driver.batch_now(request)
        if not isinstance(answer, BatchAnswer):
            answer = await asyncio.shield(answer)
        return answer

    @operation
    async def renew_lease(self, lease_id: str, ttl_s: float | None = None) -> LeaseRecord:
        """Renew everything under a lease; POST /leases/{id}/renew. Raises LeaseNotFound."""
        return self.driver.renew_lease(lease_id, LeaseRenewal(ttl_s=ttl_s))

    @operation
    async def close_lease(self, lease_id: str) -> None:
        """End a lease and free everything under it; DELETE /leases/{id}. Repeatable."""
        lease = self.driver.close_lease_now(lease_id)
        if lease is not None:
            await self.driver.clear_lease(lease)

    @operation
    async def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """Return the load of every rank, by scope; GET /loads."""
        return self.driver.loads(model_name, tenant_id)

    @operation
    async def decision(self, name: str) -> Decision:
        """Return the record behind a selection; GET /decisions/{id}. Raises DecisionNotFound."""
        return await self.driver.decision_reports.report(self.driver.decision_reports.find(name))

    @operation
    async def decisions(self, wanted: Wanted | Mapping[str, Any]) -> list[Decision]:
        """Return the last decisions, newest first; GET /decisions."""
        wanted = taken("wanted", wanted, Wanted)
        decision_reports = self.driver.decision_reports
        records = await decision_reports.matching(wanted)
        return [one async for one in decision_reports.each(records, candidates=wanted.candidates)]

    @operation
    async def trust(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> TrustTable:
        """Return how far each rank's index is trusted; GET /trust."""
        return self.driver.trust(model_name, tenant_id)

    @operation
    async def shadow(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> ShadowStatus:
        """Return what the shadow weights would have chosen; GET /shadow."""
        return await self.driver.shadow(model_name, tenant_id)

    def dump(self) -> AsyncIterator[bytes]:
        """Return the index as pieces of JSON; GET /dump."""
        return self.driver.dump()
