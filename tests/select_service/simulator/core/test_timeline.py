"""Calls in order, and a time that never goes back."""

from __future__ import annotations

import math

from select_service.simulator.core.timeline import Timeline


def test_calls_are_made_in_order_and_equals_as_they_were_asked_for() -> None:
    time = Timeline()
    made: list[object] = []
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        time.at(when, lambda name=name: made.append((time.now, name)))
    time.advance(2.0)
    assert made == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert (time.now, time.next) == (2.0, 3.0)


def test_coming_to_a_time_leaves_what_happens_then_to_happen() -> None:
    time = Timeline()
    made: list[object] = []
    time.at(1.0, made.append, "then")
    time.come_to(1.0)
    assert (made, time.now) == ([], 1.0)
    time.advance(1.0)
    assert made == ["then"]


def test_time_never_goes_back() -> None:
    time = Timeline()
    made: list[object] = []
    time.advance(5.0)
    time.at(1.0, lambda: made.append(time.now))  # late
    time.advance(2.0)
    assert (made, time.now) == ([5.0], 5.0), "what is late happens at once"
    time.advance(math.inf)
    assert (made, time.now, time.next) == ([5.0], 5.0, math.inf)
