"""The side entrance: few routes over the network, where the API is at another place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.edge import server as server_module
from select_service.edge.driver.driver import Driver
from select_service.edge.http.listening_sockets import SIDE_PATHS
from select_service.edge.server import Server
from tests import wait
from tests.coroutines import within
from tests.live.lossy import CALM, LossyLink, Weather
from tests.live.ports import free_port
from tests.select_service.edge.http.test_head_reader import MOST, head, say
from tests.select_service.edge.http.test_listening_sockets import served
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import HOST, PROMPT, Wire, add_worker, listening, worker
from tests.wait import until


@contextlib.asynccontextmanager
async def beside(**settings: Any) -> AsyncIterator[tuple[int, int, Driver, Server]]:
    """A server with both entrances: its port, that at the side, and what is behind."""
    async with listening(side_port=0, side_host=HOST, **settings) as (port, service, server):
        yield port, server._entrances.replica_port, service, server


async def asked(wire: Wire, method: str, path: str, *headers: str) -> tuple[int, Any]:
    body = PROMPT if method == "POST" else None
    status, said, content = await wire.exchange(method, path, body, *headers)
    is_json = said.get("content-type") == "application/json"
    return status, json.loads(content) if is_json and content else content


@pytest.mark.parametrize("access_log", [False, True])
@within(beside, "access_log")
async def test_it_has_its_routes_and_no_others(
    port: int, side: int, service: Driver, server: Server
) -> None:
    add_worker(service)
    main, wire = await Wire.to(port), await Wire.to(side)
    for _ in range(2):  # the second time from memory, of either entrance
        assert (await asked(main, "POST", "/select"))[0] == 200
        assert (await asked(main, "GET", "/loads"))[0] == 200
        assert await asked(wire, "GET", "/health") == (200, {"status": "ok"})
        assert (await asked(wire, "GET", "/ready?verbose=true"))[0] == 200
        status, text = await asked(wire, "GET", "/metrics")
        assert (status, b"select_service_http_connections" in text) == (200, True)
        wire.ask("HEAD", "/health")
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        for method, path in (
            *(("POST", "/select"), ("GET", "/loads"), ("GET", "/reservations/1")),
            *(("DELETE", "/workers/1"), ("GET", "/dump"), ("GET", "/console"), ("GET", "/")),
        ):
            status, body = await asked(wire, method, path)
            assert (status, body["code"]) == (404, "route_not_found")
            assert "--side-port" in body["error"]
            assert all(path in body["error"] for path in SIDE_PATHS)
        assert (await asked(wire, "POST", "/health"))[0] == 405
    status, body = await asked(main, "GET", "/nowhere")
    assert (status, body["error"]) == (404, "route not found")
    await until(lambda: len(server.server_state.connections) == 2)


@pytest.mark.parametrize("pieces", [1, 2, 40])
@pytest.mark.parametrize("size", [MOST - 1, MOST, MOST + 1])
async def test_a_head_has_a_longest_length_at_either_entrance(pieces: int, size: int) -> None:
    """On every route of the side entrance, on one it does not have, and on the console's."""
    paths = [*sorted(SIDE_PATHS), "/nowhere"]
    console = ["/console", "/console/", "/console/nowhere", "/console?a=b"]
    async with beside(head_bytes_max=MOST) as (port, side, _, server):
        for entrance, path in [(side, one) for one in paths] + [(port, one) for one in console]:
            wire, before = await Wire.to(entrance), server._counts.malformed
            for _again in range(2):  # its header lines are known then
                wire.say(head(MOST - 50))
                assert (await wire.answer())[0] == 200
            await say(wire, head(size, f"GET {path} HTTP/1.1\r\n".encode()), pieces)
            status = (await wire.answer())[0]
            assert (status == 431) is (size > MOST), (path, status)
            assert server._counts.malformed - before == (size > MOST), path


@within(beside, connections_max=2)
async def test_limits_hold_for_both_together(
    port: int, side: int, service: Driver, server: Server
) -> None:
    main, wire = await Wire.to(port), await Wire.to(side)
    assert (await asked(main, "GET", "/health"))[0] == 200
    assert (await asked(wire, "GET", "/health"))[0] == 200
    third = await Wire.to(side)
    assert (await asked(third, "GET", "/ready"))[0] == 503
    assert server._counts.refused == 1
    # what must work when they are reached
    fourth = await Wire.to(side)
    assert (await asked(fourth, "GET", "/health"))[0] == 200


@within(beside)
async def test_it_leaves_with_the_other(
    port: int, side: int, service: Driver, server: Server
) -> None:
    main, wire = await Wire.to(port), await Wire.to(side)
    assert (await asked(wire, "GET", "/health"))[0] == 200
    server.close_answers()
    for one in (main, wire):
        status, headers, _body = await one.exchange("GET", "/health")
        assert (status, headers["connection"]) == (200, "close")
        assert await one.rest() == b""
    last = await Wire.to(side)
    await until(lambda: len(server.server_state.connections) == 1)
    server.go()
    assert await last.rest() == b""


async def lets_in(port: int) -> bool:
    try:
        _reader, writer = await asyncio.open_connection(HOST, port)
    except ConnectionError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@pytest.mark.parametrize("announced", [False, True])
@within(beside)
async def test_what_has_arrived_when_the_end_comes_is_answered(
    port: int, side: int, service: Driver, server: Server, *, announced: bool
) -> None:
    """By then it may lie unread, in a connection that is known or one that is not yet."""
    wires = [await Wire.to(port), await Wire.to(side)]
    for wire in wires:
        assert (await asked(wire, "GET", "/health"))[0] == 200
    if announced:
        server.close_answers()
    strangers = [socket.create_connection((HOST, place)) for place in (port, side)]
    for one in strangers:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
    for wire in wires:
        wire.ask("GET", "/health")
    server.go()
    for one in strangers:
        reader, writer = await asyncio.open_connection(sock=one)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()
    for wire in wires:
        assert (await wire.answer())[0] == 200
        assert await wire.rest() == b""


async def test_the_end_waits_a_moment_for_those_who_were_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LAST_WORDS_S", 3600.0)
    async with beside() as (port, side, _, server):
        wires = [await Wire.to(port), await Wire.to(port), await Wire.to(side)]
        assert (await asked(wires[0], "GET", "/health"))[0] == 200
        server.go()
        while await lets_in(port):
            pass
        for wire in wires:
            status, headers, _body = await wire.exchange("GET", "/health")
            assert (status, headers["connection"]) == (200, "close")
            assert await wire.rest() == b""
    # and no longer: leaving `beside` waits for the end


async def test_tokens_and_tls_hold_there(tmp_path: Path) -> None:
    ca, tokens = Authority(tmp_path), TokenFile(tmp_path / "tokens")
    reader = "authorization: Bearer " + tokens.add("prometheus", "read")
    async with beside(**ca.serving("server"), **tokens.setting) as (port, side, _, server):
        for place in (side, port):
            wire = await Wire.to(place, ca.client())
            assert (await asked(wire, "GET", "/health"))[0] == 200
            assert (await asked(wire, "GET", "/metrics"))[0] == 401
            assert (await asked(wire, "GET", "/metrics", reader))[0] == 200
            assert (await asked(wire, "POST", "/select", reader))[0] == (
                404 if place == side else 403
            )
        assert server._counts.handshakes == 0
        plain = await Wire.to(side)
        plain.say(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
        assert b"HTTP" not in await plain.rest()


@pytest.mark.e2e
def test_replicas_heal_there_where_the_api_is_on_a_unix_socket(tmp_path: Path) -> None:
    """One is a process that nobody but its machine may ask; another has missed what it said."""
    path = str(tmp_path / "s")
    side, published, heard = free_port(), free_port(), free_port()
    args = ("--side-host", HOST, "--side-port", str(side), "--replica-sync-port", str(published))

    async def use(one: httpx.Client) -> None:
        async with listening(replica_sync_port=free_port()) as (_, two, __):
            add_worker(two)
            with LossyLink(published, heard, seed=1) as link:
                two.register_peer(f"tcp://{HOST}:{heard}")
                reserve(one, "before")
                await until(lambda: two.core.lifecycle.bookings.live("before") is not None)
                assert two.replicas is not None
                outcomes = two.replicas.pulls.outcomes
                await until(lambda: outcomes["complete"] >= 1)
                pulled, link.weather = outcomes["complete"], Weather(cut=True)
                lost = link.counts["lost"]
                reserve(one, "missed")
                await until(lambda: link.counts["lost"] > lost + 1)  # one may be a heartbeat
                link.weather = CALM
                reserve(one, "after")
                await until(lambda: two.core.lifecycle.bookings.live("missed") is not None)
                await until(lambda: outcomes["complete"] > pulled)

    with served(path, *args), httpx.Client(transport=httpx.HTTPTransport(uds=path)) as one:
        assert one.post("http://s/workers", json=worker()).status_code == 201
        wait.run(use(one))


def reserve(client: httpx.Client, name: str) -> None:
    body = {"reservation_id": name, "worker_id": 1, **PROMPT}
    assert client.post("http://s/reservations", json=body).status_code == 201
