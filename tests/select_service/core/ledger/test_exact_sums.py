"""Sums of fractions: exact, rounded half up, and gone when everything is gone."""

from __future__ import annotations

from math import fsum
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger import plain_active_blocks
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize("form", twins("select_service.core._ledger", plain_active_blocks))


def empty(form: ModuleType) -> Any:
    blocks = form.BlockCounts()
    blocks.ensure(2)
    return blocks


@EITHER
@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ([], 0),
        ([(9, 1.0)], 9),
        ([(9, 0.5)], 5),  # contract 4.3: round(4.5) = 5
        ([(9, 0.25)], 2),
        ([(5, 0.3)], 2),  # 1.5 to people, a trifle less as a sum of doubles
        ([(2, 1.0), (3, 0.5), (3, 0.1)], 4),  # contract 4.3: 3.8
        ([(1, 0.49999999999999994)], 0),  # + 0.5 would be 1.0
        ([(1, 5e-324), (3, 1.0)], 3),
        ([(2**40, 1.0), (1, 0.5)], 2**40 + 1),
    ],
)
def test_counts_round_half_up(
    form: ModuleType, weights: list[tuple[int, float]], count: int
) -> None:
    blocks = empty(form)
    for number, weight in weights:
        blocks.add(1, number, weight)
    assert blocks.count(1) == count
    assert blocks.count(0) == 0
    for number, weight in weights:
        blocks.add(1, -number, weight)
    assert blocks.count(1) == 0


@EITHER
@given(fractions=st.lists(st.floats(0, 1), max_size=30), random=st.randoms(use_true_random=False))
def test_order_does_not_matter_and_nothing_is_left(
    form: ModuleType, fractions: list[float], random: Random
) -> None:
    blocks = empty(form)
    for fraction in fractions:
        blocks.add(0, 1, fraction)
    total = fsum(fractions)
    assert blocks.count(0) == int(total) + (total % 1 >= 0.5)
    random.shuffle(fractions)
    for fraction in fractions:
        blocks.add(0, -1, fraction)
    blocks.add(0, 1, 5e-324)
    assert blocks.count(0) == 0
