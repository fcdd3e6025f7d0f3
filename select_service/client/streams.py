"""The byte streams to a selector: httpcore's streams, once on asyncio, once on blocking sockets.

Both send a request in one piece: httpcore writes head and body separately, which is a system call
each, and wakes the other side twice. Both keep a deadline: httpcore's timeouts apply to one read,
and an answer may take many. Both connect to the first of a name's addresses that accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from ipaddress import ip_address
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import httpcore

from indexer.happy_eyeballs import connect_first, connect_first_blocking, targets_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    SocketOptions = Iterable[Any] | None

_GOODBYE_S: Final = 0.5
_TOO_LATE: Final = "no whole answer in time"


class Deadline:
    """The deadline for the answer being read; set for each request."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0.0

    def wait_s(self, timeout_s: float | None) -> float:
        """Return how long to wait for the next bytes.

        Raises:
            httpcore.ReadTimeout: the deadline has passed.
        """
        left = self.until - monotonic()
        if left <= 0.0:
            raise httpcore.ReadTimeout(_TOO_LATE)
        return left if timeout_s is None else min(timeout_s, left)


class AsyncioConnection(httpcore.AsyncHTTPConnection):
    """A connection on the running loop."""

    def __init__(
        self,
        origin: httpcore.Origin,
        tls: ssl.SSLContext | None,
        keepalive_s: float,
        uds: str | None,
    ) -> None:
        self.deadline = Deadline()
        backend = AsyncioBackend(self.deadline)
        super().__init__(origin, tls, keepalive_s, uds=uds, network_backend=backend)


class SocketConnection(httpcore.HTTPConnection):
    """A connection for threads."""

    def __init__(
        self,
        origin: httpcore.Origin,
        tls: ssl.SSLContext | None,
        keepalive_s: float,
        uds: str | None,
    ) -> None:
        self.deadline = Deadline()
        backend = SocketBackend(self.deadline)
        super().__init__(origin, tls, keepalive_s, uds=uds, network_backend=backend)


class AsyncioBackend(httpcore.AsyncNetworkBackend):
    """Connects on the running loop."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a host."""
        return await _connected(_open(host, port), timeout, self._deadline)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        socket_options: SocketOptions = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a Unix domain socket."""
        return await _connected(asyncio.open_unix_connection(path), timeout, self._deadline)


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if _is_address(host):
        return await asyncio.open_connection(host, port)
    loop = asyncio.get_running_loop()
    targets = targets_of(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    _, made = await connect_first(targets)
    try:
        return await asyncio.open_connection(sock=made)
    except BaseException:
        made.close()
        raise


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _connected(
    connecting: Any, timeout_s: float | None, deadline: Deadline
) -> httpcore.AsyncNetworkStream:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await connecting
            return _AsyncioStream(reader, writer, deadline)
    except TimeoutError:
        raise httpcore.ConnectTimeout("no connection in time") from None
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from None


class _AsyncioStream(httpcore.AsyncNetworkStream):
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: Deadline
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._deadline = deadline
        self._unsent: list[bytes] = []

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as above
        wait_s = self._deadline.wait_s(timeout)
        try:
            async with asyncio.timeout(wait_s):
                if self._unsent:
                    await self._flush()
                return await self._reader.read(max_bytes)
        except TimeoutError:
            why = f"silent for {timeout:g} s" if wait_s == timeout else _TOO_LATE
            raise httpcore.ReadTimeout(why) from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from None

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        self._unsent.append(buffer)

    async def _flush(self) -> None:
        """Send a whole request; a peer that closes before reading it may still have answered."""
        whole = b"".join(self._unsent)
        self._unsent.clear()
        self._writer.write(whole)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._writer.wait_closed()
        except TimeoutError:  # the peer does not answer TLS's goodbye
            self._writer.transport.abort()
        except OSError:
            pass

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except TimeoutError:
            raise httpcore.ConnectTimeout("no TLS in time") from None
        except OSError as error:  # includes an untrusted certificate
            self._writer.close()
            raise httpcore.ConnectError(str(error)) from None
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # readable without a request: the peer has closed
            return self._reader.at_eof() or self._writer.is_closing()
        return self._writer.get_extra_info(info)


class SocketBackend(httpcore.NetworkBackend):
    """Connects with blocking sockets, and joins the writes of a request."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.NetworkStream:
        """Connect to a host."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            made = connect_first_blocking(targets_of(found), timeout)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(str(error)) from None
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _SocketStream(made, self._deadline)

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.NetworkStream:
        """Connect to a Unix domain socket; httpcore's own leaves it open if no server listens."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(timeout)
            made.connect(path)
        except TimeoutError as error:
            made.close()
            raise httpcore.ConnectTimeout(str(error)) from None
        except OSError as error:
            made.close()
            raise httpcore.ConnectError(str(error)) from None
        return _SocketStream(made, self._deadline)


class _SocketStream(httpcore.NetworkStream):
    """A connected socket."""

    def __init__(self, made: socket.socket, deadline: Deadline) -> None:
        self._socket = made
        self._deadline = deadline
        self._unsent: list[bytes] = []

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            if self._unsent:
                self._flush(timeout)
            self._socket.settimeout(self._deadline.wait_s(timeout))
            return self._socket.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unsent.append(buffer)

    def _flush(self, timeout: float | None) -> None:
        """Send a whole request; a peer that closes before reading it may still have answered."""
        whole = b"".join(self._unsent)
        self._unsent.clear()
        self._socket.settimeout(self._deadline.wait_s(timeout))
        try:
            self._socket.sendall(whole)
        except TimeoutError:
            raise
        except OSError:
            pass

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        try:
            self._socket.settimeout(timeout)
            wrapped = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
        except TimeoutError as error:
            self.close()
            raise httpcore.ConnectTimeout(str(error)) from None
        except OSError as error:  # includes an untrusted certificate
            self.close()
            raise httpcore.ConnectError(str(error)) from None
        return _SocketStream(wrapped, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        if info != "is_readable":
            return None
        waiting = select.poll()  # not `select`, which refuses descriptors from 1024 on
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(0))
