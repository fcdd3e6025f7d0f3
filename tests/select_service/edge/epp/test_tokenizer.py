"""Engines tokenize: asked within a time, remembered, left alone after a failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from indexer.core.packing import pack_tokens
from indexer.edge.addresses import Addresses
from indexer.types import EgressSettings
from select_service.edge.epp.picker_traffic import PickerTraffic
from select_service.tokenization.engine_tokenizer import PAUSE_S, EngineTokenizer
from select_service.types.router_config import PickerLimits
from tests.coroutines import run_by
from tests.select_service.edge.epp.gateway import (
    Gateway,
    endpoint_in,
    gateway,
    headers,
    receive,
    say,
)
from tests.select_service.edge.epp.gateway import body as body_of
from tests.select_service.edge.serving import HOST
from tests.wait import PATIENCE_S, run, until

TOKENS = list(range(32))
TEXT = b'{"prompt":"x"}'


class Engine:
    """An HTTP server with an answer for everything."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.status, self.answer = 200, msgspec.json.encode({"tokens": TOKENS, "count": 32})
        self.is_silent = False
        self.url = ""
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.asked.append(head.split(b" ")[1] + b" " + await reader.readexactly(size))
                if self.is_silent:
                    await reader.read()
                    break
                status_line = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n"
                writer.write(status_line % (self.status, len(self.answer)) + self.answer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.open -= 1


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    server = await asyncio.start_server(made.serve, HOST, 0)
    made.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        # Clients have left, some before they were accepted: a server that closes in between leaves
        # those connections to the collector. Within these turns all are accepted, and counted.
        for _ in range(8):
            await asyncio.sleep(0)
        server.close()
        await until(lambda: not made.open)


class Asking:
    """A tokenizer with its clock."""

    def __init__(self, limits: PickerLimits, reach: EgressSettings | None = None) -> None:
        self.now = 0.0
        self.traffic = PickerTraffic()
        self.addresses = Addresses(reach)
        self.tokenizer = EngineTokenizer(self.addresses, limits, self.traffic, lambda: self.now)

    async def ask(self, *urls: str, text: bytes = TEXT, partition: str = "m") -> bytes | str:
        return await self.tokenizer.tokens(partition, text, lambda: urls)


PATIENT = PickerLimits(tokenize_timeout_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def asking(
    limits: PickerLimits = PATIENT, reach: EgressSettings | None = None
) -> AsyncIterator[Asking]:
    made = Asking(limits, reach)
    try:
        yield made
    finally:
        await made.tokenizer.close()
        made.addresses.close()


def alone(use: object) -> None:
    run(use())  # type: ignore[operator]


@run_by(alone)
async def test_an_engine_is_asked_once_for_one_text() -> None:
    async with engine() as one, asking() as at:
        for _ in range(2):
            assert await at.ask(one.url + "/") == pack_tokens(TOKENS)
        assert one.asked == [b"/tokenize " + TEXT]
        assert await at.ask(one.url, partition="other") == pack_tokens(TOKENS)
        assert len(one.asked) == 2
        assert (at.traffic.prompts["tokenized"], at.traffic.prompts["cached"]) == (2, 1)
        assert at.traffic.tokenize_calls == 2


@run_by(alone)
async def test_what_is_remembered_is_bounded() -> None:
    limits = PickerLimits(tokenize_timeout_s=PATIENCE_S, tokenize_cache_bytes=1000)
    async with engine() as one, asking(limits) as at:
        for number in range(9):
            await at.ask(one.url, text=b"%d" % number)
            assert at.traffic.cache_bytes <= 1000
        await at.ask(one.url, text=b"8")
        assert len(one.asked) == 9
        await at.ask(one.url, text=b"0")
        assert len(one.asked) == 10
    nothing = PickerLimits(tokenize_timeout_s=PATIENCE_S, tokenize_cache_bytes=0)
    async with engine() as one, asking(nothing) as at:
        for _ in range(2):
            await at.ask(one.url)
        assert (len(one.asked), at.traffic.cache_bytes) == (2, 0)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (404, b"{}"),
        (200, b"{}"),
        (200, b"<html>"),
        (200, b'{"tokens": []}'),
        (200, b'{"tokens": [-1]}'),
        (200, b'{"tokens": [' + b"1, " * 50_000 + b"1]}"),
        (302, b""),
    ],
)
async def test_an_engine_that_fails_is_left_alone_for_a_while(status: int, answer: bytes) -> None:
    async with engine() as bad, engine() as good, asking() as at:
        bad.status, bad.answer = status, answer
        assert await at.ask(bad.url) == "engine_failed"
        assert await at.ask(bad.url) == "no_engine"
        for number in range(4):
            tokens = await at.ask(bad.url, good.url, text=b"%d" % number)
            assert tokens == pack_tokens(TOKENS)
        assert len(bad.asked) == 1
        at.now += PAUSE_S
        bad.status, bad.answer = good.status, good.answer
        assert await at.ask(bad.url) == pack_tokens(TOKENS)


@run_by(alone)
async def test_a_text_that_is_refused_leaves_the_engine_to_others() -> None:
    async with engine() as one, asking() as at:
        one.status = 400
        assert await at.ask(one.url) == "engine_refused"
        one.status = 200
        assert await at.ask(one.url, text=b"{}") == pack_tokens(TOKENS)


@run_by(alone)
async def test_an_engine_that_is_gone_or_forbidden_has_failed() -> None:
    async with asking() as at:
        assert await at.ask(f"http://{HOST}:9") == "engine_failed"
        assert await at.ask("http://[") == "engine_failed"
        assert await at.ask() == "no_engine"
    async with engine() as one, asking(reach=EgressSettings(loopback=False)) as at:
        assert await at.ask(one.url) == "engine_failed"
        assert one.asked == []


@run_by(alone)
async def test_nobody_waits_longer_than_the_timeout() -> None:
    async with engine() as one, asking(PickerLimits(tokenize_timeout_s=0.01)) as at:
        one.is_silent = True
        assert await at.ask(one.url) == "engine_timeout"
        assert at.traffic.limit_hits["epp_tokenize_timeout_s"] == 1
        assert await at.ask(one.url) == "engine_timeout"


@run_by(alone)
async def test_calls_are_bounded_and_may_be_off() -> None:
    limits = PickerLimits(tokenize_timeout_s=PATIENCE_S, tokenize_calls_max=1)
    async with engine() as one, asking(limits) as at:
        one.is_silent = True
        first = asyncio.ensure_future(at.ask(one.url))
        await until(lambda: one.asked)
        assert await at.ask(one.url) == "engine_busy"
        assert at.traffic.limit_hits["epp_tokenize_calls_max"] == 1
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        one.is_silent = False
        assert await at.ask(one.url) == pack_tokens(TOKENS)
    async with engine() as one, asking(PickerLimits(tokenize_timeout_s=0.0)) as at:
        assert await at.ask(one.url) == "engine_off"
        assert one.asked == []


@run_by(alone)
async def test_a_text_goes_to_the_worker_that_has_its_tokens() -> None:
    async with engine() as one, gateway(epp_tokenize_timeout_s=PATIENCE_S) as at:
        port = one.url.rpartition(":")[2]
        for number in (1, 2):
            at.add_worker(number, endpoint=f"http://127.0.0.{number}:{port}")
        at.store(2, TOKENS)
        assert await chosen(at, {"model": "m", "prompt": "x"}) == f"127.0.0.2:{port}"
        assert at.traffic.prompts["tokenized"] + at.traffic.load_alone["engine_failed"] >= 1


async def chosen(at: Gateway, prompt: object) -> str:
    """Place a prompt until an engine that answers was asked: one of the two does not listen."""
    found = ""
    for _ in range(3):
        stream = at.stream()
        await say(stream, headers())
        await say(stream, body_of(prompt))
        found = endpoint_in(await receive(stream))
        stream.cancel()
        if at.traffic.prompts["tokenized"]:
            break
    return found
