"""Pooled connections to one selector, for asyncio and for threads: last used, first reused.

`transport.py` creates connections and requests. Expired idle connections are closed when another
one is taken, so that a burst leaves nothing behind for ever. Background requests use a connection
beyond the limit: reporting the end of a request makes room for selections that wait in the
service's queue and hold a connection each.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, cast

from select_service.client.core.exchange import ExchangeOutcome, Failure
from select_service.client.transport import ERRORS, Gathering, failed

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable

    from select_service.client.core.exchange import Send
    from select_service.client.streams import AsyncioConnection, SocketConnection
    from select_service.client.transport import SelectorEndpoints


class AsyncConnections:
    """The pool of an asyncio client."""

    def __init__(self, endpoints: SelectorEndpoints, selector: int) -> None:
        self._endpoints = endpoints
        self._selector = selector
        self._idle: deque[AsyncioConnection] = deque()
        self._slots = asyncio.Semaphore(endpoints.connections_max)

    async def ask(self, send: Send, *, is_errand: bool) -> ExchangeOutcome:
        """Send a request and return the outcome; background requests never queue."""
        if not is_errand and not await self._has_slot(send.timeout_s):
            return _all_in_use()
        connection: AsyncioConnection | None = None
        try:
            connection = await self._taken()
            connection.deadline.until = monotonic() + send.whole_s
            response = await connection.handle_async_request(self._endpoints.request(send))
            try:
                answer = Gathering(response, self._endpoints.answer_bytes_max)
                if not answer.is_too_large:
                    async for part in cast("AsyncIterable[bytes]", response.stream):
                        if not answer.take(part):
                            break
            finally:
                await response.aclose()  # and of the connection, if there is more to come
        except ERRORS as error:
            return failed(error, monotonic())
        finally:
            if not is_errand:
                self._slots.release()
            if connection is not None:
                await self._put_back(connection)
        return answer.outcome(monotonic())

    async def _has_slot(self, timeout_s: float) -> bool:
        if not self._slots.locked():
            return await self._slots.acquire()  # does not block
        try:
            async with asyncio.timeout(timeout_s):
                return await self._slots.acquire()
        except TimeoutError:
            return False

    async def _put_back(self, connection: AsyncioConnection) -> None:
        if connection.is_idle() and not connection.is_closed():
            self._idle.append(connection)
        else:  # broken, or abandoned half-way: a cancellation may come at any await
            await connection.aclose()

    async def _taken(self) -> AsyncioConnection:
        while self._idle and self._idle[0].has_expired():
            await self._idle.popleft().aclose()
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return self._endpoints.asynchronous(self._selector)

    async def aclose(self) -> None:
        """Close idle connections; a client closes only when none is in use."""
        while self._idle:
            await self._idle.pop().aclose()


class ConnectionPool:
    """The pool of a client for threads."""

    def __init__(self, endpoints: SelectorEndpoints, selector: int) -> None:
        self._endpoints = endpoints
        self._selector = selector
        self._idle: deque[SocketConnection] = deque()
        self._lock = threading.Lock()  # guards `_idle`; nothing is sent or closed under it
        self._slots = threading.Semaphore(endpoints.connections_max)

    def ask(self, send: Send, *, is_errand: bool) -> ExchangeOutcome:
        """Send a request and return the outcome; background requests never queue."""
        if not is_errand and not self._slots.acquire(timeout=send.timeout_s):
            return _all_in_use()
        connection: SocketConnection | None = None
        try:
            connection = self._taken()
            connection.deadline.until = monotonic() + send.whole_s
            response = connection.handle_request(self._endpoints.request(send))
            try:
                answer = Gathering(response, self._endpoints.answer_bytes_max)
                if not answer.is_too_large:
                    for part in cast("Iterable[bytes]", response.stream):
                        if not answer.take(part):
                            break
            finally:
                response.close()
        except ERRORS as error:
            return failed(error, monotonic())
        finally:
            if not is_errand:
                self._slots.release()
            if connection is not None:
                self._put_back(connection)
        return answer.outcome(monotonic())

    def _put_back(self, connection: SocketConnection) -> None:
        if connection.is_idle() and not connection.is_closed():
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()

    def _taken(self) -> SocketConnection:
        found, expired = None, []
        with self._lock:
            while self._idle and self._idle[0].has_expired():
                expired.append(self._idle.popleft())
            while self._idle and found is None:
                connection = self._idle.pop()
                if connection.has_expired():
                    expired.append(connection)
                else:
                    found = connection
        for connection in expired:
            connection.close()
        return self._endpoints.synchronous(self._selector) if found is None else found

    def close(self) -> None:
        """Close idle connections; a client closes only when none is in use."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()


def _all_in_use() -> ExchangeOutcome:
    reason = "every connection is in use"
    return ExchangeOutcome(monotonic(), failure=Failure.SLOW, reason=reason)
