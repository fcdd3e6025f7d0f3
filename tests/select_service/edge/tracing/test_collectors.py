"""Collectors that are no good, or that are not there, cost spans only."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from msgspec.structs import replace

from select_service.edge.app import create_driver
from tests.live.collector import Collector
from tests.select_service.edge.serving import PROMPT, SETTINGS, Wire, listening
from tests.select_service.edge.tracing.traced import ON, traced
from tests.wait import PATIENCE_S, until


def _refuse(request: Any) -> bool:
    request.send_error(503)
    return True


def _talk_nonsense(request: Any) -> bool:
    request.wfile.write(b"\xff\xfe nonsense\r\n\r\n")
    return True


def _say_nothing(_: Any) -> bool:
    time.sleep(2.0)  # longer than the exporter waits
    return True


@pytest.mark.parametrize("behave", [_refuse, _talk_nonsense, "away", "mute"])
async def test_a_bad_collector_costs_spans_only(
    collector: Collector, behave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    if behave == "away":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    elif behave == "mute":
        collector.behave = _say_nothing
    else:
        collector.behave = behave
    few = {"trace_queue_spans_max": 8, "trace_batch_spans_max": 4, "trace_shutdown_s": 0.2}
    async with traced(**few) as (wire, service):
        for _ in range(50):
            assert await wire.status("POST", "/select", PROMPT) == 200
        assert service.tracing is not None
        export = service.tracing.export
        await until(lambda: export.failed > 0)
        assert export.dropped > 0
        text = (await wire.exchange("GET", "/metrics"))[2].decode()
        assert 'trace_spans_total{outcome="exported"} 0.0' in text
        assert f'trace_spans_total{{outcome="dropped"}} {export.dropped}.0' in text
        assert "select_service_traced_requests_total 50.0" in text


async def test_an_answer_without_end_is_not_read(collector: Collector) -> None:
    """Nor kept in memory: 64 MB of it, had it been."""
    cut = threading.Event()

    def go_on(request: Any) -> bool:
        request.send_response(200)
        request.send_header("transfer-encoding", "chunked")
        request.end_headers()
        try:
            for _ in range(64):
                request.wfile.write(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        except OSError:
            cut.set()
        return True

    collector.behave = go_on
    async with traced() as (wire, service):
        assert await wire.status("POST", "/select", PROMPT) == 200
        assert service.tracing is not None
        export = service.tracing.export
        await until(lambda: export.exported > 0)
    assert cut.wait(PATIENCE_S)


async def test_without_the_extra_there_is_a_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    async with listening(**ON) as (port, service, _):
        assert service.tracing is None
        wire = await Wire.to(port)
        assert await wire.status("GET", "/health") == 200
    assert "pip install 'opentelemetry-sdk>=1.35'" in caplog.text


def test_variables_that_make_no_sense_cost_traces_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    create_driver(replace(SETTINGS, **ON))  # with traces or without: that is the exporter's choice
    assert "soon" in caplog.text
