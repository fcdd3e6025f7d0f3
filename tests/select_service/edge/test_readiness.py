"""What /ready waits for, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from select_service.edge.driver.core_calls import CallContext
from select_service.edge.driver.replica_sync import ReplicaSync
from select_service.edge.readiness import ReadinessGate
from select_service.types import ReplicaLimits


def test_each_is_waited_for_until_it_is_there() -> None:
    there: set[str] = set()
    readiness = ReadinessGate(60.0, lambda: 0.0)
    readiness.start()
    for name in ("index_recovery", "state"):
        readiness.wait_for(name, lambda name=name: name in there)  # type: ignore[misc]
    assert readiness.missing() == ["index_recovery", "state"]
    there.add("index_recovery")
    assert readiness.missing() == ["state"]
    there.clear()
    assert readiness.missing() == ["state"], "what was there once is not asked again"
    there.add("state")
    assert readiness.missing() == []
    assert readiness.given_up == []


def test_the_ledgers_of_replicas_are_waited_for() -> None:
    """A peer that never answers costs three heartbeats, one that tells costs what it takes."""
    now = 0.0
    peers: list[str] = []
    status: list[SimpleNamespace] = []
    plane = SimpleNamespace(peers=lambda: peers)
    limits = SimpleNamespace(replica_heartbeat_s=1.0)
    core: Any = SimpleNamespace(
        limits=limits, replica_operations=SimpleNamespace(status=lambda _: status)
    )
    carrier: Any = SimpleNamespace(replicas=None)
    turn = CallContext(core, lambda: now, lambda _: None)
    is_settled = False
    readiness = ReadinessGate(60.0, lambda: now)
    replicating = ReplicaSync(turn, carrier, 9091, ReplicaLimits())
    replicating.hold(readiness, lambda: is_settled)
    applied = replicating.ledgers_applied
    assert not applied(), "not started"
    carrier.replicas = plane
    assert readiness.missing() == ["replica_ledgers"], "nobody knows who they are"
    is_settled = True
    assert applied(), "there are none"
    peers.append("tcp://a:1")
    assert not applied()
    status.append(SimpleNamespace(peer="tcp://a:1", state="behind"))
    now = 100.0
    assert not applied(), "it is being pulled, however long that takes"
    status[0].state = "synced"
    assert applied()
    peers.append("tcp://mute:1")
    assert applied(), "time enough has passed"
    assert readiness.missing() == []
