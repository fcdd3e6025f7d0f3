from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.hit_threshold import (
    Basis,
    base_tokens,
    cached_blocks,
    check_threshold,
    filter_groups,
    filter_rows,
    threshold_in_force,
)
from tests.select_service.core.admission.golden import CASES


@pytest.mark.parametrize("text", CASES["invalid_thresholds"], ids=str)
def test_recorded_invalid_thresholds(text: object) -> None:
    value = text
    if isinstance(text, str):
        value = json.loads(text) if text.startswith('"') else float(text)
    with pytest.raises(ValueError, match="cache_hit_threshold"):
        check_threshold(value)


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, 0.5])
def test_valid_thresholds(value: float) -> None:
    assert check_threshold(value) == value


@pytest.mark.parametrize("value", [None, "", [], math.inf, -math.inf, False])
def test_more_invalid_thresholds(value: object) -> None:
    with pytest.raises(ValueError):
        check_threshold(value)


def test_a_loop_ends() -> None:
    assert threshold_in_force(0.9, 0.0, attempt=2, attempts_max=3) == (0.9, "request")
    assert threshold_in_force(0.9, 0.0, attempt=3, attempts_max=3) == (0.0, "loop_guard")
    assert threshold_in_force(None, 0.5, attempt=3, attempts_max=3) == (0.0, "loop_guard")
    assert threshold_in_force(0.0, 0.5, attempt=9, attempts_max=3) == (0.0, "request")


def test_scope_counts_tiers() -> None:
    device, host, disk = np.array([1.0]), np.array([2.0]), np.array([4.0])
    found = {s: cached_blocks(device, host, disk, s)[0] for s in ("gpu", "cpu", "disk", "any")}
    assert found == {"gpu": 1, "cpu": 3, "disk": 7, "any": 7}


def test_the_cacheable_basis_leaves_out_the_last_token() -> None:
    assert base_tokens(512, 16, "prompt") == 512
    assert base_tokens(512, 16, "cacheable") == 496
    assert base_tokens(513, 16, "cacheable") == 512
    assert base_tokens(1, 16, "cacheable") == base_tokens(0, 16, "cacheable") == 0
    assert not filter_rows(np.array([31.0]), 16, 512, 1.0, "cacheable").refused
    assert filter_rows(np.array([31.0]), 16, 512, 1.0, "prompt").refused
    assert filter_rows(np.array([32.0]), 16, 512, 0.0, "cacheable").best_rate == 1.0


@given(st.lists(st.integers(0, 64), min_size=1, max_size=8), st.integers(1, 1024), st.floats(0, 1))
def test_the_filter_is_the_definition(blocks: list[int], isl: int, threshold: float) -> None:
    hits = filter_rows(np.array(blocks, dtype=float), 16, isl, threshold)
    rates = [min(one * 16, isl) / isl for one in blocks]
    assert hits.best_rate == max(rates)
    passing = list(range(len(blocks))) if hits.passing is None else hits.passing.tolist()
    assert passing == [row for row, rate in enumerate(rates) if rate >= threshold]
    assert hits.refused == (not passing)


@given(
    st.lists(st.integers(0, 64), max_size=8),
    st.lists(st.integers(1, 64), max_size=3),
    st.integers(0, 1024),
    st.floats(0, 1) | st.just(0.0),
    st.sampled_from(["prompt", "cacheable"]),
    st.randoms(),
)
def test_few_holders_or_a_column_of_all(
    blocks: list[int],
    strangers: list[int],
    isl: int,
    threshold: float,
    basis: Basis,
    order: random.Random,
) -> None:
    of_rows = blocks + strangers  # who hold some of it and are no candidates
    groups = [
        (number, np.array(order.sample(rows, len(rows))))
        for number in sorted(set(of_rows) - {0}, key=lambda _: order.random())
        if (rows := [row for row, one in enumerate(of_rows) if one == number])
    ]
    column = filter_rows(np.array(blocks, dtype=float), 16, isl, threshold, basis)
    few = filter_groups(groups, len(blocks), 16, isl, threshold, basis)
    assert few[1:] == column[1:]
    assert (few.passing is None) == (column.passing is None)
    if few.passing is not None and column.passing is not None:
        assert few.passing.tolist() == column.passing.tolist()
