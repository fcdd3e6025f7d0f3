"""What can be asked of the service, but for what is one request without more (`operations.py`)."""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from select_service.client import calls
from select_service.client.base_client import BaseClient, seconds
from select_service.client.core.exchange import SelectorRequest
from select_service.client.reservation import PairReservation, Reservation
from select_service.client.verb import BookingVerb, Verb
from select_service.types import (
    BatchAnswer,
    BatchRequest,
    LeaseRecord,
    LoadRow,
    OverlapScores,
    ScopeLoads,
    WorkerRecord,
)
from select_service.types.batches import SelectBatchAnswer
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


class Verbs(BaseClient):
    """Every verb of the service."""

    @BookingVerb
    def reserve(
        self,
        *,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.SelectFields],
    ) -> Run[Reservation]:
        """Choose a worker and book it: `with client.reserve(…) as r:`; leaving it frees.

        Of an `AsyncClient`: `async with`. Without `with`, or awaited, it returns the reservation,
        and you must call `r.free()` yourself.

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
            NotCached: no rank holds enough of the prompt for `cache_hit_threshold`.
            ClientError: no selector answers, and there is no catalog to choose from.
        """
        body = calls.prompt_body(fields)
        book = self._session.reserve
        return self._booked(Reservation, book, body, reservation_id, timeout_ms)

    @BookingVerb
    def reserve_pair(
        self,
        *,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.SelectFields],
    ) -> Run[PairReservation]:
        """Choose a prefill and a decode worker, or one for both, and book them (/select_pair).

        Arguments, use and errors as in `reserve`.
        """
        body = calls.prompt_body(fields)
        book = self._session.reserve_pair
        return self._booked(PairReservation, book, body, reservation_id, timeout_ms)

    @BookingVerb
    def book(
        self,
        worker_id: int,
        dp_rank: int = 0,
        *,
        block_size: int | None = None,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.BookingFields],
    ) -> Run[Reservation]:
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
        return self._booked(Reservation, book, body, reservation_id, timeout_ms)

    @Verb
    def select(
        self,
        *,
        timeout_ms: float | None = None,
        **fields: Unpack[calls.SelectFields],
    ) -> Run[Selection]:
        """Choose a worker and book nothing; arguments and errors as in `reserve`."""
        body = calls.prompt_body(fields)
        return self._session.select(body, monotonic(), seconds(timeout_ms))

    @Verb
    def ready(self) -> Run[calls.Readiness]:
        """GET /ready: whether anything can be scheduled."""
        return self._answered("GET", "/ready", kind=calls.Readiness, accepts=(503,))

    @Verb
    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> Run[list[WorkerRecord]]:
        """GET /workers: the catalog, by ascending id."""
        scope = calls.query(model_name=model_name, tenant_id=tenant_id)
        return self._answered("GET", "/workers" + scope, kind=list[WorkerRecord])

    @Verb
    def drain_worker(self, worker_id: int, reason: str | None = None) -> Run[DrainStatus]:
        """POST /workers/{id}/drain: place nothing new there. Raises WorkerNotFound."""
        body: dict[str, object] | None = None if reason is None else {"reason": reason}
        return self._answered("POST", f"/workers/{worker_id}/drain", body, DrainStatus)

    @Verb
    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> Run[list[ScopeLoads]]:
        """GET /loads: the load of every rank, by scope."""
        scope = calls.query(model_name=model_name, tenant_id=tenant_id)
        return self._answered("GET", "/loads" + scope, kind=list[ScopeLoads])

    @Verb
    def potential_loads(self, **fields: Unpack[calls.SelectFields]) -> Run[list[LoadRow]]:
        """POST /potential_loads: what every rank would carry with this prompt."""
        body = calls.prompt_body(fields)
        return self._answered("POST", "/potential_loads", body, list[LoadRow])

    @Verb
    def overlap_scores(self, **fields: Unpack[calls.SelectFields]) -> Run[OverlapScores]:
        """POST /overlap_scores: what every rank holds of this prompt."""
        body = calls.prompt_body(fields)
        return self._answered("POST", "/overlap_scores", body, OverlapScores)

    @Verb
    def decision(self, name: str) -> Run[Decision]:
        """GET /decisions/{id}: why this worker. Raises DecisionNotFound."""
        return self._answered("GET", f"/decisions/{calls.quoted(name)}", kind=Decision)

    @Verb
    def decisions(self, limit: int = 50) -> Run[list[Decision]]:
        """GET /decisions: the last ones, newest first."""
        answer = yield from self._answered("GET", f"/decisions?limit={limit}", kind=calls.Decisions)
        return answer.decisions

    @Verb
    def batch(self, operations: Sequence[Operation]) -> Run[list[OperationResult]]:
        """POST /reservations/batch: lifecycle calls by id, in order, and the result of each.

        For ids that no reservation object of this client represents. A request whose reply is lost
        is repeated, so report output by `total`, which may be repeated, and not by `count`.
        """
        body = msgspec.to_builtins(BatchRequest(operations=list(operations)))
        answer = yield from self._answered("POST", "/reservations/batch", body, BatchAnswer)
        return answer.results

    @Verb
    def select_batch(self, batch: SelectBatchRequest) -> Run[SelectBatchAnswer]:
        """POST /select_batch: workers for many prompts together, booked if `batch.reserve`.

        Bookings live by the ids and leases their items name, and are ended by `batch` or by their
        lease. Items without an id get one here, so that repeating a request whose reply was lost
        books nothing twice.
        """
        if batch.reserve:
            for item in batch.requests:
                if item.reservation_id is None:
                    item.reservation_id = self._session.new_id()
        return self._answered("POST", "/select_batch", calls.batch_body(batch), SelectBatchAnswer)

    @Verb
    def open_lease(
        self, lease_id: str | None = None, *, ttl_s: float = 30.0, owner: str | None = None
    ) -> Run[LeaseRecord]:
        """POST /leases: one of your own, besides that of `reserve`; its id a UUID unless given."""
        name = self._session.new_id() if lease_id is None else lease_id
        body: dict[str, object] = {
            "lease_id": name,
            "owner": owner or self._session.owner,
            "ttl_s": ttl_s,
        }
        return self._answered("POST", "/leases", body, LeaseRecord)

    @Verb
    def renew_lease(self, lease_id: str, ttl_s: float | None = None) -> Run[LeaseRecord]:
        """POST /leases/{id}/renew. Raises LeaseNotFound."""
        path = f"/leases/{calls.quoted(lease_id)}/renew"
        body: dict[str, object] | None = None if ttl_s is None else {"ttl_s": ttl_s}
        return self._answered("POST", path, body, LeaseRecord)

    @Verb
    def close_lease(self, lease_id: str) -> Run[None]:
        """DELETE /leases/{id}: with all that is booked under it. Raises LeaseNotFound."""
        yield from self._answered("DELETE", f"/leases/{calls.quoted(lease_id)}")

    # -- for these methods, and those of `operations.py` ----------------------------------------

    def _answered(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        kind: type[T] = Any,  # type: ignore[assignment]
        *,
        timeout_ms: float | None = None,
        accepts: tuple[int, ...] = (),
    ) -> Run[T]:
        """Ask, and decode the answer as `kind`; see `Client.call`."""
        ask = SelectorRequest(method, path, body, accepts=accepts)
        return self._session.read(ask, kind, monotonic(), seconds(timeout_ms))

    def _booked(
        self,
        kind: type[R],
        book: Book,
        body: dict[str, Any],
        name: str | None,
        timeout_ms: float | None,
    ) -> Run[R]:
        """Book, and return an object that represents the booking; time counts from its start."""
        made = self._session.new_id() if name is None else name
        booking = yield from book(body, made, monotonic(), seconds(timeout_ms))
        return kind(booking, self._session, self._lock, monotonic, self._refuse_forked)
