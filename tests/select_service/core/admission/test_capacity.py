from __future__ import annotations

import numpy as np
import pytest

from select_service.core.admission.capacity import WorkerCap, WorkerCaps


@pytest.mark.parametrize(("most", "queue"), [(0, 1), (-1, 1), (1, -1)])
def test_bad_caps_are_refused(most: int, queue: int) -> None:
    with pytest.raises(ValueError):
        WorkerCap(most, queue)


def test_full_slots_are_no_candidates_and_room_is_shared_out() -> None:
    caps = WorkerCaps()
    caps.attach(7, [0, 1], 2, 1)
    caps.attach(8, [2], 1, 2)
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
    assert caps.detach(7) == 1
    assert caps.waiting == 2
    caps.check()


def test_a_changed_record_keeps_what_is_there() -> None:
    caps = WorkerCaps()
    caps.attach(1, [0], 4, 4)
    caps.note(1, 3)
    caps.attach(1, [0, 1], 3, 4)
    assert caps.all_full(slice(0, 2))
    caps.attach(1, [0, 1], 5, 4)
    assert not caps.full_slots
    caps.check()
