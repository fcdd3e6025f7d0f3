"""Fetching a snapshot: whole, or failed with a name and within every bound."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from indexer.edge.addresses import Addresses
from select_service.core.effects import NOTHING, Effects, Pull
from select_service.core.replication.checksum import with_checksum
from select_service.core.replication.message_codec import encode_part
from select_service.core.replication.messages import (
    ClaimRecord,
    SnapshotEnd,
    SnapshotHead,
    SnapshotPart,
)
from select_service.edge.logs import LINES_MAX, PERIOD_S
from select_service.edge.replication.pull import (
    SnapshotPulls,
    snapshot_url,
)
from select_service.types import ReplicaLimits
from tests.live.tcp_server import tcp_server
from tests.wait import until

ROUTER = 7
HEAD = SnapshotHead(ROUTER, 1, 5)
CLAIM = ClaimRecord("r", 1, "m", "t", 16, 1, 0, b"\1" * 64)
PARTS: list[SnapshotPart] = [HEAD, *[CLAIM] * 40, SnapshotEnd(40)]
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
LIMITS = ReplicaLimits(pull_timeout_s=1e3, pull_backoff_s=0.01, pull_backoff_max_s=0.02)


def framed(*parts: SnapshotPart) -> bytes:
    frames = [encode_part(part) for part in parts]
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


def checked(*parts: SnapshotPart, plain: int | None = None) -> bytes:
    """As we give them, but for one frame without a checksum."""
    frames = [encode_part(part) for part in parts]
    frames = [one if at == plain else with_checksum(one) for at, one in enumerate(frames)]
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


class Reader:
    """What the core would have received."""

    def __init__(self, *, knows_it: bool = True) -> None:
        self.knows_it = knows_it
        self.parts: list[SnapshotPart] = []
        self.ended: list[bool] = []

    def snapshot_begin(self, pull: Pull, head: SnapshotHead, now: float) -> bool:
        assert now
        assert pull.router_id == ROUTER
        self.parts.append(head)
        return self.knows_it

    def snapshot_part(self, router_id: int, part: SnapshotPart, now: float) -> Effects:
        assert now
        assert router_id == ROUTER
        self.parts.append(part)
        return NOTHING

    def snapshot_end(self, router_id: int, now: float, *, complete: bool) -> Effects:
        assert now
        assert router_id in {ROUTER, ROUTER + 1}
        self.ended.append(complete)
        return NOTHING


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def pulling(
    reader: Reader,
    said: list[str],
    *,
    limits: ReplicaLimits = LIMITS,
    clock: Callable[[], float] = time.monotonic,
    addresses: Addresses | None = None,
) -> AsyncIterator[SnapshotPulls]:
    where = addresses or Addresses()
    client = SnapshotPulls(reader, lambda _: None, limits, clock, said.append, where)
    yield client
    await client.close()
    where.close()


async def pulled(
    handler: Handler | bytes,
    outcome: str,
    *,
    limits: ReplicaLimits = LIMITS,
    knows_it: bool = True,
    pulls: int = 1,
) -> list[SnapshotPart]:
    """Pull from a server until so many pulls have ended; each must end like this."""
    reader = Reader(knows_it=knows_it)
    logged: list[str] = []
    async with serving(handler) as port, pulling(reader, logged, limits=limits) as client:
        for number in range(1, pulls + 1):
            client.ask(Pull("tcp://127.0.0.1:1", ROUTER, port, None))
            client.ask(Pull("tcp://127.0.0.1:1", ROUTER, port, None))  # one at a time
            while len(reader.ended) < number or client.running:
                await asyncio.sleep(0)  # the next is asked for as soon as this one is over
    assert client.outcomes[outcome] == pulls
    assert sum(client.outcomes.values()) == pulls
    assert reader.ended == [outcome == "complete"] * pulls
    assert len(logged) == (0 if outcome == "complete" else pulls)
    return reader.parts


@contextlib.asynccontextmanager
async def serving(handler: Handler | bytes) -> AsyncIterator[int]:
    """A server that answers each request like this; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /replica_sync/snapshot HTTP/1.1")
        assert b"gzip" not in head, "a small answer must not become a large one"
        if isinstance(handler, bytes):
            writer.write(handler)
        else:
            await handler(reader, writer)
        writer.close()
        await writer.wait_closed()

    async with tcp_server(serve) as port:
        yield port


async def test_all_parts_arrive_in_order() -> None:
    assert await pulled(OK + framed(*PARTS), "complete", pulls=2) == PARTS * 2


async def test_all_parts_arrive_with_checksums() -> None:
    assert await pulled(OK + checked(*PARTS), "complete") == PARTS


async def test_frames_may_be_cut_anywhere() -> None:
    parts: list[SnapshotPart] = [HEAD, CLAIM, SnapshotEnd(1)]

    async def byte_by_byte(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in OK + framed(*parts):
            writer.write(bytes([byte]))
            await writer.drain()

    assert await pulled(byte_by_byte, "complete") == parts


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (OK + framed(HEAD, CLAIM), "cut_off"),
        (OK + framed(*PARTS)[:-1], "cut_off"),
        (OK + framed(*PARTS) + b"\0", "cut_off"),
        (OK, "cut_off"),
        (OK + framed(CLAIM, SnapshotEnd(1)), "malformed"),
        (OK + b"\0\0\0\x01\xc1", "malformed"),
        (OK + checked(*PARTS).replace(b"\1" * 64, b"\1" * 63 + b"\0", 1), "garbled"),
        (OK + checked(*PARTS, plain=3), "garbled"),
        (OK + b"\xff\xff\xff\xff", "too_large"),
        (b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n", "refused"),
        (b"HTTP/1.1 307 x\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n", "refused"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + framed(*PARTS), "unreachable"),
        (b"SSH-2.0-OpenSSH\r\n", "unreachable"),
        (b"", "unreachable"),
    ],
)
async def test_anything_else_has_failed(answer: bytes, outcome: str) -> None:
    await pulled(answer, outcome, pulls=2)


async def test_another_publisher_is_read_no_further() -> None:
    assert await pulled(OK + framed(*PARTS), "other_publisher", knows_it=False) == [HEAD]


async def test_more_bytes_than_allowed() -> None:
    limits = ReplicaLimits(pull_bytes_max=500)
    await pulled(OK + framed(*PARTS), "too_large", limits=limits)


async def test_one_that_never_ends() -> None:
    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + framed(HEAD))
        while True:
            writer.write(framed(CLAIM))
            await writer.drain()
            await asyncio.sleep(0.005)

    await pulled(drip, "timeout", limits=ReplicaLimits(pull_timeout_s=0.2))


async def failed(
    *pulls: Pull, addresses: Addresses | None = None
) -> tuple[dict[str, int], list[str]]:
    """Ask for snapshots that cannot be fetched; return what became of them, and what was said."""
    said: list[str] = []
    reader = Reader()
    async with pulling(reader, said, addresses=addresses) as client:
        for pull in pulls:
            client.ask(pull)
        await until(lambda: len(reader.ended) == len(pulls) and not client.running)
    assert reader.ended == [False] * len(pulls)
    return client.outcomes, said


async def test_nobody_listens() -> None:
    no_url = Pull("tcp://127.0.0.1:1", ROUTER + 1, 9, "http://[::1")
    outcomes, _ = await failed(Pull("tcp://127.0.0.1:1", ROUTER, 9, None), no_url)
    assert outcomes["unreachable"] == 2


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:169.254.169.254]",
        "http://metadata.test:80",
        # or that would be asked for anything else than a snapshot
        "http://127.0.0.1:1/delete?all=",
        "http://127.0.0.1:1/any/path#",
        "http://name:secret@127.0.0.1:1",
        "http://127.0.0.1:1/a b",
    ],
)
async def test_a_replica_that_says_it_is_where_nobody_may_go(url: str) -> None:
    addresses = Addresses(look_up=lambda _: ["169.254.169.254"])
    pull = Pull("tcp://127.0.0.1:1", ROUTER, 9, url)
    outcomes, said = await failed(pull, addresses=addresses)
    assert outcomes["denied"] == 1
    assert len(said) == 1
    assert "secret" not in said[0]


async def test_pulls_that_fail_are_told_once_in_a_while_and_by_where_they_were_heard_of() -> None:
    """Who says in every heartbeat that it is somewhere else writes no log of ours."""
    said: list[str] = []
    now, reader = 1.0, Reader()
    async with pulling(reader, said, clock=lambda: now) as client:

        async def fail(peer: str, count: int) -> None:
            for number in range(len(reader.ended), len(reader.ended) + count):
                client.ask(Pull(peer, ROUTER, 9, f"http://169.254.169.254/{number}"))
                while len(reader.ended) <= number or client.running:
                    await asyncio.sleep(0)

        await fail("tcp://a:1", 20)
        await fail("tcp://b:1", 20)
        assert len(said) == 2 * LINES_MAX
        now += PERIOD_S
        await fail("tcp://a:1", 1)
        assert len(said) == 2 * LINES_MAX + 1
        assert f"({20 - LINES_MAX} more since the last line)" in said[-1]


async def test_those_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select_service.edge.replication.pull.PULLS_WAITING_MAX", 1)
    reader = Reader()
    async with pulling(reader, []) as client:
        client.ask(Pull("tcp://127.0.0.1:1", ROUTER, 9, None))
        client.ask(Pull("tcp://127.0.0.1:1", ROUTER + 1, 9, None))
    assert client.outcomes["left_out"] == 1
    assert reader.ended == [False], "the core knows, and may ask again"


def test_where_a_snapshot_is() -> None:
    def where(peer: str, url: str | None = None) -> str:
        return snapshot_url(Pull(peer, ROUTER, 80, url))

    assert where("tcp://h:1") == "http://h:80/replica_sync/snapshot"
    assert where("tcp://[::1]:1") == "http://[::1]:80/replica_sync/snapshot"
    assert where("tcp://eth0;h:1") == "http://h:80/replica_sync/snapshot"
    assert where("ipc://x.sock") == "http://127.0.0.1:80/replica_sync/snapshot"
    assert where("tcp://h:1", "https://g/a/") == "https://g/a/replica_sync/snapshot"


async def test_arriving_parts_let_others_run() -> None:
    """A part that takes its time holds the loop alone, not with those that follow."""
    turns = 0
    seen: list[int] = []

    class Slow(Reader):
        def snapshot_part(self, *args: Any) -> Effects:
            seen.append(turns)
            time.sleep(0.001)  # the whole slice
            return super().snapshot_part(*args)

    reader = Slow()
    async with serving(OK + framed(*PARTS)) as port, pulling(reader, []) as client:
        client.ask(Pull("tcp://127.0.0.1:1", ROUTER, port, None))
        while not reader.ended:
            turns += 1
            await asyncio.sleep(0)
    assert reader.ended == [True]
    assert len(set(seen)) == len(seen)
