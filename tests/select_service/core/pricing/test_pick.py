"""Ties and temperature (contract 3.3)."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from select_service.core.pricing.pick import pick


def draws(costs: list[float], temperature: float, count: int = 4000) -> list[float]:
    rng = random.Random(7)
    column = np.array(costs)
    seen = Counter(pick(column, temperature, rng) for _ in range(count))
    return [seen[position] / count for position in range(len(costs))]


def test_cold_takes_the_cheapest() -> None:
    assert draws([4.0, 3.5, 8.0], 0.0) == [0.0, 1.0, 0.0]


def test_exact_ties_are_drawn_uniformly() -> None:
    shares = draws([2.0, 9.0, 2.0, 2.0], 0.0)
    assert shares[1] == 0.0
    assert [shares[0], *shares[2:]] == pytest.approx([1 / 3] * 3, abs=0.03)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 5.0])
def test_warm_follows_the_softmax_of_the_scaled_cost(temperature: float) -> None:
    costs = [4.0, 6.0, 8.0]
    weight = [math.exp(-(cost - 4.0) / (4.0 * temperature)) for cost in costs]
    expected = [one / sum(weight) for one in weight]
    assert draws(costs, temperature) == pytest.approx(expected, abs=0.03)


def test_warm_and_equal_is_uniform() -> None:
    assert draws([5.0, 5.0], 1.0) == pytest.approx([0.5, 0.5], abs=0.03)


def test_the_generator_decides_alone() -> None:
    column = np.zeros(9)
    one = [pick(column, 0.0, random.Random(3)) for _ in range(5)]
    assert len(set(one)) == 1


@pytest.mark.parametrize("costs", [[math.inf], [math.inf, math.inf], [1.0, math.inf]])
def test_warm_survives_infinite_costs(costs: list[float]) -> None:
    assert sum(draws(costs, 1.0, 10)) == pytest.approx(1.0)
