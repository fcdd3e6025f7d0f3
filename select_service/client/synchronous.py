"""The client for threads: the same as `asynchronous.py`, without a loop.

One background thread tells and renews; every step of the core is taken under one lock, and no
request is sent while it is held.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx

from select_service.client import verbs
from select_service.client.core.exchange import Ask, Outcome, Send
from select_service.client.face import Face, seconds
from select_service.client.reservation import Reservation
from select_service.client.transport import answered, failed

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from select_service.client.core.exchange import Command, Run
    from select_service.client.core.options import Options
    from select_service.decision_types import Decision
    from select_service.drain_types import DrainStatus
    from select_service.types import (
        CacheThreshold,
        LoadRow,
        OverlapScores,
        ScopeLoads,
        Selection,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )

__all__ = ["Client"]

T = TypeVar("T")
_FOREVER_S = 86_400.0


class Client(Face):
    """`with Client("http://selector:8092") as client:`, then its methods, from any thread.

    What runs beside (telling, renewing) begins with the first reservation and ends with `close`,
    which frees whatever is still booked.
    """

    def __init__(
        self,
        *selectors: str,
        token: str | Callable[[], str] | None = None,
        ca: str | ssl.SSLContext | None = None,
        cert: tuple[str, str] | None = None,
        owner: str | None = None,
        options: Options | None = None,
    ) -> None:
        """Make a client; arguments as of `AsyncClient`."""
        super().__init__(selectors, token, ca, cert, owner, options)
        self._transports = self._doors.synchronous()
        self._wake = threading.Event()
        self._told = threading.Condition(self._lock)  # everything has been told
        self._background: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell what is still to be told, end the leases with all under them, disconnect."""
        with self._lock:
            if self._session.is_closed:
                return
            self._session.is_closed = True
            background = self._background
        self._wake.set()
        if background is not None:
            background.join()
        try:
            self._drive(self._upkeep.farewell(monotonic()))
        finally:
            with self._told:
                self._told.notify_all()
            for transport in self._transports:
                transport.close()

    def reserve(
        self,
        *,
        token_ids: Sequence[int] | bytes | None = None,
        block_hashes: Sequence[int] | bytes | None = None,
        sequence_hashes: Sequence[int] | bytes | None = None,
        isl_tokens: int | None = None,
        reservation_id: str | None = None,
        timeout_ms: float | None = None,
        **options: Unpack[verbs.SelectOptions],
    ) -> Reserved:
        """Choose a worker and book it, now; as a context manager it is freed at its end.

        Arguments and errors as of `AsyncClient.reserve`.
        """
        self._begin()
        body = verbs.prompt_body(token_ids, block_hashes, sequence_hashes, isl_tokens, options)
        name = self._session.new_id() if reservation_id is None else reservation_id
        run = self._session.reserve(body, name, monotonic(), seconds(timeout_ms))
        return Reserved(self._drive(run), self._session, self._lock, monotonic)

    def select(
        self,
        *,
        token_ids: Sequence[int] | bytes | None = None,
        block_hashes: Sequence[int] | bytes | None = None,
        sequence_hashes: Sequence[int] | bytes | None = None,
        isl_tokens: int | None = None,
        timeout_ms: float | None = None,
        **options: Unpack[verbs.SelectOptions],
    ) -> Selection | CacheThreshold:
        """Choose a worker and book nothing; arguments as of `reserve`."""
        body = verbs.prompt_body(token_ids, block_hashes, sequence_hashes, isl_tokens, options)
        return self._drive(self._session.select(body, monotonic(), seconds(timeout_ms)))

    def flush(self) -> None:
        """Return when everything said so far has been told, however long that takes."""
        self._begin()
        with self._told:
            self._told.wait_for(lambda: self._session.is_settled or self._session.is_closed)

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        kind: type[T] = Any,  # type: ignore[assignment]
        *,
        timeout_ms: float | None = None,
    ) -> T:
        """Ask for any route, and read the answer as `kind`. The path is taken as it is."""
        return self._do(verbs.Verb(Ask(method, path, body), kind), timeout_ms)

    def ready(self) -> verbs.Readiness:
        """GET /ready: whether anything can be scheduled."""
        return self._do(verbs.ready())

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers: the catalog, by ascending id."""
        return self._do(verbs.workers(model_name, tenant_id))

    def upsert_worker(self, spec: WorkerSpec) -> WorkerRecord:
        """POST /workers: put a whole record into the catalog."""
        return self._do(verbs.upsert_worker(spec))

    def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """PATCH /workers/{id}: merge a patch into a record. Raises WorkerNotFound."""
        return self._do(verbs.patch_worker(worker_id, patch))

    def delete_worker(self, worker_id: int) -> WorkerRecord:
        """DELETE /workers/{id}: with its load and index. Raises WorkerNotFound."""
        return self._do(verbs.delete_worker(worker_id))

    def drain_worker(self, worker_id: int, reason: str | None = None) -> DrainStatus:
        """POST /workers/{id}/drain: nothing new goes there. Raises WorkerNotFound."""
        return self._do(verbs.drain_worker(worker_id, reason))

    def drain_status(self, worker_id: int) -> DrainStatus:
        """GET /workers/{id}/drain: how far it is from being idle. Raises WorkerNotFound."""
        return self._do(verbs.drain_status(worker_id))

    def undrain_worker(self, worker_id: int) -> DrainStatus:
        """DELETE /workers/{id}/drain: it takes requests again. Raises WorkerNotFound."""
        return self._do(verbs.undrain_worker(worker_id))

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads: the load of every rank, by scope."""
        return self._do(verbs.loads(model_name, tenant_id))

    def potential_loads(
        self,
        *,
        token_ids: Sequence[int] | bytes | None = None,
        block_hashes: Sequence[int] | bytes | None = None,
        sequence_hashes: Sequence[int] | bytes | None = None,
        isl_tokens: int | None = None,
        **options: Unpack[verbs.SelectOptions],
    ) -> list[LoadRow]:
        """POST /potential_loads: what every rank would carry with this prompt."""
        body = verbs.prompt_body(token_ids, block_hashes, sequence_hashes, isl_tokens, options)
        return self._do(verbs.potential_loads(body))

    def overlap_scores(
        self,
        *,
        token_ids: Sequence[int] | bytes | None = None,
        block_hashes: Sequence[int] | bytes | None = None,
        sequence_hashes: Sequence[int] | bytes | None = None,
        isl_tokens: int | None = None,
        **options: Unpack[verbs.SelectOptions],
    ) -> OverlapScores:
        """POST /overlap_scores: what every rank holds of this prompt."""
        body = verbs.prompt_body(token_ids, block_hashes, sequence_hashes, isl_tokens, options)
        return self._do(verbs.overlap_scores(body))

    def decision(self, name: str) -> Decision:
        """GET /decisions/{id}: why this worker. Raises DecisionNotFound."""
        return self._do(verbs.decision(name))

    def decisions(self, limit: int = 50) -> list[Decision]:
        """GET /decisions: the last ones, newest first."""
        return (self._do(verbs.decisions(limit))).decisions

    # -- behind ---------------------------------------------------------------------------------

    def _do(self, verb: verbs.Verb[T], timeout_ms: float | None = None) -> T:
        run = self._session.read(verb.ask, verb.kind, monotonic(), seconds(timeout_ms))
        return self._drive(run)

    def _begin(self) -> None:
        with self._lock:
            if self._background is None and not self._session.is_closed:
                self._background = threading.Thread(
                    target=self._keep_up, name="select-service-client", daemon=True
                )
                self._background.start()

    def _on_work(self) -> None:
        self._wake.set()

    def _keep_up(self) -> None:
        while not self._session.is_closed:
            self._wake.clear()
            with self._lock:
                delay = self._upkeep.due() - monotonic()
            if delay > 0:
                if not self._session.is_closed:
                    self._wake.wait(min(delay, _FOREVER_S))
                continue
            self._drive(self._upkeep.turn(monotonic()), in_background=True)
            with self._told:
                if self._session.is_settled:
                    self._told.notify_all()

    def _drive(self, run: Run[T], *, in_background: bool = False) -> T:
        """Carry out a run; one that is dropped tidies up behind itself."""
        try:
            with self._lock:
                command = next(run)
            while True:
                outcome = self._carry_out(command)
                if in_background and self._session.is_closed:
                    return None  # type: ignore[return-value] # nobody reads it
                with self._lock:
                    command = run.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            with self._lock:
                run.close()

    def _carry_out(self, command: Command) -> Outcome:
        if not isinstance(command, Send):
            sleep(command.seconds)
            return Outcome(monotonic())
        transport = self._transports[command.selector]
        try:
            response = transport.handle_request(self._doors.request(command))
            body = response.read()
        except httpx.TransportError as error:
            return failed(error, monotonic())
        return answered(response, body, monotonic())


class Reserved(Reservation):
    """A reservation that is freed when its `with` block is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
