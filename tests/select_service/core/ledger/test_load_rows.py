"""Rows of the load columns: the kernel and its twin write what plain lists of numbers say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger import plain_load_rows
from select_service.core.ledger.loads import unpacked
from tests.indexer.kernels import twins

ROWS = 3
TWINS = twins("select_service.core._ledger", plain_load_rows)

TOKENS = st.integers(0, 2**66)  # sums of two prompts of 2^64-1 tokens are written here, too
COUNT = st.integers(0, 2**40) | st.integers(0, 3)
SLOT = st.integers(0, ROWS - 1)
TIME = st.floats(0.0, 1e9)
STEP_TOKENS = [0.0, 8192.0, 1000.0]  # of each row
SEATS = [2**62, 2, 1]
WAIT = [7.0, 3.0, 1000.0]
STEPS = st.lists(
    st.tuples(st.just("book"), SLOT, TOKENS, TOKENS, COUNT, COUNT, COUNT, TIME)
    | st.tuples(st.just("complete"), SLOT, TOKENS, TOKENS | st.integers(0, 20_000), TIME)
    | st.tuples(st.just("lengthen"), SLOT, COUNT, COUNT)
    | st.tuples(st.just("give_up"), SLOT, TOKENS, TOKENS | st.just(0), st.integers(0, 3))
    | st.tuples(st.just("free"), SLOT, COUNT, COUNT, COUNT),
    max_size=12,
)


def columns() -> list[Any]:
    kinds = [np.float64] * 4 + [np.int64] * 2 + [np.float64] * 2
    zeros = [np.zeros(ROWS, dtype=kind) for kind in kinds]
    return [*zeros, np.array(STEP_TOKENS), np.array(SEATS), np.array(WAIT)]


def ahead_of(left: int, head: int, step: float) -> float:
    """Whole steps of the prompt whose turn it is, one at least; no more than there is."""
    steps = max(1, math.ceil(head / step)) if step else 0
    return min(float(left), steps * step)


@pytest.mark.parametrize("twin", TWINS)
@given(steps=STEPS)
def test_every_step_writes_its_row_and_no_other(twin: Any, steps: list[Any]) -> None:
    made = columns()
    rows = twin.LoadRows(*made)
    expected = [column.tolist() for column in made]
    prefill, decode, churn, context, requests, computing, updated_at, ahead, *_ = expected
    for name, slot, *numbers in steps:
        getattr(rows, name)(slot, *numbers)
        if name == "book":
            was_empty = not prefill[slot]
            prefill[slot], tokens, requests[slot], decode[slot], blocks, now = numbers
            if was_empty:
                updated_at[slot], ahead[slot] = now, float(prefill[slot])
            churn[slot] += float(tokens)
            computing[slot] += 1
            context[slot] += float(blocks)
            context[slot] += WAIT[slot] if requests[slot] >= SEATS[slot] else 0.0
        elif name == "complete":
            prefill[slot], head, updated_at[slot] = numbers
            ahead[slot] = ahead_of(numbers[0], head, STEP_TOKENS[slot])
            computing[slot] -= 1
        elif name == "lengthen":
            decode[slot], blocks = numbers
            context[slot] += float(blocks)
        elif name == "give_up":
            prefill[slot], begun, prompts = numbers
            ahead[slot] = min(max(0.0, ahead[slot] - float(begun)), float(prefill[slot]))
            computing[slot] -= prompts
        else:
            requests[slot], decode[slot], blocks = numbers
            context[slot] -= float(blocks)
            context[slot] -= WAIT[slot] if requests[slot] + 1 >= SEATS[slot] else 0.0
    prefill[:] = map(float, prefill)
    assert [column.tolist() for column in made] == expected


@pytest.mark.parametrize("twin", TWINS)
def test_packed_rows_are_the_loads_of_a_decision(twin: Any) -> None:
    made = columns()
    rows = twin.LoadRows(*made)
    rows.book(1, 700, 700, 1, 44, 45, 3.0)
    rows.book(2, 9000, 9000, 1, 563, 564, 4.0)
    prefill, decode, churn, context, _, _, updated_at, ahead, *_ = [one.tolist() for one in made]
    plain = unpacked(rows.pack(2, math.inf, None))
    for found in (plain, unpacked(rows.pack(2, math.inf, 50.5))):
        assert [one.tolist() for one in found[:4]] == [prefill, decode, churn, context]
        assert found[4:6] == (2.0, math.inf)
    assert (plain.queue_updated_at, plain.ahead, plain.pace, plain.requests) == (
        None,
        None,
        0.0,
        None,
    )
    assert found.queue_updated_at is not None
    assert found.ahead is not None
    assert (found.queue_updated_at.tolist(), found.ahead.tolist(), found.pace) == (
        updated_at,
        ahead,
        50.5,
    )
    none = twin.LoadRows(*[column[:0] for column in columns()])
    assert unpacked(none.pack(0, 0.0, None)).prefilling == 0


@pytest.mark.parametrize("twin", TWINS)
def test_there_is_nothing_beyond_the_last_row(twin: Any) -> None:
    rows = twin.LoadRows(*columns())
    with pytest.raises(IndexError):
        rows.book(ROWS, 1, 1, 1, 1, 1, 1.0)
    with pytest.raises(IndexError):
        rows.complete(ROWS, 1, 1, 1.0)
    with pytest.raises(IndexError):
        rows.lengthen(ROWS, 1, 1)
    with pytest.raises(IndexError):
        rows.give_up(ROWS, 1, 1, 1)
    with pytest.raises(IndexError):
        rows.free(ROWS, 1, 1, 1)


def test_columns_of_several_lengths_are_no_columns() -> None:
    compiled = pytest.importorskip("select_service.core._ledger")
    for longer in (3, 6, 7, 8, 9, 10):
        short = columns()
        short[longer] = np.zeros(ROWS + 1, dtype=short[longer].dtype)
        with pytest.raises(ValueError, match="one length"):
            compiled.LoadRows(*short)
