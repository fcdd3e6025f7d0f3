"""The client for asyncio: carries out what the core asks for on the loop it is used in."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx

from select_service.client import verbs
from select_service.client.core.exchange import Ask, Failure, Outcome, Send
from select_service.client.face import Face, seconds
from select_service.client.reservation import Reservation
from select_service.client.transport import answered, failed

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Sequence
    from types import TracebackType

    from select_service.client.core.exchange import Command, Run
    from select_service.client.core.options import Options
    from select_service.client.transport import Doors
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

__all__ = ["AsyncClient"]

T = TypeVar("T")
_FOREVER_S = 86_400.0


class AsyncClient(Face):
    """`async with AsyncClient("http://selector:8092") as client:`, then its methods.

    All of them are awaited on one event loop. What runs beside (telling, renewing) begins with the
    first call and ends with `aclose`, which frees whatever is still booked.
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
        """Make a client; nothing is connected yet.

        Args:
            selectors: `http://…`, `https://…` or `unix:/path`, the preferred one first; the next is
                asked when it fails. Without any, http://127.0.0.1:8092.
            token: to show as a bearer token, or who returns it for each request.
            ca: file of certificates to trust instead of the system's, or a whole TLS context.
            cert: files of a client certificate and its key.
            owner: of its leases, for people who look at them; host and process id by default.
            options: limits and waits.

        Raises:
            ValueError: an address that is none.
        """
        super().__init__(selectors, token, ca, cert, owner, options)
        self._pools = [_Pool(self._doors, at) for at, _ in enumerate(self._doors.addresses)]
        self._wake = asyncio.Event()
        self._background: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []  # for everything to be told

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Tell what is still to be told, end the leases with all under them, disconnect."""
        if self._session.is_closed:
            return
        self._session.is_closed = True
        if self._background is not None:
            self._background.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._background
        try:
            await self._drive(self._upkeep.farewell(monotonic()))
        finally:
            self._release_waiting()
            for pool in self._pools:
                await pool.aclose()

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
    ) -> AsyncReserving:
        """Choose a worker and book it: `async with client.reserve(…) as r:`; its end frees.

        Awaited instead, it returns the reservation, and `r.free()` is yours to call.

        Args:
            token_ids: the prompt, as numbers or packed little-endian (4 bytes each); or
            block_hashes: its hashes, as numbers or packed (8 bytes each), with
            sequence_hashes: those of its prefixes; made of the former unless given (xxhash), and
            isl_tokens: its length.
            reservation_id: a UUID unless given; must not be in use.
            timeout_ms: of this call altogether.
            options: the other fields of POST /select_and_reserve.

        Raises:
            ServiceError: the service refuses; see `select_service.errors`.
            NotCached: nobody holds enough of the prompt for `cache_hit_threshold`.
            ClientError: nobody answers, and there is no catalog to choose from.
        """
        body = verbs.prompt_body(token_ids, block_hashes, sequence_hashes, isl_tokens, options)
        return AsyncReserving(self, body, reservation_id, timeout_ms)

    async def _reserve(
        self, body: dict[str, Any], reservation_id: str | None, timeout_ms: float | None
    ) -> Reservation:
        self._begin()
        name = self._session.new_id() if reservation_id is None else reservation_id
        run = self._session.reserve(body, name, monotonic(), seconds(timeout_ms))
        return self._held(await self._drive(run))

    async def select(
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
        self._begin()
        body = verbs.prompt_body(token_ids, block_hashes, sequence_hashes, isl_tokens, options)
        return await self._drive(self._session.select(body, monotonic(), seconds(timeout_ms)))

    async def flush(self) -> None:
        """Return when everything said so far has been told, however long that takes."""
        self._begin()
        if not self._session.is_settled:
            told = asyncio.get_running_loop().create_future()
            self._waiting.append(told)
            await told

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        kind: type[T] = Any,  # type: ignore[assignment]
        *,
        timeout_ms: float | None = None,
    ) -> T:
        """Ask for any route, and read the answer as `kind`. The path is taken as it is."""
        return await self._do(verbs.Verb(Ask(method, path, body), kind), timeout_ms)

    async def ready(self) -> verbs.Readiness:
        """GET /ready: whether anything can be scheduled."""
        return await self._do(verbs.ready())

    async def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers: the catalog, by ascending id."""
        return await self._do(verbs.workers(model_name, tenant_id))

    async def upsert_worker(self, spec: WorkerSpec) -> WorkerRecord:
        """POST /workers: put a whole record into the catalog."""
        return await self._do(verbs.upsert_worker(spec))

    async def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """PATCH /workers/{id}: merge a patch into a record. Raises WorkerNotFound."""
        return await self._do(verbs.patch_worker(worker_id, patch))

    async def delete_worker(self, worker_id: int) -> WorkerRecord:
        """DELETE /workers/{id}: with its load and index. Raises WorkerNotFound."""
        return await self._do(verbs.delete_worker(worker_id))

    async def drain_worker(self, worker_id: int, reason: str | None = None) -> DrainStatus:
        """POST /workers/{id}/drain: nothing new goes there. Raises WorkerNotFound."""
        return await self._do(verbs.drain_worker(worker_id, reason))

    async def drain_status(self, worker_id: int) -> DrainStatus:
        """GET /workers/{id}/drain: how far it is from being idle. Raises WorkerNotFound."""
        return await self._do(verbs.drain_status(worker_id))

    async def undrain_worker(self, worker_id: int) -> DrainStatus:
        """DELETE /workers/{id}/drain: it takes requests again. Raises WorkerNotFound."""
        return await self._do(verbs.undrain_worker(worker_id))

    async def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads: the load of every rank, by scope."""
        return await self._do(verbs.loads(model_name, tenant_id))

    async def potential_loads(
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
        return await self._do(verbs.potential_loads(body))

    async def overlap_scores(
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
        return await self._do(verbs.overlap_scores(body))

    async def decision(self, name: str) -> Decision:
        """GET /decisions/{id}: why this worker. Raises DecisionNotFound."""
        return await self._do(verbs.decision(name))

    async def decisions(self, limit: int = 50) -> list[Decision]:
        """GET /decisions: the last ones, newest first."""
        return (await self._do(verbs.decisions(limit))).decisions

    # -- behind ---------------------------------------------------------------------------------

    async def _do(self, verb: verbs.Verb[T], timeout_ms: float | None = None) -> T:
        self._begin()
        run = self._session.read(verb.ask, verb.kind, monotonic(), seconds(timeout_ms))
        return await self._drive(run)

    def _begin(self) -> None:
        if self._background is None and not self._session.is_closed:
            loop = asyncio.get_running_loop()
            self._background = loop.create_task(self._keep_up(), name="select-service-client")

    def _on_work(self) -> None:
        self._wake.set()

    async def _keep_up(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            delay = self._upkeep.due() - monotonic()
            if delay <= 0:
                await self._drive(self._upkeep.turn(monotonic()))
                if self._session.is_settled:
                    self._release_waiting()
                await asyncio.sleep(0)  # whatever is due, others get on
                continue
            alarm = loop.call_later(delay, self._wake.set) if delay < _FOREVER_S else None
            try:
                await self._wake.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def _release_waiting(self) -> None:
        for told in self._waiting:
            if not told.done():
                told.set_result(None)
        self._waiting.clear()

    async def _drive(self, run: Run[T]) -> T:
        """Carry out a run; one that is dropped, cancelled for instance, tidies up behind itself."""
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        try:
            command = next(run)
            while True:
                outcome = await self._carry_out(command)
                if task.cancelling() > cancelled:  # and what carries it out has swallowed that
                    raise asyncio.CancelledError
                command = run.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            run.close()

    async def _carry_out(self, command: Command) -> Outcome:
        if not isinstance(command, Send):
            await asyncio.sleep(command.seconds)
            return Outcome(monotonic())
        return await self._pools[command.selector].ask(command)


class _Pool:
    """Connections to one selector: the one used last is used next."""

    def __init__(self, doors: Doors, selector: int) -> None:
        self._doors = doors
        self._selector = selector
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._slots = asyncio.Semaphore(doors.connections_max)

    async def ask(self, send: Send) -> Outcome:
        try:
            async with asyncio.timeout(send.timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            reason = "every connection is in use"
            return Outcome(monotonic(), failure=Failure.SLOW, reason=reason)
        connection = self._idle.pop() if self._idle else self._doors.asynchronous(self._selector)
        try:
            response = await connection.handle_async_request(self._doors.request(send))
            body = await response.aread()
        except httpx.TransportError as error:
            return failed(error, monotonic())
        finally:  # one that broke connects anew when it is used
            self._idle.append(connection)
            self._slots.release()
        return answered(response, body, monotonic())

    async def aclose(self) -> None:
        """Close what is not in use; nothing is, when a client closes."""
        while self._idle:
            await self._idle.pop().aclose()


class AsyncReserving:
    """What `reserve` returns: enter it, or await it."""

    __slots__ = ("_body", "_client", "_name", "_reservation", "_timeout_ms")

    def __init__(
        self,
        client: AsyncClient,
        body: dict[str, Any],
        name: str | None,
        timeout_ms: float | None,
    ) -> None:
        self._client = client
        self._body = body
        self._name = name
        self._timeout_ms = timeout_ms
        self._reservation: Reservation | None = None

    def __await__(self) -> Generator[Any, None, Reservation]:
        return self._client._reserve(self._body, self._name, self._timeout_ms).__await__()  # noqa: SLF001 - its other half

    async def __aenter__(self) -> Reservation:
        self._reservation = await self
        return self._reservation

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reservation is not None:
            self._reservation.free()  # waits for nothing, so nothing can keep it from happening
