"""The cheapest set to lose, against all sets there are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import select_service.core.operations.scale_down as module
from select_service.core.operations.scale_down import cheapest_set, marginals
from tests.effort import examples
from tests.sliced import answer_of

PLACES = 7

tokens = st.one_of(st.just(0.0), st.integers(0, 5).map(float), st.floats(0.0, 1e6))
alone = st.lists(tokens, min_size=1, max_size=PLACES)


def cost_of(those: frozenset[int], loads: list[float], shared: dict[int, float]) -> float:
    """By the definition: what each takes along, and what is shared by nobody else."""
    own = [loads[place] for place in those]
    gone = [
        weight
        for mask, weight in shared.items()
        if {place for place in range(len(loads)) if mask >> place & 1} <= those
    ]
    return math.fsum(own + gone)


@st.composite
def stakes(draw: st.DrawFn) -> tuple[list[float], dict[int, float], list[int], int]:
    loads = draw(alone)
    mask = st.integers(1, (1 << len(loads)) - 1)
    shared = draw(st.dictionaries(mask, tokens, max_size=12))
    firsts = draw(st.sets(st.integers(0, len(loads) - 1), max_size=2))
    return loads, shared, sorted(firsts), draw(st.integers(1, PLACES + 1))


@settings(max_examples=examples(150))
@given(stakes())
def test_no_other_set_of_so_many_is_cheaper(
    case: tuple[list[float], dict[int, float], list[int], int],
) -> None:
    loads, shared, firsts, count = case
    order = answer_of(cheapest_set(loads, shared, firsts, count))
    wanted = min(count, len(loads))
    assert len(set(order)) == len(order) == wanted
    forced = order[: min(count, len(firsts))]
    assert set(forced) <= set(firsts), "who leaves anyway goes first"
    best = min(
        cost_of(frozenset({*forced, *rest}), loads, shared)
        for rest in itertools.combinations(
            sorted(set(range(len(loads))) - set(forced)), wanted - len(forced)
        )
    )
    cost = cost_of(frozenset(order), loads, shared)
    assert cost <= best * (1 + 1e-6) + 1e-6


@settings(max_examples=examples(150))
@given(stakes())
def test_each_costs_what_the_set_costs_more_with_it(
    case: tuple[list[float], dict[int, float], list[int], int],
) -> None:
    loads, shared, firsts, count = case
    order = answer_of(cheapest_set(loads, shared, firsts, count))
    marginal = answer_of(marginals(order, loads, shared))
    sets = [frozenset(order[:number]) for number in range(len(order) + 1)]
    costs = [cost_of(those, loads, shared) for those in sets]
    for number, price in enumerate(marginal):
        assert price == pytest.approx(costs[number + 1] - costs[number], rel=1e-6, abs=1e-3)
        if number >= len(firsts):
            others = [cost_of(sets[number] | {one}, loads, shared) for one in order[number:]]
            assert costs[number + 1] <= min(others) * (1 + 1e-6) + 1e-6, "the cheapest of the set"


def test_two_that_share_little_go_before_one_who_shares_with_everybody() -> None:
    # 0 holds nothing alone, but whoever goes with it takes a hundred along
    loads = [0.0, 1.0, 1.0, 1.0]
    shared = {0b0011: 100.0, 0b0101: 100.0, 0b1001: 100.0}
    assert answer_of(cheapest_set(loads, shared, [], 1)) == [0]
    assert answer_of(cheapest_set(loads, shared, [], 2)) == [1, 2]
    assert answer_of(cheapest_set(loads, shared, [0], 2)) == [0, 1]


def test_where_too_many_sets_would_have_to_be_looked_at_one_by_one_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SETS_MAX", 0)
    shared = {0b0011: 100.0, 0b0101: 100.0, 0b1001: 100.0}
    assert answer_of(cheapest_set([0.0, 1.0, 1.0, 1.0], shared, [], 2)) == [0, 1]


def test_a_large_fleet_that_shares_everything_is_looked_at_so_far_only() -> None:
    places = 200
    shared = {1 << one | 1 << other: 1.0 for one, other in itertools.combinations(range(places), 2)}
    asked = cheapest_set([0.0] * places, shared, [], 64)
    slices = sum(1 for _ in asked)
    assert slices <= 2 * module.SETS_MAX + len(shared) // module.GROUPS_PER_SLICE + 4 * 64
