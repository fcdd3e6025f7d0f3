"""The doctor as an operator meets it: a real service, a real engine's socket, the real command."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.indexer.encoding import stored
from tests.live.engine import FakeEngine
from tests.live.ports import HOST, free_port
from tests.live.server import Server
from tests.wait import PATIENCE_S, block_until

pytestmark = pytest.mark.e2e


def examine(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "select_service", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def found(server: Server) -> list[dict[str, Any]]:
    answer = server.request("GET", "/ready?verbose=true")
    return msgspec.json.decode(answer.raw)["findings"]  # type: ignore[no-any-return]


def test_a_service_with_a_worker_whose_block_size_is_wrong(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server, FakeEngine(free_port()) as engine:
        url = f"http://{HOST}:{server.port}"
        worker = {"worker_id": 1, "endpoint": "http://w1", "block_size": 32}
        server.request("POST", "/workers", worker | {"kv_events_endpoint": engine.endpoint})
        engine.wait_for_subscribers()
        healthy = examine("--url", url)
        assert (healthy.returncode, healthy.stderr) == (0, "")
        assert "No problems found." in healthy.stdout
        for seq in range(4):
            event = stored([seq + 1], list(range(16 * seq, 16 * seq + 16)))
            engine.publish(seq, [time.time(), [event], None])
        block_until(lambda: found(server))
        ill = examine("--url", url)
        assert ill.returncode == 1
        assert "ERROR   block-size-mismatch  worker 1, rank 0" in ill.stdout
        assert "blocks of 16 tokens, its record of 32" in ill.stdout
        assert examine("--url", url, "--json").returncode == 1
    assert "doctor: its events announce blocks of 16 tokens" in (tmp_path / "log").read_text()
    gone = examine("--url", url)
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "Connection refused" in gone.stderr
