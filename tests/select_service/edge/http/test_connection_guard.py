"""Clients that are slow, silent, wrong or too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from select_service.edge.app import create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.http.connection import HttpConnection
from select_service.edge.http.connection_guard import RESERVED_MAX, Phase
from select_service.edge.http.connection_limits import ConnectionLimits
from select_service.edge.http.traffic import Connections
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.http.fake_clients import unopened
from tests.select_service.edge.serving import PROMPT, SETTINGS, Wire, add_worker, listening
from tests.wait import until

SOON = {"header_timeout_s": 0.3, "body_timeout_s": 0.3}
HEAD = b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"


def _counts(server: Server) -> Connections:
    return server._counts


async def _refused(wire: Wire, status: int, code: str) -> None:
    got, headers, body = await wire.answer()
    assert (got, json.loads(body)["code"]) == (status, code)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert await wire.rest() == b""
    wire.close()  # else the server lingers


@within(listening, **SOON)
async def test_a_head_that_does_not_end(port: int, service: Driver, server: Server) -> None:
    wire = await Wire.to(port)
    wire.say(b"GET /health HTTP/1.1\r\nhost:")
    await _refused(wire, 408, "request_timeout")
    assert _counts(server).header_timeouts == 1


@within(listening, **SOON)
async def test_a_head_that_trickles(port: int) -> None:
    wire = await Wire.to(port)

    async def trickle() -> None:
        for byte in b"GET /health HTTP/1.1\r\nx: " + b"y" * 10_000:
            wire.say(bytes([byte]))
            await asyncio.sleep(0.01)

    trickling = asyncio.ensure_future(trickle())
    await _refused(wire, 408, "request_timeout")
    trickling.cancel()


@within(listening, **SOON)
async def test_a_client_that_says_nothing(port: int, service: Driver, server: Server) -> None:
    wire = await Wire.to(port)
    assert await wire.rest() == b""
    assert _counts(server).header_timeouts == 1


@pytest.mark.parametrize("framing", [b"content-length: 10", b"transfer-encoding: chunked"])
@within(listening, **SOON)
async def test_a_body_that_does_not_end(
    port: int, service: Driver, server: Server, *, framing: bytes
) -> None:
    wire = await Wire.to(port)
    wire.say(HEAD + framing + b"\r\n\r\n")
    wire.say(b"1\r\n{\r\n" if b"chunked" in framing else b"{")
    await _refused(wire, 408, "request_timeout")
    assert _counts(server).body_timeouts == 1


@within(listening, **SOON)
async def test_a_body_that_does_not_end_after_its_answer(
    port: int, service: Driver, server: Server
) -> None:
    wire = await Wire.to(port)
    wire.say(b"POST /nope HTTP/1.1\r\nhost: s\r\ncontent-length: 10\r\n\r\n{")
    assert (await wire.answer())[0] == 404
    assert await wire.rest() == b""
    assert _counts(server).body_timeouts == 1


@within(listening, **SOON)
async def test_a_client_that_does_not_read(port: int, service: Driver, server: Server) -> None:
    async def endless(*_: object, **__: object) -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    service.dump = endless  # type: ignore[method-assign]
    wire = await Wire.to(port)
    wire.ask("GET", "/dump")
    await until(lambda: _counts(server).write_timeouts == 1)
    await until(lambda: not server.server_state.connections)
    wire.close()


@within(listening, keep_alive_timeout_s=0)
async def test_an_idle_connection_is_closed(port: int, service: Driver, server: Server) -> None:
    wire = await Wire.to(port)
    assert await wire.status("GET", "/health") == 200
    assert await wire.rest() == b""
    assert _counts(server).header_timeouts == 0


@within(listening, header_timeout_s=0.3, body_timeout_s=0.3)
async def test_waiting_is_not_slowness(port: int, service: Driver) -> None:
    add_worker(service, max_num_batched_tokens=1)
    wire = await Wire.to(port)
    busy = {"reservation_id": "b", "worker_id": 1, "sequence_hashes": [9], "isl_tokens": 100}
    await wire.exchange("POST", "/reservations", busy)
    waiting = await Wire.to(port)
    waiting.ask("POST", "/select", PROMPT)
    waiting.say(b"GET /health HTT")  # a second request, half of it
    eager = await Wire.to(port)
    eager.ask("POST", "/select", PROMPT)
    eager.ask("POST", "/select", {"token_ids": [7] * 300_000})  # too much: we stop reading
    await asyncio.sleep(0.8)
    await wire.exchange("DELETE", "/reservations/b")
    assert (await waiting.answer())[0] == 200
    waiting.say(b"P/1.1\r\nhost: s\r\n\r\n")
    assert (await waiting.answer())[0] == 200
    assert (await eager.answer())[0] == 200
    assert (await eager.answer())[0] == 200


@within(listening, head_bytes_max=2000)
async def test_a_head_without_end_and_without_pause(
    port: int, service: Driver, server: Server
) -> None:
    wire = await Wire.to(port)
    wire.say(b"GET /health HTTP/1.1\r\nx: " + b"y" * 3000)
    assert (await wire.answer())[0] == 431
    assert _counts(server).malformed == 1


@pytest.mark.parametrize("cut", [1, 60, 130, 170])
@within(listening)
async def test_an_upgrade_is_answered_as_plain_http(port: int, *, cut: int) -> None:
    for offered in (b"h2c", b"websocket"):
        wire = await Wire.to(port)
        upgrade = b"connection: upgrade\r\nupgrade: " + offered + b"\r\n"
        data = HEAD + upgrade + b"content-length: 2\r\n\r\n{}"
        wire.say(data[:cut])
        await wire.writer.drain()
        wire.say(data[cut:])
        status, _headers, body = await wire.answer()
        assert (status, json.loads(body)["code"]) == (503, "no_schedulable_worker")
        assert await wire.status("GET", "/health") == 200


@within(listening)
async def test_one_offer_of_another_protocol_behind_the_other(
    port: int, service: Driver, server: Server
) -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: faults.append(what))
    wire = await Wire.to(port)
    wire.say(b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 2000)
    with contextlib.suppress(ConnectionError):
        await wire.rest()
    assert not faults
    assert _counts(server).malformed == 1


async def test_a_reserve_of_those_who_are_served() -> None:
    """Nobody is sent away to whom an answer is owed."""
    made = alone()
    protocols = [made() for _ in range(RESERVED_MAX + 2)]
    counts = protocols[0].counts
    protocols[0].connection_made(NoTransport())
    transports = [NoTransport() for _ in protocols[1:]]
    for one, transport in zip(protocols[1:-1], transports, strict=False):
        one.connection_made(transport)
        one.on_message_begin()
        one.phase = Phase.REST
    assert counts.reserved == RESERVED_MAX
    protocols[-1].connection_made(transports[-1])
    assert transports[-1].closed
    assert counts.refused == 1
    assert not any(one.closed for one in transports[:-1])
    for one in protocols[1:-1]:
        one.connection_lost(None)
    assert not counts.reserved


@within(listening, connections_max=2)
async def test_too_many_connections(port: int, service: Driver, server: Server) -> None:
    first, second = await Wire.to(port), await Wire.to(port)
    for wire in (first, second):
        assert await wire.status("GET", "/health") == 200
    third = await Wire.to(port)
    third.ask("POST", "/select", {"token_ids": [1]})
    await _refused(third, 503, "too_many_connections")
    assert _counts(server).refused == 1
    first.close()
    await until(lambda: len(server.server_state.connections) == 1)
    fourth = await Wire.to(port)
    assert await fourth.status("GET", "/health") == 200


@pytest.mark.parametrize("limit", ["connections_max", "connections_per_address_max"])
@within(listening)
async def test_a_limit_that_is_too_low_can_be_taken_back(
    port: int, service: Driver, server: Server, *, limit: str
) -> None:
    """Who looks whether we are alive, and who may change that, find some connections more."""
    others = [await Wire.to(port)]
    assert await others[0].status("PUT", "/config", {"settings": {limit: 1}}) == 200
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("GET", "/config?x=1")):
        wire = await Wire.to(port)
        status, headers, _body = await wire.exchange(method, path)
        assert (status, headers["connection"]) == (200, "close")
        assert await wire.rest() == b""
    for path in ("/loads", "/configs", "/"):
        wire = await Wire.to(port)
        wire.ask("GET", path)
        await _refused(wire, 503, "too_many_connections")
    assert _counts(server).malformed == 0
    await until(lambda: _counts(server).reserved == 0)
    others += [await Wire.to(port) for _ in range(RESERVED_MAX)]
    await until(lambda: _counts(server).reserved == RESERVED_MAX)
    # strangers who sit there and ask nothing keep nobody out, the first goes first
    turned_away = _counts(server).refused + _counts(server).refused_by_address
    wire = await Wire.to(port)
    await _refused(others[1], 503, "too_many_connections")
    assert _counts(server).refused + _counts(server).refused_by_address == turned_away + 1
    assert await wire.status("PUT", "/config", {"settings": {limit: None}}) == 200
    wire = await Wire.to(port)
    assert await wire.status("GET", "/loads") == 200


class NoTransport(asyncio.Transport):
    """A connection that is only written down."""

    def __init__(self, **extra: object) -> None:
        super().__init__(extra)
        self.written = b""
        self.closed = False
        self.ended = False

    def write_eof(self) -> None:
        self.ended = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def alone() -> Callable[[], HttpConnection]:
    """Make connections of a server for one."""
    limits = ConnectionLimits(1, 1, 1, 1 << 16, 128, 1, 1, 1 << 20, 0)
    return unopened(create_driver(SETTINGS), limits=limits)


@pytest.mark.parametrize(
    "requests",
    [
        b"HEAD /health HTTP/1.1\r\nhost: s\r\n\r\n" * 3,
        HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
        (HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}") * 2,
    ],
    ids=["three", "expecting", "two expecting"],
)
async def test_nonsense_behind_requests_that_wait(
    requests: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (port, _, server):
        wire = await Wire.to(port)
        wire.say(requests + b"NONSENSE\r\n\r\n")
        assert await wire.rest() == b""  # what has come is not to be trusted either
        assert _counts(server).malformed == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_after_a_refusal_nothing_is_heard() -> None:
    transport = NoTransport()
    protocol = alone()()
    protocol.connection_made(transport)
    protocol.data_received(b"NONSENSE\r\n\r\n")
    assert transport.ended
    written = transport.written
    assert b"malformed_http" in written
    protocol.data_received(b"GET /health HTTP/1.1\r\n\r\n")
    protocol.sweep(1e12)
    assert transport.written == written
    assert protocol.counts.header_timeouts == 0


@pytest.mark.parametrize(
    "said", [b"GET /health HTT", HEAD + b"content-length: 2\r\n\r\n{"], ids=["head", "body"]
)
async def test_a_process_that_stood_still_does_not_take_it_for_slowness(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its clients, who have had no chance: the time counts in which somebody listened."""
    sweeps: list[float] = []
    sweep = HttpConnection.sweep

    def seen(self: HttpConnection, now: float) -> None:
        sweeps.append(now)
        sweep(self, now)

    monkeypatch.setattr(HttpConnection, "sweep", seen)
    async with listening() as (port, _, server):
        wire = await Wire.to(port)
        wire.say(said)
        (connection,) = await connections_of(server)
        await until(lambda: connection._stamped in (Phase.BODY, Phase.HEAD) and len(sweeps) > 1)
        loop = asyncio.get_running_loop()
        time, ahead_s = loop.time, 100.0
        monkeypatch.setattr(loop, "time", lambda: time() + ahead_s)
        jumped = loop.time()
        await until(lambda: sweeps[-1] > jumped)
        wire.say(b"P/1.1\r\nhost: s\r\n\r\n" if said.startswith(b"GET") else b"}")
        assert (await wire.answer())[0] in (200, 503)
        assert _counts(server).header_timeouts == _counts(server).body_timeouts == 0


async def connections_of(server: Server) -> list[HttpConnection]:
    found = server.server_state.connections
    await until(lambda: found)
    return cast("list[HttpConnection]", list(found))
