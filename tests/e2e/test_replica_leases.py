"""A client's lease outlives the replica it was opened at, and not the client: real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.test_replicas import pair
from tests.live.clocked import Clocks
from tests.live.ports import free_port
from tests.live.replicas import Replica, agree, ours
from tests.wait import eventually

pytestmark = pytest.mark.e2e

TTL_S = 5.0
LONG_S = 600.0  # by clocks that we set
COUNT = 40


def lease(replica: Replica, name: str = "l", ttl_s: float = TTL_S) -> None:
    replica.ask("POST", "/leases", {"lease_id": name, "owner": "o", "ttl_s": ttl_s}, ok=(201,))


def book(replica: Replica, ttl_s: float = TTL_S) -> None:
    lease(replica, ttl_s=ttl_s)
    for number in range(COUNT):
        replica.reserve(f"r{number}", 1, [number], lease_id="l")


def renew_for(replica: Replica, seconds: float, *names: str) -> None:
    """As a client does that lives: five times in each time to live."""
    for _ in range(round(5 * seconds / TTL_S)):
        for name in names or ("l",):
            replica.ask("POST", f"/leases/{name}/renew")
        time.sleep(TTL_S / 5)


def kill(replica: Replica) -> None:
    assert replica.process
    replica.process.send_signal(signal.SIGKILL)
    replica.process.wait()


@pytest.mark.heavy
def test_renewals_elsewhere_keep_what_a_dead_replica_has_booked(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        book(a)
        eventually(lambda: b.load(1)[2], COUNT)
        (known,) = b.ask("GET", "/leases")["leases"]
        assert (known["lease_id"], known["reservations"]) == ("l", COUNT)
        assert len(known["router_ids"]) == 1
        kill(a)
        renew_for(b, 2 * TTL_S + 3.0)  # well after it counts as gone
        assert b.load(1)[2] == COUNT
        (known,) = b.ask("GET", "/leases")["leases"]
        assert "router_ids" not in known, "it is open here by now"
        assert known["reservations"] == COUNT
        assert b.metric("replica_leases_total", event="adopted") == 1
        eventually(lambda: b.load(1), (0, 0, 0))  # nobody renews it any more
        assert b.request("POST", "/leases/l/renew").status == 404


def test_nobody_renews_what_a_dead_replica_has_booked(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    with pair(tmp_path, "--replica-orphan-ttl-s", "3600", clocks=clocks) as (a, b):
        book(a, LONG_S)
        a.reserve("brief", 2, [1, 2], ttl_s=LONG_S / 5)
        eventually(lambda: (b.load(1)[2], b.load(2)[2]), (COUNT, 1))
        kill(a)
        clocks.pass_time(10.0)
        eventually(lambda: b.metric("replica_publishers", state="gone"), 1.0)
        clocks.pass_time(LONG_S)
        eventually(lambda: (b.load(1), b.load(2)), ((0, 0, 0), (0, 0, 0)))
        assert b.metric("replica_leases_total", event="missed") == 1


@pytest.mark.heavy
def test_renewed_and_closed_at_another_replica_while_its_own_lives(tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        book(a)
        eventually(lambda: b.load(1)[2], COUNT)
        renew_for(b, 2 * TTL_S)
        assert agree((a, b))["default", "default", 1, 0][2] == COUNT
        assert a.ask("GET", "/leases")["leases"][0]["reservations"] == COUNT
        b.ask("DELETE", "/leases/l")
        assert b.request("POST", "/leases/l/renew").json["code"] == "lease_closed"  # type: ignore[index]
        eventually(lambda: (a.load(1), b.load(1)), ((0, 0, 0), (0, 0, 0)))
        eventually(lambda: a.request("POST", "/leases/l/renew").status, 404)


@pytest.mark.heavy
def test_ended_leases_are_remembered_after_a_restart(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    port = free_port()
    with ours(tmp_path, "a", *state, port=port) as a:
        a.add_worker()
        for name in ("closed", "missed", "kept"):
            lease(a, name)
        a.ask("DELETE", "/leases/closed")
        renew_for(a, TTL_S + 2.0, "kept")
        kill(a)
    with ours(tmp_path, "again", *state, port=port) as again:
        for name, status, code in (
            *(("closed", 404, "lease_closed"), ("missed", 404, "lease_expired")),
            *(("kept", 200, None), ("nobody's", 404, "lease_not_found")),
        ):
            answer = again.request("POST", f"/leases/{name}/renew")
            assert isinstance(answer.json, dict)
            assert (answer.status, answer.json.get("code")) == (status, code)
