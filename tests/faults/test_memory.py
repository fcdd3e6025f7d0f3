"""What a hundred thousand reservations, a thousand partitions and a large dump take of memory."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bench.load.http import Answer, drive, request_bytes
from tests.faults.patient import HEALTH_P99_LOADED_MS, Patient, service
from tests.faults.probe import Probe
from tests.faults.table import Line
from tests.faults.vitals import Vitals, forget_peak, vitals
from tests.indexer.encoding import message
from tests.live.ports import HOST
from tests.live.replicas import Replica
from tests.live.window import BIN, Garbage
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
RESERVATIONS = 100_000
BLOCKS = 16
PARTITIONS = 1000
LEFT_BLOCKS = 10_000
"""Objects more than before: of 1,400,000 that were there. Each is a counter, a cache of something
fixed, a slot in a table; nothing of a reservation is left."""
REMEMBERED_BYTES = 300
"""An id that has ended, where there are replicas: the id, the claim on it and that somebody freed
it, for ten minutes. Not among Python's objects."""
BACK = 0.75
"""Of the growth so much comes back at the least, and the ids; 0.89 were measured. What does not are
arenas, a megabyte each, in which a single counter that has grown meanwhile stands; the next load
finds them."""
QUIET_S = 30.0
"""Memory goes back in quiet moments, `garbage.TRIM_S` apart."""
FIRST_FDS = 16  # of libzmq itself, opened with its first socket
LEFT_OF_PARTITION = 20
"""Objects, however often it is made: its name, and the block size that it keeps for good (4,096 of
them at most), and tables that were made longer for all of them."""
DUMPED = 1 << 20
DUMPED_AT_ONCE = 1 << 11
"""Blocks of one event, each a child of the one before."""
DUMP_GROWTH_MB = 200.0
"""What a dump of a million blocks may take; the peer took 1,100."""
PARTITIONS_LEFT_MB = 16.0
"""Beyond what two thousand before them have left to be used again; they take 60 and more."""


def all_of(replica: Replica, count: int, request: Callable[[int], bytes], status: int) -> None:
    """Send so many requests and have each answered so."""

    def check(answer: Answer) -> None:
        assert answer.status == status, answer

    drive(
        (HOST, replica.port),
        lambda number: (request(number),),
        check,
        operations=range(count),
        connections=8,
    )


def booking(number: int) -> bytes:
    first = number * BLOCKS
    body: dict[str, Any] = {
        "reservation_id": f"r{number}",
        "worker_id": 1 + number % 2,
        "sequence_hashes": list(range(first, first + BLOCKS)),
        "isl_tokens": 16 * BLOCKS,
    }
    if number % 2:
        body["lease_id"] = "l"
    return request_bytes("POST", "/reservations", json.dumps(body).encode())


def book_and_end(server: Replica, count: int, pid: int) -> Vitals:
    """Half of them end one by one, half with their lease; what it looked like with all of them."""
    lease = {"lease_id": "l", "owner": "o", "ttl_s": 3600}
    server.ask("POST", "/leases", lease, ok=(201,))
    all_of(server, count, booking, 201)
    assert server.metric("reservations") == count
    full = vitals(pid)
    server.ask("DELETE", "/leases/l")
    all_of(
        server,
        count // 2,
        lambda number: request_bytes("DELETE", f"/reservations/r{2 * number}"),
        200,
    )
    eventually(lambda: server.metric("reservations"), 0.0)
    assert server.view().booked == []
    return full


def test_a_hundred_thousand_reservations(tmp_path: Path, record_property: Record) -> None:
    flags: tuple[str, ...] = (
        "--lease-ttl-max-s",
        "3600",
        "--lease-reopen-s",
        "0",
        "--decision-ring",
        "0",
    )
    # their workers say nothing of their caches: what those hold would be estimated, up to a bound
    # of its own, from prompts that have ended
    flags += ("--kv-estimate-after-s", "0")
    with service(tmp_path, *flags) as server:
        server.add_worker(1, 2)
        patient = Patient(server)
        book_and_end(server, 1000, patient.pid)  # what is imported and set up once
        blocks = bin_of(server).blocks
        before = vitals(patient.pid)
        line = Line("100,000 reservations")
        began = time.monotonic()
        with Probe(server.port) as probe:
            full = book_and_end(server, RESERVATIONS, patient.pid)
        line.lasted_s = time.monotonic() - began
        line.health, line.before, line.after = probe.health, before, vitals(patient.pid)
        line.note = f"{full.rss_mb:.0f} MB when all were there"
        line.write(record_property)
        assert probe.health.judged_ms < HEALTH_P99_LOADED_MS
        assert server.metric("freed_reservation_ids") == RESERVATIONS
        assert bin_of(server).blocks - blocks < LEFT_BLOCKS, "an object per reservation is left"
        remembered = RESERVATIONS * REMEMBERED_BYTES / 1e6
        bound = full.rss_mb - BACK * (full.rss_mb - before.rss_mb) + remembered

        def is_back() -> bool | Vitals:
            now = vitals(patient.pid)
            return now.rss_mb < bound or now

        eventually(is_back, True, deadline_s=QUIET_S)


def bin_of(server: Replica) -> Garbage:
    """Count what is alive, and what only a collection frees."""
    return msgspec.json.decode(server.request("GET", BIN).raw, type=Garbage)


def partition(number: int) -> bytes:
    body = {
        "worker_id": 100 + number,
        "model_name": f"model-{number}",
        "endpoint": "http://w",
        "block_size": 16,
        "kv_events_endpoint": f"tcp://{HOST}:9",
    }
    return request_bytes("POST", "/workers", json.dumps(body).encode())


def of_partition(number: int) -> bytes:
    body = {
        "reservation_id": f"of-{number}",
        "worker_id": 100 + number,
        "model_name": f"model-{number}",
        "token_ids": list(range(256)),
    }
    return request_bytes("POST", "/reservations", json.dumps(body).encode())


def test_a_thousand_partitions(tmp_path: Path, record_property: Record) -> None:
    """Made with sockets and a booking each, deleted, and again: the third time takes no more."""
    with service(tmp_path, "--scope-linger-s", "1", "--decision-ring", "0") as server:
        patient = Patient(server)
        before = vitals(patient.pid)
        make_partitions(server, 10)  # what is imported and set up once
        settled(patient, before.fds + FIRST_FDS)
        blank = bin_of(server)
        line = Line("1,000 partitions, three times")
        began = time.monotonic()
        make_partitions(server, PARTITIONS)
        first = settled(patient, before.fds + FIRST_FDS)
        bin_of(server)
        make_partitions(server, PARTITIONS)
        second = settled(patient, first.fds + 2)
        found = bin_of(server)
        with Probe(server.port) as probe:
            full = make_partitions(server, PARTITIONS)
            last = settled(patient, first.fds + 2)
        left: list[Garbage] = []

        def is_back() -> bool | Garbage:
            left.append(bin_of(server))
            return left[-1].blocks - blank.blocks < LEFT_OF_PARTITION * PARTITIONS or left[-1]

        line.lasted_s = time.monotonic() - began
        line.note = f"{full.fds} descriptors when all were there; {second.rss_mb:.0f} MB before"
        line.health, line.before, line.after = probe.health, before, last
        line.write(record_property)
        assert probe.health.judged_ms < HEALTH_P99_LOADED_MS
        assert last.threads <= first.threads
        eventually(is_back, True, deadline_s=QUIET_S)  # what was there is taken apart in turns
        assert max(one.found for one in (found, *left)) < PARTITIONS, "a ring of objects each"
        assert last.rss_mb - second.rss_mb < PARTITIONS_LEFT_MB, (first, second, full, last)


def make_partitions(server: Replica, count: int) -> Vitals:
    assert server.process is not None
    all_of(server, count, partition, 201)
    all_of(server, count, of_partition, 201)
    full = vitals(server.process.pid)
    all_of(server, count, lambda number: request_bytes("DELETE", f"/workers/{100 + number}"), 200)
    return full


def settled(patient: Patient, fds_max: int) -> Vitals:
    """What it takes once everything has been given up."""
    eventually(lambda: patient.server.metric("scopes"), 0.0, deadline_s=30.0)
    eventually(lambda: vitals(patient.pid).fds <= fds_max, True, deadline_s=30.0)
    return vitals(patient.pid)


def test_a_dump_of_a_million_blocks_is_not_held(tmp_path: Path, record_property: Record) -> None:
    """It is made as it is read: whoever stops reading in the middle costs no more than others."""
    with service(tmp_path, "--decision-ring", "0") as server, zmq.Context() as context:
        engine = context.socket(zmq.XPUB)
        engine.linger, engine.sndhwm = 0, 0
        port = engine.bind_to_random_port(f"tcp://{HOST}")
        record: dict[str, Any] = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
        server.ask(
            "POST", "/workers", record | {"kv_events_endpoint": f"tcp://{HOST}:{port}"}, ok=(201,)
        )
        engine.recv()  # it listens
        for number in range(DUMPED // DUMPED_AT_ONCE):
            first = number * DUMPED_AT_ONCE
            hashes = list(range(first, first + DUMPED_AT_ONCE))
            tokens = list(range(16 * first, 16 * (first + DUMPED_AT_ONCE)))
            stored = ["BlockStored", hashes, None, tokens, 16]
            engine.send_multipart(message(number, msgspec.msgpack.encode([0.0, [stored]])))
        eventually(lambda: server.metric("kv_blocks_stored_total"), float(DUMPED), deadline_s=60.0)
        patient = Patient(server)
        before = vitals(patient.pid)
        forget_peak(patient.pid)
        line = Line("a dump of a million blocks")
        began = time.monotonic()
        with Probe(server.port) as probe:
            reader = http.client.HTTPConnection(HOST, server.port, timeout=60.0)
            reader.request("GET", "/dump")
            answer = reader.getresponse()
            piece_before, size = answer.read(1 << 20), 1 << 20
            for _ in range(100):
                server.ask("POST", "/select", {"token_ids": list(range(64))})
            blocks = piece_before.count(b'"block_hash"')
            while piece := answer.read(1 << 20):
                size += len(piece)
                blocks += (piece_before[-11:] + piece).count(b'"block_hash"')
                piece_before = piece
        line.lasted_s = time.monotonic() - began
        line.note = f"{size / 1e6:.0f} MB"
        line.health, line.before, line.after = probe.health, before, vitals(patient.pid)
        line.write(record_property)
        reader.close()
        assert blocks == DUMPED
        assert not probe.health.failed
        assert line.after.peak_mb - before.rss_mb < DUMP_GROWTH_MB
        engine.close()
