"""The process: how it starts, what it refuses to start with, how it ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from select_service.edge import app
from select_service.edge.app import create_driver
from select_service.settings import PolicyFile, RouterSettings, Settings
from select_service.types import RouterConfig
from tests.live.http import exchange
from tests.live.ports import HOST, free_port
from tests.live.server import OURS, Server
from tests.select_service.edge.serving import PROMPT, add_worker, worker
from tests.wait import PATIENCE_S

pytestmark = pytest.mark.e2e

BUSY = {"reservation_id": "b", "worker_id": 1, "sequence_hashes": [9], "isl_tokens": 100}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "log", args=("--host", HOST, "--log-format", "json")) as running:
        yield running


def _run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "select_service", "--host", HOST, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def _end(server: Server, number: signal.Signals) -> int:
    assert server.process is not None
    server.process.send_signal(number)
    return server.process.wait(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(server: Server, number: signal.Signals) -> None:
    idle = socket.create_connection((HOST, server.port))
    half = socket.create_connection((HOST, server.port))
    half.sendall(b"POST /select HTTP/1.1\r\n")
    with idle, half:
        assert _end(server, number) == 0
    events = [json.loads(line)["event"] for line in server.log_tail().splitlines()]
    assert events == ["listening", "stopped"]


def test_it_ends_while_requests_wait(server: Server) -> None:
    server.request("POST", "/workers", worker(max_num_batched_tokens=1))
    assert server.request("POST", "/reservations", BUSY).status == 201
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(exchange(server.port, "POST", "/select", PROMPT))
    )
    waiting.start()
    while b'"pending_count":0' in server.request("GET", "/loads").raw:
        pass
    assert _end(server, signal.SIGTERM) == 0
    waiting.join(PATIENCE_S)
    assert answers[0].status == 503
    assert b'"code":"shutting_down"' in answers[0].raw


def test_a_client_that_hangs_delays_the_end_no_longer_than_allowed(tmp_path: Path) -> None:
    args = ("--host", HOST, "--shutdown-timeout-s", "1")
    with Server(tmp_path / "log", args=args) as server:
        head = b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
        with socket.create_connection((HOST, server.port)) as half:
            half.sendall(head + b"content-length: 10\r\n\r\n{")
            server.request("GET", "/health")
            assert _end(server, signal.SIGTERM) == 0


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = _run("--port", str(port))
    assert ended.returncode == 1
    assert f"cannot listen on {HOST} port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_replica_port() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = _run("--port", str(free_port()), "--replica-sync-port", str(port))
    assert ended.returncode == 1
    assert "cannot start" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_of_somebody_else() -> None:
    ended = _run("--host", "192.0.2.1", "--port", "0")
    assert ended.returncode == 1
    assert "cannot listen on 192.0.2.1" in ended.stderr


def test_open_files_are_not_bounded_by_the_soft_limit(tmp_path: Path) -> None:
    command = ("/bin/sh", "-c", 'ulimit -S -n 200; exec "$@"', "sh", *OURS)
    with Server(tmp_path / "log", command=command) as server:
        text = server.request("GET", "/metrics").raw.decode()
        found = re.search(r"^process_max_fds (.*)$", text, re.MULTILINE)
        assert found is not None
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert hard == resource.RLIM_INFINITY or float(found[1]) == hard
        assert float(found[1]) > 200
        assert server.log_tail().count("open files") == 1


def test_an_environment_nobody_can_read(tmp_path: Path) -> None:
    env = {"DYN_ROUTER_QUEUE_THRESHOLD": "none", "DYN_ROUTER_POLICY_CONFIG": "/nowhere.yaml"}
    with Server(tmp_path / "log", env=env) as server:
        record = json.loads(server.request("POST", "/workers", worker()).raw)
        assert record["not_schedulable_reasons"] == [
            "reconciliation failed: failed to read router policy config /nowhere.yaml: "
            "No such file or directory (os error 2)"
        ]
        assert "DYN_ROUTER_QUEUE_THRESHOLD='none' is not a float" in server.log_tail()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bogus: 1", "failed to parse router policy config p.yaml: "),
        ("default_policy_family: x", "invalid router policy config: "),
    ],
)
def test_a_policy_file_nobody_can_use(text: str, why: str) -> None:
    router = RouterSettings(RouterConfig(), PolicyFile("p.yaml", text, None), ())
    service = create_driver(Settings(router=router))
    add_worker(service)
    (record,) = service.workers()
    assert record.not_schedulable_reasons
    assert record.not_schedulable_reasons[0].startswith(f"reconciliation failed: {why}")


def test_a_policy_file_in_use() -> None:
    text = (
        "default_policy_family: f\n"
        "uncached_isl_buckets: [{min_tokens: 0, bucket: all}]\n"
        "policy_classes: [{name: n, policy_family: f, cache_bucket: all,"
        " prefill_busy_threshold: 9000000000000000000}]\n"
    )
    router = RouterSettings(RouterConfig(), PolicyFile("p.yaml", text, None), ())
    assert create_driver(Settings(router=router)) is not None


def test_it_runs_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert app.loop_factory() is None
