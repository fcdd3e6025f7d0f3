"""Rows of the load columns: the kernel and its twin write what plain lists of numbers say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.compiled import usable
from select_service.core.books import plain_load_rows

ROWS = 3
KINDS: list[Any] = [plain_load_rows.LoadRows]
if usable("select_service.core._speed", 15):
    from select_service.core._speed import LoadRows

    KINDS.append(LoadRows)

TOKENS = st.integers(0, 2**66)  # sums of two prompts of 2^64-1 tokens are written here, too
COUNT = st.integers(0, 2**40)
SLOT = st.integers(0, ROWS - 1)
STEPS = st.lists(
    st.tuples(st.just("book"), SLOT, TOKENS, TOKENS, COUNT, COUNT, COUNT)
    | st.tuples(st.just("complete"), SLOT, TOKENS)
    | st.tuples(st.just("free"), SLOT, COUNT, COUNT, COUNT),
    max_size=12,
)


def columns() -> list[Any]:
    kinds = [np.float64] * 4 + [np.int64] * 2
    return [np.zeros(ROWS, dtype=kind) for kind in kinds]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)
@given(steps=STEPS)
def test_every_step_writes_its_row_and_no_other(kind: Any, steps: list[Any]) -> None:
    made = columns()
    rows = kind(*made)
    expected = [column.tolist() for column in made]
    prefill, decode, churn, context, requests, computing = expected
    for name, slot, *numbers in steps:
        getattr(rows, name)(slot, *numbers)
        if name == "book":
            prefill[slot], tokens, requests[slot], decode[slot], blocks = numbers
            churn[slot] += float(tokens)
            computing[slot] += 1
            context[slot] += float(blocks)
        elif name == "complete":
            prefill[slot] = numbers[0]
            computing[slot] -= 1
        else:
            requests[slot], decode[slot], blocks = numbers
            context[slot] -= float(blocks)
    prefill[:] = map(float, prefill)
    assert [column.tolist() for column in made] == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)
def test_there_is_nothing_beyond_the_last_row(kind: Any) -> None:
    rows = kind(*columns())
    with pytest.raises(IndexError):
        rows.book(ROWS, 1, 1, 1, 1, 1)
    with pytest.raises(IndexError):
        rows.complete(ROWS, 1)
    with pytest.raises(IndexError):
        rows.free(ROWS, 1, 1, 1)


def test_columns_of_several_lengths_are_no_columns() -> None:
    short = columns()
    short[3] = np.zeros(ROWS + 1)
    for kind in KINDS[1:]:
        with pytest.raises(ValueError, match="one length"):
            kind(*short)
