from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.capacity import WorkerCap, WorkerCaps


@pytest.mark.parametrize(("most", "queue"), [(0, 1), (-1, 1), (1, -1)])
def test_bad_caps_are_refused(most: int, queue: int) -> None:
    with pytest.raises(ValueError):
        WorkerCap(most, queue)


def test_full_slots_are_no_candidates_and_room_is_shared_out() -> None:
    caps = WorkerCaps()
    caps.seat(7, [0, 1], 2, 1)
    caps.seat(8, [2], 1, 2)
    everyone = slice(0, 3)
    caps.note(7, 2)
    assert not caps.all_full(everyone)
    assert isinstance(rows := caps.open_rows(everyone), np.ndarray)
    assert rows.tolist() == [2]
    caps.note(8, 1)
    assert caps.all_full(everyone)
    assert caps.all_full(np.array([1, 2]))
    assert [caps.take_place(everyone) for _ in range(4)] == [8, 7, 8, None]
    assert not caps.has_place(everyone)
    caps.leave_place(7)
    assert caps.take_place(np.array([2])) is None, "only a candidate's room counts"
    assert caps.take_place(np.array([0, 2])) == 7
    caps.check()
    caps.note(8, 0)
    assert not caps.all_full(everyone)
    assert caps.unseat(7) == 1
    assert caps.waiting == 2
    caps.check()


def test_no_cap_is_never_full() -> None:
    caps = WorkerCaps()
    caps.seat(1, [0], None)
    caps.note(1, 10**9)
    assert not caps.all_full(slice(0, 1))
    assert caps.open_rows(slice(0, 1)) == slice(0, 1)


def test_a_changed_record_keeps_what_is_there() -> None:
    caps = WorkerCaps()
    caps.seat(1, [0], 4, 4)
    caps.note(1, 3)
    caps.seat(1, [0, 1], 3, 4)
    assert caps.all_full(slice(0, 2))
    caps.seat(1, [0, 1], 5, 4)
    assert not caps.full_slots
    caps.check()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("seat"), st.integers(0, 2), st.integers(1, 3), st.integers(0, 3)),
            st.tuples(st.just("unseat"), st.integers(0, 2)),
            st.tuples(st.just("note"), st.integers(0, 2), st.integers(0, 5)),
            st.tuples(st.just("take")),
            st.tuples(st.just("leave"), st.integers(0, 2)),
        ),
        max_size=50,
    )
)
def test_columns_follow_every_change(steps: list[tuple[Any, ...]]) -> None:
    caps = WorkerCaps()
    caps.ensure(6)
    seated: set[int] = set()
    for kind, *facts in steps:
        if kind == "seat":
            worker, most, queue = facts
            caps.seat(worker, [2 * worker, 2 * worker + 1], most, queue)
            seated.add(worker)
        elif kind == "unseat":
            caps.unseat(facts[0])
            seated.discard(facts[0])
        elif kind == "note" and facts[0] in seated:
            caps.note(*facts)
        elif kind == "take":
            had = caps.has_place(slice(0, 6))
            assert (caps.take_place(slice(0, 6)) is not None) == had
        elif kind == "leave":
            caps.leave_place(facts[0])
        caps.check()
