"""Whose turn it is, against what is promised: nobody is left out, nobody waits for the busy."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.round_robin import RoundRobinNames

names = st.integers(0, 12)
steps = st.lists(st.tuples(st.frozensets(names), st.frozensets(names)), max_size=40)


@given(steps=steps, per_turn=st.integers(1, 5))
def test_everybody_gets_a_turn_whoever_is_busy(
    steps: list[tuple[frozenset[int], frozenset[int]]], per_turn: int
) -> None:
    rounds: RoundRobinNames[int] = RoundRobinNames(per_turn)
    due: set[int] = set()
    busy: set[int] = set()
    turns = 0
    for everything, busied in steps:
        if rounds.is_new:
            assert not due, "a round ended without some"
            due, turns = set(everything), math.ceil(len(everything) / per_turn)
        some = rounds.turn(lambda everything=everything: sorted(everything))  # type: ignore[misc]
        turns -= 1
        assert len(some) == len(set(some)) <= 2 * per_turn
        assert len(busy & set(some)) >= min(per_turn, len(busy))
        due -= set(some)
        busy -= set(some)
        for name in sorted(busied & set(some)):
            rounds.has_more(name)
            busy.add(name)
        assert rounds.is_new == (turns <= 0), "a round takes no longer for those who are busy"
        assert rounds.is_over == (not busy and rounds.is_new)
        assert rounds.is_busy == bool(busy)


def test_the_busy_take_turns() -> None:
    rounds: RoundRobinNames[int] = RoundRobinNames(2)
    for name in range(6):
        rounds.has_more(name)
    seen: list[int] = []
    for _ in range(math.ceil(6 / 2)):
        for name in rounds.turn(list):
            seen.append(name)
            rounds.has_more(name)
    assert seen == list(range(6))


def test_a_name_that_is_busy_and_due_has_one_turn() -> None:
    rounds: RoundRobinNames[str] = RoundRobinNames(4)
    for name in ("c", "b"):
        rounds.has_more(name)
    assert rounds.turn(lambda: ["a", "b"]) == ["a", "b", "c"], "the round's are first"
    assert rounds.is_over
