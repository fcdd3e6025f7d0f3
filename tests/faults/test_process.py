"""The service itself is killed, stopped, out of descriptors, out of disk."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.engine import Engine, engines
from tests.faults.patient import Patient, refusal, service
from tests.faults.vitals import vitals
from tests.live.ports import HOST
from tests.live.replicas import Replica
from tests.live.window import WATCHED
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
DISK_BYTES = 24 << 20
DESCRIPTORS = 150
NO_DESCRIPTORS = 5  # what a process opens first has lower numbers


@pytest.fixture(scope="module")
def publishing() -> Iterator[list[Engine]]:
    with engines(2, first=21) as found:
        for one in found:
            one.churn(40)
        yield found


@contextlib.contextmanager
def at_work(server: Replica, publishing: list[Engine]) -> Iterator[Patient]:
    with server:
        patient = Patient(server, publishing)
        patient.register()
        for one in publishing:
            one.churn(3)
        patient.index_is_true()
        yield patient


def durable(folder: Path, *args: str) -> Replica:
    state = ("--state-dir", str(folder / "state"), "--index-snapshot-interval-s", "1")
    return service(folder, *state, "--reservation-ttl-s", "0", *args)


def test_killed_and_started_again(
    tmp_path: Path, publishing: list[Engine], record_property: Record
) -> None:
    """Three times: what was acknowledged stands, and the index is what engines hold by then."""
    with at_work(durable(tmp_path), publishing) as patient:
        for life in range(3):
            with patient.suffering("kill -9", record_property, breaks=True) as line:
                for one in publishing:
                    one.run(100)
                time.sleep(0.4 + 0.2 * life)
                process = patient.server.process
                assert process is not None
                process.kill()
                process.wait()
                time.sleep(0.1)
                began = time.monotonic()
                patient.server.__enter__()
                line.note = f"up again after {time.monotonic() - began:.2f} s"
                time.sleep(0.3)
            patient.recovers()


def test_stopped_for_a_while(
    tmp_path: Path, publishing: list[Engine], record_property: Record
) -> None:
    """Nobody gets a 500, and what was published meanwhile is known afterwards."""
    with at_work(service(tmp_path), publishing) as patient:
        with patient.suffering("service frozen", record_property, is_down=True):
            for one in publishing:
                one.run(200)
            time.sleep(0.5)
            for _ in range(2):
                os.kill(patient.pid, signal.SIGSTOP)
                time.sleep(1.5)
                os.kill(patient.pid, signal.SIGCONT)
                time.sleep(0.5)
        patient.recovers()


def test_no_descriptors_left(
    tmp_path: Path, publishing: list[Engine], record_property: Record
) -> None:
    """Who is connected is served; who comes waits or is sent away; then all is as before."""
    few = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "few", *WATCHED)
    with (
        at_work(service(tmp_path, command=few), publishing) as patient,
        contextlib.ExitStack() as stack,
    ):
        before = vitals(patient.pid).fds
        with patient.suffering("no descriptors", record_property) as line:
            time.sleep(0.3)  # who works is connected
            for _ in range(2 * DESCRIPTORS):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex((HOST, patient.server.port))
            server = patient.server
            eventually(lambda: server.metric("limit_hits_total", name="descriptors_kept") > 0, True)
            # what connections leave is taken from it as well
            resource.prlimit(patient.pid, resource.RLIMIT_NOFILE, (NO_DESCRIPTORS, DESCRIPTORS))
            ours = patient.traffic.all[0].statuses
            seen = ours.total()
            publishing[0].lose(3)  # a replay needs a descriptor
            publishing[0].churn(3)
            eventually(lambda: ours.total() > seen + 50, True)
            line.note = f"{vitals(patient.pid).fds} of {DESCRIPTORS} in use"
            stack.close()
            resource.prlimit(patient.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        eventually(lambda: vitals(patient.pid).fds <= before + 8, True)
        patient.recovers()
        patient.register()  # workers that are there already, and their sockets


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A disk that can be filled, and emptied again."""
    folder = tmp_path / "state"
    folder.mkdir()
    if request.param == "limit":
        yield Disk(folder, is_mounted=False)
        return
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    try:
        mounted = subprocess.run(mounting, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield Disk(folder, is_mounted=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Disk:
    """A small tmpfs; or any disk, and a limit on how long a file of that process may be."""

    def __init__(self, folder: Path, *, is_mounted: bool) -> None:
        self.folder = folder
        self.kind = "tmpfs" if is_mounted else "limit"
        self._is_mounted = is_mounted

    def fill(self, pid: int) -> None:
        if self._is_mounted:
            with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", 0) as ballast:
                while True:
                    ballast.write(bytes(4096))
        else:
            longest = max(one.stat().st_size for one in self.folder.iterdir())
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (longest, resource.RLIM_INFINITY))

    def empty(self, pid: int) -> None:
        if self._is_mounted:
            (self.folder / "ballast").unlink()
        else:
            forever = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, forever)


def book_until_refused(patient: Patient) -> list[str]:
    """Large bookings; the ids of those that were acknowledged."""
    booked: list[str] = []
    while True:
        name = f"large-{len(booked)}"
        body = {"reservation_id": name, "worker_id": 21, "sequence_hashes": list(range(4000))}
        answer = patient.server.request("POST", "/reservations", body | {"isl_tokens": 64_000})
        if answer.status != 201:
            assert refusal(answer) in {(503, "state_disk_full"), (503, "state_unwritable")}
            return booked
        booked.append(name)
        assert len(booked) < 2000, "the disk does not fill"


def test_a_full_disk(
    tmp_path: Path, disk: Disk, publishing: list[Engine], record_property: Record
) -> None:
    """Nothing is acknowledged that is not on disk; questions are answered; then it goes on."""
    with at_work(durable(tmp_path), publishing) as patient:
        with patient.suffering(f"full disk ({disk.kind})", record_property) as line:
            time.sleep(0.3)
            disk.fill(patient.pid)
            large = book_until_refused(patient)
            line.note = f"{len(large)} large bookings fitted"
            assert patient.server.request("POST", "/select", {"token_ids": [1]}).status == 200
            assert patient.server.request("GET", "/loads").status == 200
            time.sleep(1.0)
            disk.empty(patient.pid)
            for name in large:
                path = f"/reservations/{name}"
                eventually(lambda: patient.server.request("DELETE", path).status, 200)
        patient.traffic.resolve_doubts()
        assert patient.server.process is not None
        patient.server.process.kill()
        patient.server.process.wait()
        patient.server.__enter__()
        patient.recovers()
