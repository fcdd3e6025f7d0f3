"""The set of block values, compiled and plain, against Python's own."""

from __future__ import annotations

import random
import struct
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger import plain_value_set
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize("twin", twins("select_service.core._value_set", plain_value_set))

few = st.integers(0, 40) | st.sampled_from([2**64 - 1, 2**63, 2**32])
runs = st.lists(few, max_size=30)
steps = st.lists(st.tuples(st.sampled_from(["enter", "leave", "discard"]), runs), max_size=40)


def packed(values: list[int]) -> bytes:
    return struct.pack(f"={len(values)}Q", *values)


def follow(real: Any, naive: set[int], verb: str, values: list[int]) -> None:
    if verb == "enter":
        fresh = len(set(values) - naive)
        assert real.enter(packed(values)) == fresh
        naive.update(values)
    elif verb == "leave":
        real.leave(packed(values))
        naive.difference_update(values)
    else:
        for value in values:
            real.discard(value)
            naive.discard(value)
    assert len(real) == len(naive)


def take_any(held: list[int], rng: random.Random) -> int:
    at = rng.randrange(len(held))
    held[at], held[-1] = held[-1], held[at]
    return held.pop()


@EITHER
@given(history=steps)
def test_any_history(twin: ModuleType, history: list[tuple[str, list[int]]]) -> None:
    real, naive = twin.ValueSet(), set[int]()
    for verb, values in history:
        follow(real, naive, verb, values)
        assert sorted(real) == sorted(naive)
        assert all((value in real) == (value in naive) for value in range(41))


@EITHER
@pytest.mark.parametrize("stride", [1, 1 << 32, 0x9E3779B97F4A7C15])
def test_it_grows_and_shrinks_and_forgets_nothing(twin: ModuleType, stride: int) -> None:
    """Through every move between tables, with values that come and go meanwhile."""
    rng = random.Random(stride)
    real, naive, number = twin.ValueSet(), set[int](), 0
    held: list[int] = []  # the same as `naive`, to choose from
    for tide in (1, -1, 1, -1):
        for _ in range(300):
            run = [(number + step) * stride % 2**64 for step in range(rng.randrange(200))]
            number += len(run)
            some_held = rng.randrange(20 if tide > 0 else 200)
            gone = [take_any(held, rng) for _ in range(min(len(held), some_held))]
            much, little = (run, gone) if tide > 0 else (run[:20], gone)
            held += much
            follow(real, naive, "enter", much)
            follow(real, naive, "leave", little)
            some = (much + little)[:50]
            assert [value in real for value in some] == [value in naive for value in some]
        assert sorted(real) == sorted(naive)


@EITHER
def test_nothing_is_nothing(twin: ModuleType) -> None:
    real = twin.ValueSet()
    assert real.enter(b"") == 0
    assert list(real) == []
