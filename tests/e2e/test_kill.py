"""kill -9 under load: what was acknowledged is there after the restart, and nothing else is sure.

Clients book, report and free against a real process with --state-dir, which is killed at a random
moment and started again. What a client has an answer for is certain; the call that was under way
when the process died may have happened or not, and nothing else may.
`SELECT_SERVICE_KILLS` sets the number of kills, `SELECT_SERVICE_KILL_SEED` the random moments.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.effort import share_of
from tests.live.ports import HOST
from tests.live.server import OURS, OURS_EXTRA, Server
from tests.wait import PATIENCE_S, block_until

CLIENTS = 6
WORKERS = 3
PROMPT_TOKENS = 64
LIVE_PER_CLIENT_MAX = 12
NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}

pytestmark = pytest.mark.e2e


@dataclass
class Known:
    """What its client knows of one reservation."""

    body: dict[str, Any]
    path: str
    answer: dict[str, Any]
    prefill_done: bool = False
    outputs: int = 0


@dataclass
class Client:
    """One client with its own ids, one call at a time; a life of it ends with the process."""

    number: int
    rng: random.Random
    live: dict[str, Known] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)  # under way when the process died
    acknowledged: int = 0
    booked: int = 0

    def run(self, port: int) -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
        try:
            while True:
                self._step(connection)
        except (OSError, http.client.HTTPException):
            pass  # killed
        finally:
            connection.close()

    def _step(self, connection: http.client.HTTPConnection) -> None:
        if not self.live or (len(self.live) < LIVE_PER_CLIENT_MAX and self.rng.random() < 0.4):
            self._book(connection)
            return
        name = self.rng.choice(list(self.live))
        known = self.live[name]
        self.doubtful.add(name)
        match self.rng.randrange(4):
            case 0:
                assert call(connection, "DELETE", f"/reservations/{name}")[0] == 200
                del self.live[name]
                self.freed.append(name)
            case 1:
                path = f"/reservations/{name}/prefill_complete"
                assert call(connection, "POST", path)[0] == 200
                known.prefill_done = True
            case _:
                path = f"/reservations/{name}/output_block"
                assert call(connection, "POST", path, {})[0] == 200
                known.outputs += 1
        self._acknowledged(name)

    def _book(self, connection: http.client.HTTPConnection) -> None:
        self.booked += 1
        name = f"c{self.number}-{self.booked}"
        # a prompt of its own: then blocks are the sum of what everybody has
        start = (self.number * 1_000_000 + self.booked) * PROMPT_TOKENS
        body: dict[str, Any] = {
            "reservation_id": name,
            "token_ids": [token % (1 << 31) for token in range(start, start + PROMPT_TOKENS)],
        }
        path = "/select_and_reserve"
        if self.rng.random() < 0.5:
            path, body["worker_id"] = "/reservations", self.rng.randint(1, WORKERS)
        self.doubtful.add(name)
        status, answer = call(connection, "POST", path, body)
        assert status in (200, 201), answer
        self.live[name] = Known(body, path, answer)
        self._acknowledged(name)

    def _acknowledged(self, name: str) -> None:
        self.doubtful.discard(name)
        self.acknowledged += 1


def call(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    content = None if body is None else json.dumps(body)
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path, content, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def start(directory: Path, log: Path) -> Server:
    args = (*OURS_EXTRA, "--state-dir", str(directory), "--reservation-ttl-s", "0")
    return Server(log, OURS, args, NO_EVENTS)


def kill_under_load(
    server: Server, clients: list[Client], moment_s: float, *, after: int = 0
) -> None:
    """Kill it at some moment, once so many calls are answered."""
    threads = [threading.Thread(target=client.run, args=(server.port,)) for client in clients]
    for thread in threads:
        thread.start()
    block_until(lambda: sum(client.acknowledged for client in clients) >= after)
    time.sleep(moment_s)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def verify(server: Server, clients: list[Client]) -> None:
    """Compare the restarted process with what clients know, then settle what is in doubt."""
    state: Any = server.request("GET", "/ready").json
    assert state["state"]["damage"] == []
    assert state["state"]["dropped"]["reservation"] == 0
    connection = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE_S)
    try:
        for client in clients:
            for name in sorted(client.doubtful):  # may be there or not: end it, whatever it was
                assert call(connection, "DELETE", f"/reservations/{name}")[0] in (200, 404)
                if client.live.pop(name, None) is not None:
                    client.freed.append(name)
            client.doubtful.clear()
        loads(connection, clients)
        for client in clients:
            for known in client.live.values():
                status, again = call(connection, "POST", known.path, known.body)
                assert (status in (200, 201), again) == (True, known.answer), "the same answer"
            for name in client.freed[-20:]:
                assert call(connection, "DELETE", f"/reservations/{name}")[0] == 200
        loads(connection, clients)  # nothing was booked by asking again
    finally:
        connection.close()


def loads(connection: http.client.HTTPConnection, clients: list[Client]) -> None:
    """The load of every worker is the sum over what is known to be live: no more and no less."""
    wanted = {number: [0, 0, 0] for number in range(1, WORKERS + 1)}
    for client in clients:
        for known in client.live.values():
            row = wanted[known.answer["worker_id"]]
            row[0] += 0 if known.prefill_done else PROMPT_TOKENS
            row[1] += PROMPT_TOKENS // 16 + known.outputs
            row[2] += 1
    _, scopes = call(connection, "GET", "/loads")
    found = {
        row["worker_id"]: [
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
            row["active_requests"],
        ]
        for row in scopes[0]["loads"]
    }
    assert found == wanted


def survive(tmp_path: Path, kills: int) -> int:
    seed = int(os.environ.get("SELECT_SERVICE_KILL_SEED", random.randrange(1 << 32)))
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    rng = random.Random(seed)
    clients = [Client(number, random.Random(rng.random())) for number in range(CLIENTS)]
    directory, log = tmp_path / "state", tmp_path / "log"
    with start(directory, log) as server:
        for number in range(1, WORKERS + 1):
            spec = {"worker_id": number, "endpoint": f"http://w{number}", "block_size": 16}
            assert server.request("POST", "/workers", spec).status == 201
        kill_under_load(server, clients, 0.1, after=30)
    for number in range(1, kills):
        with start(directory, log) as server:
            verify(server, clients)
            answered = sum(client.acknowledged for client in clients)
            after = answered + 50 if number % 2 else 0  # every other one whenever it happens
            kill_under_load(server, clients, rng.expovariate(1 / 0.15), after=after)
    with start(directory, log) as server:
        verify(server, clients)
    return sum(client.acknowledged for client in clients)


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    assert survive(tmp_path, 2) >= 30


def test_relaxed_loses_the_end_and_nothing_before_it(tmp_path: Path) -> None:
    """What was acknowledged is there up to some moment, and from there on it is not."""
    args = (
        *(*OURS_EXTRA, "--reservation-ttl-s", "0", "--state-dir", str(tmp_path / "state")),
        *("--durability", "relaxed", "--durability-window-s", "0.2"),
    )
    acknowledged: list[str] = []

    def book_on(port: int) -> None:
        with (
            contextlib.closing(
                http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
            ) as connection,
            contextlib.suppress(OSError, http.client.HTTPException),  # killed
        ):
            while True:
                name = f"r{len(acknowledged)}"
                body = {"reservation_id": name, "worker_id": 1, "token_ids": [1] * 16}
                assert call(connection, "POST", "/reservations", body)[0] == 201
                acknowledged.append(name)

    with Server(tmp_path / "log", args=args, env=NO_EVENTS) as server:
        register(server)
        client = threading.Thread(target=book_on, args=(server.port,))
        client.start()
        block_until(lambda: server.fleet_load()[0] >= 300 and committed(server))
        assert server.process is not None
        server.process.kill()
        client.join(PATIENCE_S)
        assert not client.is_alive()
    with Server(tmp_path / "log", args=args, env=NO_EVENTS) as server:
        end = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE_S)
        with contextlib.closing(end):
            kept = [call(end, "DELETE", f"/reservations/{one}")[0] for one in acknowledged]
    assert kept == [200] * kept.count(200) + [404] * kept.count(404)
    assert kept[0] == 200, "what was written before the kill"


def committed(server: Server) -> bool:
    """Whether anything has been written since it was booked."""
    booked = server.fleet_load()[0]  # first: more are booked between the two answers
    state: Any = server.request("GET", "/ready").json
    return int(state["state"]["pending"]) < booked


def test_what_an_operator_set_survives_a_kill(tmp_path: Path) -> None:
    args = (
        *OURS_EXTRA,
        *("--state-dir", str(tmp_path / "state")),
        *("--admission-control", "token-capacity"),
    )
    policy = {"policy": "tier-shed", "config": {"threshold": 7}}
    threshold = {"model": "default", "active_prefill_tokens_threshold": 10}
    with Server(tmp_path / "log", args=args, env=NO_EVENTS) as server:
        register(server)
        assert server.request("PUT", "/admission", policy).status == 200
        assert server.request("POST", "/busy_threshold", threshold).status == 200
        assert server.process is not None
        server.process.kill()
    with Server(tmp_path / "log", args=args, env=NO_EVENTS) as server:
        status: Any = server.request("GET", "/admission").json
        assert (status["policy"], status["config"]) == ("tier-shed", {"threshold": 7})
        assert status["thresholds"][0]["active_prefill_tokens_threshold"] == 10
        assert book(server, "a") == 201
        refused: Any = server.request("POST", "/select", {"token_ids": [1] * 16})
        assert (refused.status, refused.json["reason"]) == (503, "all-workers-busy")


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_nothing_acknowledged_is_lost_in_many_lives(tmp_path: Path) -> None:
    kills = int(os.environ.get("SELECT_SERVICE_KILLS", max(20, share_of(60))))
    assert survive(tmp_path, kills) > 20 * kills


def traced(*, of: str) -> tuple[str, ...]:
    """Strace with these arguments; skips where it cannot be used."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    # -I2: it ends when it is asked to, and takes the process that it has started along
    command = ("strace", "-I2", "-f", "-y", "-e", f"trace={of}")
    probe = subprocess.run([*command, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.decode().strip()[-200:]}")
    return command


def register(server: Server) -> None:
    spec = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
    assert server.request("POST", "/workers", spec).status == 201


def book(server: Server, name: str) -> int:
    body = {"reservation_id": name, "worker_id": 1, "token_ids": [1] * 16}
    return server.request("POST", "/reservations", body).status


def in_order(trace: str, names: list[str]) -> list[str]:
    """What happened to each name: it is in the log, the log is on disk, the client is answered.

    A sync counts when it has come back, and a sync that began before the log was written does not.
    """
    said: list[str] = []
    written: set[str] = set()
    syncing: dict[str, set[str]] = {}  # by thread: what was written when its sync began
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if re.match(r"p?write(64)?\(\d+<[^>]*state\.db-wal>", call):
            written.update(name for name in names if name in call)
        elif re.match(r"f(data)?sync\(\d+<[^>]*state\.db-wal>", call):
            syncing[thread] = set(written)
        if thread in syncing and re.search(r"\) += 0$", call) and "sync" in call:
            said += (f"synced {name}" for name in sorted(syncing.pop(thread)))
        if "HTTP/1.1 201" in call:
            said += (f"answered {name}" for name in names if name in call)
    return said


def test_nothing_is_acknowledged_before_its_sync_has_come_back(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    calls = "fsync,fdatasync,pwrite64,sendto,sendmsg,write,writev"
    command = (*traced(of=calls), "-s", "8192", "-o", str(trace), *OURS)
    args = (*OURS_EXTRA, "--state-dir", str(tmp_path / "state"))
    names = [f"name-{number}-of-five" for number in range(5)]
    with Server(tmp_path / "log", command, args, NO_EVENTS) as server:
        register(server)
        for name in names:
            assert book(server, name) == 201
    said = in_order(trace.read_text("utf-8", "replace"), names)
    for name in names:
        assert f"synced {name}" in said, "never on disk"
        assert said.index(f"synced {name}") < said.index(f"answered {name}"), "answered too soon"


def test_what_the_disk_does_not_sync_is_refused(tmp_path: Path) -> None:
    """A disk whose syncs begin to fail, and later succeed again."""
    injecting = (*traced(of="fsync,fdatasync"), "-e", "inject=fsync,fdatasync:error=EIO", "-p")
    args = (*OURS_EXTRA, "--state-dir", str(tmp_path / "state"))
    with Server(tmp_path / "log", args=args, env=NO_EVENTS) as server:
        register(server)
        assert book(server, "before") == 201
        assert server.process is not None
        trouble = tmp_path / "trouble"
        with trouble.open("wb") as log:
            strace = subprocess.Popen([*injecting, str(server.process.pid)], stderr=log)
        try:

            def is_attached() -> bool:
                if strace.poll() is not None:
                    pytest.skip(f"strace may not attach: {trouble.read_text()[-200:]}")
                return b"attached" in trouble.read_bytes()

            block_until(is_attached)
            assert book(server, "during") == 503
            assert book(server, "during") == 503, "and not the answer of the first"
            assert carried(server) == 1, "what was refused carries nothing"
        finally:
            strace.terminate()
            strace.wait()
        block_until(lambda: book(server, "after") == 201)  # it tries again by itself
        server.process.kill()
    with Server(tmp_path / "log", args=args, env=NO_EVENTS) as server:
        assert carried(server) == 2
        for name in ("before", "after"):
            assert book(server, name) == 201, "a repeat, with the first answer"
        assert carried(server) == 2


def carried(server: Server) -> int:
    loads: Any = server.request("GET", "/loads").json
    return int(loads[0]["loads"][0]["active_requests"])


def test_who_sends_on_while_the_disk_works_gets_answers_in_order(tmp_path: Path) -> None:
    """A booking, its free, and a question in one packet: the lane's answers and uvicorn's mix."""
    book = json.dumps({"reservation_id": "r", "worker_id": 1, "token_ids": [1] * 16})
    requests = (
        f"POST /reservations HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(book)}\r\n\r\n{book}"
        "DELETE /reservations/r HTTP/1.1\r\nHost: h\r\n\r\n"
        "GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
        "DELETE /reservations/never HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    )
    with start(tmp_path / "state", tmp_path / "log") as server:
        spec = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
        assert server.request("POST", "/workers", spec).status == 201
        with socket.create_connection((HOST, server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(requests.encode())
            received = b""
            while piece := connection.recv(1 << 16):
                received += piece
    statuses = re.findall(rb"HTTP/1.1 (\d+)", received)
    assert statuses == [b"201", b"200", b"200", b"404"]
