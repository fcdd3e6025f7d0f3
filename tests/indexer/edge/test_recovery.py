"""Start-up recovery against peers of every kind, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from indexer.core import dump_reader
from indexer.core.index import KvIndex
from indexer.core.registry import StreamRegistry
from indexer.edge import recovery as room
from indexer.edge.addresses import Addresses
from indexer.edge.recovery import Recovery
from indexer.types import RecoveryLimits, Scope, Tier, WorkerRank
from tests import wait
from tests.indexer.core.indices import pack
from tests.live.tcp_server import tcp_server

HOST = "127.0.0.1"
A, B = WorkerRank(1, 0), WorkerRank(2, 3)
SCOPE = Scope("default", "default")
LIMITS = RecoveryLimits(attempts_max=1, backoff_s=0.0, silence_s=1e3, timeout_s=1e3)

Answer = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


def source() -> KvIndex:
    index = KvIndex(16)
    for rank in (A, B):
        index.attach(rank)
        names = list(range(1, 1001))
        index.store(rank, Tier.DEVICE, None, names, pack(*names))
    index.store(A, Tier.HOST_PINNED, 1000, [2000], pack(2000))
    index.store(A, Tier.EXTERNAL, 2000, [2001], pack(2001))
    return index


def document(index: KvIndex, name: str = "default:default") -> bytes:
    events = [json.loads(msgspec.json.encode(event)) for event in filter(None, index.dump())]
    return json.dumps({name: {"block_size": index.block_size, "events": events}}).encode()


def whole(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()

    return answer


def hangs_after(body: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n" + body)
        await writer.drain()
        await asyncio.sleep(3600)

    return answer


def breaks_after(body: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n" + body)
        await writer.drain()

    return answer


async def no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0\r\n\r\n")


@contextlib.asynccontextmanager
async def peer(*answers: Answer) -> AsyncIterator[str]:
    """A peer that gives these answers in turn, the last one for ever."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        assert request.startswith(b"GET /dump HTTP/1.1\r\n")
        await (left.pop(0) if len(left) > 1 else left[0])(writer)

    async with tcp_server(serve) as port:
        yield f"http://{HOST}:{port}"


def recover(
    *peers: list[Answer], registry: StreamRegistry | None = None, limits: RecoveryLimits = LIMITS
) -> Recovery:
    registry = StreamRegistry() if registry is None else registry

    async def run() -> Recovery:
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(peer(*answers)) for answers in peers]
            recovery = Recovery(registry, urls, limits=limits)
            await recovery.run()
            return recovery

    recovery = wait.run(run())
    for _, index in registry.indexes():
        index.check()
    return recovery


def rows(index: KvIndex | None) -> dict[WorkerRank | None, tuple[int, int, int]]:
    assert index is not None
    found = index.find_matches(pack(*range(1, 1001), 2000, 2001)).rows()
    return {index.rank_of(slot): row for slot, row in found.items()}


EXPECTED = {A: (1000, 1, 1), B: (1000, 0, 0)}


@pytest.mark.parametrize("at_once", [7, 256])
def test_a_dump_becomes_an_index(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BLOCKS_AT_ONCE", at_once)
    registry = StreamRegistry()
    recovery = recover([whole(document(source()))], registry=registry)
    assert recovery.outcome == "recovered"
    assert rows(registry.index(SCOPE)) == EXPECTED
    assert {scope: set(ranks) for scope, ranks in recovery.recovered.items()} == {SCOPE: {A, B}}
    assert recovery.blocks == 2002


def test_an_empty_dump_is_a_success() -> None:
    recovery = recover([whole(b"{}")], [whole(document(source()))])
    assert (recovery.outcome, recovery.recovered) == ("recovered", {})


DUMP = document(source())
DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
FAULTS: dict[str, tuple[Answer, str]] = {
    "500": (whole(b"", status="500 Oh"), "status"),
    "redirect": (whole(b"", "location: http://127.0.0.1:9/dump", status="302 Found"), "redirect"),
    "garbage": (whole(b"<html>no</html>"), "garbage"),
    "half a dump": (whole(DUMP[: len(DUMP) // 2]), "garbage"),
    "no colon": (whole(document(source(), "nocolon")), "garbage"),
    "breaks off": (breaks_after(DUMP[: len(DUMP) // 2]), "connection"),
    "unknown packing": (whole(DUMP, "content-encoding: br"), "encoding"),
    "not really packed": (whole(DUMP, "content-encoding: gzip"), "garbage"),
    "half packed": (whole(gzip.compress(DUMP)[:-400], "content-encoding: gzip"), "garbage"),
    "too large": (whole(b'{"default:default": {"a": [' + b"1," * 6_000_000), "too_large"),
    "bomb": (whole(gzip.compress(b" " * 20_000_000), "content-encoding: gzip"), "too_large"),
    "no HTTP": (no_http, "connection"),
    "a deep document": (whole(b'{"m:t": {"block_size": 16, "x": ' + DEEP + b"}}"), "garbage"),
    "a deep event": (
        whole(b'{"m:t": {"block_size": 16, "events": [{"x": ' + DEEP + b"}]}}"),
        "garbage",
    ),
    "no text": (whole(b'{"\xff:t": {"block_size": 16, "events": []}}'), "garbage"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_next_peer_is_asked_and_nothing_is_left(fault: str) -> None:
    answer, kind = FAULTS[fault]
    registry = StreamRegistry()
    limits = RecoveryLimits(attempts_max=1, silence_s=1e3, bytes_max=1_000_000)
    recovery = recover([answer], [whole(DUMP)], registry=registry, limits=limits)
    assert recovery.failures == {kind: 1}
    assert rows(registry.index(SCOPE)) == EXPECTED
    assert registry.index(Scope("nocolon", "")) is None


@pytest.mark.parametrize("silence_s", [0.2, 100.0])
def test_a_peer_that_hangs_is_left(silence_s: float) -> None:
    limits = RecoveryLimits(attempts_max=1, silence_s=silence_s, timeout_s=0.5)
    registry = StreamRegistry()
    half = DUMP[: len(DUMP) // 2]
    recovery = recover([hangs_after(half)], registry=registry, limits=limits)
    assert (recovery.outcome, recovery.failures) == ("failed", {"timeout": 1})
    assert list(registry.indexes()) == []


def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_reader, "EVENT_BYTES_MAX", 100_000)
    line = b'{"m:t": {"block_size": 16, "events": [{"worker_id": ' + b"1" * 1_000_000
    recovery = recover([whole(line)])
    assert recovery.failures == {"garbage": 1}


def test_nobody_there_and_urls_that_are_none() -> None:
    recovery = Recovery(
        StreamRegistry(), ["http://127.0.0.1:1", "bad", "ftp://x", ""], limits=LIMITS
    )
    assert asyncio.run(recovery.run()) == "failed"
    assert sum(recovery.failures.values()) == 4


def test_it_asks_again() -> None:
    limits = RecoveryLimits(attempts_max=3, backoff_s=0.0)
    answers = [whole(b"", status="503 Later"), whole(b"{", status="200 OK"), whole(DUMP)]
    recovery = recover(answers, limits=limits)
    assert (recovery.outcome, recovery.failures) == ("recovered", {"status": 1, "garbage": 1})


def test_packed_dumps_are_read() -> None:
    registry = StreamRegistry()
    recover([whole(gzip.compress(DUMP), "content-encoding: gzip")], registry=registry)
    assert rows(registry.index(SCOPE)) == EXPECTED


def test_what_importers_must_accept() -> None:
    """Contract 7.1: absent members, unknown ones, removals and clears; nonsense is skipped."""

    def event(worker_id: object, data: object, **more: object) -> dict[str, object]:
        return {"worker_id": worker_id, "event": {"event_id": 0, "data": data}, **more}

    def stored(parent: int | None, *blocks: int) -> dict[str, object]:
        listed = [{"block_hash": b, "tokens_hash": b} for b in blocks]
        return {"stored": {"parent_hash": parent, "blocks": listed, "extra": {}}}

    events = [
        event(1, stored(None, 1, 2, 3), extra=1),
        event(1, {"removed": {"block_hashes": [3]}}),
        event(2, stored(None, 1)),
        event(2, "cleared"),
        event(1, stored(2, 2**64 - 1), storage_tier="disk"),
        event("one", stored(None, 1)),
        event(-1, stored(None, 1)),
        event(1 << 64, stored(None, 1)),
        event(1, stored(None, 9), storage_tier="cloud"),
        event(1, "exploded"),
    ]
    registry = StreamRegistry()
    body = json.dumps({"m:t:2": {"block_size": 4, "unknown": [], "events": events}}).encode()
    recovery = recover([whole(body)], registry=registry)
    index = registry.index(Scope("m", "t:2"))
    assert index is not None
    assert index.block_size == 4
    found = index.find_matches(pack(1, 2, 2**64 - 1)).rows()
    assert {index.rank_of(s): row for s, row in found.items()} == {WorkerRank(1, 0): (2, 0, 1)}
    assert recovery.skipped == 5


def test_a_scope_that_was_opened_meanwhile_is_filled() -> None:
    registry = StreamRegistry()
    here = registry.open_index(SCOPE, 16)
    here.attach(B)
    told: list[Scope] = []

    async def run() -> Recovery:
        async with peer(whole(DUMP)) as url:
            recovery = Recovery(registry, [url], told.append, limits=LIMITS)
            await recovery.run()
            return recovery

    asyncio.run(run())
    assert registry.index(SCOPE) is here
    assert rows(here) == EXPECTED
    assert told == [SCOPE]
    here.check()


@pytest.mark.parametrize(
    ("found", "outcome", "failure"),
    [
        ("127.0.0.1", "recovered", None),
        ("169.254.169.254", "failed", "denied"),
        ("", "failed", "connection"),
    ],
)
def test_a_peer_known_by_name_is_asked_where_the_name_leads(
    found: str, outcome: str, failure: str | None
) -> None:
    async def run() -> Recovery:
        addresses = Addresses(look_up=lambda _: [found] if found else [])
        async with peer(whole(DUMP)) as url:
            named = url.replace("127.0.0.1", "peer.test")
            recovery = Recovery(StreamRegistry(), [named], limits=LIMITS, addresses=addresses)
            await recovery.run()
        addresses.close()
        return recovery

    recovery = asyncio.run(run())
    assert recovery.outcome == outcome
    assert recovery.failures.keys() == ({failure} if failure else set())


def test_a_scope_with_another_block_size_is_left_alone() -> None:
    registry = StreamRegistry()
    here = registry.open_index(SCOPE, 32)
    recovery = recover([whole(DUMP)], registry=registry)
    assert (recovery.outcome, recovery.conflicts, recovery.recovered) == ("recovered", 1, {})
    assert here.ranks() == []


def test_requests_get_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else is on the loop runs many times while a dump is read and applied."""
    monkeypatch.setattr(room, "SLICE_S", 0.0)
    turns = 0

    async def run() -> None:
        nonlocal turns
        async with peer(whole(DUMP)) as url:
            recovering = asyncio.ensure_future(
                Recovery(StreamRegistry(), [url], limits=LIMITS).run()
            )
            while not recovering.done():
                turns += 1
                await asyncio.sleep(0)

    asyncio.run(run())
    assert turns > len(DUMP) / room.PIECE_BYTES
