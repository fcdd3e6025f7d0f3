"""Three replicas with their state on disk: what one has acknowledged is final, whatever restarts.

They do not receive one another while it is acknowledged, and the one that did so is killed or
stopped before it can send it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.proxy import HEALTHY, REFUSING, Proxy
from tests.live.replicas import Replica, agree, ours
from tests.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

LEASE = {"lease_id": "job", "owner": "client", "ttl_s": 300.0}
COUNT = 3
both_signals = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])


class Fleet:
    """Three replicas, each of which receives the others through ways of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.replicas: list[Replica] = []
        for name in "abc":
            state = ("--state-dir", str(folder / name), "--reservation-ttl-s", "0")
            self.replicas.append(stack.enter_context(ours(folder, name, *state)))
        self.ways: list[Proxy] = []
        for one in self.replicas:
            one.add_worker(1)
            for other in self.replicas:
                if other is not one:
                    way = stack.enter_context(Proxy(other.replica_port))
                    one.listen_to(way.endpoint)
                    self.ways.append(way)
        self.publishers(synced=2)

    def publishers(self, **expected: int) -> None:
        for one in self.replicas:
            for state, count in expected.items():
                eventually(lambda: one.metric("replica_publishers", state=state), count)

    def cut(self) -> None:
        for way in self.ways:
            way.set(REFUSING)

    def join(self) -> None:
        for way in self.ways:
            way.set(HEALTHY)

    def carry(self, count: int) -> None:
        for one in self.replicas:
            eventually(lambda: one.load(1)[2], count)


@contextmanager
def three(folder: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(folder, stack)
        first = fleet.replicas[0]
        first.ask("POST", "/leases", LEASE, ok=(200, 201))
        for number in range(COUNT):
            first.reserve(f"r{number}", 1, range(2), lease_id="job")
        fleet.carry(COUNT)
        yield fleet


def end(replica: Replica, how: int) -> None:
    assert replica.process is not None
    replica.process.send_signal(how)
    replica.process.wait()


@both_signals
def test_what_was_freed_ends_where_it_was_taken_over(tmp_path: Path, how: int) -> None:
    with three(tmp_path) as fleet:
        _, second, third = fleet.replicas
        fleet.cut()
        fleet.publishers(gone=2)
        assert second.request("DELETE", "/reservations/r0").status == 200
        third.ask("POST", "/reservations/r0/prefill_complete")
        eventually(lambda: third.metric("replica_leases_total", event="adopted"), 1.0)
        end(second, how)
        second.__enter__()
        fleet.join()
        fleet.publishers(synced=2)
        third.ask("POST", "/leases/job/renew", {})
        fleet.carry(COUNT - 1)
        for one in fleet.replicas:
            assert one.request("POST", "/reservations/r0/output_block", {}).status == 404
        agree(fleet.replicas)


@both_signals
def test_a_lease_closed_while_its_owner_was_away_is_closed(tmp_path: Path, how: int) -> None:
    with three(tmp_path) as fleet:
        first, second, _ = fleet.replicas
        fleet.cut()
        end(first, how)
        assert second.request("DELETE", "/leases/job").status == 200
        end(second, how)
        first.__enter__()
        second.__enter__()
        assert first.load(1)[2] == COUNT, "it does not know yet"
        fleet.join()
        fleet.carry(0)
        for one in fleet.replicas:
            eventually(lambda: one.ask("GET", "/leases")["leases"], [])
        assert second.request("DELETE", "/leases/job").status == 200


@both_signals
def test_progress_reported_to_another_replica_outlives_it(tmp_path: Path, how: int) -> None:
    with three(tmp_path) as fleet:
        first, second, _ = fleet.replicas
        before = first.load(1)
        fleet.cut()
        second.ask("POST", "/reservations/r0/prefill_complete")
        second.ask("POST", "/reservations/r0/output_block", {})
        load = second.load(1)
        assert load != before == first.load(1)
        end(second, how)
        second.__enter__()
        fleet.join()
        for one in fleet.replicas:
            eventually(lambda: one.load(1), load)
        agree(fleet.replicas)
