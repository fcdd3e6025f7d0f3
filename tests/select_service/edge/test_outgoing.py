"""The service's own clients: none takes a proxy from the environment unless that is set."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from select_service.edge.tracing.span_export import otlp_exporter
from select_service.kubernetes_api import KubernetesApi

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        self.rfile.read(length)
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - the base class's spelling

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """A proxy that the environment names, and a server."""
    proxy, server = Server(), Server()
    for name in VARIABLES:
        for spelt in (name, name.lower()):
            monkeypatch.setenv(spelt, "" if name == "NO_PROXY" else proxy.url)
    for one in (proxy, server):
        threading.Thread(target=one.serve_forever, daemon=True).start()
    yield proxy, server
    for one in (proxy, server):
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize("is_set", [False, True])
def test_the_collector_of_traces(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    proxy, server = servers
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/v1/traces")
    exporter = otlp_exporter(proxy_from_environment=is_set)
    assert exporter.export([]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert server.requests == ([] if is_set else ["/v1/traces"])
    assert proxy.requests == ([f"{server.url}/v1/traces"] if is_set else [])


def test_the_token_of_a_collector_goes_into_no_proxy_that_can_read_it(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = servers
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    exporter = otlp_exporter(proxy_from_environment=True)
    assert exporter.export([]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert (server.requests, proxy.requests) == (["/v1/traces"], [])


@pytest.mark.parametrize("is_set", [False, True])
async def test_the_kubernetes_api(servers: tuple[Server, Server], is_set: bool) -> None:
    """Its token goes into no proxy that can read it: without TLS the server is asked directly."""
    proxy, server = servers
    api = KubernetesApi(server.url, "/nonexistent", "n", proxy_from_environment=is_set)
    async with api.client(httpx.Timeout(5.0)) as client:
        await client.get("/api")
    assert (server.requests, proxy.requests) == (["/api"], [])
