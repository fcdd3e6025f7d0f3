"""What an engine is worth, and the price by which the past would have kept a promise."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest

from select_service.planner.core.marginal_value import (
    COUNTS_MOST,
    PRICES,
    TRIED_LATE,
    Table,
    price_of,
    table_of,
)
from select_service.planner.core.similar_past import Past, PastTrial, tried
from tests.select_service.planner.core.test_similar_past import rising


def needed(rate: float) -> int:
    return math.ceil(rate / 13.0)


def late(rate: float, engines: int) -> float:
    return float(needed(rate) > engines)


def table(trial: PastTrial, gpus: int = 1) -> Table:
    return table_of(trial.grid, needed, late, gpus)


TRIAL = tried(Past(rising(8), 10.0, 65.0))


def naive_best(found: Table, probabilities: list[float], price: float) -> int:
    costs = {}
    for count, lates in zip(found.counts, found.late, strict=True):
        share = sum(one * left for one, left in zip(probabilities, lates, strict=True))
        costs[count] = share + price * found.gpus * count
    return min(costs, key=costs.__getitem__)


@pytest.mark.parametrize("price", [0.001, 0.1, 1.0, 8.0])
def test_as_many_engines_as_save_more_than_they_cost(price: float) -> None:
    found = table(TRIAL)
    assert found.counts == (0, 1, 2, 3, 4)[: needed(float(TRIAL.grid[-1])) + 1]
    for probabilities in TRIAL.predicted[::37]:
        assert found.best(probabilities, price) == naive_best(found, probabilities.tolist(), price)


def test_an_engine_of_more_gpus_has_to_save_more() -> None:
    one, eight = table(TRIAL), table(TRIAL, gpus=8)
    for probabilities in TRIAL.predicted[::37]:
        assert eight.best(probabilities, 0.1) == one.best(probabilities, 0.8)


def test_who_has_started_stays_a_while() -> None:
    grid = np.array([0.0, 10.0, 20.0])
    found = table_of(grid, needed, late, 1)
    probabilities = np.array([0.0, 0.97, 0.03])  # 0.6 requests/s are late with one engine
    assert found.next(probabilities, 1.0, 1) == 1
    assert found.next(probabilities, 1.0, 2) == 2
    assert found.next(np.array([0.0, 1.0, 0.0]), 1.0, 2) == 1
    assert found.next(probabilities, 0.5, 1) == 2


def test_the_price_is_the_dearest_that_keeps_the_promise() -> None:
    found = [table(TRIAL)]

    def share(price: float) -> float:
        return float(found[0].late_of(TRIAL, price).sum() / TRIAL.came.sum())

    price = price_of(TRIAL, found, 0.01)
    assert price is not None
    assert share(price) <= 0.01 * TRIED_LATE
    dearer = [one for one in PRICES if one > price]
    assert share(dearer[-1]) > 0.01 * TRIED_LATE
    assert (price_of(TRIAL, found, 0.05) or 0.0) >= price, "a weaker promise is cheaper"


def test_slow_rises_need_nobody_to_stand_ready_and_sudden_ones_cannot_be_foreseen() -> None:
    slow = tried(Past(rising(8, rise=60), 10.0, 65.0))
    fast = tried(Past(rising(8, rise=12), 10.0, 65.0))
    dear, cheap = price_of(slow, [table(slow)], 0.02), price_of(fast, [table(fast)], 0.02)
    assert dear is not None
    assert cheap is None or dear > cheap
    rng = random.Random(1)
    noise = [10.0 ** rng.uniform(1, 3) for _ in range(400)]
    nothing = tried(Past(noise, 10.0, 65.0))
    empty = PastTrial(nothing.grid, nothing.predicted[:0], nothing.came[:0])
    assert price_of(empty, [table(nothing)], 0.01) is None


def test_large_fleets_are_compared_at_some_counts_only() -> None:
    grid = np.linspace(0.0, 12_000.0, 64)
    found = table_of(grid, needed, late, 1)
    assert len(found.counts) == COUNTS_MOST
    assert found.counts[0] == 0
    assert found.counts[-1] == needed(12_000.0)
    assert (np.diff(found.late, axis=0) <= 0).all(), "more engines are never later"


@pytest.mark.parametrize("price", [0.001, 0.1, 1.0])
def test_it_is_said_what_more_engines_would_be_worth(price: float) -> None:
    """Whatever is predicted: what is asked for exceeds what is saved, or they would be there."""
    found = table(TRIAL)
    for probabilities in TRIAL.predicted[::37]:
        count = found.best(probabilities, price)
        text = found.why(probabilities, price, count)
        if count == found.counts[-1]:
            assert text == "more were of no use at any rate that came"
            continue
        said = re.fullmatch(
            r"(\d+) would save (\S+) requests/s more from being late, and have to be worth (\S+)",
            text,
        )
        assert said is not None
        more, saved, asked = int(said[1]), float(said[2]), float(said[3])
        assert more > count
        assert saved <= 1.1 * asked  # two digits
        assert asked == pytest.approx(price * (more - count), rel=0.06)
    sure = np.zeros(len(TRIAL.grid))
    sure[0] = 1.0
    assert "stays while worth 10% of its price" in found.why(sure, 1.0, 2)
