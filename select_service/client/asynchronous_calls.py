"""The calls of an `AsyncClient` that are more than one request; a subclass does the I/O.

`synchronous_calls.py` is generated from this file, and `asynchronous_operations.py` has the calls
that are one request without more (`make twin`).
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import msgspec

from select_service.client import calls
from select_service.client.base_client import BaseClient, seconds
from select_service.client.core.exchange import SelectorRequest
from select_service.client.reservation import PairReservation, Reservation
from select_service.client.reserve_context import AsyncReserve
from select_service.types import (
    BatchAnswer,
    BatchRequest,
    LeaseRecord,
    LoadRow,
    OverlapScores,
    ScopeLoads,
    WorkerRecord,
)
from select_service.types.batches import WaveAnswer
from select_service.types.decisions import Decision
from select_service.types.workers import DrainStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.client.base_client import Book
    from select_service.client.core.exchange import Run
    from select_service.client.reservation import ReservationHandle
    from select_service.types import (
        Operation,
        OperationResult,
        Selection,
    )
    from select_service.types.batches import SelectBatchRequest

T = TypeVar("T")
R = TypeVar("R", bound="ReservationHandle")


class AsyncCalls(BaseClient):
    """Every verb of the service."""

    def reserve(
        self,
        *,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.SelectFields],
    ) -> AsyncReserve[Reservation]:
        """Choose a worker and book it: `async with client.reserve(…) as r:`; leaving it frees.

        Awaited instead, it returns the reservation, and you must call `r.free()` yourself.

        Args:
            reservation_id: a UUID unless given; must not be in use.
            timeout_ms: total time of this call.
            fields: those of POST /select_and_reserve: the prompt as `token_ids` (numbers, or packed
                little-endian, 4 bytes each), or as `block_hashes` (8 bytes each), with
                `sequence_hashes` (computed from the former unless given, which needs xxhash) and
                `isl_tokens`; and what else is wanted.

        Raises:
            TypeError: a field does not exist.
            UnknownModel: no worker was ever registered for the model.
            ServiceError: the service refuses; see `select_service.errors`.
            NotCached: nobody holds enough of the prompt for `cache_hit_threshold`.
            ClientError: no selector answers, and there is no catalog to choose from.
        """
        body = calls.prompt_body(fields)
        book = self._session.reserve
        return self._reserving(book, Reservation, body, reservation_id, timeout_ms)

    def reserve_pair(
        self,
        *,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.SelectFields],
    ) -> AsyncReserve[PairReservation]:
        """Choose a prefill and a decode worker, or one for both, and book them (/select_pair).

        Arguments, use and errors as in `reserve`.
        """
        body = calls.prompt_body(fields)
        book = self._session.reserve_pair
        return self._reserving(book, PairReservation, body, reservation_id, timeout_ms)

    def book(
        self,
        worker_id: int,
        dp_rank: int = 0,
        *,
        block_size: int | None = None,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.BookingFields],
    ) -> AsyncReserve[Reservation]:
        """Book a rank that was chosen elsewhere, for example by `select` (POST /reservations).

        Use and errors as in `reserve`.

        Args:
            worker_id: the worker, and
            dp_rank: its rank.
            block_size: of the worker, needed to count output; looked up in the catalog unless
                given.
            reservation_id: a UUID unless given; must not be in use.
            timeout_ms: total time of this call.
            fields: the other ones of POST /reservations, the prompt as in `reserve`.
        """
        body = calls.booking_body(worker_id, dp_rank, fields)
        book = partial(self._session.book, block_size=block_size)
        return self._reserving(book, Reservation, body, reservation_id, timeout_ms)

    async def select(
        self,
        *,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.SelectFields],
    ) -> Selection:
        """Choose a worker and book nothing; arguments and errors as in `reserve`."""
        body = calls.prompt_body(fields)
        return await self._drive(self._session.select(body, monotonic(), seconds(timeout_ms)))

    @overload
    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        *,
        timeout_ms: float | None = None,
        accepts: tuple[int, ...] = (),
    ) -> Any: ...

    @overload
    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        kind: type[T] = ...,
        *,
        timeout_ms: float | None = None,
        accepts: tuple[int, ...] = (),
    ) -> T: ...

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        kind: type[T] = Any,  # type: ignore[assignment]
        *,
        timeout_ms: float | None = None,
        accepts: tuple[int, ...] = (),
    ) -> T | Any:
        """Call any route, and decode the answer as `kind`. The path is used unchanged.

        `accepts` names statuses from 400 on whose body is such an answer too, as 503 of /ready.
        """
        run = self._session.read(
            SelectorRequest(method, path, body, accepts=accepts),
            kind,
            monotonic(),
            seconds(timeout_ms),
        )
        return await self._drive(run)

    async def ready(self) -> calls.Readiness:
        """GET /ready: whether anything can be scheduled."""
        return await self.call("GET", "/ready", kind=calls.Readiness, accepts=(503,))

    async def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers: the catalog, by ascending id."""
        scope = calls.query(model_name=model_name, tenant_id=tenant_id)
        return await self.call("GET", "/workers" + scope, kind=list[WorkerRecord])

    async def drain_worker(self, worker_id: int, reason: str | None = None) -> DrainStatus:
        """POST /workers/{id}/drain: place nothing new there. Raises WorkerNotFound."""
        body: dict[str, object] | None = None if reason is None else {"reason": reason}
        return await self.call("POST", f"/workers/{worker_id}/drain", body, DrainStatus)

    async def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads: the load of every rank, by scope."""
        scope = calls.query(model_name=model_name, tenant_id=tenant_id)
        return await self.call("GET", "/loads" + scope, kind=list[ScopeLoads])

    async def potential_loads(self, **fields: Unpack[calls.SelectFields]) -> list[LoadRow]:
        """POST /potential_loads: what every rank would carry with this prompt."""
        body = calls.prompt_body(fields)
        return await self.call("POST", "/potential_loads", body, list[LoadRow])

    async def overlap_scores(self, **fields: Unpack[calls.SelectFields]) -> OverlapScores:
        """POST /overlap_scores: what every rank holds of this prompt."""
        body = calls.prompt_body(fields)
        return await self.call("POST", "/overlap_scores", body, OverlapScores)

    async def decision(self, name: str) -> Decision:
        """GET /decisions/{id}: why this worker. Raises DecisionNotFound."""
        return await self.call("GET", f"/decisions/{calls.quoted(name)}", kind=Decision)

    async def decisions(self, limit: int = 50) -> list[Decision]:
        """GET /decisions: the last ones, newest first."""
        told = await self.call("GET", f"/decisions?limit={limit}", kind=calls.Decisions)
        return told.decisions

    async def batch(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """POST /reservations/batch: lifecycle calls by id, in order, and the result of each.

        For ids that no reservation object of this client represents. A request whose reply is lost
        is repeated, so report output by `total`, which may be repeated, and not by `count`.
        """
        body = msgspec.to_builtins(BatchRequest(operations=list(operations)))
        told = await self.call("POST", "/reservations/batch", body, BatchAnswer)
        return told.results

    async def select_batch(self, wave: SelectBatchRequest) -> WaveAnswer:
        """POST /select_batch: workers for many prompts together, booked if `wave.reserve`.

        Bookings live by the ids and leases their items name, and are ended by `batch` or by their
        lease. Items without an id get one here, so that repeating a request whose reply was lost
        books nothing twice.
        """
        if wave.reserve:
            for item in wave.requests:
                if item.reservation_id is None:
                    item.reservation_id = self._session.new_id()
        return await self.call("POST", "/select_batch", calls.batch_body(wave), WaveAnswer)

    async def open_lease(
        self, lease_id: str | None = None, *, ttl_s: float = 30.0, owner: str | None = None
    ) -> LeaseRecord:
        """POST /leases: one of your own, besides that of `reserve`; its id a UUID unless given."""
        name = self._session.new_id() if lease_id is None else lease_id
        body: dict[str, object] = {
            "lease_id": name,
            "owner": owner or self._session.owner,
            "ttl_s": ttl_s,
        }
        return await self.call("POST", "/leases", body, LeaseRecord)

    async def renew_lease(self, lease_id: str, ttl_s: float | None = None) -> LeaseRecord:
        """POST /leases/{id}/renew. Raises LeaseNotFound."""
        path = f"/leases/{calls.quoted(lease_id)}/renew"
        body: dict[str, object] | None = None if ttl_s is None else {"ttl_s": ttl_s}
        return await self.call("POST", path, body, LeaseRecord)

    async def close_lease(self, lease_id: str) -> None:
        """DELETE /leases/{id}: with all that is booked under it. Raises LeaseNotFound."""
        await self.call("DELETE", f"/leases/{calls.quoted(lease_id)}")

    # -- for the face ---------------------------------------------------------------------------

    async def _drive(self, run: Run[T]) -> T:
        """Carry out a run."""
        raise NotImplementedError

    def _reserving(
        self,
        book: Book,
        kind: type[R],
        body: dict[str, Any],
        name: str | None,
        timeout_ms: float | None,
    ) -> AsyncReserve[R]:
        """Book, and return an object that represents the booking."""
        raise NotImplementedError
