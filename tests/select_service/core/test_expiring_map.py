"""What is remembered for a while, against a list."""

from __future__ import annotations

import random
from math import inf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.expiring_map import ExpiringMap

texts = st.sampled_from(["", "a", "b", "é", "\ud800", "a\0b", "x" * 70]) | st.text(max_size=2)
values = st.binary(max_size=9) | st.sampled_from([300, 70_000]).map(bytes)
puts = st.tuples(st.just("put"), texts, values)
others = st.tuples(st.sampled_from(["discard", "pop"]), texts, values)


@given(steps=st.lists(puts | others, max_size=60))
def test_it_is_a_list_in_the_order_of_the_last_words(steps: list[Any]) -> None:
    real = ExpiringMap[str]()
    naive: list[tuple[str, float, bytes]] = []
    for now, (verb, key, value) in enumerate(steps):
        known = next((one for one in naive if one[0] == key), None)
        if verb == "pop":
            until = now - 3.0
            oldest = naive.pop(0) if naive and naive[0][1] <= until else None
            assert real.pop_oldest(until) == (oldest and (oldest[0], oldest[2]))
            continue
        if known is not None:
            naive.remove(known)
        if verb == "put":
            real.put(key, float(now), value)
            naive.append((key, float(now), value))
            assert (real.at(key), real.get(key)) == (now, value)
        else:
            assert real.discard(key) == (known is not None)
            assert (real.at(key), real.get(key)) == (None, None)
        assert (key in real) == (verb == "put")
        assert len(real) == len(naive)
    assert real.items() == naive


def test_many_come_and_go_and_nothing_is_left() -> None:
    memory = ExpiringMap[bytes]()
    for number in range(20_000):
        memory.put(b"%d" % number, number, b"v")
    assert memory.nbytes < 300 * 20_000
    for number in range(0, 20_000, 2):
        assert memory.discard(b"%d" % number)
    assert not memory.discard(b"0")
    assert [key for key, _ in iter(lambda: memory.pop_oldest(inf), None)] == [
        b"%d" % number for number in range(1, 20_000, 2)
    ]
    assert len(memory) == memory.nbytes == 0


@given(seed=st.integers(0, 99))
@settings(max_examples=8)
def test_holes_do_not_pile_up(seed: int) -> None:
    """Some are said anew all the time, some leave early, and some stay: as when replicas resync."""
    memory = ExpiringMap[bytes]()
    dice, naive = random.Random(seed), dict[bytes, bytes]()
    for number in range(30_000):
        key = b"%d" % (dice.randrange(60) if dice.random() < 0.9 else number)
        value = bytes(dice.choice([0, 8, 40, 600]))
        naive.pop(key, None)
        if dice.random() < 0.1:
            memory.discard(key)
        else:
            memory.put(key, number, value)
            naive[key] = value
        if len(naive) > 500:
            oldest = next(iter(naive))
            assert memory.pop_oldest(inf) == (oldest, naive.pop(oldest))
    assert [(key, value) for key, _, value in memory.items()] == list(naive.items())
    assert all(memory.get(key) == value for key, value in naive.items())
    assert memory.nbytes < 500_000
