"""What has ended is not carried out again, unless by other code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import resumable
from bench.resumable import Kept

if TYPE_CHECKING:
    from pathlib import Path


def twice(number: int) -> int:
    if number < 0:
        raise ValueError("below 0")
    return 2 * number


def refused(number: int) -> int:
    raise AssertionError(f"{number} was carried out again")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path, jobs: int) -> None:
    path = tmp_path / "folder" / "kept.jsonl"
    with pytest.raises(ValueError, match="below 0"):
        Kept(path, 1).results("double", twice, [3, 1, -1, 4], int)
    assert Kept(path, 1).results("double", refused, [1, 3], int) == [2, 6]
    assert Kept(path, jobs).results("double", twice, [5, 3, 1, 5, 4], int) == [10, 6, 2, 10, 8]
    assert len(path.read_bytes().splitlines()) == 4


def test_another_question_about_the_same_is_another(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept.jsonl", 1)
    assert kept.results("double", twice, [3], int) == [6]
    assert kept.results("negate", lambda one: -one, [3], int) == [-3]


def test_what_other_code_has_measured_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.jsonl"
    Kept(path, 1).results("double", twice, [3], int)
    monkeypatch.setattr(resumable, "_code_of", lambda: "changed")
    kept = Kept(path, 1)
    assert "1 lines of other code are left out" in capsys.readouterr().err
    assert kept.results("double", lambda one: 0 * one, [3], int) == [0]
    assert Kept(path, 1).results("double", refused, [3], int) == [0]


def test_code_that_is_not_committed_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "trees", "diff": ""}
    monkeypatch.setattr(resumable, "git", lambda command, *_: answers[command])
    committed = resumable._code_of()
    answers["diff"] = "a change"
    assert resumable._code_of() != committed
