"""A process that traces to a collector that is not there, or there: it serves, and it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.collector import collecting
from tests.live.server import OURS_EXTRA, Server

pytestmark = pytest.mark.e2e

FAST = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_SCHEDULE_DELAY": "10"}


def test_a_collector_that_is_not_there(tmp_path: Path) -> None:
    env = FAST | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with Server(tmp_path / "log", args=OURS_EXTRA, env=env) as server:
        for _ in range(20):
            assert server.request("GET", "/workers").status == 200
        assert server.stop() == 0  # within the ten seconds that it gets, or it would be -9
    assert "stopped" in server.log_tail()


def test_the_last_spans_are_exported_before_the_end(tmp_path: Path) -> None:
    with collecting() as collector:
        env = FAST | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "600000",
            "OTEL_SERVICE_NAME": "ours",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        with Server(tmp_path / "log", args=OURS_EXTRA, env=env) as server:
            assert server.request("GET", "/workers").status == 200
            assert server.stop() == 0
        (span,) = collector.spans
    assert span.name == "GET /workers"
    assert span.of["service.name"] == "ours"
    assert span.of["deployment.environment.name"] == "test"


def test_switched_off_it_is_off(tmp_path: Path) -> None:
    env = FAST | {"OTEL_SDK_DISABLED": "true"}
    with Server(tmp_path / "log", args=OURS_EXTRA, env=env) as server:
        assert b"select_service_tracing 0.0" in server.request("GET", "/metrics").raw
