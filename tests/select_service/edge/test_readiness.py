"""What /ready waits for, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from select_service.edge.driver.replica_operations import ReplicaOperations
from select_service.edge.driver.startup_recovery import StartupRecovery
from select_service.edge.readiness import ReadinessGate

if TYPE_CHECKING:
    from select_service.core.service import SelectionCore


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


def test_engines_known_at_the_start_are_waited_for_a_little() -> None:
    now, is_listed = 0.0, False
    streams = [SimpleNamespace(awaits_past=True) for _ in range(3)]
    registry = SimpleNamespace(streams=lambda: streams[:2])
    readiness = ReadinessGate(60.0, lambda: now)
    recovering = StartupRecovery(
        cast("SelectionCore", SimpleNamespace(registry=registry)), readiness, lambda: now
    )
    recovering.ask_engines(5.0, lambda: is_listed)
    readiness.wait_for("discovery", lambda: is_listed)
    readiness.start()
    recovering.start(lambda: None)
    assert readiness.missing() == ["discovery"], "nobody knows yet who there is"
    is_listed = True
    assert readiness.missing() == ["past_events"]
    registry.streams = lambda: streams  # one more is registered
    streams[0].awaits_past = False
    assert readiness.missing() == ["past_events"]
    streams[1].awaits_past = False
    assert readiness.missing() == []
    assert readiness.given_up == []


def test_an_engine_that_does_not_answer_is_not_waited_for_as_long_as_others() -> None:
    now = 0.0
    readiness = ReadinessGate(60.0, lambda: now)
    readiness.wait_for("past_events", lambda: False, within_s=5.0, after=("discovery",))
    readiness.wait_for("state", lambda: False)
    readiness.start()
    assert readiness.missing() == ["past_events", "state"]
    now = 5.0
    assert readiness.missing() == ["state"]
    assert readiness.given_up == ["past_events"]
    now = 60.0
    assert readiness.missing() == []


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
    is_settled = False
    readiness = ReadinessGate(60.0, lambda: now)
    replicating: Any = ReplicaOperations()
    replicating.core, replicating._clock = core, lambda: now
    replicating._effects_executor = carrier
    applied = replicating.ledgers_applied
    readiness.wait_for("replica_ledgers", lambda: is_settled and applied())
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
