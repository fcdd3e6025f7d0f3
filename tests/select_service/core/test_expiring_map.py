"""What is remembered for a while, compiled and plain, against a list."""

from __future__ import annotations

import random
import sys
from math import inf
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core import plain_expiring_map
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize(
    "twin", twins("select_service.core._expiring_map", plain_expiring_map)
)

texts = st.sampled_from(["", "a", "b", "é", "\ud800", "a\0b", "x" * 70]) | st.text(max_size=2)
values = st.binary(max_size=9) | st.sampled_from([300, 70_000]).map(bytes)
puts = st.tuples(st.just("put"), texts, values)
others = st.tuples(st.sampled_from(["discard", "pop"]), texts, values)


@EITHER
@given(steps=st.lists(puts | others, max_size=60))
def test_it_is_a_list_in_the_order_of_the_last_words(twin: ModuleType, steps: list[Any]) -> None:
    real: Any = twin.ExpiringMap()
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


@EITHER
def test_many_come_and_go_and_nothing_is_left(twin: ModuleType) -> None:
    memory: Any = twin.ExpiringMap()
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


@EITHER
@given(seed=st.integers(0, 99))
@settings(max_examples=8)
def test_holes_do_not_pile_up(twin: ModuleType, seed: int) -> None:
    """Some are said anew all the time, some leave early, and some stay: as when replicas resync."""
    memory: Any = twin.ExpiringMap()
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


@EITHER
def test_a_text_and_its_bytes_are_two(twin: ModuleType) -> None:
    memory: Any = twin.ExpiringMap()
    memory.put("a", 1.0)
    assert b"a" not in memory


def test_the_compiled_one_makes_no_object_per_entry() -> None:
    compiled = pytest.importorskip("select_service.core._expiring_map")
    memory = compiled.ExpiringMap()
    before = sys.getallocatedblocks()
    for number in range(1000):
        memory.put(str(number), 1.0)
    assert sys.getallocatedblocks() - before < 100
