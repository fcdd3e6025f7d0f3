"""A client that is refused learns why, and is cut off if it goes on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.http import connection_guard
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.http.test_connection_guard import (
    HEAD,
    NoTransport,
    alone,
    connections_of,
)
from tests.select_service.edge.serving import Wire, listening
from tests.wait import PATIENCE_S, until


def _say_all(port: int, data: bytes) -> bytes:
    """What a client reads that first sends everything, as many do; blocking."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(data)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
        return answer


_TOO_LONG = b"x" * (8 * 1024 * 1024 + 1)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(_TOO_LONG), 413),
        (HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n900000\r\n", 413),
        (HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(_TOO_LONG), 413),
        (b"GET / HTTP/1.1\r\nx: ", 431),
        (b"no http\r\n", 400),
    ],
)
@within(listening)
async def test_a_client_that_sends_all_before_it_reads_hears_why(
    port: int, service: Driver, server: Server, *, data: bytes, status: int
) -> None:
    for _attempt in range(3):
        answer = await asyncio.to_thread(_say_all, port, data + _TOO_LONG)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"code":' in answer
    await until(lambda: not server.server_state.connections)


async def test_a_refused_client_that_goes_on_for_ever_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_guard, "LINGER_BYTES_MAX", 1 << 20)
    async with listening() as (port, _, server):
        wire = await Wire.to(port)
        wire.say(b"no http\r\n")
        assert (await wire.answer())[0] == 400

        async def go_on() -> None:
            while True:
                wire.say(bytes(1 << 16))
                await wire.writer.drain()

        with pytest.raises(ConnectionError):
            await go_on()
        await until(lambda: not server.server_state.connections)


async def test_a_refused_client_that_still_sends_is_heard_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However slowly, within bounds: who sends all before it reads would lose the answer."""
    monkeypatch.setattr(connection_guard, "LINGER_S", 0.05)
    monkeypatch.setattr(connection_guard, "LINGER_MAX_S", 1000.0)
    async with listening() as (port, _, server):
        wire = await Wire.to(port)
        wire.say(b"no http\r\n")
        (connection,) = await connections_of(server)
        looks: list[int] = []
        look = connection._end_linger

        def seen(discarded: int) -> None:
            looks.append(discarded)
            wire.say(b"more")
            connection._discard(b"it came before the look")
            look(discarded)

        monkeypatch.setattr(connection, "_end_linger", seen)
        await until(lambda: len(looks) > 2)
        assert server.server_state.connections
        connection._linger_until = 0.0
        await until(lambda: not server.server_state.connections)


async def test_a_refused_client_that_stays_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "LINGER_S", 0.1)
    async with listening() as (port, _, server):
        wire = await Wire.to(port)
        wire.say(b"no http\r\n")
        assert (await wire.answer())[0] == 400
        await until(lambda: not server.server_state.connections)


@within(listening)
async def test_a_refused_client_that_stays_does_not_delay_the_end(
    port: int, service: Driver, server: Server
) -> None:
    wire = await Wire.to(port)
    wire.say(b"no http\r\n")
    assert (await wire.answer())[0] == 400
    assert server.server_state.connections
    server.should_exit = True
    await until(lambda: not server.server_state.connections)


async def test_a_client_that_reads_again_in_time() -> None:
    transport = NoTransport()
    protocol = alone()()
    protocol.connection_made(transport)
    protocol.pause_writing()
    protocol.resume_writing()
    now = asyncio.get_running_loop().time()
    protocol.sweep(now + 0.5)
    assert protocol.counts.write_timeouts == 0
