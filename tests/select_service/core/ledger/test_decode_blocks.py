"""Sums of fractions: exact, rounded half up, and gone when everything is gone."""

from __future__ import annotations

from math import fsum
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger.decode_blocks import DecodeBlocks


@pytest.fixture
def sums() -> DecodeBlocks:
    sums = DecodeBlocks()
    sums.ensure(2)
    return sums


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
    sums: DecodeBlocks, weights: list[tuple[int, float]], count: int
) -> None:
    for blocks, fraction in weights:
        sums.add(1, blocks, fraction)
    assert sums.count(1) == count
    assert sums.count(0) == 0
    for blocks, fraction in weights:
        sums.add(1, -blocks, fraction)
    assert sums.count(1) == 0


@given(st.lists(st.floats(0, 1), max_size=30), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_nothing_is_left(fractions: list[float], random: Random) -> None:
    sums = DecodeBlocks()
    sums.ensure(1)
    for fraction in fractions:
        sums.add(0, 1, fraction)
    total = fsum(fractions)
    assert sums.count(0) == int(total) + (total % 1 >= 0.5)
    random.shuffle(fractions)
    for fraction in fractions:
        sums.add(0, -1, fraction)
    sums.add(0, 1, 5e-324)
    assert sums.count(0) == 0


def test_moving_to_another_fraction_is_noted(sums: DecodeBlocks) -> None:
    faded: dict[int, float] = {}
    sums.add(0, 8, 1.0)
    for fraction, count in ((0.5, 4), (0.5, 4), (0.25, 2), (1.0, 8)):
        sums.refade(faded, 0, 8, fraction)
        assert sums.count(0) == count
        assert faded.get(0, 1.0) == fraction
    assert not faded
