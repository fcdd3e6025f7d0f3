"""A service, engines and a gateway library before them, all on one loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn

from indexer.core.hashing import block_hashes
from indexer.types import Tier
from select_service.client import AsyncClient, Options
from select_service.edge.driver.driver import Driver
from select_service.gateway import Encode, Gateway, GatewayOptions, GatewayResponse
from select_service.types import WorkerSpec
from tests.select_service.edge.serving import HOST, listening, worker
from tests.wait import PATIENCE_S, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PATIENT = GatewayOptions(tokenize_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
TOKENS = list(range(40))


@dataclass
class ScriptedEngine:
    """An HTTP server that answers what a test sets."""

    url: str = ""
    status: int = 200
    head: bytes = b"content-type: application/json\r\n"
    pieces: list[bytes] = field(default_factory=lambda: [b'{"id": "1"}'])
    breaks: bool = False
    """Hang up behind the pieces, in the middle of the answer."""
    is_silent: bool = False
    """Answer nothing any more, behind the pieces."""
    listed: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "m"}])
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """Path, head, and body of each request."""
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    left: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                _, _, size = head.lower().partition("content-length: ")
                body = await reader.readexactly(int(size.split("\r\n")[0])) if size else b""
                path = head.split(" ")[1]
                if path == "/tokenize":
                    self._respond(writer, msgspec.json.encode({"tokens": TOKENS}))
                elif path == "/v1/models":
                    self._respond(writer, msgspec.json.encode({"data": self.listed}))
                else:
                    self.asked.append((path, head, msgspec.json.decode(body)))
                    await self._answer(reader, writer)
                    if self.breaks:
                        break
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.open.discard(writer)

    @staticmethod
    def _respond(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.pieces:
            writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n" % self.status)
            writer.write(self.head + b"\r\n")
        for piece in self.pieces:
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        await writer.drain()
        if self.is_silent:
            await reader.read()
            self.left += 1
            raise asyncio.IncompleteReadError(b"", 1)
        if not self.breaks:
            writer.write(b"0\r\n\r\n")


@dataclass
class Stage:
    """What a test has at hand."""

    driver: Driver
    client: AsyncClient
    gateway: Gateway
    port: int

    def register(self, worker_id: int, engine: ScriptedEngine, **fields: Any) -> None:
        """Make an engine a worker."""
        known: dict[str, Any] = {"endpoint": engine.url, "model_name": "m", **fields}
        self.driver.upsert_worker(msgspec.convert(worker(worker_id, **known), WorkerSpec))

    def store(self, worker_id: int, tokens: list[int]) -> None:
        """Let the index know whole blocks of a prompt at a worker."""
        (partition,) = self.driver.core.partitions.values()
        ranks = {rank.worker_id: rank for rank, _ in partition.fleet_slots.ranks_and_slots()}
        names = list(range(1, len(tokens) // 16 + 1))
        partition.index.store(ranks[worker_id], Tier.DEVICE, None, names, block_hashes(tokens, 16))

    async def ask(self, body: dict[str, Any], path: str = TEXT, **headers: str) -> GatewayResponse:
        """Forward a request; header names with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.gateway.forward(msgspec.json.encode(body), path=path, headers=named)

    def loads(self) -> list[tuple[int, int, int, int]]:
        """Worker, prefill tokens, blocks and requests of each rank with any."""
        return [
            (
                row.worker_id,
                row.potential_prefill_tokens,
                row.potential_decode_blocks,
                row.active_requests,
            )
            for scope in self.driver.loads()
            for row in scope.loads
            if row.active_requests
        ]

    async def freed(self, **outcomes: int) -> None:
        """Wait until nothing is reserved any more; `outcomes`, if given, is how all has ended."""
        await self.client.flush()
        await until(lambda: not self.loads(), self.loads)
        found = {name: count for name, count in self.driver.core.counters.outcomes.items() if count}
        assert not outcomes or found == outcomes


@contextlib.asynccontextmanager
async def engine(**script: Any) -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine(**script)
    server = await asyncio.start_server(made.serve, HOST, 0)
    made.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for _ in range(8):  # who was accepted, and whose client has left, is counted within these
            await asyncio.sleep(0)
        for writer in [*made.open]:  # kept by the gateway for its next request
            writer.close()
        await until(lambda: not made.open)


@contextlib.asynccontextmanager
async def stage(
    options: GatewayOptions = PATIENT, tokenizer: Encode | None = None, **settings: Any
) -> AsyncIterator[Stage]:
    patient = Options(
        retry_refused=False,
        timeout_ms=PATIENCE_S * 1e3,
        attempt_timeout_ms=PATIENCE_S * 1e3,
        connect_timeout_ms=PATIENCE_S * 1e3,
    )
    async with (
        listening(**settings) as (port, driver, _),
        AsyncClient(f"http://{HOST}:{port}", options=patient) as client,
        Gateway(client, options=options, tokenizer=tokenizer) as gateway,
    ):
        yield Stage(driver, client, gateway, port)


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """An application on a port of its own; its URL."""
    config = uvicorn.Config(app, HOST, 0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    try:
        await until(lambda: server.started or serving.done())
        yield f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def whole(answer: GatewayResponse) -> bytes:
    """Read an answer to its end."""
    return b"".join([piece async for piece in answer])
