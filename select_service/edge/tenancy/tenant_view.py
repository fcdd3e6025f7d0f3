"""The service as seen by a token bound to tenants, and by callers without a token.

Both views take the driver's place before the handlers, which do not notice. To a bound token,
things of other tenants do not exist: errors are worded exactly as for missing ones. Verbs not
defined here are refused, so that a new verb of the driver stays closed until somebody has
considered tenants. The tenants' ids are kept under a prefix: see `tenant_ids.py`.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, TypeVar

import msgspec
from msgspec import UNSET

from select_service.core.admission.queue import Ticket
from select_service.core.fleet.catalog import worker_not_found
from select_service.edge.tenancy.tenant_decisions import TenantDecisions
from select_service.edge.tenancy.tenant_ids import TenantIds
from select_service.edge.withdrawal import ids_in
from select_service.errors import (
    NoSchedulableWorker,
    ServiceError,
    TenantNotFound,
    TokenIsBound,
    Unauthenticated,
    WorkerIdTaken,
)
from select_service.types import (
    BatchAnswer,
    BriefReady,
    LeaseList,
    Ready,
)
from select_service.types.workers import HIT_RATE_LOSS_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from indexer.types import Scope
    from select_service.core.batches.batch_selection import Item
    from select_service.core.decisions.trust_monitor import TrustedRank
    from select_service.core.ledger.reservation import Lease
    from select_service.edge.driver.driver import Driver
    from select_service.edge.state.keeper import Keeper
    from select_service.types import (
        Answer,
        BatchRequest,
        LeaseRecord,
        LeaseRenewal,
        LeaseRequest,
        LoadRow,
        Outcome,
        OverlapScores,
        OverlapScoresRequest,
        PotentialLoadsRequest,
        PromptFields,
        RankTrustRow,
        ReservationAnswer,
        ReservationRequest,
        Role,
        ScopeLoads,
        SelectAndReserveRequest,
        SelectPairRequest,
        SelectRequest,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )
    from select_service.types.admission import WorkerMetrics, WorkerMetricsAnswer
    from select_service.types.batches import SelectBatchAnswer, SelectBatchRequest
    from select_service.types.shadow import ShadowStatus
    from select_service.types.workers import DrainRequest, DrainStatus, ScaleDownCandidate

B = TypeVar("B", "SelectAndReserveRequest", "SelectPairRequest", "ReservationRequest")
A = TypeVar("A")
P = ParamSpec("P")
Q = TypeVar("Q", bound="PromptFields")


class Outside:
    """The view of callers without a token: whether the process is ready, and no more."""

    keeper: Keeper | None = None

    def __init__(self, service: Driver) -> None:
        self._service = service

    def is_ready(self) -> bool:
        """GET /ready, without the workers."""
        return self._service.is_ready()

    def ready_for_traffic(self) -> BriefReady:
        """GET /ready?for=traffic, without what it waits for."""
        return BriefReady(self._service.ready_for_traffic().ready)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unauthenticated("missing")


class TenantView:
    """The service, restricted to some tenants."""

    def __init__(
        self, service: Driver, tenants: tuple[str, ...], note_foreign: Callable[[], None]
    ) -> None:
        """Show a service to a token.

        Args:
            service: does the work.
            tenants: to which the token is bound; its leases go under the first.
            note_foreign: called when something of another tenant is named.
        """
        self.keeper, self.bookings = service.keeper, service.bookings
        self._service = service
        self._tenants = frozenset(tenants)
        self._charged_to = tenants[0]  # for what is of no scope
        self._names = TenantIds(service.core, tenants, note_foreign)
        self._note_foreign = note_foreign

    def __getattr__(self, name: str) -> NoReturn:
        raise TokenIsBound

    @cached_property
    def decision_reports(self) -> TenantDecisions:
        """Renders the tenants' own decisions."""
        reports = self._service.decision_reports
        return TenantDecisions(reports, self._tenants, self._names, self._note_foreign)

    # -- workers -------------------------------------------------------------------------------

    def _check_worker(self, worker_id: int) -> None:
        worker = self._service.core.catalog.find(worker_id)
        if worker is None or worker.scope.tenant_id not in self._tenants:
            if worker is not None:
                self._note_foreign()
            raise worker_not_found(worker_id)

    def upsert_worker(self, spec: WorkerSpec) -> WorkerRecord:
        """POST /workers. Worker ids are process-wide: another tenant's is refused."""
        tenant = spec.tenant_id if spec.tenant_id is not UNSET else spec.routing_group
        name = "default" if tenant is UNSET else tenant
        if name not in self._tenants:
            self._note_foreign()
            raise TenantNotFound(name)
        known = self._service.core.catalog.find(spec.worker_id)
        if known is not None and known.scope.tenant_id not in self._tenants:
            self._note_foreign()
            raise WorkerIdTaken(spec.worker_id)
        return self._service.upsert_worker(spec)

    def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """PATCH /workers/{id}."""
        self._check_worker(worker_id)
        return self._service.patch_worker(worker_id, patch)

    def delete_worker(self, worker_id: int) -> WorkerRecord:
        """DELETE /workers/{id}."""
        self._check_worker(worker_id)
        return self._service.delete_worker(worker_id)

    def drain_worker(self, worker_id: int, request: DrainRequest) -> DrainStatus:
        """POST /workers/{id}/drain."""
        self._check_worker(worker_id)
        return self._service.drain_worker(worker_id, request)

    def undrain_worker(self, worker_id: int) -> DrainStatus:
        """DELETE /workers/{id}/drain."""
        self._check_worker(worker_id)
        return self._service.undrain_worker(worker_id)

    def drain_status(self, worker_id: int) -> DrainStatus:
        """GET /workers/{id}/drain."""
        self._check_worker(worker_id)
        return self._service.drain_status(worker_id)

    async def scale_down_candidates(
        self,
        count: int,
        model_name: str | None = None,
        tenant_id: str | None = None,
        role: Role | None = None,
        hit_rate_loss_max: float = HIT_RATE_LOSS_MAX,
    ) -> list[ScaleDownCandidate]:
        """GET /scale_down_candidates, of the token's tenants."""
        among = self._asked(tenant_id)
        return await self._service.scale_down_candidates(
            count, model_name, None, role, hit_rate_loss_max, among=among
        )

    def report(self, worker_id: int, metrics: WorkerMetrics) -> WorkerMetricsAnswer:
        """POST /workers/{id}/metrics."""
        self._check_worker(worker_id)
        return self._service.report(worker_id, metrics)

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers."""
        found = [
            worker
            for tenant in self._asked(tenant_id)
            for worker in self._service.workers(model_name, tenant)
        ]
        return sorted(found, key=lambda worker: worker.worker_id)

    def worker_ids(self, model_name: str | None = None, tenant_id: str | None = None) -> list[int]:
        """GET /workers: the ids to report."""
        return sorted(
            worker_id
            for tenant in self._asked(tenant_id)
            for worker_id in self._service.worker_ids(model_name, tenant)
        )

    def worker_record(self, worker_id: int) -> WorkerRecord | None:
        """GET /workers: one record; None if it is another tenant's by now."""
        record = self._service.worker_record(worker_id)
        return record if record is not None and record.tenant_id in self._tenants else None

    def _asked(self, tenant_id: str | None) -> list[str]:
        """Return the tenants a query is about."""
        if tenant_id is None:
            return sorted(self._tenants)
        if tenant_id in self._tenants:
            return [tenant_id]
        self._note_foreign()
        return []

    def is_ready(self) -> bool:
        """GET /ready for a token that may not read."""
        return self._service.is_ready()

    def ready_for_traffic(self) -> BriefReady:
        """GET /ready?for=traffic, without what the process waits for."""
        return BriefReady(self._service.ready_for_traffic().ready)

    def ready(self, *, with_workers: bool = True) -> Ready:
        """GET /ready: of the process, with the tenants' workers."""
        schedulable = sum(
            worker.lifecycle == "schedulable"
            for worker in self._service.core.catalog
            if worker.scope.tenant_id in self._tenants
        )
        workers = self.workers() if with_workers else []
        return Ready(self._service.is_ready(), schedulable, workers)

    # -- selection -----------------------------------------------------------------------------

    def _check_scope(self, request: PromptFields) -> None:
        if request.scope.tenant_id not in self._tenants:
            self._note_foreign()
            raise NoSchedulableWorker.in_scope(request.scope)

    def _read(
        self, verb: Callable[Concatenate[Q, P], A], request: Q, *args: P.args, **kwargs: P.kwargs
    ) -> A:
        """Ask about a prompt of the token's tenants."""
        self._check_scope(request)
        try:
            return verb(request, *args, **kwargs)
        except NoSchedulableWorker as refusal:
            raise _of_scope(refusal, request.scope) from None

    def select_now(self, request: SelectRequest, unknown: bytes = b"") -> Answer | Ticket:
        """POST /select."""
        return self._read(self._service.select_now, request, unknown)

    def select_and_reserve_now(
        self, request: SelectAndReserveRequest, unknown: bytes = b""
    ) -> Answer | Ticket:
        """POST /select_and_reserve."""
        return self._book(request, unknown, self._service.select_and_reserve_now)

    def select_pair_now(self, request: SelectPairRequest, unknown: bytes = b"") -> Answer | Ticket:
        """POST /select_pair."""
        return self._book(request, unknown, self._service.select_pair_now)

    async def select_batch(
        self, request: SelectBatchRequest, items: Sequence[Item]
    ) -> SelectBatchAnswer:
        """POST /select_batch; items for other tenants find no worker."""
        own = [self._own_item(item) for item in items]
        try:
            answer = await self._service.select_batch(request, own)
        except ServiceError as error:
            raise self._names.in_words_of_client(error) from None
        return msgspec.structs.replace(
            answer, results=[self._names.result_named_by_client(one) for one in answer.results]
        )

    def _own_item(self, item: Item) -> Item:
        if isinstance(item, ServiceError):
            return item
        request, unknown = item
        try:
            self._check_scope(request)
            self._names.rename(request)
        except ServiceError as error:
            return error
        return request, unknown

    def reserve(self, request: ReservationRequest, unknown: bytes = b"") -> ReservationAnswer:
        """POST /reservations."""
        return self._book(request, unknown, self._service.reserve)

    def _book(self, request: B, unknown: bytes, verb: Callable[[B, bytes], A]) -> A:
        """Book under the kept ids, and answer with the client's."""
        self._check_scope(request)
        self._names.rename(request)
        try:
            answer = verb(request, unknown)
        except NoSchedulableWorker as refusal:
            raise _of_scope(refusal, request.scope) from None
        except ServiceError as error:
            raise self._names.in_words_of_client(error) from None
        return self._names.named_by_client(answer)

    async def wait(self, ticket: Ticket) -> Answer:
        """Wait for an answer that could not be given at once."""
        try:
            return self._names.named_by_client(await self._service.wait(ticket))
        except ServiceError as error:
            raise self._names.in_words_of_client(error) from None

    def withdraw(self, answer: object, added: int) -> None:
        """Take back what an answer says was booked; see `SelectionOperations`."""
        names = [self._names.reservation(name) for name in ids_in(answer)]
        self._service.withdraw_named(names, added)

    # -- reservations --------------------------------------------------------------------------

    def prefill_complete(self, reservation_id: str, cached_tokens: int | None = None) -> None:
        """POST /reservations/{id}/prefill_complete."""
        kept = self._names.reservation(reservation_id)
        self._ask(self._service.prefill_complete, kept, cached_tokens)

    def output_block(self, reservation_id: str, decay_fraction: float | None = None) -> None:
        """POST /reservations/{id}/output_block."""
        kept = self._names.reservation(reservation_id)
        self._ask(self._service.output_block, kept, decay_fraction)

    def free(
        self,
        reservation_id: str,
        cached_tokens: int | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """DELETE /reservations/{id}."""
        kept = self._names.reservation(reservation_id)
        self._ask(self._service.free, kept, cached_tokens, outcome)

    def _ask(self, verb: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """Call a verb; its refusals use the client's ids."""
        try:
            return verb(*args, **kwargs)
        except ServiceError as error:
            raise self._names.in_words_of_client(error) from None

    def batch_now(self, request: BatchRequest) -> BatchAnswer | asyncio.Task[BatchAnswer]:
        """POST /reservations/batch."""
        self._service.core.reservations.check_batch(request)
        for operation in request.operations:
            operation.reservation_id = self._names.reservation(operation.reservation_id)
        answer = self._service.batch_now(request)
        if isinstance(answer, BatchAnswer):
            return self._names.batch_named_by_client(answer)
        return asyncio.get_running_loop().create_task(self._results_later(answer))

    async def _results_later(self, answer: asyncio.Task[BatchAnswer]) -> BatchAnswer:
        return self._names.batch_named_by_client(await asyncio.shield(answer))

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: LeaseRequest) -> LeaseRecord:
        """POST /leases."""
        name = request.lease_id
        if name is None:
            request.lease_id = self._names.prefixes[0] + self._service.core.selection.new_id()
        else:
            request.lease_id = self._names.lease(name)
        return self._names.lease_named_by_client(self._ask(self._service.open_lease, request))

    def renew_lease(self, lease_id: str, request: LeaseRenewal) -> LeaseRecord:
        """POST /leases/{id}/renew."""
        lease = self._ask(self._service.renew_lease, self._names.lease(lease_id), request)
        return self._names.lease_named_by_client(lease)

    def close_lease_now(self, lease_id: str) -> Lease | None:
        """DELETE /leases/{id}, up to one turn."""
        return self._ask(self._service.close_lease_now, self._names.lease(lease_id))

    async def clear_lease(self, lease: Lease) -> None:
        """Free the rest under an ended lease."""
        await self._service.clear_lease(lease)

    def leases(self, owner: str | None, limit: int) -> LeaseList:
        """GET /leases."""
        listed = self._service.leases(owner, limit, prefixes=self._names.prefixes)
        own = [self._names.lease_named_by_client(one) for one in listed.leases]
        return LeaseList(own, listed.total)

    # -- inspection ----------------------------------------------------------------------------

    def load_scopes(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[Scope]:
        """GET /loads: the scopes to report."""
        return sorted(
            scope
            for tenant in self._asked(tenant_id)
            for scope in self._service.load_scopes(model_name, tenant)
        )

    def load_of(self, scope: Scope) -> ScopeLoads | None:
        """GET /loads: one scope."""
        return self._service.load_of(scope)

    async def trusted_ranks(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[TrustedRank]:
        """GET /trust: the ranks to report."""
        return [
            trusted_rank
            for tenant in self._asked(tenant_id)
            for trusted_rank in await self._service.trusted_ranks(model_name, tenant)
        ]

    def trust_row(self, trusted_rank: TrustedRank) -> RankTrustRow:
        """GET /trust: one rank."""
        return self._service.trust_row(trusted_rank)

    async def shadow(
        self, model_name: str | None, tenant_id: str | None, limit: int
    ) -> ShadowStatus:
        """GET /shadow."""
        self._asked(tenant_id)
        return await self._service.shadow(model_name, tenant_id, limit, self._tenants)

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """POST /potential_loads."""
        return self._read(self._service.potential_loads, request)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """POST /overlap_scores."""
        return self._read(self._service.overlap_scores, request)

    def dump(self) -> AsyncIterator[bytes]:
        """GET /dump."""
        return self._service.dump(self._tenants, self._charged_to)


def _of_scope(refusal: NoSchedulableWorker, scope: Scope) -> NoSchedulableWorker:
    """Word a refusal for its scope alone: its text might name other tenants' workers."""
    details = refusal.details or {}  # of the scope, but for where others are known and it is not
    reasons = [str(one) for one in details["reasons"]]  # type: ignore[attr-defined]
    return NoSchedulableWorker.in_scope(scope, reasons, is_known=bool(details["is_known"]) or None)
