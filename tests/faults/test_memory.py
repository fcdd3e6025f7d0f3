"""Memory comes back when load has gone: reservations by the hundred thousand, partitions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.load.http import Answer, drive, request_bytes
from tests.faults.patient import Patient, service
from tests.faults.probe import Probe
from tests.faults.table import Line
from tests.faults.vitals import Vitals, vitals
from tests.live.ports import HOST
from tests.live.replicas import Replica, eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
RESERVATIONS = 100_000
BLOCKS = 16
PARTITIONS = 1000
RESERVATIONS_LEFT_MB = 60.0
FORGETFUL = ("--freed-ids-max", "1000", "--replica-ended-max", "1000", "--decision-ring", "0")
"""By default ids of what has ended are remembered for ten minutes: a hundred bytes each, but between
all that was there beside them, so that most pages stay as long. Here nobody waits for that."""
PARTITIONS_LEFT_MB = 16.0


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


def test_a_hundred_thousand_reservations(tmp_path: Path, record_property: Record) -> None:
    """Half of them end one by one, half with their lease; and then again, in what came back."""
    with service(tmp_path, "--lease-ttl-max-s", "3600", *FORGETFUL) as server:
        server.seat(1, 2)
        patient = Patient(server)
        before = vitals(patient.pid)
        line = Line("100,000 reservations")
        began = time.monotonic()
        with Probe(server.port) as probe:
            lease = {"lease_id": "l", "owner": "o", "ttl_s": 3600}
            server.ask("POST", "/leases", lease, ok=(201,))
            all_of(server, RESERVATIONS, booking, 201)
            assert server.metric("reservations") == RESERVATIONS
            full = vitals(patient.pid)
            server.ask("DELETE", "/leases/l")
            all_of(
                server,
                RESERVATIONS // 2,
                lambda number: request_bytes("DELETE", f"/reservations/r{2 * number}"),
                200,
            )
            eventually(lambda: server.metric("reservations"), 0.0)
        line.lasted_s = time.monotonic() - began
        line.health, line.before, line.after = probe.health, before, vitals(patient.pid)
        line.note = f"{full.rss_mb:.0f} MB when all were there"
        line.write(record_property)
        assert server.view().booked == []
        came_back(patient, before, RESERVATIONS_LEFT_MB)


def came_back(patient: Patient, before: Vitals, left_mb: float) -> None:
    eventually(
        lambda: vitals(patient.pid).rss_mb - before.rss_mb < left_mb or vitals(patient.pid), True
    )
