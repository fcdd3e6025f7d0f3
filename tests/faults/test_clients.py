"""Clients that never finish, by the thousand."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from select_service.edge.http.connection_guard import RESERVED_MAX
from tests.faults.patient import Patient, service
from tests.faults.vitals import vitals
from tests.live.ports import HOST
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
SLOW = 1500
FAR = "127.0.0.2"  # they are not where the probe is
BEGINNINGS = (
    b"",
    b"GET /health HTTP/1.1\r\nhost: slow\r\nx-head",
    b"POST /select HTTP/1.1\r\nhost: slow\r\ncontent-type: application/json\r\n"
    b"content-length: 1000\r\n\r\n{",
)
FEW = 200


@pytest.fixture
def room() -> Iterator[None]:
    """Descriptors for all of them, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * SLOW if hard == resource.RLIM_INFINITY else min(hard, 4 * SLOW)
    if wanted < SLOW + 500:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_slowly(stack: contextlib.ExitStack, port: int, count: int) -> list[socket.socket]:
    """Connections that each have begun something."""
    opened = []
    for number in range(count):
        one = stack.enter_context(socket.create_connection((HOST, port), 20, (FAR, 0)))
        one.send(BEGINNINGS[number % len(BEGINNINGS)])
        opened.append(one)
    return opened


def hung_up_on(connections: list[socket.socket]) -> int:
    """How many of them the service has closed."""
    count = 0
    for one in connections:
        one.setblocking(False)
        try:
            while data := one.recv(4096):
                assert data.startswith((b"HTTP/1.1 408", b"HTTP/1.1 503")), data
            count += 1
        except BlockingIOError:
            pass
        except OSError:  # reset
            count += 1
    return count


def test_slow_clients(tmp_path: Path, room: None, record_property: Record) -> None:
    """500 of each kind: all are gone at their deadline, and what they took with them."""
    soon = ("--header-timeout-s", "3", "--body-timeout-s", "3")
    with service(tmp_path, *soon) as server, contextlib.ExitStack() as stack:
        server.add_worker(1)
        patient = Patient(server)
        before = vitals(patient.pid)
        with patient.suffering("1,500 slow clients", record_property) as line:
            slow = open_slowly(stack, server.port, SLOW)
            together = before.fds + SLOW * 9 // 10
            eventually(lambda: vitals(patient.pid).fds > together, True)
            line.note = f"{vitals(patient.pid).fds} descriptors"
            eventually(lambda: hung_up_on(slow), SLOW)
        eventually(lambda: vitals(patient.pid).fds <= before.fds + 2, True)
        patient.traffic.resolve_doubts()
        patient.conserves()


def test_too_many_from_one_address(tmp_path: Path, room: None, record_property: Record) -> None:
    """Beyond its share an address is sent away at once, and nobody else notices."""
    few = ("--connections-per-address-max", str(FEW), "--connections-max", str(2 * FEW))
    with service(tmp_path, *few) as server, contextlib.ExitStack() as stack:
        server.add_worker(1)
        patient = Patient(server)
        before = vitals(patient.pid)
        with patient.suffering("1,500 from one address", record_property) as line:
            slow = open_slowly(stack, server.port, SLOW)
            least = SLOW - FEW - RESERVED_MAX
            eventually(lambda: hung_up_on(slow) >= least, True)
            line.note = f"{FEW} let in"
            stack.close()
        eventually(lambda: vitals(patient.pid).fds <= before.fds + 2, True)
        patient.traffic.resolve_doubts()
        patient.conserves()
