"""Waits that double until what was tried has lasted."""

from __future__ import annotations

from indexer.edge.backoff import Backoff


def waits(backoff: Backoff, count: int) -> list[float]:
    return [backoff.next_s() for _ in range(count)]


def test_waits_double_up_to_the_longest() -> None:
    assert waits(Backoff(1.0, 5.0), 5) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_what_breaks_at_once_lets_them_grow() -> None:
    backoff = Backoff(1.0, 30.0)
    found = []
    for now in range(4):
        backoff.holds(float(now))
        backoff.broke(float(now) + 0.5)
        found.append(backoff.next_s())
    assert found == [1.0, 2.0, 4.0, 8.0]


def test_what_lasted_sets_them_back() -> None:
    backoff = Backoff(1.0, 30.0)
    assert waits(backoff, 3) == [1.0, 2.0, 4.0]
    backoff.holds(100.0)
    backoff.broke(130.0)  # no longer than the longest wait
    assert backoff.next_s() == 8.0
    backoff.holds(200.0)
    backoff.broke(230.1)
    assert waits(backoff, 2) == [1.0, 2.0]


def test_what_never_held_begins_with_the_first() -> None:
    backoff = Backoff(1.0, 30.0)
    backoff.broke(0.0)
    assert backoff.next_s() == 1.0


def test_begun_anew() -> None:
    backoff = Backoff(0.5, 2.0)
    assert waits(backoff, 4) == [0.5, 1.0, 2.0, 2.0]
    backoff.begin_anew()
    assert waits(backoff, 2) == [0.5, 1.0]
