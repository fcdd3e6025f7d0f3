"""What a planner remembers where the disk lets it not: told, and nothing is left in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from select_service.planner.edge.state_file import StateFile
from select_service.planner.errors import PlannerError
from tests.select_service.planner.edge.test_loop import loop_of


def test_a_damaged_file_that_cannot_be_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    path.write_text("{")
    (tmp_path / "planner.damaged").mkdir()
    with pytest.raises(PlannerError, match=r"planner\.json.*cannot be put aside: Is a directory"):
        StateFile(path).read(loop_of().fleet)
    assert path.read_text() == "{"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays, and half of a new one does not keep the room it has taken."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "planner.json"
    state, fleet = StateFile(path), loop_of().fleet
    state.write(fleet, 1, {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PlannerError, match=r"planner\.json: No space left on device"):
            state.write(fleet, 2, {})
    assert os.listdir(tmp_path) == ["planner.json"]
    assert StateFile(path).read(fleet).decision_id == 1
    state.write(fleet, 3, {})
    assert StateFile(path).read(fleet).decision_id == 3
