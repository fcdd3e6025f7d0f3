"""Clients that read their answer a byte at a time, or not at all: what they cost is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

from indexer.core.packing import pack_u64
from indexer.types import Scope, Tier, WorkerRank
from select_service.edge.driver.driver import Driver
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.serving import HOST, Wire, add_worker, listening
from tests.wait import until

BLOCKS = 60_000  # 5 MB of /dump: more than the system takes in for a client
CHAIN = 500
RECEIVE_BYTES = 4096
RANK = WorkerRank(1, 0)


def fill(service: Driver) -> None:
    """Have much to write."""
    add_worker(service)
    index = service.core.registry.index(Scope("default", "default"))
    assert index is not None
    for start in range(0, BLOCKS, CHAIN):
        names = list(range(1 + start, 1 + start + CHAIN))
        assert index.store(RANK, Tier.DEVICE, None, names, pack_u64(names)) == CHAIN


class Slow:
    """A client with hardly any room for what it does not read."""

    def __init__(self, port: int, request: bytes) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._socket.connect((HOST, port))
        self._socket.sendall(request)
        self._socket.setblocking(False)
        self.read = 0

    async def drip(self) -> None:
        """Read a byte at a time until nothing more comes, letting everybody else go on."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(self._socket, 1):
                self.read += 1
                await asyncio.sleep(0)

    async def rest(self) -> bytes:
        loop, pieces = asyncio.get_running_loop(), []
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(self._socket, 1 << 16):
                pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._socket.close()


@contextlib.asynccontextmanager
async def slow(
    port: int, count: int, path: str, *lines: str, version: str = "1.1"
) -> AsyncIterator[list[Slow]]:
    head = [f"GET {path} HTTP/{version}", "host: s", *lines, "", ""]
    made = [Slow(port, "\r\n".join(head).encode()) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


async def metric(port: int, name: str) -> float:
    wire = await Wire.to(port)
    status, _, body = await wire.exchange("GET", "/metrics")
    assert status == 200
    wire.close()
    rows = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if line[:1] != "#")
    return float(rows["select_service_" + name])


async def serves(port: int) -> None:
    """Others notice nothing."""
    wire = await Wire.to(port)
    prompt = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}
    for _ in range(5):
        assert await wire.status("POST", "/select", prompt) == 200
    wire.close()


@within(listening, dumps_max=2)
async def test_dumps_at_one_time_are_bounded(port: int, service: Driver) -> None:
    """And many who drip them keep nobody out of the other routes."""
    fill(service)
    async with slow(port, 20, "/dump") as clients:
        await until(lambda: service.dumps.outcomes["refused"] == 18)
        assert service.dumps.running == 2
        dripping = [asyncio.ensure_future(one.drip()) for one in clients]
        await serves(port)
        wire = await Wire.to(port)
        status, headers, body = await wire.exchange("GET", "/dump")
        assert (status, json.loads(body)["code"]) == (503, "too_many_dumps")
        assert "retry-after" in headers
        assert await metric(port, 'limit_hits_total{name="dumps_max"}') == 19
        assert await metric(port, "dumps_running") == 2
        for one in dripping:
            one.cancel()
        await asyncio.gather(*dripping, return_exceptions=True)
    await until(lambda: not service.dumps.running)
    assert service.dumps.outcomes["cut_off"] == 2
    wire.ask("GET", "/dump", None, "connection: close")
    assert (await wire.rest()).endswith(b"0\r\n\r\n")
    assert service.dumps.outcomes["complete"] == 1


@within(listening, dumps_max=1)
async def test_asking_for_the_head_of_a_dump_takes_no_place(port: int, service: Driver) -> None:
    add_worker(service)
    wire = await Wire.to(port)
    for _attempt in range(3):
        wire.ask("HEAD", "/dump")
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert service.dumps.running == 0


@within(listening)
async def test_a_dump_has_a_deadline(port: int, service: Driver) -> None:
    """The index tidies up behind nobody while one is under way."""
    fill(service)
    index = service.core.registry.index(Scope("default", "default"))
    assert index is not None
    async with slow(port, 1, "/dump") as (client,):
        await until(lambda: service.dumps.running == 1)
        assert not list(index.tables())
        service.dumps._clock = lambda: 1e12
        said = await client.rest()
    assert service.dumps.outcomes["timeout"] == 1
    assert not said.endswith(b"0\r\n\r\n"), "it has no end that could be believed"
    assert not service.dumps.running
    assert list(index.tables())
    assert await metric(port, "http_crashes_total") == 0


@within(listening)
async def test_http_1_0_is_sent_a_stream_as_it_reads(
    port: int, service: Driver, server: Server
) -> None:
    """It was made whole in memory, once for each client."""
    fill(service)
    async with slow(port, 1, "/dump", version="1.0") as (client,):
        await until(lambda: server._counts.unread_bytes > 0)
        assert server._counts.unread_bytes < 1 << 20
        assert service.dumps.running == 1
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert json.loads(body)["default:default"]["block_size"] == 16
    assert service.dumps.outcomes["complete"] == 1


def add_many_workers(service: Driver) -> None:
    """Have eight megabytes of workers to write: the system takes in four for a client."""
    for number in range(40):
        add_worker(service, number, taints=["x" * 200_000])


@within(listening, unread_bytes_max=8 << 20)
async def test_answers_nobody_reads_are_bounded(port: int, service: Driver, server: Server) -> None:
    """The connections that read nothing for longest go, and not before there is too much."""
    add_many_workers(service)
    counts = server._counts
    async with slow(port, 1, "/workers"):
        await until(lambda: counts.unread_bytes > 0)
        async with slow(port, 8, "/workers"):
            await until(lambda: counts.unread > 0 and counts.unread_bytes <= 8 << 20)
            await serves(port)
            connections = server.server_state.connections
            await until(lambda: 0 < len(connections) < 9)  # with one that has just served
            assert await metric(port, "http_unread_bytes") <= 8 << 20
            name = 'http_connections_cut_total{reason="unread"}'
            assert await metric(port, name) == counts.unread


@within(listening, body_timeout_s=0.3)
async def test_an_answer_behind_which_the_connection_ends_has_a_deadline_too(
    port: int, service: Driver, server: Server
) -> None:
    """Uvicorn closes at once, which waits for the client for ever."""
    add_many_workers(service)
    async with slow(port, 3, "/workers", "connection: close"):
        await until(lambda: server._counts.write_timeouts == 3)
        await until(lambda: not server.server_state.connections)
