"""Replicas of this service as real processes: they agree, heal, and never wait for each other."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from indexer.core.packing import unpack_i64
from tests.live.clocked import CLOCKED, Clocks
from tests.live.ports import HOST, free_port
from tests.live.replicas import Replica, agree, ours
from tests.live.server import OURS, OURS_EXTRA, Server
from tests.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def pair(
    folder: Path, *args: str, clocks: Clocks | None = None
) -> Iterator[tuple[Replica, Replica]]:
    """Two that listen to each other, with the same workers, under clocks that a test may set."""
    ports = free_port(), free_port()
    clocked: Any = {} if clocks is None else {"command": CLOCKED, "env": clocks.env}
    made = [
        ours(folder, name, *args, replica_port=own, peers=[f"tcp://{HOST}:{other}"], **clocked)
        for name, own, other in zip("ab", ports, reversed(ports), strict=True)
    ]
    with made[0] as a, made[1] as b:
        a.add_worker()
        b.add_worker()
        for one in (a, b):
            eventually(lambda: one.metric("replica_peers", state="connected"), 1.0)
        yield a, b


def test_a_reservation_and_all_that_becomes_of_it(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        for here, there, name in ((a, b, "x"), (b, a, "y")):
            here.reserve(name, 1, [1, 2, 3, 4])
            eventually(lambda: there.load(1), (64, 4, 1))
            here.ask("POST", f"/reservations/{name}/output_block", {})
            eventually(lambda: there.load(1), (64, 5, 1))
            there.ask("POST", f"/reservations/{name}/output_block", {})
            eventually(lambda: here.load(1), (64, 6, 1))
            there.ask("POST", f"/reservations/{name}/prefill_complete")
            eventually(lambda: here.load(1), (0, 6, 1))
            there.ask("DELETE", f"/reservations/{name}")
            eventually(lambda: here.load(1), (0, 0, 0))
        assert agree((a, b))["default", "default", 1, 0] == (0, 0, 0)


def posted(replica: Replica, path: str, body: dict[str, Any], kind: str) -> tuple[int, Any]:
    """One exchange in JSON or MessagePack."""
    packed = json.dumps(body).encode() if kind == "json" else msgspec.msgpack.encode(body)
    connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=PATIENCE_S)
    try:
        head = {"Content-Type": f"application/{kind}", "Accept": f"application/{kind}"}
        connection.request("POST", path, packed, head)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if kind == "json":
        return answer.status, json.loads(content)
    decoded = msgspec.msgpack.decode(content)
    if "sequence_hashes" in decoded:  # bytes, where JSON has numbers
        decoded["sequence_hashes"] = unpack_i64(decoded["sequence_hashes"])
    return answer.status, decoded


def test_a_request_is_repeated_at_another_replica_in_whatever_form(tmp_path: Path) -> None:
    prompt = {"block_hashes": [1, 2], "sequence_hashes": [1, 2], "isl_tokens": 32}
    asks = {
        "/select_and_reserve": {"reservation_id": "s", **prompt},
        "/reservations": {"reservation_id": "r", "worker_id": 1, **prompt},
        "/select_pair": {"reservation_id": "p", **prompt},
        "/select_batch": {
            "reserve": True,
            "requests": [{"reservation_id": "b", "n": 2, **prompt}],
        },
    }
    with pair(tmp_path) as (a, b):
        firsts = {path: posted(a, path, body, "json") for path, body in asks.items()}
        assert {status for status, _ in firsts.values()} == {200, 201}
        agree((a, b))
        for path, body in asks.items():
            for kind in ("json", "msgpack"):
                assert posted(b, path, body, kind) == firsts[path]
            other = json.loads(json.dumps(body).replace("32", "33"))
            status, answer = posted(b, path, other, "json")
            refused = answer["results"][0] if path == "/select_batch" else answer
            assert refused["code"] == "reservation_conflict"
            assert 409 in {status, refused.get("status")}
        assert b.metric("reservation_events_total", event="repeated") >= 8


def test_who_comes_late_has_it_all(tmp_path: Path) -> None:
    with ours(tmp_path, "a") as a:
        a.add_worker()
        for number in range(300):
            a.reserve(f"r{number}", 1 + number % 2, [number * 2, number * 2 + 1])
        a.ask("POST", "/reservations/r0/prefill_complete")
        a.ask("POST", "/reservations/r1/output_block", {})
        a.ask("DELETE", "/reservations/r2")
        with ours(tmp_path, "b", peers=[a.replica_endpoint]) as b:
            b.add_worker(1)
            eventually(lambda: b.load(1)[2], 149)
            b.add_worker(2)  # its reservations were known before it was
            assert sum(row[2] for row in agree((a, b)).values()) == 299
            assert b.metric("replica_pulls_total", outcome="complete") >= 1


def test_one_that_is_restarted_gets_its_load_back_from_the_other(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        a.reserve("mine", 1, [1, 2])
        b.reserve("theirs", 2, [3, 4, 5])
        agree((a, b))
        expected = b.loads()
        assert a.process
        a.process.send_signal(signal.SIGKILL)
        a.process.wait()
        assert b.loads() == expected, "no load is lost because its owner is"
        again = Replica(
            tmp_path / "a2.log",
            args=(*OURS_EXTRA, "--replica-heartbeat-s", "0.2", "--replica-timeout-s", "3"),
            port=a.port,
            replica_port=a.replica_port,
            peers=[b.replica_endpoint],
        )
        with again:
            again.add_worker()
            eventually(again.loads, expected)
            again.ask("DELETE", "/reservations/mine")  # an orphan is ended by whoever is asked
            eventually(lambda: b.load(1), (0, 0, 0))
            again.ask("DELETE", "/reservations/theirs")
            eventually(lambda: b.load(2), (0, 0, 0))


@pytest.mark.parametrize("bookings", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_stops_costs_nobody_time(
    tmp_path: Path, number: signal.Signals, bookings: int
) -> None:
    """Who waited for it would wait until a replica counts as gone, and that is for ever here."""
    with pair(tmp_path, "--replica-timeout-s", "3600") as (a, b):
        assert b.process
        b.process.send_signal(number)
        try:
            for count in range(bookings):
                a.reserve(f"r{count}", 1, range(count, count + 200))
            a.ask("GET", "/replica_sync/peers")
            a.ask("POST", "/replica_sync/deregister_peer", {"endpoint": b.replica_endpoint})
            a.ask(
                "POST", "/replica_sync/register_peer", {"endpoint": b.replica_endpoint}, ok=(201,)
            )
        finally:
            b.process.send_signal(signal.SIGCONT) if b.process.poll() is None else None
        if number == signal.SIGSTOP:
            agree((a, b))


def test_a_peer_on_the_command_line_that_is_none(tmp_path: Path) -> None:
    for endpoint, reason in (("bad", "missing scheme"), ("tcp://*:1", "failed to register")):
        server = Server(
            tmp_path / "s.log",
            args=(
                *OURS_EXTRA,
                "--replica-sync-port",
                str(free_port()),
                "--replica-sync-peers",
                endpoint,
            ),
        )
        with pytest.raises(RuntimeError, match="ended with 1 "), server:
            pass
        assert f"invalid replica peer endpoint `{endpoint}`" in server.log_tail()
        assert reason in server.log_tail()
    with (
        pytest.raises(RuntimeError, match="ended with 2 "),
        Server(tmp_path / "s.log", command=OURS, args=("--replica-sync-peers", "tcp://h:1")),
    ):
        pass
