"""A process without descriptors to spare: a newcomer is refused so, and it gets well by itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.patient import refusal
from tests.faults.vitals import vitals
from tests.live.http import JSON_TYPE
from tests.live.ports import HOST
from tests.live.replicas import Replica
from tests.live.server import OURS
from tests.select_service.edge.serving import PROMPT
from tests.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.e2e

DESCRIPTORS = 160
KEPT = 64
NONE = 5  # numbers below that are taken from the beginning


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Replica]:
    few = ("sh", "-c", f'ulimit -S -n {DESCRIPTORS}; ulimit -H -n {DESCRIPTORS}; exec "$@"', "few")
    with Replica(tmp_path / "log", command=(*few, *OURS)) as running:
        yield running


class Kept:
    """A client with one connection, that it has already."""

    def __init__(self, port: int) -> None:
        self._wire = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body."""
        content = None if body is None else json.dumps(body)
        self._wire.request(method, path, content, {"Content-Type": JSON_TYPE})
        response = self._wire.getresponse()
        return response.status, json.loads(response.read())

    def register(self, worker_id: int, ranks: int = 1) -> list[str]:
        """Register a worker whose engine nobody has started; why it cannot be scheduled."""
        record = {
            "worker_id": worker_id,
            "endpoint": "http://w",
            "block_size": 16,
            "max_num_batched_tokens": 1 << 20,
            "kv_events_endpoints": {str(rank): f"tcp://{HOST}:9" for rank in range(ranks)},
            "data_parallel_size": ranks,
        }
        _, answer = self.ask("POST", "/workers", record)
        reasons: list[str] = answer.get("not_schedulable_reasons", [])
        return reasons


@pytest.fixture
def client(server: Replica) -> Iterator[Kept]:
    kept = Kept(server.port)
    assert kept.ask("GET", "/health")[0] == 200
    yield kept
    kept._wire.close()


@contextlib.contextmanager
def crowd(server: Replica, count: int) -> Iterator[None]:
    """So many who connect, and say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((HOST, server.port))
        yield


def test_connections_leave_descriptors_to_others(server: Replica) -> None:
    """Those beyond are refused and counted; probes, engines and the files have what they need."""
    assert server.process is not None
    pid = server.process.pid
    server.add_worker(1)
    with crowd(server, 2 * DESCRIPTORS):
        eventually(lambda: server.metric("limit_hits_total", name="descriptors_kept") > 0, True)
        assert server.request("GET", "/health").status == 200
        answer = server.request("POST", "/select", PROMPT)
        assert refusal(answer) == (503, "too_many_connections")
        assert vitals(pid).fds <= DESCRIPTORS - KEPT // 2
    eventually(lambda: server.request("POST", "/select", PROMPT).status, 200)


def test_engines_leave_descriptors_to_others(server: Replica, client: Kept) -> None:
    """The worker too many says why it is none, and becomes one when others have gone."""
    taken = 1
    while not (reasons := client.register(taken)):
        taken += 1
        assert taken < DESCRIPTORS
    assert "Too many open files" in reasons[0]
    assert server.request("GET", "/health").status == 200, "who comes anew is let in"
    assert server.metric("limit_hits_total", name="descriptors_kept") > 0
    for worker_id in range(1, taken):
        assert client.ask("DELETE", f"/workers/{worker_id}")[0] == 200
    eventually(lambda: client.ask("GET", "/ready")[0], 200)


def test_a_source_that_found_no_descriptor_is_tried_again(server: Replica, client: Kept) -> None:
    """Somebody else had them all; nobody has to register the worker again."""
    assert server.process is not None
    pid = server.process.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (NONE, DESCRIPTORS))
    for worker_id in (1, 2, 3):
        assert "Too many open files" in client.register(worker_id)[0]
    assert client.ask("GET", "/ready")[0] == 503
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    eventually(lambda: client.ask("GET", "/ready")[1]["schedulable_workers"], 3)


def test_who_needs_many_keeps_nobody_waiting_who_needs_few(server: Replica, client: Kept) -> None:
    """The first in the line has sixteen ranks, and there is room for the others only."""
    assert server.process is not None
    pid = server.process.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (NONE, DESCRIPTORS))
    for worker_id, ranks in ((1, 16), (2, 1), (3, 1)):
        assert "Too many open files" in client.register(worker_id, ranks)[0]
    some = max(number + 1 for number in numbers(pid)) + KEPT // 2 + 24
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (some, DESCRIPTORS))
    eventually(lambda: client.ask("GET", "/ready")[1]["schedulable_workers"], 2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    eventually(lambda: client.ask("GET", "/ready")[1]["schedulable_workers"], 3)


def numbers(pid: int) -> list[int]:
    return [int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()]
