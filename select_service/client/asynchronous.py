"""The client for asyncio: carries out the core's commands on the event loop it is used on.

The verbs are in `verbs.py`, all decisions in `core`; `connections.py` sends the requests.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from select_service.client.connections import AsyncConnections
from select_service.client.core.exchange import ExchangeOutcome, Send
from select_service.client.core.problems import OtherLoop
from select_service.client.operations import Operations
from select_service.client.verb import AwaitedClient

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from typing_extensions import TypeVar

    from select_service.client.core.exchange import Command, Run
    from select_service.client.core.options import Options

    T = TypeVar("T", default=Any)

_FOREVER_S = 86_400.0


class AsyncClient(Operations, AwaitedClient):
    """`async with AsyncClient("http://selector:8092") as client:`, then its methods.

    All methods are awaited on one event loop. Background work (reporting, renewing) begins with the
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
        """Create a client; nothing is connected yet.

        Args:
            selectors: `http://…`, `https://…` or `unix:/path`, the preferred one first; the next
                one is asked if it fails. Default: http://localhost:8092.
            token: a bearer token, or a callable that returns it for each request.
            ca: file of certificates to trust instead of the system's, or a whole TLS context.
            cert: files of a client certificate and its key.
            owner: owner of its leases, for people who look at them; default: host and process id.
            options: limits and waits.

        Raises:
            ValueError: an address is invalid, or a file of `ca` or `cert` cannot be used.
        """
        super().__init__(selectors, token, ca, cert, owner, options)
        self._pools = [
            AsyncConnections(self._endpoints, at) for at, _ in enumerate(self._endpoints.addresses)
        ]
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop it is in use on
        self._background: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []  # callers of `flush`

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send pending reports, end the leases with all under them, disconnect.

        Does nothing in a fork of the process that uses it, which still owns all of that.
        """
        if self._is_forked() or self._session.is_closed:
            return
        self._refuse_other_loop()
        self._session.is_closed = True
        try:
            if self._background is not None:
                self._background.cancel()
                await asyncio.wait([self._background])
            await self._drive(self._upkeep.farewell(monotonic()), is_errand=True)
        finally:
            self._release_waiting()
            for pool in self._pools:
                await pool.aclose()

    async def flush(self) -> None:
        """Wait until everything so far has been reported, however long that takes."""
        self._begin()
        if not self._session.is_settled:
            settled = asyncio.get_running_loop().create_future()
            self._waiting.append(settled)
            await settled

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        kind: type[T] = Any,  # type: ignore[assignment]
        *,
        timeout_ms: float | None = None,
        accepts: tuple[int, ...] = (),
    ) -> T:
        """Call any route, and decode the answer as `kind`. The path is used unchanged.

        `accepts` names statuses from 400 on whose body is such an answer too, as 503 of /ready.
        """
        run = self._answered(method, path, body, kind, timeout_ms=timeout_ms, accepts=accepts)
        return await self._drive(run)

    # -- behind ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._refuse_forked()
        loop = self._refuse_other_loop()
        if self._background is None and not self._session.is_closed:
            self._background = loop.create_task(self._keep_up(), name="select-service-client")

    def _refuse_other_loop(self) -> asyncio.AbstractEventLoop:
        """Refuse to use connections that belong to another event loop.

        Raises:
            OtherLoop: the client was used on another loop; each `asyncio.run` creates one.
        """
        here = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = here
        if self._loop is not here:
            raise OtherLoop(
                "the client is at work on one event loop, and this is another: make one here, or "
                "take Client, which needs none"
            )
        return here

    def _on_work(self) -> None:
        self._wake.set()

    async def _keep_up(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            delay = self._upkeep.due() - monotonic()
            if delay <= 0:
                try:
                    await self._drive(self._upkeep.turn(monotonic()), is_errand=True)
                except Exception:  # noqa: BLE001 - see there
                    self._stumbled()
                if self._session.is_settled:
                    self._release_waiting()
                await asyncio.sleep(0)  # even if more is due, let others run
                continue
            alarm = loop.call_later(delay, self._wake.set) if delay < _FOREVER_S else None
            try:
                await self._wake.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def _release_waiting(self) -> None:
        for settled in self._waiting:
            if not settled.done():
                settled.set_result(None)
        self._waiting.clear()

    async def _drive(self, run: Run[T], *, is_errand: bool = False) -> T:
        """Carry out a run; a run that is dropped, for example cancelled, cleans up after itself."""
        self._begin()
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        try:
            command = next(run)
            while True:
                outcome = await self._carry_out(command, is_errand)
                if task.cancelling() > cancelled:  # the callee may have swallowed the cancellation
                    raise asyncio.CancelledError
                command = run.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            run.close()

    async def _carry_out(self, command: Command, is_errand: bool) -> ExchangeOutcome:  # noqa: FBT001
        if not isinstance(command, Send):
            await asyncio.sleep(command.seconds)
            return ExchangeOutcome(monotonic())
        return await self._pools[command.selector].ask(command, is_errand=is_errand)
