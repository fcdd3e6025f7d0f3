"""A TCP server of a test that leaves nothing behind.

`asyncio.Server.close` ends no connection, fails on those it has just accepted, and a handler that
the end of the loop cancels does not close its own. A caller may come or go at any instant: what is
open at the end is aborted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from typing_extensions import override

from tests.live.ports import HOST

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Connections:
    """Those that are open, and the handlers that run."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._is_closing = False
        self._transports: set[asyncio.BaseTransport] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_lost = asyncio.Event()
        self._failures: list[Exception] = []

    def opened(self, transport: asyncio.BaseTransport) -> None:
        self._transports.add(transport)
        if self._is_closing:
            _abort(transport)

    def lost(self, transport: asyncio.BaseTransport) -> None:
        self._transports.discard(transport)
        if not self._transports:
            self._all_lost.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._counted():
            try:
                await self._handler(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass  # the caller has gone
            except Exception as error:  # noqa: BLE001 - the test that runs the server raises it
                self._failures.append(error)
            finally:
                writer.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def close(self, making: set[asyncio.Task[object]]) -> None:
        """Abort what is open, and end the handlers; raises what one of them failed with.

        Args:
            making: connections that are accepted; each is aborted as soon as it is made.
        """
        self._is_closing = True
        await asyncio.gather(*making, return_exceptions=True)
        await asyncio.sleep(0)  # a handler that has not begun would leave its connection open
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for transport in list(self._transports):
            _abort(transport)
        if self._transports:
            self._all_lost.clear()
            await self._all_lost.wait()
        await asyncio.gather(*tasks, return_exceptions=True)
        for failure in self._failures:
            raise failure


class _Connection(asyncio.StreamReaderProtocol):
    """Known from its first instant, before its handler has run."""

    def __init__(self, connections: _Connections) -> None:
        super().__init__(asyncio.StreamReader(), connections.serve)
        self._connections = connections
        self._made: asyncio.BaseTransport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made = transport
        super().connection_made(transport)
        self._connections.opened(transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._made is not None:
            self._connections.lost(self._made)


def _abort(transport: asyncio.BaseTransport) -> None:
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()
    else:
        transport.close()


@contextlib.asynccontextmanager
async def tcp_server(
    handler: Handler, host: str = HOST, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Give each connection to the handler, which need not close it; yields the port.

    A caller that goes away ends its handler quietly, and so does the end of the block.
    """
    connections = _Connections(handler)
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # not `loop.create_server`: closing it loses what it has accepted and not yet made
    listening = socket.create_server((host, port), family=family, backlog=100)
    listening.setblocking(False)
    making: set[asyncio.Task[object]] = set()

    def accept() -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            accepted, _ = listening.accept()
            coming = loop.connect_accepted_socket(
                lambda: _Connection(connections), accepted, ssl=tls
            )
            task = loop.create_task(coming)
            making.add(task)
            task.add_done_callback(made)

    def made(task: asyncio.Task[object]) -> None:
        making.discard(task)
        task.exception()  # a handshake that failed is the caller's concern

    loop.add_reader(listening, accept)
    try:
        yield listening.getsockname()[1]
    finally:
        loop.remove_reader(listening)
        listening.close()
        await connections.close(making)
