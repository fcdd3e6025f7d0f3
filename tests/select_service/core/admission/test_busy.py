from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.busy import BusyRanks, RankReport, rank_busy
from select_service.core.admission.thresholds import FIELDS, NOTHING, ThresholdBook, Thresholds
from select_service.core.admission.thresholds import read_thresholds as read

FIELD_DECODE, FIELD_TOKENS, FIELD_FRAC = FIELDS


@pytest.mark.parametrize(
    ("thresholds", "report", "busy"),
    [
        ({FIELD_DECODE: 0.85}, {"active_decode_blocks": 85, "kv_total_blocks": 100}, False),
        ({FIELD_TOKENS: 10_000}, {"active_prefill_tokens": 10_000}, False),
        ({FIELD_FRAC: 0.6}, {"active_prefill_tokens": 1228, "max_num_batched_tokens": 2048}, False),
        ({FIELD_FRAC: 1.5}, {"active_prefill_tokens": 4, "max_num_batched_tokens": 2}, True),
        ({FIELD_FRAC: 0.6}, {"active_prefill_tokens": 6_000_001}, True),
        ({FIELD_FRAC: 0.6}, {"active_prefill_tokens": 1, "max_num_batched_tokens": 0}, True),
        ({FIELD_DECODE: 0.0}, {"kv_used_blocks": 1, "kv_total_blocks": 9}, True),
        ({FIELD_DECODE: 0.5}, {"kv_used_blocks": 99}, False),
    ],
)
def test_edges(thresholds: dict[str, Any], report: dict[str, Any], busy: bool) -> None:
    assert rank_busy(read(thresholds), RankReport(**report)) == busy


def test_only_declared_ranks_count() -> None:
    board = BusyRanks()
    board.set_thresholds(read({FIELD_DECODE: 0.5}))
    board.attach(0, None, 10)
    board.attach(1, None, 10)
    assert board.report(0, 9)
    assert not board.report(2, 9), "an undeclared rank's report is dropped"
    assert not board.all_busy(slice(0, 2)), "a declared rank without a report is free"
    assert isinstance(free := board.free_rows(slice(0, 2)), np.ndarray)
    assert free.tolist() == [1]
    board.report(1, 9)
    assert board.all_busy(slice(0, 2))
    board.detach(1)
    assert board.count == 1
    board.check()


def test_thresholds_are_in_force_at_once() -> None:
    board = BusyRanks()
    board.attach(0, None, None)
    board.note(0, 500, 0)
    assert not board.count
    board.set_thresholds(read({FIELD_TOKENS: 499}))
    assert board.exceeded(0) == (FIELD_TOKENS, 500, 499)
    board.set_thresholds(read({FIELD_TOKENS: 500}))
    assert board.exceeded(0) is None
    board.set_thresholds(NOTHING)
    assert not board.count
    assert not board.watches


numbers = st.integers(0, 40)
changes = st.one_of(
    st.tuples(st.just("note"), st.integers(0, 3), numbers, numbers),
    st.tuples(st.just("report"), st.integers(0, 3), st.none() | numbers),
    st.tuples(st.just("attach"), st.integers(0, 3), st.none() | numbers, st.none() | numbers),
    st.tuples(st.just("detach"), st.integers(0, 3)),
    st.tuples(
        st.just("thresholds"),
        st.none() | st.floats(0, 1),
        st.none() | numbers,
        st.none() | st.floats(0, 2),
    ),
)


@given(st.lists(changes, max_size=40))
def test_bits_follow_every_change(steps: list[tuple[Any, ...]]) -> None:
    board = BusyRanks()
    board.ensure(4)
    attached = set()
    for kind, *facts in steps:
        if kind == "thresholds":
            board.set_thresholds(Thresholds(*facts))
        elif kind == "attach":
            board.attach(*facts)
            attached.add(facts[0])
        elif kind == "detach":
            board.detach(*facts)
            attached.discard(facts[0])
        elif kind == "report":
            assert board.report(*facts) == (facts[0] in attached)
        elif facts[0] in attached:
            board.note(*facts)
        board.check()
        rows = np.arange(4)
        free = board.free_rows(rows)
        assert board.all_busy(rows) != (len(np.flatnonzero(~board.busy)) > 0)
        assert not isinstance(free, slice)


# -- the book --------------------------------------------------------------------------------------


def test_a_tenant_goes_before_its_model() -> None:
    book = ThresholdBook(read({FIELD_FRAC: 3}))
    book.merge("m", None, read({FIELD_TOKENS: 10, FIELD_DECODE: 0.5}), entries_max=9)
    book.merge("m", "t", read({FIELD_TOKENS: 20}), clear=[FIELD_DECODE], entries_max=9)
    assert book.of("m", "t") == Thresholds(None, 20, 3.0)
    assert book.of("m", "other") == Thresholds(0.5, 10, 3.0)
    copy = ThresholdBook(read({FIELD_FRAC: 3}))
    for entry in book.entries():
        copy.restore(*entry)
    assert copy.entries() == book.entries()
    assert copy.of("m", "t") == book.of("m", "t")


@pytest.mark.parametrize(
    "values",
    [
        {FIELD_DECODE: 1.01},
        {FIELD_DECODE: -0.1},
        {FIELD_DECODE: True},
        {FIELD_DECODE: "0.5"},
        {FIELD_DECODE: math.nan},
        {FIELD_TOKENS: -1},
        {FIELD_TOKENS: 1.5},
        {FIELD_TOKENS: 1 << 64},
        {FIELD_FRAC: -0.5},
        {FIELD_FRAC: math.inf},
        {"active_blocks": 1},
    ],
)
def test_bad_thresholds_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        read(values)


def test_bad_clears_are_refused() -> None:
    book = ThresholdBook()
    with pytest.raises(ValueError, match="cannot clear nonsense"):
        book.merge("m", None, NOTHING, clear=["nonsense"], entries_max=9)
    with pytest.raises(ValueError, match="both set and cleared"):
        book.merge("m", None, read({FIELD_TOKENS: 1}), clear=[FIELD_TOKENS], entries_max=9)
    assert book.entries() == []


def test_a_book_has_an_end() -> None:
    book = ThresholdBook()
    for name in ("m", "n", "m"):
        book.merge(name, None, read({FIELD_TOKENS: 1}), entries_max=2)
    with pytest.raises(ValueError, match="2, as there may be scopes"):
        book.merge("o", None, read({FIELD_TOKENS: 1}), entries_max=2)
    assert book.forget("m", None)
    book.merge("o", None, read({FIELD_TOKENS: 1}), entries_max=2)


def test_a_whole_threshold_beyond_2_to_53_is_not_rounded() -> None:
    """As a double it is one less: who has just as much would be busy."""
    most = 2**53 + 1
    busy = BusyRanks()
    busy.set_thresholds(Thresholds(active_prefill_tokens_threshold=most))
    busy.attach(0, None, None)
    busy.note(0, most, 0.0)
    assert not busy.slots
    busy.note(0, most + 1, 0.0)
    assert busy.exceeded(0) == ("active_prefill_tokens_threshold", most + 1, most)
