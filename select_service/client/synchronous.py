"""The client for threads: the same as `asynchronous.py`, without a loop.

One background thread reports and renews; every step of the core runs under one lock, which is never
held while a request is sent.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self

from select_service.client.connections import ConnectionPool
from select_service.client.core.exchange import ExchangeOutcome, Send
from select_service.client.operations import Operations
from select_service.client.verb import BlockingClient

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from typing_extensions import TypeVar

    from select_service.client.core.exchange import Command, Run
    from select_service.client.core.options import Options

    T = TypeVar("T", default=Any)

_FOREVER_S = 86_400.0


class Client(Operations, BlockingClient):
    """`with Client("http://selector:8092") as client:`, then its methods, from any thread.

    Background work (reporting, renewing) begins with the first reservation and ends with `close`,
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
        """Create a client; arguments as for `AsyncClient`."""
        super().__init__(selectors, token, ca, cert, owner, options)
        self._pools = [
            ConnectionPool(self._endpoints, at) for at, _ in enumerate(self._endpoints.addresses)
        ]
        self._wake = threading.Event()
        self._settled = threading.Condition(self._lock)  # everything has been reported
        self._background: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Send pending reports, end the leases with all under them, disconnect.

        Does nothing in a fork of the process that uses it, which still owns all of that.
        """
        if self._is_forked():
            return
        with self._lock:
            if self._session.is_closed:
                return
            self._session.is_closed = True
            background = self._background
        self._wake.set()
        if background is not None:
            background.join()
        try:
            self._drive(self._upkeep.farewell(monotonic()), is_errand=True)
        finally:
            with self._settled:
                self._settled.notify_all()
            for pool in self._pools:
                pool.close()

    def flush(self) -> None:
        """Wait until everything so far has been reported, however long that takes."""
        self._begin()
        with self._settled:
            self._settled.wait_for(lambda: self._session.is_settled or self._session.is_closed)

    def call(
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
        return self._drive(run)

    # -- behind ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._refuse_forked()
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
            try:
                self._drive(self._upkeep.turn(monotonic()), is_errand=True, until_closed=True)
            except Exception:  # noqa: BLE001 - see there
                self._stumbled()
            with self._settled:
                if self._session.is_settled:
                    self._settled.notify_all()

    def _drive(self, run: Run[T], *, is_errand: bool = False, until_closed: bool = False) -> T:
        """Carry out a run; a run that is dropped cleans up after itself."""
        self._refuse_forked()
        try:
            with self._lock:
                command = next(run)
            while True:
                outcome = self._carry_out(command, is_errand)
                if until_closed and self._session.is_closed:
                    return None  # type: ignore[return-value] # it is not read
                with self._lock:
                    command = run.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            with self._lock:
                run.close()

    def _carry_out(self, command: Command, is_errand: bool) -> ExchangeOutcome:  # noqa: FBT001
        if not isinstance(command, Send):
            sleep(command.seconds)
            return ExchangeOutcome(monotonic())
        return self._pools[command.selector].ask(command, is_errand=is_errand)
