"""The listener: health, tokens, TLS, a process that starts and ends with it, and no gRPC at all."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import grpc
import pytest

from select_service.edge.app import serve
from select_service.edge.driver.driver import Driver
from select_service.edge.http.listening_sockets import CannotListenError
from select_service.edge.security.exposure import open_doors
from select_service.settings import Settings
from tests.live.ports import free_port
from tests.live.server import Server
from tests.select_service.edge.epp.gateway import (
    PROCESS,
    Gateway,
    body,
    endpoint_in,
    gateway,
    headers,
    placed,
    played,
    receive,
    requested,
    say,
)
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import HOST, worker
from tests.wait import PATIENCE_S, run, until

PROMPT = {"model": "m", "prompt": [1, 2, 3]}
SERVING, NOT_SERVING = 1, 2
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


@played()
async def test_health_tells_whether_requests_can_be_placed(at: Gateway) -> None:
    for service in ("", "readiness", SERVICE):
        assert await at.health(service) == NOT_SERVING
    assert await at.health("liveness") == SERVING
    at.add_worker()
    for service in ("", "readiness", SERVICE):
        assert await at.health(service) == SERVING
    at.driver.announce_leaving()
    assert (await at.health(SERVICE), await at.health("liveness")) == (NOT_SERVING, SERVING)
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await at.health("other")
    assert found.value.code() is grpc.StatusCode.NOT_FOUND


@played()
async def test_strange_calls_harm_nobody(at: Gateway) -> None:
    at.add_worker()
    check = at.channel.unary_unary("/grpc.health.v1.Health/Check")
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await check(b"\xff\xff")
    assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await at.channel.unary_unary("/a.B/C")(b"")
    assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED
    _, writer = await asyncio.open_connection(HOST, at.picker.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    stream, _ = await placed(at, PROMPT)
    stream.cancel()


@played()
async def test_a_bug_ends_its_stream_and_is_counted(
    at: Gateway, *, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    at.add_worker()
    with caplog.at_level(logging.CRITICAL, logger="grpc._cython.cygrpc"):
        with monkeypatch.context() as patched:
            patched.setattr(Driver, "select_and_reserve", fail)
            stream = await requested(at, PROMPT)
            assert await stream.code() is not grpc.StatusCode.OK
        await at.settled()
        assert at.traffic.crashes == 1
        stream, _ = await placed(at, PROMPT)
        stream.cancel()


async def test_a_token_is_asked_for_and_says_whose_requests_these_are(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    for name, scope, more in (
        ("gateway", "select", {}),
        ("reader", "read", {}),
        ("team", "select", {"tenants": ["acme"]}),
    ):
        tokens.add(name, scope, **more)
    async with gateway(**tokens.setting) as at:
        at.add_worker(1)
        at.add_worker(2, tenant_id="acme")
        for credentials, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer x"),), grpc.StatusCode.UNAUTHENTICATED),
            (tuple(tokens.header("reader").items()), grpc.StatusCode.PERMISSION_DENIED),
        ):
            stream = at.stream(*credentials)
            assert await stream.code() is code
        for name, endpoint in (("gateway", "10.0.0.1:8000"), ("team", "10.0.0.2:8000")):
            stream = await requested(at, PROMPT, *tokens.header(name).items())
            assert endpoint_in(await receive(stream)) == endpoint
            stream.cancel()


async def test_tls_is_that_of_the_service(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with gateway(**authority.serving("server"), epp_host="localhost") as at:
        at.add_worker()
        trusted = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{at.picker.port}", trusted) as channel:
            stream = channel.stream_stream(PROCESS)(timeout=PATIENCE_S)
            await say(stream, headers())
            await say(stream, body(PROMPT))
            assert endpoint_in(await receive(stream)) == "10.0.0.1:8000"
            stream.cancel()
            await until(lambda: not at.driver.awaited)


async def test_a_port_that_is_taken_is_told() -> None:
    async with gateway() as at:
        with pytest.raises(CannotListenError, match=f"port {at.picker.port} \\(--epp-port\\)"):
            async with gateway(epp_port=at.picker.port):
                pass


def test_without_grpc_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [one for one in sys.modules if one.startswith("select_service.edge.epp.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.setattr("select_service.edge.app._configure_logs", lambda _: None)
    with caplog.at_level(logging.ERROR):
        assert serve(Settings(host=HOST, port=0, epp_port=0)) == 1
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert "--epp-port" in line
    assert "pip install 'grpcio" in line


def test_an_open_port_is_warned_of() -> None:
    assert open_doors(Settings(host="127.0.0.1")) == {}
    assert open_doors(Settings(host="127.0.0.1", epp_port=1)) == {}
    found = open_doors(Settings(host="127.0.0.1", epp_port=1, epp_host="0.0.0.0"))
    assert found.keys() == {"tokens", "tls"}


@pytest.mark.e2e
def test_a_process_serves_gateways_and_ends(tmp_path: Path) -> None:
    """On uvloop, where that is installed; a stream that is open holds nothing up."""
    port = free_port()
    args = ("--host", HOST, "--epp-port", str(port), "--shutdown-timeout-s", "1")
    with Server(tmp_path / "log", args=args) as server:
        at = {"endpoint": "http://10.0.0.1:8000", "model_name": "m"}
        assert server.request("POST", "/workers", worker(1, **at)).status == 201

        async def use() -> None:
            async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
                stream = channel.stream_stream(PROCESS)(timeout=PATIENCE_S)
                await say(stream, headers())
                await say(stream, body(PROMPT))
                assert endpoint_in(await receive(stream)) == "10.0.0.1:8000"
                metrics = await asyncio.to_thread(server.request, "GET", "/metrics")
                assert b"select_service_epp_streams 1.0" in metrics.raw
                assert server.process is not None
                await asyncio.to_thread(server.process.terminate)
                assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0

        run(use())
        text = server.log_path.read_text("utf-8")
    listening = next(one for one in text.splitlines() if "listening" in one)
    assert f"epp_port={port}" in listening
