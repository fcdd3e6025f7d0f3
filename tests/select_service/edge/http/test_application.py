"""One exchange: waiting, leaving, streaming, failing, counting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from select_service.edge import server
from select_service.edge.app import create_application
from select_service.edge.driver.driver import Driver
from select_service.edge.http.traffic import CLIENT_GONE
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.serving import (
    PROMPT,
    SETTINGS,
    Wire,
    add_worker,
    app_client,
    listening,
)
from tests.wait import until

BUSY = {"reservation_id": "busy", "worker_id": 1, "sequence_hashes": [9], "isl_tokens": 100}


async def _fill(port: int, service: Driver) -> Wire:
    """Make the only worker busy; returns an open connection."""
    add_worker(service, max_num_batched_tokens=1)
    wire = await Wire.to(port)
    assert await wire.status("POST", "/reservations", BUSY) == 201
    return wire


def _pending(service: Driver) -> int:
    return sum(scope.pending_count for scope in service.loads())


@within(listening)
async def test_a_request_that_waits_is_answered_when_there_is_room(
    port: int, service: Driver
) -> None:
    wire = await _fill(port, service)
    waiting = await Wire.to(port)
    waiting.ask("POST", "/select", {**PROMPT, "bogus": 1})
    await until(lambda: _pending(service) == 1)
    assert await wire.status("POST", "/reservations/busy/prefill_complete") == 200
    status, headers, body = await waiting.answer()
    assert status == 200
    assert headers["warning"] == '299 - "unknown field: bogus"'
    assert json.loads(body)["worker_id"] == 1
    waiting.ask("GET", "/health")  # the connection is as good as before
    assert (await waiting.answer())[0] == 200


@within(listening)
async def test_a_refusal_after_waiting(port: int, service: Driver) -> None:
    wire = await _fill(port, service)
    waiting = await Wire.to(port)
    waiting.ask("POST", "/select", PROMPT)
    await until(lambda: _pending(service) == 1)
    waiting_too = await Wire.to(port)
    constraint = {"routing_constraints": {"required_taints": ["nobody"]}}
    waiting_too.ask("POST", "/select", {**PROMPT, **constraint})
    await until(lambda: _pending(service) == 2)
    assert await wire.status("DELETE", "/reservations/busy") == 200
    assert (await waiting.answer())[0] == 200
    status, _headers, body = await waiting_too.answer()
    assert (status, json.loads(body)["code"]) == (503, "no_eligible_worker")


async def test_leaving_is_not_put_off_until_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TICK_S", 600.0)
    async with listening(header_timeout_s=9000.0, body_timeout_s=9000.0) as (port, _, running):
        wire = await Wire.to(port)
        assert await wire.status("GET", "/health") == 200
        assert not running.should_exit


@within(listening)
async def test_who_is_let_in_as_the_port_closes_is_sent_away(
    port: int, service: Driver, server: Server
) -> None:
    server._application.leave()
    late = await Wire.to(port)
    assert await late.rest() == b""


class _Endless:
    """A dump that never ends, and notices when nobody wants more of it."""

    def __init__(self) -> None:
        self.pieces = 0
        self.closed = False

    async def dump(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.pieces += 1
                yield b"x" * 1000
                await asyncio.sleep(0)
        finally:
            self.closed = True


@within(listening)
async def test_a_stream_ends_with_its_client(
    port: int, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = _Endless()
    monkeypatch.setattr(service, "dump", endless.dump)
    wire = await Wire.to(port)
    wire.ask("GET", "/dump")
    await until(lambda: endless.pieces > 10)
    wire.close()
    await until(lambda: endless.closed)


@within(listening)
async def test_a_stream_ends_with_the_process(
    port: int, service: Driver, server: Server, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = _Endless()
    monkeypatch.setattr(service, "dump", endless.dump)
    wire = await Wire.to(port)
    wire.ask("GET", "/dump")
    await until(lambda: endless.pieces > 10)
    server.should_exit = True
    data = await wire.rest()
    assert data.startswith(b"HTTP/1.1 200")
    assert not data.endswith(b"0\r\n\r\n")  # cut short, and recognisably so
    await until(lambda: endless.closed)


async def test_a_stream_that_fails_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ZeroDivisionError

    async with listening() as (port, service, _):
        monkeypatch.setattr(service, "dump", broken)
        wire = await Wire.to(port)
        wire.ask("GET", "/dump")
        assert not (await wire.rest()).endswith(b"0\r\n\r\n")
    assert "stream failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_an_error_of_ours_is_500_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    async with app_client() as (client, service):
        for verb in ("load_scopes", "select_now", "upsert_worker"):
            monkeypatch.setattr(service, verb, broken)
        seen = [
            await client.get("/loads"),
            await client.post("/select", json=PROMPT),
            await client.post("/workers", json={"worker_id": 1}),
        ]
        for answer in seen:
            assert answer.status_code == 500
            assert answer.json() == {"error": "internal error", "code": "internal_error"}
        assert (await client.get("/health")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert "select_service_http_crashes_total 3.0" in metrics
    assert caplog.text.count("ZeroDivisionError: secret") == 3


async def test_a_wait_that_fails_is_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError

    async with listening() as (port, service, _):
        await _fill(port, service)
        monkeypatch.setattr(service, "wait", broken)
        wire = await Wire.to(port)
        assert await wire.status("POST", "/select", PROMPT) == 500


@within(listening)
async def test_a_client_that_leaves_within_its_body(port: int) -> None:
    wire = await Wire.to(port)
    wire.say(
        b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    other = await Wire.to(port)
    await other.exchange("GET", "/health")
    wire.close()

    async def gone() -> bool:
        text = (await other.exchange("GET", "/metrics"))[2].decode()
        line = f'route="/select",status="{CLIENT_GONE}"'
        return line in text

    while not await gone():
        await asyncio.sleep(0.005)


@within(listening, max_body_bytes=1000)
async def test_a_big_body_refused_early_is_read_to_its_end(port: int) -> None:
    wire = await Wire.to(port)
    head = b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
    wire.say(head + b"content-length: 3000000\r\n\r\n")
    assert (await wire.answer())[0] == 413
    wire.say(b" " * 3_000_000)
    wire.ask("GET", "/health")
    assert (await wire.answer())[0] == 200


@within(listening, max_body_bytes=1000)
async def test_a_client_that_asks_first_is_told_before_it_sends(port: int) -> None:
    head = (
        b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\n"
    )
    wire = await Wire.to(port)
    wire.say(head + b"content-length: 3000000\r\n\r\n")
    status, headers, _body = await wire.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert await wire.rest() == b""
    wire = await Wire.to(port)
    wire.say(head + b"content-length: 2\r\n\r\n")
    assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.say(b"{}")
    assert (await wire.answer())[0] == 503


async def test_only_http_is_served() -> None:
    async def nothing(*_: Any) -> Any:
        raise AssertionError

    application, _ = create_application(Driver(), SETTINGS)
    with pytest.raises(RuntimeError, match="websocket"):
        await application({"type": "websocket"}, nothing, nothing)


async def test_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="select_service.access"):
        async with app_client(access_log=True) as (client, _):
            await client.get("/health")
    (record,) = caplog.records
    assert (record.__dict__["path"], record.__dict__["status"]) == ("/health", 200)
