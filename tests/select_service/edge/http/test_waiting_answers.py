"""Answers that wait for a handler or for the disk, and what comes behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from select_service.edge.codec.responses import DurableResponse, Response
from select_service.edge.driver.driver import Driver
from select_service.edge.http.application import Application
from select_service.edge.http.connection import HttpConnection
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, listening
from tests.wait import until


@within(listening)
async def test_an_answer_that_has_to_wait_is_handed_over(
    port: int, service: Driver, server: Server, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def later() -> Response:
        await asked.wait()
        return Response(200, b'"late"')

    monkeypatch.setattr(
        Application,
        "answer_now",
        lambda *_, **__: later() if not asked.is_set() else Response(200, b"{}"),
    )
    waiting, other = await Wire.to(port), await Wire.to(port)
    waiting.ask("GET", "/health")
    await until(lambda: server._application._traffic.in_flight == 1)
    asked.set()
    assert (await waiting.answer())[2] == b'"late"'
    assert (await other.exchange("GET", "/health"))[2] == b"{}"


async def test_what_comes_behind_a_request_of_many_lines_that_waits_is_read_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a request is parsed in pieces, over several turns of the loop."""
    many = list(range(1, 201))
    long = {**PROMPT, "isl_tokens": 3200, "block_hashes": many, "sequence_hashes": many}
    body = json.dumps(long, indent=1).encode()
    async with listening() as (port, service, server):
        asked = asyncio.Event()
        real = Application.answer_now

        async def later() -> Response:
            await asked.wait()
            return Response(200, b'"late"')

        def answer_now(
            self: Application, call: Any, head: Any, sent: bytes, *a: Any, **k: Any
        ) -> Any:
            return later() if sent == body else real(self, call, head, sent, *a, **k)

        monkeypatch.setattr(Application, "answer_now", answer_now)
        add_worker(service)
        wire = await Wire.to(port)
        for method, path, prompt in (("GET", "/health", None), ("POST", "/select", PROMPT)):
            assert await wire.status(method, path, prompt) == 200
        head = f"POST /select HTTP/1.1\r\nhost: s\r\ncontent-length: {len(body)}\r\n"
        kind = "content-type: application/json\r\n\r\n"
        behind = b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n"
        wire.say(f"{head}{kind}".encode() + body + behind)
        await until(lambda: server._application._traffic.in_flight == 1)
        asked.set()
        assert (await wire.answer())[2] == b'"late"'
        assert (await wire.answer())[0] == 200


async def test_nonsense_behind_an_answer_that_waits_for_the_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (port, _, server):
        written = asyncio.get_running_loop().create_future()
        owed = DurableResponse(Response(200, b'"owed"'), written)
        monkeypatch.setattr(Application, "answer_now", lambda *_, **__: owed)
        wire = await Wire.to(port)
        wire.say(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\nNONSENSE\r\n\r\n")
        assert await wire.rest() == b""  # 400 would be taken for the answer to the first
        written.set_result(None)
        wire = await Wire.to(port)
        assert (await wire.exchange("GET", "/health"))[2] == b'"owed"'
        assert server._application._traffic.crashes == 0
    assert not [record for record in caplog.records if record.exc_info]


async def test_after_an_answer_that_waited_for_the_disk_heads_are_known_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[bytes] = []
    real = HttpConnection.on_headers_complete

    def spy(self: HttpConnection) -> None:
        parsed.append(self.url)
        real(self)

    async with listening() as (port, _, _):

        def settling(*_: object, **__: object) -> DurableResponse:
            written = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(written.set_result, None)
            return DurableResponse(Response(200, b"{}"), written)

        monkeypatch.setattr(Application, "answer_now", settling)
        monkeypatch.setattr(HttpConnection, "on_headers_complete", spy)
        wire = await Wire.to(port)
        for _n in range(4):
            assert await wire.status("GET", "/health") == 200
        assert parsed == [b"/health"]


@within(listening)
async def test_who_is_owed_an_answer_by_the_disk_may_take_its_time(
    port: int, service: Driver, server: Server, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(
        Application,
        "answer_now",
        lambda *_, **__: DurableResponse(Response(200, b'"owed"'), written),
    )
    wire = await Wire.to(port)
    wire.say(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\nGET")
    await until(lambda: any(getattr(one, "_awaits_disk", None) for one in _connections(server)))
    (connection,) = _connections(server)
    connection.sweep(1e12)
    written.set_result(None)
    assert (await wire.answer())[2] == b'"owed"'


@within(listening)
async def test_a_connection_is_not_idle_while_a_pipelined_request_waits(
    port: int, service: Driver, server: Server, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    real = Application.answer_now

    async def later() -> Response:
        await asked.wait()
        return Response(200, b'"late"')

    def answer_now(self: Application, call: Any, *what: Any, **how: Any) -> Any:
        return later() if call.path == b"/ready" else real(self, call, *what, **how)

    monkeypatch.setattr(Application, "answer_now", answer_now)
    wire = await Wire.to(port)
    wire.say(b"".join(b"GET /%b HTTP/1.1\r\nhost: s\r\n\r\n" % n for n in (b"health", b"ready")))
    assert (await wire.answer())[0] == 200
    await until(lambda: server._application._traffic.in_flight == 1)
    (connection,) = _connections(server)
    for now in (1e12, 2e12):  # the first notes that it is idle, if it is
        connection.sweep(now)
    asked.set()
    assert (await wire.answer())[2] == b'"late"'


def _connections(server: Server) -> list[HttpConnection]:
    return [one for one in server.server_state.connections if isinstance(one, HttpConnection)]
