"""The document at /openapi.json against the service, over real HTTP, by schemathesis.

No 5xx but an honest 503, no status, header, content type or shape of answer that the document does
not have, nothing accepted that it forbids. `FUZZ_SECONDS` runs it for as long as that instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz.budget import SECONDS, SEED
from tests.fuzz.known import LEASE, RESERVATION, WORKERS
from tests.live.http import exchange
from tests.live.server import OURS_EXTRA, Server

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
COMMAND: Final = "from schemathesis.cli import schemathesis; schemathesis()"
EXAMPLES: Final = 10  # for each operation and phase; half a minute altogether
SHOWN: Final = 20_000
FLAGS: Final = (
    *OURS_EXTRA,
    *("--queue-deadline-s", "0.05", "--reservation-ttl-s", "0"),
    *("--admission-control", "token-capacity"),
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    """A service with what `openapi_hooks.py` names."""
    pytest.importorskip("schemathesis", reason="not installed: pip install '.[fuzz]'")
    with Server(tmp_path / "log", args=FLAGS, env={"DYN_USE_KV_EVENTS": "false"}) as server:
        for worker_id in WORKERS:
            record = {"worker_id": worker_id, "endpoint": "http://w", "block_size": 16}
            answer = exchange(server.port, "POST", "/workers", record)
            assert b"not_schedulable_reasons" not in answer.raw
        lease = {"lease_id": LEASE, "owner": "o", "ttl_s": 3600}
        assert exchange(server.port, "POST", "/leases", lease).status == 201
        booking = {"reservation_id": RESERVATION, "worker_id": WORKERS[0], "token_ids": [1] * 40}
        assert exchange(server.port, "POST", "/reservations", booking).status == 201
        yield server


@pytest.mark.timeout(0)
def test_the_document_is_true(served: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    bounds = ("--max-examples", str(EXAMPLES))
    if SECONDS is not None:
        bounds = ("--max-time", str(int(SECONDS)))
    done = subprocess.run(
        [
            *(sys.executable, "-c", COMMAND, "--config-file", str(CONFIG)),
            *("run", f"http://127.0.0.1:{served.port}/openapi.json", "--no-color"),
            *("--seed", str(SEED), "--report", "json", "--report-json-path", str(report), *bounds),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-SHOWN:] + done.stderr + served.log_tail()
    told = json.loads(report.read_text("utf-8"))
    assert told["operations"]["tested"] == told["operations"]["total"]
    cases = told["test_cases"]["generated"]
    assert cases > 1000
    print(f"{cases} cases in {told['running_time']:.0f} s")
    answered = exchange(served.port, "GET", "/metrics").raw.decode()
    assert "select_service_http_crashes_total 0" in answered
    assert served.process is not None
    assert served.process.poll() is None
