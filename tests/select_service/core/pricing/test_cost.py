"""The cost formula against the worked examples of contract 3.4 and a naive twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger.loads import PackedLoads
from select_service.core.pricing.cost import Size, Terms, TierMatches, preferences, terms_of
from select_service.core.pricing.weights import Weights, weights_in_force
from select_service.types import RouterConfig, RouterConfigOverride


def weights(**changes: float | bool) -> Weights:
    return weights_in_force(RouterConfig(), None)._replace(**changes)  # type: ignore[arg-type]


def groups(column: Any) -> list[tuple[int, Any]]:
    """As the index gives them: slots by how many blocks they have."""
    values = np.array(column)
    return [(int(one), np.flatnonzero(values == one)) for one in np.unique(values) if one]


def priced(
    rows: list[tuple[float, float, float, float, float]],
    isl: int,
    chosen: Weights,
    block_size: int = 16,
    *,
    matched: bool = True,
) -> Terms:
    """Rows are (P, D + N, device, host extension, disk extension)."""
    columns = np.array(rows, dtype=np.float64).T
    nothing = np.zeros(len(rows))
    loads = PackedLoads(columns[0], columns[1], nothing, nothing, 0.0, 0.0, nothing, nothing)
    device, host, disk = map(groups, columns[2:])
    found = TierMatches(device, host, disk) if matched else None
    size = Size(isl, 0, block_size)
    return terms_of(loads, slice(0, len(rows)), size, chosen, found, None, None, 0.0)


def naive_cost(
    row: tuple[float, float, float, float, float],
    least: float,
    isl: int,
    w: Weights,
    bs: int,
) -> float:
    """Contract 3.2, line by line, for one candidate."""
    active, decode, dev, host, disk = row
    cached = math.floor((dev * 1.0 + host * 0.75 + disk * 0.25) * bs + 0.5)
    track = w.track_prefill_tokens
    raw = (active + max(0, isl - cached) + cached) / bs if track else 0.0
    decay = 1.0
    if track and w.overlap_score_credit_decay > 0:
        over = (active - least) / bs / math.ceil(isl / bs)
        decay = 1 / (1 + w.overlap_score_credit_decay * over)
    credit = w.overlap_score_credit * decay * dev + 0.75 * host + 0.25 * disk
    return w.prefill_load_scale * max(0.0, raw - credit) + decode


# (isl, override, rows, expected costs): the numbers of contract 3.4
EXAMPLES = [
    pytest.param(512, {}, [(0, 8, 0, 0, 0)], [40.0], id="1 no overlap"),
    pytest.param(96, {}, [(0, 6, 3, 2, 1)], [7.25], id="2 three tiers"),
    pytest.param(100, {}, [(0, 6, 3, 2, 1)], [7.5], id="3 partial block"),
    pytest.param(100, {"overlap_score_credit": 0.0}, [(0, 6, 3, 2, 1)], [10.5], id="4 credit 0"),
    pytest.param(100, {"overlap_score_credit": 0.5}, [(0, 6, 3, 2, 1)], [9.0], id="4 credit half"),
    pytest.param(100, {"prefill_load_scale": 3.0}, [(0, 6, 3, 2, 1)], [10.5], id="4 scale 3"),
    pytest.param(100, {"overlap_score_weight": 0.0}, [(0, 6, 3, 2, 1)], [6.0], id="4 weight 0"),
    pytest.param(
        100, {"track_prefill_tokens": False}, [(0, 6, 3, 2, 1)], [6.0], id="4 no tracking"
    ),
    pytest.param(60, {}, [(0, 6, 3, 2, 1)], [6.0], id="5 isl below cached"),
    pytest.param(
        128,
        {},
        [(0, 14, 6, 0, 0), (0, 8, 3, 0, 0), (0, 8, 0, 0, 0)],
        [16.0, 13.0, 16.0],
        id="6 overlap against load",
    ),
    pytest.param(
        128,
        {},
        [(0, 14, 6, 0, 0), (32, 10, 3, 0, 0), (16, 9, 0, 0, 0)],
        [16.0, 17.0, 18.0],
        id="7 prefill in flight",
    ),
    pytest.param(128, {}, [(32, 8, 6, 0, 0)], [12.0], id="8 own prompt booked"),
    pytest.param(
        128,
        {"prefill_load_scale": 0.0},
        [(0, 14, 6, 0, 0), (32, 10, 3, 0, 0), (16, 9, 0, 0, 0)],
        [14.0, 10.0, 9.0],
        id="10 decode only",
    ),
    pytest.param(64, {}, [(0, 4, 2, 0, 0), (0, 4, 1, 3, 0)], [6.0, 4.75], id="11 ranks and tiers"),
]


@pytest.mark.parametrize(("isl", "override", "rows", "expected"), EXAMPLES)
def test_worked_examples(
    isl: int,
    override: dict[str, float],
    rows: list[tuple[float, float, float, float, float]],
    expected: list[float],
) -> None:
    chosen = weights_in_force(RouterConfig(), RouterConfigOverride(**override))  # type: ignore[arg-type]
    assert priced(rows, isl, chosen).cost.tolist() == expected


def test_worked_example_13_decay() -> None:
    config = RouterConfig(
        overlap_score_credit=0.5, overlap_score_credit_decay=1.0, prefill_load_scale=2.0
    )
    chosen = weights_in_force(config, None)
    rows = [(64.0, 4.0, 3.0, 1.0, 0.0), (32.0, 4.0, 0.0, 0.0, 0.0)]
    assert priced(rows, 64, chosen).cost.tolist() == [16.5, 16.0]


@pytest.mark.parametrize(
    ("preferred", "expected"),
    [({"b": 1.0}, 3.268450414057098), ({"a": -1.0, "b": 5.0}, 2.576883825392521)],
)
def test_worked_example_12_preferred_taints(preferred: dict[str, float], expected: float) -> None:
    assert 7.0 * preferences(preferred, [frozenset("ab")])[0] == expected


def test_the_old_name_of_the_scale_wins_and_zero_takes_the_credit_along() -> None:
    # asked of the reference: weight 2 beside scale 3 prices with 2
    both = RouterConfigOverride(overlap_score_weight=2.0, prefill_load_scale=3.0)
    assert weights_in_force(RouterConfig(), both).prefill_load_scale == 2.0
    zero = RouterConfigOverride(overlap_score_weight=0.0)
    assert weights_in_force(RouterConfig(), zero).overlap_score_credit == 0.0


row_values = st.tuples(
    st.integers(0, 5000),
    st.integers(0, 500),
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 64),
)


@given(
    rows=st.lists(row_values, min_size=1, max_size=20),
    isl=st.integers(1, 3000),
    credit=st.sampled_from([0.0, 0.5, 1.0]),
    decay=st.sampled_from([0.0, 0.7]),
    scale=st.sampled_from([0.0, 1.0, 2.5]),
    track=st.booleans(),
    block_size=st.sampled_from([1, 16, 48]),
)
def test_columns_price_like_the_formula_read_aloud(
    rows: list[tuple[int, int, int, int, int]],
    isl: int,
    credit: float,
    decay: float,
    scale: float,
    track: bool,
    block_size: int,
) -> None:
    chosen = weights(
        overlap_score_credit=credit,
        overlap_score_credit_decay=decay,
        prefill_load_scale=scale,
        track_prefill_tokens=track,
    )
    given_rows: Any = [tuple(map(float, row)) for row in rows]
    least = min(row[0] for row in rows)
    expected = [naive_cost(row, least, isl, chosen, block_size) for row in rows]
    found = priced(given_rows, isl, chosen, block_size).cost
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    bare = priced(given_rows, isl, chosen, block_size, matched=False).cost
    empty = [naive_cost((row[0], row[1], 0, 0, 0), least, isl, chosen, block_size) for row in rows]
    assert bare.tolist() == pytest.approx(empty, rel=1e-12)


HUGE = 1.7e308
EXTREMES = {
    "overlap_score_credit": -HUGE,
    "overlap_score_credit_decay": HUGE,
    "prefill_load_scale": HUGE,
    "host_cache_hit_weight": HUGE,
    "disk_cache_hit_weight": HUGE,
}


@pytest.mark.filterwarnings("error")
def test_huge_weights_overflow_nothing() -> None:
    row = (2.0**63, 1.0, 2.0**31, 2.0**31, 2.0**31)
    for sign in (1.0, -1.0):
        changes: dict[str, Any] = {name: sign * value for name, value in EXTREMES.items()}
        config = RouterConfig(**changes)
        chosen = weights_in_force(config, RouterConfigOverride(router_temperature=HUGE))
        prices = priced([row, (0.0,) * 5], 2**63, chosen).cost
        assert np.isfinite(prices).all()


def test_a_huge_weight_of_a_request_still_tells_ranks_apart() -> None:
    chosen = weights_in_force(RouterConfig(), RouterConfigOverride(prefill_load_scale=HUGE))
    prices = priced([(32.0, 0, 0, 0, 0), (16.0, 0, 0, 0, 0)], 64, chosen).cost
    assert prices[1] < prices[0]


def test_what_taints_make_of_a_cost_is_reckoned_once_for_each_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 1,280 ranks one after another it took 2 ms of the loop."""
    reckoned: list[float] = []
    tanh = math.tanh

    def noted(weight: float) -> float:
        reckoned.append(weight)
        return tanh(weight)

    monkeypatch.setattr(math, "tanh", noted)
    taints = [frozenset({"a"}), frozenset({"a", "b"}), frozenset[str]()] * 100
    factors = preferences({"a": 1.0, "b": 0.5, "c": 9.0}, taints)
    assert sorted(reckoned) == [0.0, 1.0, 1.5]
    assert factors.tolist() == [math.exp(-tanh(weight)) for weight in (1.0, 1.5, 0.0)] * 100
