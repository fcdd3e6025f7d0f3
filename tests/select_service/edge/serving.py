"""A service behind its HTTP API: without a socket, or on a real port of this very loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import httpx
import msgspec
from msgspec.structs import replace

from select_service.edge.app import create_app, create_application, create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.http.listening_sockets import ListeningSockets
from select_service.edge.security.exposure import side_address
from select_service.edge.server import Server
from select_service.settings import Settings
from select_service.types import WorkerSpec
from tests import wait
from tests.wait import until

HOST = "127.0.0.1"
PROMPT: dict[str, Any] = {"block_hashes": [1, 2], "sequence_hashes": [1, 2], "isl_tokens": 32}
SETTINGS = Settings(
    host=HOST,
    port=0,
    replay_silence_s=1_000.0,
    replay_timeout_s=10_000.0,
    header_timeout_s=1_000.0,
    body_timeout_s=1_000.0,
)
"""Patient with engines and clients that a test plays: it may get no time for seconds."""


def worker(worker_id: int = 1, **fields: Any) -> dict[str, Any]:
    """The body of POST /workers for a schedulable worker nobody publishes for."""
    return {
        "worker_id": worker_id,
        "endpoint": f"http://w{worker_id}",
        "block_size": 16,
        "kv_events_endpoint": "tcp://127.0.0.1:9",
        **fields,
    }


def add_worker(service: Driver, worker_id: int = 1, **fields: Any) -> None:
    """Register a worker without HTTP."""
    service.upsert_worker(msgspec.convert(worker(worker_id, **fields), WorkerSpec))


@contextlib.asynccontextmanager
async def app_client(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Driver]]:
    """A client that calls the app directly, and what is behind."""
    chosen = replace(SETTINGS, **settings)
    service = create_driver(chosen)
    await service.start()
    transport = httpx.ASGITransport(create_app(service, chosen))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            yield client, service
    finally:
        await service.close()


@contextlib.asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[int, Driver, Server]]:
    """A real server on a port of its own, in this loop; at the end wires close, and it ends."""
    chosen = replace(SETTINGS, **settings)
    service = create_driver(chosen)
    await service.start()
    assert chosen.port is not None
    mode, address = int(chosen.uds_mode, 8), (chosen.host, chosen.port)
    side = side_address(chosen)
    with ListeningSockets.bound(address, chosen.uds, mode, side) as entrances:
        server = Server(chosen, *create_application(service, chosen), entrances, service.security)
        serving = asyncio.ensure_future(server.serve(sockets=entrances.sockets))
        try:
            await until(lambda: server.started)
            yield entrances.port, service, server
        finally:
            await Wire.close_all()
            for _ in range(20):  # in which the server sees them: else it waits and looks again
                await asyncio.sleep(0)
            server.should_exit = True
            await serving
            await service.close()


def on_a_port(use: Callable[[int, Driver, Server], Awaitable[None]], **settings: Any) -> None:
    """Run `use` against a real port."""

    async def run() -> None:
        async with listening(**settings) as (port, service, server):
            await use(port, service, server)

    wait.run(run())


class Wire:
    """A client that sends exactly the bytes it is given."""

    _all: ClassVar[list[Wire]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int | str, tls: ssl.SSLContext | None = None) -> Wire:
        """Connect to a port, or to a Unix socket."""
        if isinstance(port, str):
            wire = cls(*await asyncio.open_unix_connection(port))
        else:
            wire = cls(*await asyncio.open_connection(HOST, port, ssl=tls))
        cls._all.append(wire)
        return wire

    @classmethod
    async def close_all(cls) -> None:
        while cls._all:
            wire = cls._all.pop()
            wire.close()
            with contextlib.suppress(OSError):
                await wire.writer.wait_closed()

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, method: str, path: str, body: object = None, *headers: str) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self._send(method, path, content, None if body is None else "application/json", headers)

    def ask_packed(self, method: str, path: str, body: object = None, *headers: str) -> None:
        """The same in MessagePack."""
        content = b"" if body is None else msgspec.msgpack.encode(body)
        self._send(method, path, content, None if body is None else "application/msgpack", headers)

    def _send(
        self, method: str, path: str, content: bytes, kind: str | None, headers: tuple[str, ...]
    ) -> None:
        head = [f"{method} {path} HTTP/1.1", "host: s", f"content-length: {len(content)}"]
        if kind is not None:
            head.append(f"content-type: {kind}")
        self.say("\r\n".join([*head, *headers, "", ""]).encode() + content)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One response, whether it has a length or comes in chunks."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        return int(head[0].split()[1]), headers, body

    async def exchange(
        self, method: str, path: str, body: object = None, *headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask, and read the response."""
        self.ask(method, path, body, *headers)
        return await self.answer()

    async def status(self, method: str, path: str, body: object = None, *headers: str) -> int:
        return (await self.exchange(method, path, body, *headers))[0]

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self.writer.close()
