"""What the service lets go is freed by its last reference; see `edge/garbage_collection.py`."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest

from tests.live.ports import HOST
from tests.live.replicas import Replica, ours
from tests.live.window import BIN, WATCHED, Garbage
from tests.wait import eventually

ROUNDS = 150
MORE = {"max_num_batched_tokens": 16, "kv_events_endpoint": f"tcp://{HOST}:9"}


def garbage(replica: Replica) -> Garbage:
    answer = replica.request("GET", BIN)
    assert answer.status == 200, replica.log_tail()
    return msgspec.json.decode(answer.raw, type=Garbage)


def of_the_start(replica: Replica) -> None:
    """Put away what importing modules leaves: it is frozen with them, stays, and never grows."""
    assert garbage(replica).found < 5_000


def lifecycles(replica: Replica) -> None:
    for number in range(ROUNDS):
        replica.reserve(f"r{number}", 1, range(number, number + 9))
        replica.ask("POST", f"/reservations/r{number}/prefill_complete")
        replica.ask("POST", f"/reservations/r{number}/output_block", {})
        if number % 2:
            replica.ask("DELETE", f"/reservations/r{number}")


def refusals(replica: Replica) -> None:
    for _ in range(ROUNDS):
        replica.ask("POST", "/select", {"token_ids": 5}, ok=(422,))
        replica.ask("GET", "/nowhere", ok=(404,))
        replica.ask("DELETE", "/reservations/of-nobody", ok=(404,))


def clients_that_leave(replica: Replica) -> None:
    """In the middle of a body, and while they wait for capacity."""
    worker = {"worker_id": 9, "model_name": "busy", "endpoint": "http://w", "block_size": 16}
    replica.ask("POST", "/workers", worker | MORE, ok=(201,))
    replica.reserve(f"busy-{replica.port}", 9, range(64), model_name="busy")
    body = json.dumps({"model_name": "busy", "token_ids": [1] * 32}).encode()
    head = b"POST /select HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for number in range(ROUNDS):
        with socket.create_connection((HOST, replica.port)) as leaving:
            leaving.sendall(whole[: -1 - number % 20] if number % 2 else whole)
    eventually(lambda: replica.metric("http_requests_in_flight"), 0.0)
    assert replica.metric("selections_withdrawn_total") > ROUNDS // 4


@pytest.mark.e2e
def test_nothing_that_was_frozen_becomes_garbage(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    with ours(tmp_path, "a", *state, command=WATCHED) as a:
        of_the_start(a)
        a.add_worker()
        lifecycles(a)
        with ours(tmp_path, "b", command=WATCHED, peers=[a.replica_endpoint]) as b:
            of_the_start(b)
            b.add_worker()
            eventually(lambda: b.load(1)[2], ROUNDS // 2)  # by way of a snapshot
            for replica in (a, b):
                first = garbage(replica)
                assert first.frozen > 10_000, "the program itself, at least"
                refusals(replica)
                clients_that_leave(replica)
                for _ in range(10):
                    replica.request("GET", "/metrics")
                    replica.request("GET", "/dump")
                second = garbage(replica)
                # what each of them left would be twice as much at least
                assert first.found + second.found < ROUNDS // 2, (first, second)
