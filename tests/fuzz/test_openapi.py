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
from typing import Any, Final

import pytest

from tests.fuzz.budget import SECONDS, SEED
from tests.fuzz.known import LEASE, RESERVATION, WORKERS
from tests.live.http import JSON_TYPE, Answer, exchange_raw
from tests.live.server import OURS_EXTRA, Server
from tests.select_service.edge.security.credentials_made import TokenFile

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
COMMAND: Final = "from schemathesis.cli import schemathesis; schemathesis()"
BOUNDS: Final = {
    "anybody": ["--max-examples", "4"],
    "a tenant": ["--max-examples", "12", "--phases", "fuzzing"],
}
"""Some 40 s: most of it is the phase `coverage`, every bound of every member. And ten."""

SHOWN: Final = 20_000
FLAGS: Final = (
    *OURS_EXTRA,
    *("--queue-deadline-s", "0.05", "--reservation-ttl-s", "0"),
    *("--admission-control", "token-capacity"),
)


class Service:
    """A service with what `openapi_hooks.py` names, and what it may be asked with."""

    def __init__(self, server: Server, admin: str | None, guest: str | None) -> None:
        self.server = server
        self.guest = _bearer(guest)
        self._admin = _bearer(admin)
        for worker_id in WORKERS:
            record = {"worker_id": worker_id, "endpoint": "http://w", "block_size": 16}
            assert b"not_schedulable_reasons" not in self.ask("POST", "/workers", record).raw
        lease = {"lease_id": LEASE, "owner": "o", "ttl_s": 3600}
        assert self.ask("POST", "/leases", lease).status == 201
        booking = {"reservation_id": RESERVATION, "worker_id": WORKERS[0], "token_ids": [1] * 40}
        assert self.ask("POST", "/reservations", booking).status == 201

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Ask as who may do everything."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": JSON_TYPE} | self._admin
        return exchange_raw(self.server.port, method, path, content, headers)


def _bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Start a service for somebody; it ends with the test."""
    pytest.importorskip("schemathesis", reason="not installed: pip install '.[fuzz]'")
    servers: list[Server] = []

    def start(who: str) -> Service:
        flags: tuple[str, ...] = FLAGS
        admin = guest = None
        if who == "a tenant":
            file = TokenFile(tmp_path / "tokens")
            admin = file.add("admin", "admin")
            guest = file.add("guest", "select", "lifecycle", "read", tenants=["default"])
            flags = (*flags, "--token-file", str(file.path))
        server = Server(tmp_path / "log", args=flags, env={"DYN_USE_KV_EVENTS": "false"})
        servers.append(server.__enter__())
        return Service(server, admin, guest)

    yield start
    for server in servers:
        server.stop()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("who", BOUNDS)
def test_the_document_is_true(who: str, serve: Any, tmp_path: Path) -> None:
    service: Service = serve(who)
    report = tmp_path / "report.json"
    bounds = BOUNDS[who]
    if SECONDS is not None:
        bounds = ["--max-time", str(int(SECONDS))]
    headers = [f"--header={name}:{value}" for name, value in service.guest.items()]
    done = subprocess.run(
        [
            *(sys.executable, "-c", COMMAND, "--config-file", str(CONFIG)),
            *("run", f"http://127.0.0.1:{service.server.port}/openapi.json", "--no-color"),
            *("--seed", str(SEED), "--report", "json", "--report-json-path", str(report)),
            *(*bounds, *headers),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    log = service.server.log_tail()
    assert done.returncode == 0, done.stdout[-SHOWN:] + done.stderr + log
    report_read = json.loads(report.read_text("utf-8"))
    assert report_read["operations"]["tested"] == report_read["operations"]["total"]
    cases = report_read["test_cases"]["generated"]
    assert cases > 300
    print(f"{who}: {cases} cases in {report_read['running_time']:.0f} s")
    answered = service.ask("GET", "/metrics").raw.decode()
    assert "select_service_http_crashes_total 0" in answered, log
    assert service.server.stop() == 0
