"""Who dies takes its load with it, and nobody else's: real processes, a real SIGKILL."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.clocked import CLOCKED, Clocks
from tests.live.server import OURS_EXTRA, Server
from tests.wait import eventually

RESERVATIONS = 1000
TTL_S = 600.0  # by the clock of the service, which we set: nobody is late
CLIENT = """
import http.client, json, sys

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))


def ask(path, body):
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status < 300, text


ask("/leases", {"lease_id": "l", "owner": "client", "ttl_s": float(sys.argv[3])})
for number in range(int(sys.argv[2])):
    prompt = {"block_hashes": [number], "sequence_hashes": [number], "isl_tokens": 20}
    ask("/select_and_reserve", {"reservation_id": f"r{number}", "lease_id": "l", **prompt})
print("booked", flush=True)
for _ in sys.stdin:
    ask("/leases/l/renew", {})
    print("renewed", flush=True)
"""


def register(server: Server) -> None:
    for worker_id in (1, 2):
        spec = {
            "worker_id": worker_id,
            "endpoint": f"http://w{worker_id}",
            "block_size": 16,
            "kv_events_endpoint": "tcp://127.0.0.1:9",
        }
        assert server.request("POST", "/workers", spec).status == 201


@pytest.mark.e2e
def test_a_killed_clients_load_is_gone_after_its_lease(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    args = (*OURS_EXTRA, "--log-level", "warning")
    with Server(tmp_path / "log", command=CLOCKED, args=args, env=clocks.env) as server:
        register(server)
        command = [sys.executable, "-c", CLIENT, str(server.port), str(RESERVATIONS), str(TTL_S)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, bufsize=1, **pipes) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            try:
                assert client.stdout.readline() == "booked\n"
                for _ in range(2):  # renewed for longer than it could live without
                    clocks.pass_time(0.7 * TTL_S)
                    client.stdin.write("renew\n")
                    assert client.stdout.readline() == "renewed\n"
                assert server.fleet_load() == (RESERVATIONS, RESERVATIONS * 20, RESERVATIONS)
            finally:
                client.send_signal(signal.SIGKILL)
        clocks.pass_time(TTL_S)
        eventually(server.fleet_load, (0, 0, 0))
        late = server.request("POST", "/leases/l/renew", {})
        assert late.status == 404
        assert late.json["code"] == "lease_expired"  # type: ignore[index]
        metrics = server.request("GET", "/metrics").raw.decode()
        assert f'reservation_events_total{{event="lease_ended"}} {RESERVATIONS}.0\n' in metrics


@pytest.mark.e2e
@pytest.mark.heavy
def test_a_lease_outlives_the_service_but_not_its_owner(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    args = (*OURS_EXTRA, "--log-level", "warning", "--state-dir", str(tmp_path / "state"))
    clocked: Any = {"command": CLOCKED, "args": args, "env": clocks.env}
    with Server(tmp_path / "first.log", **clocked) as server:
        register(server)
        for name, ttl_s in (("short", TTL_S), ("long", 3 * TTL_S)):
            lease = {"lease_id": name, "owner": "client", "ttl_s": ttl_s}
            assert server.request("POST", "/leases", lease).status == 201
            for number in range(20):
                body = {
                    "reservation_id": f"{name}-{number}",
                    "lease_id": name,
                    "worker_id": 1,
                    "sequence_hashes": [number],
                    "isl_tokens": 20,
                }
                assert server.request("POST", "/reservations", body).status == 201
        assert server.process is not None
        server.process.kill()
    with Server(tmp_path / "second.log", **clocked) as server:
        listed: Any = server.request("GET", "/leases").json
        assert {one["lease_id"]: one["reservations"] for one in listed["leases"]} == {
            "short": 20,
            "long": 20,
        }
        assert server.fleet_load()[0] == 40
        clocks.pass_time(TTL_S)
        eventually(lambda: server.fleet_load()[0], 20)
        assert server.request("DELETE", "/leases/long").status == 200
        assert server.fleet_load() == (0, 0, 0)
