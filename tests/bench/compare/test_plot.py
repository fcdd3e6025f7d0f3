"""What is drawn; the drawing itself needs the extra `bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.compare.plot import bars, length_lines, main
from bench.compare.report import document, rows
from bench.compare.results import Result, ResultRow
from bench.compare.run import Sample
from bench.output import write_json

if TYPE_CHECKING:
    from pathlib import Path

COSTS = {
    "W1 select, hashes, isl 2048": (30.0, 40.0),
    "W1 select, hashes, isl 512": (20.0, 25.0),
    "W1 paced 300/s, select, hashes, isl 512": (200.0, 100.0),
    "W3 select, tokens, isl 2048": (80.0, 160.0),
    "W8 memory, unique content, after a burst": (150.0, 100.0),
}
SAMPLES = [
    Sample("W", row, "unit", name, number, cost * number)
    for row, costs in COSTS.items()
    for name, cost in zip(("ours", "1.6.1"), costs, strict=True)
    for number in (1, 2, 3)
]
PAIR = "ours / 1.6.1"


def result() -> Result:
    found = msgspec.convert(rows(SAMPLES), list[ResultRow], from_attributes=True)
    return Result(2, "2026-01-01T00:00:00+00:00", "0123456789", found)


def test_a_bar_per_row_with_its_target() -> None:
    drawn = bars(result(), PAIR)
    assert [(one.name, one.value, one.target) for one in drawn] == [
        ("W1 select, hashes, isl 2048", 0.75, 0.5),
        ("W1 select, hashes, isl 512", 0.8, 0.5),
        ("W1 paced 300/s, select, hashes, isl 512", 2.0, None),
        ("W3 select, tokens, isl 2048", 0.5, 0.5),
        ("W8 memory, unique content, after a burst", 1.5, None),
    ]
    assert len({one.colour for one in drawn}) == 3  # met, missed, not judged
    assert bars(result(), "ours / 1.3.1") == []


def test_lines_are_by_length_and_only_of_saturated_selections() -> None:
    drawn = {(one.name, one.contender): one.points for one in length_lines(result())}
    assert drawn == {
        ("W1", "ours"): [(512, 40.0), (2048, 60.0)],
        ("W1", "1.6.1"): [(512, 50.0), (2048, 80.0)],
        ("W3", "ours"): [(2048, 160.0)],
        ("W3", "1.6.1"): [(2048, 320.0)],
    }


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    where = {"taken_at": "2026-01-01T00:00:00+00:00", "commit": "0123456789"}
    write_json(path, document(where, {}, SAMPLES))
    assert main([str(path), "--out", str(tmp_path / "drawn")]) == 0
    names = {one.name for one in tmp_path.iterdir()} - {"result.json"}
    assert names == {"drawn-ratios.svg", "drawn-cpu-by-length.svg"}
    assert b"</svg>" in (tmp_path / "drawn-ratios.svg").read_bytes()


def test_what_is_no_result_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(tmp_path / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err
