"""A scale-down with real processes: two selectors, a planner that is killed, an API server."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typing_extensions import override

from tests.live.ports import HOST, free_port
from tests.live.replicas import Replica, ours
from tests.live.server import Server
from tests.select_service.planner.edge.fakes import FakeKube
from tests.select_service.planner.golden import PROFILE
from tests.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

COUNT = 4
DECODE = "/apis/apps/v1/namespaces/inference/deployments/decode"


@contextlib.contextmanager
def api_server() -> Iterator[tuple[FakeKube, str]]:
    """The fake, over HTTP."""
    fake, one_by_one = FakeKube(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            url, headers = f"http://{HOST}{self.path}", dict(self.headers)
            request = httpx.Request(self.command, url, headers=headers, content=content)
            with one_by_one:
                answer = fake.answer(request)
            self.send_response(answer.status_code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_PATCH = do_POST = do_PUT = answer  # noqa: N815 - names of the library

        @override
        def log_message(self, format: str, *args: object) -> None:
            """It is quiet."""

    server = ThreadingHTTPServer((HOST, free_port()), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield fake, f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def selectors(folder: Path) -> Iterator[tuple[Replica, Replica]]:
    """Two that are each other's replicas and know the same workers."""
    first, second = free_port(), free_port()
    with (
        ours(folder, "a", replica_port=first, peers=[f"tcp://{HOST}:{second}"]) as a,
        ours(folder, "b", replica_port=second, peers=[f"tcp://{HOST}:{first}"]) as b,
    ):
        for one in (a, b):
            for worker_id in range(1, 1 + COUNT):
                record = {
                    "worker_id": worker_id,
                    "model_name": "m",
                    "role": "decode",
                    "endpoint": f"http://10.0.0.{worker_id}:8000",
                    "block_size": 16,
                    "kv_events_endpoint": f"tcp://{HOST}:9",
                }
                one.ask("POST", "/workers", record, ok=(201,))
            eventually(lambda: one.metric("replica_peers", state="connected"), 1.0)
        yield a, b


def planner(folder: Path, api: str, urls: list[str]) -> Server:
    """One that looks ten times a second and finds more engines than it needs."""
    pools = [
        {"role": role, "resource": f"deployments/{role}", "stabilisation_s": 0.5, "step_down": 2}
        for role in ("prefill", "decode")
    ]
    model = {"model_name": "m", "profile_results_dir": str(PROFILE), "pools": pools}
    targets = folder / "targets.json"  # which is YAML, too
    targets.write_text(json.dumps({"models": [model]}))
    args = ["--targets", targets, "--connector", "kubernetes", "--kubernetes-api", api]
    args += ["--namespace", "inference", "--metrics-source", "selector", "--drain"]
    args += ["--load-interval", "0.1", "--adjustment-interval", "1", "--lease", "machine"]
    args += [part for url in urls for part in ("--selector", url)]
    return Server(
        folder / "planner.log",
        (sys.executable, "-m", "select_service.planner", "run"),
        [str(one) for one in args],
        {"XDG_RUNTIME_DIR": str(folder)},
    )


def test_a_planner_killed_amid_a_drain_is_followed_by_one_that_cuts_nobody_off(
    tmp_path: Path,
) -> None:
    with api_server() as (fake, api), selectors(tmp_path) as (a, b):
        fake.deployment("prefill", 1, 1)
        fake.deployment("decode", COUNT, COUNT)
        busy = set(range(1, 1 + COUNT))
        for worker_id in busy:
            fake.pod(f"decode-{worker_id}", "decode", f"10.0.0.{worker_id}")
            b.reserve(f"r{worker_id}", worker_id, [worker_id], model_name="m")
        gone: list[tuple[int, bool]] = []

        def control(path: str) -> None:
            for ip in fake.control("decode") if path == DECODE else ():
                worker_id = int(ip.rpartition(".")[2])
                gone.append((worker_id, worker_id in busy))
                for one in (a, b):
                    one.ask("DELETE", f"/workers/{worker_id}")

        def draining(one: Replica) -> set[int]:
            records: Any = one.ask("GET", "/workers")
            return {row["worker_id"] for row in records if row["lifecycle"] == "draining"}

        def end(worker_id: int) -> None:
            busy.remove(worker_id)
            b.ask("DELETE", f"/reservations/r{worker_id}")

        fake.patched = control
        urls = [f"http://{HOST}:{one.port}" for one in (a, b)]
        with planner(tmp_path, api, urls) as first:
            eventually(lambda: len(draining(a) & draining(b)), 2)
            assert first.process is not None
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        before = draining(a)
        assert not gone
        with planner(tmp_path, api, urls) as second:

            def leaving() -> bool:
                page = second.request("GET", "/metrics").raw.decode()
                return (
                    'workers_leaving{model_name="m",role="decode",tenant_id="default"} 2.0' in page
                )

            eventually(leaving, True)
            assert draining(a) == draining(b) == before, "those that the first one had chosen"
            one, other = sorted(before)
            end(other)
            eventually(lambda: gone, [(other, False)])
            a.ask("DELETE", f"/workers/{one}/drain")  # by hand
            eventually(lambda: draining(a) == draining(b) and len(draining(a)), 2)
            assert one in draining(a)
            for worker_id in sorted(draining(a)):
                end(worker_id)
            eventually(lambda: fake.objects[DECODE]["spec"]["replicas"], 1)
            eventually(lambda: len(gone), COUNT - 1)
            assert not any(was_busy for _, was_busy in gone)
            ends = second.request("GET", "/metrics").raw.decode()
            assert 'select_planner_leavers_total{end="late"} 0.0' in ends
