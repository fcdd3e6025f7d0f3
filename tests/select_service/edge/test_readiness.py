"""What /ready waits for, and for how long."""

from __future__ import annotations

from select_service.edge.readiness import Readiness


def test_each_is_waited_for_until_it_is_there() -> None:
    there: set[str] = set()
    readiness = Readiness(60.0, lambda: 0.0)
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


def test_the_wait_is_bounded() -> None:
    now = 100.0
    readiness = Readiness(60.0, lambda: now)
    readiness.wait_for("state", lambda: False)
    now = 1000.0
    assert readiness.missing() == ["state"], "the time has not begun to run"
    readiness.start()
    now = 1059.0
    assert readiness.missing() == ["state"]
    now = 1060.0
    assert readiness.missing() == []
    assert readiness.given_up == ["state"]
