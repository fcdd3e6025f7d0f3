"""Pricing, compiled and plain, against the whole formula: the same price to the last bit."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.books.loads import ranks_in, unpacked
from select_service.core.pricing import plain_pricer
from select_service.core.pricing.picking import pick
from select_service.core.pricing.projection import Overlap, Projection
from select_service.core.pricing.scoring import costs
from select_service.core.pricing.weights import Weights
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize("twin", twins("select_service.core._pricer", plain_pricer))
ROWS = 12
MANY = 72  # more than the plain twin takes one by one
counts = st.integers(0, 5) | st.integers(0, 2**40)
blocks = st.integers(0, 6)
columns = st.lists(counts, min_size=ROWS, max_size=ROWS) | counts.map(lambda one: [one] * ROWS)
weights = st.floats(-2.0, 3.0) | st.just(1.0)
factors = st.sampled_from([1.0, 0.0, 0.3]) | st.floats(0.0, 1.0)


def groups(of_rows: list[int]) -> list[tuple[int, Any]] | None:
    """As the index gives them: those with blocks, disjoint, one group for each number."""
    found = [
        (number, np.array([at for at, one in enumerate(of_rows) if one == number]))
        for number in sorted(set(of_rows) - {0})
    ]
    return found or None


@EITHER
@pytest.mark.parametrize("repeats", [1, MANY // ROWS])
@given(
    prefill=columns,
    decode=columns,
    device=st.lists(blocks, min_size=ROWS, max_size=ROWS) | st.just([0] * ROWS),
    shared=st.lists(blocks, min_size=ROWS, max_size=ROWS) | st.just([0] * ROWS),
    isl=st.integers(1, 200),
    block_size=st.sampled_from([1, 3, 16, 17]),
    rows=st.integers(1, ROWS),
    chosen_ones=st.none() | st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True),
    scale=weights,
    credit=weights,
    track=st.booleans(),
    seed=st.integers(0, 3),
    trust=st.none() | st.lists(factors, min_size=ROWS, max_size=ROWS),
    churn=columns,
    ours=st.none()
    | st.tuples(
        *(weights, weights, st.floats(0.0, 1.0), st.booleans(), weights),
        st.just(0.0) | st.floats(0.0, 1e5) | st.sampled_from([1e-300, 1e200]),
    ),
    context=columns,
    heard=st.lists(st.floats(0.0, 20.0) | st.just(1e15), min_size=ROWS, max_size=ROWS),
    ahead=columns,
    now=st.sampled_from([15.0, 0.0, 1e15]) | st.floats(0.0, 1e12),
)
def test_like_the_columns(
    twin: ModuleType,
    repeats: int,
    prefill: list[int],
    decode: list[int],
    device: list[int],
    shared: list[int],
    isl: int,
    block_size: int,
    rows: int,
    chosen_ones: list[int] | None,
    scale: float,
    credit: float,
    track: bool,
    seed: int,
    trust: list[float] | None,
    churn: list[int],
    ours: tuple[float, float, float, bool, float, float] | None,
    context: list[int],
    heard: list[float],
    ahead: list[int],
    now: float,
) -> None:
    prefill, decode, churn = prefill * repeats, decode * repeats, churn * repeats
    device, shared = device * repeats, shared * repeats
    rows += ROWS * (repeats - 1)
    booked, held = np.array(prefill, dtype=np.float64), np.array(decode, dtype=np.float64)
    lately = np.array(churn, dtype=np.float64)
    attended = np.array(context * repeats, dtype=np.float64)
    since, queued = np.array(heard * repeats), np.array(ahead * repeats, dtype=np.float64)
    pace = 0.0 if ours is None else ours[-1]  # some were heard of later than now
    worked = [
        min(max(0.0, (now - then) * pace), most) for then, most in zip(since, queued, strict=True)
    ]
    which = np.arange(rows)
    if chosen_ones is not None:  # some of them, in any order
        which = np.array([one + ROWS * part for part in range(repeats) for one in chosen_ones])
    matched = np.array(device, dtype=np.float64)[which]
    none = np.zeros(len(which))
    overlap = Overlap(matched, none, none) if any(device) else None
    after = held[which] + 6 - np.array(shared)[which]
    believed = None if trust is None else np.array(trust * repeats)
    cached = matched * block_size
    if believed is not None:
        cached = np.floor(cached * believed[which])
    projection = Projection(
        *(booked[which], after, overlap, overlap, cached, False, isl, block_size),
        trust=None if believed is None or overlap is None else believed[which],
        booked=np.array(shared, dtype=np.float64)[which] if any(shared) else None,
        churn=lately[which],
        context=attended[which] + 6,
        worked=np.array(worked)[which],
    )
    chosen = Weights(credit, 0.0, scale, 0.75, 0.25, 0.0, track, *(ours or ()))
    if ours is not None and chosen.is_kv_cost:
        ours = None
    prices = costs(projection, chosen)
    pricer = twin.Pricer(booked, held, lately, attended, since, queued)
    row, price, left = pricer.cheapest(
        *(rows if chosen_ones is None else which, isl, block_size, 6, scale, credit, track),
        *(groups(device), groups(shared), random.Random(seed).random, believed, ours, now),
    )
    at = pick(prices, 0.0, random.Random(seed))
    assert row == which[at]
    assert price == prices[at]
    assert left == int(after[at])
    if any(device):
        assert pricer.matched_at(row) == device[row]


@EITHER
@given(
    loads=st.lists(
        st.tuples(counts | st.integers(0, 2**62), counts | st.integers(0, 2**50)),
        min_size=1,
        max_size=ROWS,
    ),
    isl=st.integers(1, 200),
    block_size=st.sampled_from([1, 16, 64]),
    seed=st.integers(0, 3),
)
def test_unmatched_prompts_of_whole_weights_like_the_formula(
    twin: ModuleType, loads: list[tuple[int, int]], isl: int, block_size: int, seed: int
) -> None:
    """The plain twin compares whole numbers of tokens there, as long as doubles hold them."""
    booked, held = (np.array(one, dtype=np.float64) for one in zip(*loads, strict=True))
    prices = (booked + isl) / block_size + (held + 6)
    pricer = twin.Pricer(booked, held, *np.zeros((4, len(loads))))
    row, price, _ = pricer.cheapest(
        *(len(loads), isl, block_size, 6, 1.0, 1.0, True),
        *(None, None, random.Random(seed).random, None, None, 0.0),
    )
    assert row == pick(prices, 0.0, random.Random(seed))
    assert price == prices[row]


@EITHER
def test_it_does_not_read_beyond_its_columns(twin: ModuleType) -> None:
    pricer = twin.Pricer(*np.zeros((6, 4)))
    rest = (1, 1, 0, 1.0, 1.0, True)
    for rows in (0, 5, -1):
        with pytest.raises(ValueError, match="rows"):
            pricer.cheapest(rows, *rest, None, None, random.random)
    with pytest.raises(ValueError, match="rows"):
        pricer.cheapest(np.array([], dtype=np.int64), *rest, None, None, random.random)
    for slot in (-1, 4):
        with pytest.raises(IndexError):
            pricer.cheapest(4, *rest, [(1, np.array([slot]))], None, random.random)
        with pytest.raises(IndexError):
            pricer.cheapest(np.array([0, slot]), *rest, None, None, random.random)
    with pytest.raises(IndexError):
        pricer.matched_at(4)
    with pytest.raises(ValueError, match="rows"):
        pricer.cheapest(4, *rest, [(1, np.array([0]))], None, random.random, np.ones(3))
    for shorter in range(1, 6):
        with pytest.raises(ValueError, match="length"):
            twin.Pricer(*(np.zeros(3 if at == shorter else 4) for at in range(6)))


@EITHER
def test_factors_of_one_change_nothing(twin: ModuleType) -> None:
    rng = random.Random(5)
    for _ in range(200):
        booked = np.array([float(rng.randrange(5000)) for _ in range(ROWS)])
        held = np.array([float(rng.randrange(50)) for _ in range(ROWS)])
        device = groups([rng.randrange(9) for _ in range(ROWS)])
        question = (ROWS, rng.randrange(1, 300), 16, 7, 1.0, 1.0, True, device, None)
        pricer = twin.Pricer(booked, held, held, held, held, held)
        drawn = [
            pricer.cheapest(*question, random.Random(1).random, *more)
            for more in ((), (None,), (np.ones(ROWS),))
        ]
        assert drawn[0] == drawn[1] == drawn[2]


@EITHER
def test_a_draw_of_almost_one_is_the_last_of_equals(twin: ModuleType) -> None:
    pricer = twin.Pricer(*np.zeros((6, 3)))
    drawn = pricer.cheapest(3, 1, 1, 0, 1.0, 1.0, True, None, None, lambda: 1.0 - 2**-53)
    assert drawn[0] == 2


@EITHER
@given(
    ranks=st.lists(st.tuples(counts, counts, st.floats(0, 100), st.floats(0, 3)), max_size=ROWS),
    room=st.floats(1, 1e6),
)
def test_how_full_ranks_are(
    twin: ModuleType,
    ranks: list[tuple[int, int, float, float]],
    room: float,
) -> None:
    columns = np.array(ranks, dtype=np.float64).reshape(len(ranks), 4).T.copy()
    prefill, decode, block_tokens, floor = columns
    lanes = [0.0] * 8
    for row, (booked, blocks, tokens, least) in enumerate(columns.T.tolist()):
        lanes[row % 8] += max(booked, blocks * tokens, least * room)
    total = 0.0
    for lane in lanes:  # not `sum`, which is exact in later Pythons
        total += lane
    fill = twin.Fill(prefill, decode, block_tokens, floor)
    assert fill.total(room) == total
    prefill[:] = 0.0  # it reads what is there, not what was
    decode[:] = 0.0
    assert fill.total(0.0) == 0.0


@EITHER
def test_columns_of_one_length(twin: ModuleType) -> None:
    some, more = np.zeros(3), np.zeros(4)
    for longer in range(4):
        columns = [more if longer == at else some for at in range(4)]
        with pytest.raises(ValueError, match="length"):
            twin.Fill(*columns)


@EITHER
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_columns_are_copied_as_they_are_now(twin: ModuleType, rows: int) -> None:
    prefill, decode = np.arange(rows, dtype=np.float64), np.full(rows, 0.5)
    churn, context = np.full(rows, 7.0), np.full(rows, 9.0)
    columns = prefill, decode, churn, context
    heard, ahead = np.full(rows, 1.25), np.full(rows, 3.0)
    pricer = twin.Pricer(*columns, heard, ahead)
    before = pricer.packed(3, 7.5)
    assert ranks_in(before) == rows
    whole = b"".join(one.tobytes() for one in columns)
    assert before == whole + np.array([3.0, 7.5]).tobytes()
    told = unpacked(before)
    assert [one.tolist() for one in told[:4]] == [one.tolist() for one in columns]
    assert told[4:] == (3.0, 7.5, None, None, 0.0)
    paced = pricer.packed(3, 7.5, 0.5)
    assert ranks_in(paced) == rows
    assert paced == before + heard.tobytes() + ahead.tobytes() + np.array([0.5]).tobytes()
    told = unpacked(paced)
    assert told.heard is not None
    assert told.ahead is not None
    paced_columns = [*told[:4], told.heard, told.ahead]
    assert [one.tolist() for one in paced_columns] == [
        one.tolist() for one in (*columns, heard, ahead)
    ]
    assert (*told[4:6], told.pace) == (3.0, 7.5, 0.5)
    prefill += 1.0
    assert pricer.packed(3, 7.5)[: 8 * rows] == prefill.tobytes()
    assert rows == 0 or before != pricer.packed(3, 7.5)
    assert pricer.packed(4, 7.5) != pricer.packed(3, 7.5)


def test_the_length_says_what_is_told() -> None:
    told = {16 + 32 * ranks: ranks for ranks in range(40)}
    paced = {24 + 48 * ranks: ranks for ranks in range(40)}
    assert not told.keys() & paced.keys()
    for length in range(1200):
        ranks = told.get(length, paced.get(length))
        if ranks is None:
            with pytest.raises(ValueError, match="loads of"):
                ranks_in(bytes(length))
        else:
            assert ranks_in(bytes(length)) == ranks
            assert (unpacked(bytes(length)).heard is None) == (length in told)
