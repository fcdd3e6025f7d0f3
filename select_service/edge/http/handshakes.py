"""Accepts TLS clients, with a limit on concurrent handshakes.

Asyncio would not show us a connection before its handshake is complete: no limit would count it,
while it holds a descriptor and some 60 KB until it times out. So connections are accepted here,
where their address is known. At the limit, the longest-running handshake is dropped: a handshake
takes milliseconds, and idle connections must not lock out legitimate clients, least of all the one
which can change the limit.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Final

from indexer.edge.descriptors import descriptors_end
from select_service.tcp_listener import plain_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from select_service.edge.http.connection_limits import ConnectionLimits
    from select_service.edge.http.traffic import Connections

_log = logging.getLogger("select_service")

ACCEPTED_PER_TURN: Final = 16
WAIT_S: Final = 1.0
"""Pause before the next try when no descriptor is left."""


class Handshakes:
    """Listening sockets; `uvicorn.Server` treats this like an asyncio server."""

    def __init__(
        self,
        listeners: Mapping[socket.socket, Callable[[], asyncio.Protocol]],
        limits: ConnectionLimits,
        counts: Connections,
    ) -> None:
        """Accept no connection yet.

        Args:
            listeners: bound sockets, with the factory of protocols for clients after their
                handshake; the caller closes them.
            limits: on handshakes, in total and per address, and on their duration.
            counts: of refused connections.
        """
        self._listeners = listeners
        self._limits = limits
        self._counts = counts
        self._by_address: dict[str, dict[asyncio.Task[None], None]] = {}  # oldest first
        self._shaking: dict[asyncio.Task[None], str] = {}  # task → address, oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # including cancelled handshakes
        self._again: asyncio.TimerHandle | None = None
        self._is_open = False
        self._context: ssl.SSLContext

    def start(self, context: ssl.SSLContext, backlog: int) -> None:
        """Start to accept; a handshake has the same time limit as the head of a request."""
        self._context = context
        for listener in self._listeners:
            listener.listen(backlog)
        self._is_open = True
        self._listen()

    @property
    def is_quiet(self) -> bool:
        """Whether no handshake is under way."""
        return not self._shaking

    def stop(self) -> None:
        """Accept everything in the backlog, then close the listeners; handshakes continue."""
        if not self._is_open:
            return
        self._pause()
        for listener, make in self._listeners.items():
            while self._accept(listener, make):
                pass
            listener.close()
        self._is_open = False

    def close(self) -> None:
        """Stop accepting and cancel handshakes. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pause()
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake is under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self) -> None:
        self._again = None
        if not self._is_open:
            return
        loop = asyncio.get_running_loop()
        for listener, make in self._listeners.items():
            loop.add_reader(listener.fileno(), self._accept, listener, make)

    def _pause(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> bool:
        """Accept some pending connections; return whether there may be more."""
        for _ in range(ACCEPTED_PER_TURN):
            try:
                client, (address, *_) = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                _log.error("no connection is accepted for a second: %s", error)
                self._pause()
                if self._again is None:
                    self._again = asyncio.get_running_loop().call_later(WAIT_S, self._listen)
                return False
            self._greet(client, plain_address(address), make)
        return True

    def _greet(
        self, client: socket.socket, address: str, make: Callable[[], asyncio.Protocol]
    ) -> None:
        others = self._by_address.get(address)
        if others is not None and len(others) >= self._limits.connections_per_address_max:
            self._counts.refused_by_address += 1
            self._give_up(next(iter(others)))
        elif len(self._shaking) >= self._limits.tls_handshakes_max:
            self._counts.refused_handshakes += 1
            self._give_up(next(iter(self._shaking)))
        elif self._shaking and client.fileno() >= descriptors_end(self._limits.descriptors_kept):
            self._counts.refused_for_descriptors += 1
            self._give_up(next(iter(self._shaking)))
        client.setblocking(False)  # noqa: FBT003 - the name of the parameter is `flag`
        task = asyncio.get_running_loop().create_task(self._shake(client, make))
        self._tasks.add(task)
        self._shaking[task] = address
        self._by_address.setdefault(address, {})[task] = None
        self._counts.handshakes = len(self._shaking)
        task.add_done_callback(self._over)

    def _give_up(self, task: asyncio.Task[None]) -> None:
        self._forget(task)
        task.cancel()

    async def _shake(self, client: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make,
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.header_timeout_s,
            )
        except OSError as error:
            self._counts.handshakes_failed[_fault(error)] += 1

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._forget(task)
        self._counts.handshakes = len(self._shaking)

    def _forget(self, task: asyncio.Task[None]) -> None:
        address = self._shaking.pop(task, None)
        if address is not None:
            others = self._by_address[address]
            del others[task]
            if not others:
                del self._by_address[address]


def _fault(error: OSError) -> str:
    """Classify a failure as one of `HANDSHAKE_FAULTS`."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        reason = error.reason or ""
        if reason in {"HTTP_REQUEST", "HTTPS_PROXY_REQUEST"}:
            return "plain"
        return "certificate" if "CERTIFICATE" in reason else "protocol"
    return "timeout" if isinstance(error, ConnectionAbortedError) else "gone"
