"""How a process goes: announced, for a while, and not before those who need it are done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from select_service.edge.leave_command import is_service, serves
from tests.live.ports import HOST
from tests.live.replicas import Replica
from tests.live.server import Server
from tests.select_service.edge.serving import PROMPT, worker
from tests.wait import PATIENCE_S, eventually

BOOKED = {**PROMPT, "reservation_id": "r"}


def test_all_is_served_until_the_end(tmp_path: Path) -> None:
    args = ("--host", HOST, "--leave-grace-s", "60", "--log-format", "json")
    with Server(tmp_path / "log", args=args) as server:
        assert server.request("POST", "/workers", worker()).status == 201
        assert server.request("POST", "/select_and_reserve", BOOKED).status == 200
        url = f"http://{HOST}:{server.port}"
        with httpx.Client(base_url=url) as before:
            assert "connection" not in before.get("/ready").headers
            assert server.process is not None
            for _ in range(2):
                server.process.send_signal(signal.SIGTERM)
            eventually(lambda: server.request("GET", "/ready").status, 503)
            ready = server.request("GET", "/ready")
            assert ready.json["waiting_for"] == ["leaving"]  # type: ignore[index]
            assert server.request("GET", "/health").status == 200

            answer = before.post("/select", json=PROMPT)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        text = server.request("GET", "/metrics").raw.decode()
        assert 'select_service_waiting_for{name="leaving"} 1.0' in text
        answer = httpx.post(f"{url}/reservations/r/prefill_complete")
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        answer = httpx.request("HEAD", f"{url}/health")  # goes uvicorn's way
        assert answer.headers["connection"] == "close"
        assert server.process.poll() is None
        assert server.request("DELETE", "/reservations/r").status == 200
        assert server.process.wait(PATIENCE_S) == 0
        assert '"event":"left"' in server.log_tail().replace(": ", ":")


def test_an_interrupt_waits_for_nobody(tmp_path: Path) -> None:
    args = ("--host", HOST, "--leave-notice-s", "60", "--leave-grace-s", "60")
    with Server(tmp_path / "log", args=args) as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.request("GET", "/ready").json["waiting_for"][-1], "leaving")  # type: ignore[index]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 0


def test_bookings_move_to_those_who_stay(tmp_path: Path) -> None:
    slow = ("--host", HOST, "--replica-timeout-s", "3600", "--replica-heartbeat-s", "0.2")
    staying = Replica(tmp_path / "stays", args=slow)
    with staying, Replica(tmp_path / "goes", args=(*slow, "--leave-grace-s", "0.2")) as going:
        for one, other in ((staying, going), (going, staying)):
            one.add_worker(1)
            one.listen_to(other.replica_endpoint)
        eventually(lambda: staying.metric("replica_publishers", state="synced"), 1.0)
        going.reserve("r", 1, [1, 2])
        eventually(lambda: staying.load(1)[2], 1)
        assert going.process is not None
        going.process.send_signal(signal.SIGTERM)
        assert going.process.wait(PATIENCE_S) == 0
        eventually(lambda: staying.metric("replica_publishers", state="gone"), 1.0)
        staying.ask("POST", "/reservations/r/prefill_complete")
        assert staying.load(1) == (0, 2, 1)
        staying.ask("DELETE", "/reservations/r")
        assert staying.load(1) == (0, 0, 0)


def test_a_hook_has_it_leave_before_it_must(tmp_path: Path) -> None:
    args = ("--host", HOST, "--leave-notice-s", "0.1", "--leave-grace-s", "60")
    with Server(tmp_path / "log", args=args) as server:
        assert server.process is not None
        assert server.request("POST", "/workers", worker()).status == 201
        said = leave("--pid", str(server.process.pid), "--wait-s", "0.1")
        assert (said.returncode, said.stderr) == (0, "")
        eventually(lambda: server.request("GET", "/ready").json["waiting_for"], ["leaving"])  # type: ignore[index]
        assert server.request("POST", "/select", PROMPT).status == 200, "it serves on"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        said = leave("--pid", str(server.process.pid))
        assert said.returncode == 1
        assert f"process {server.process.pid} is no select-service" in said.stderr


def test_nobody_else_is_signalled() -> None:
    """For who has no handler that signal is the end; itself is no service either."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        said = leave("--pid", str(other.pid))
        assert (said.returncode, other.poll()) == (1, None)
        assert "is no select-service" in said.stderr
        other.communicate(b"\n")
        assert other.returncode == 0
    assert not is_service(os.getpid())


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("/opt/bin/select-service --port 1", True),
        ("/opt/bin/python3.11 /opt/bin/select-service", True),
        ("python -u -m select_service --port 1", True),
        ("python -m select_service demo --port 1", False),
        ("/opt/bin/python /opt/bin/select-service doctor", False),
        ("python -m select_service leave --pid 7", False),
        ("less select_service", False),
        ("sleep 9", False),
        ("", False),
    ],
)
def test_who_serves_is_told_by_how_it_was_started(words: str, *, is_one: bool) -> None:
    assert serves([word.encode() for word in words.split()]) == is_one


def leave(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "select_service", "leave", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
