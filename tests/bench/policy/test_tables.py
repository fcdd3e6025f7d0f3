"""Tables of all policies say what their runs say, and go on where they were interrupted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from bench.policy.tables import Row, main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_table_of_a_drawn_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["--shapes", "code", "--requests", "40", "--workers", "1", "--loads", "0.5", "1.0"]
    words += ["--seeds", "1", "--policies", "kv-cost", "first-token", "bound"]
    words += ["--jobs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench.policy.tables", *words])
    main()
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("| code, 1 workers, 1.6M tokens; at 0.5 / 1 | SLO capacity |")
    names = [line.split("|")[1].strip() for line in lines[2:5]]
    assert names == ["`kv-cost`", "`first-token`", "`bound`"]
    assert "* At 0.5: " in told.out
    rows = msgspec.convert(msgspec.json.decode(out.read_bytes())["rows"], list[Row])
    assert [row.policy for row in rows] == ["kv-cost", "first-token", "bound"]
    base, other, bound = rows
    assert base.against is not None
    assert base.against.mean == 0.0
    assert other.slo_capacity is not None
    assert f"| {other.slo_capacity.mean:.3f} (" in told.out
    assert bound.slo_capacity is None  # no router can be it
    assert "| what is asked; **missed** | code, 1 workers, 1.6M tokens |" in told.out
    main()
    again = capsys.readouterr()
    assert again.out == told.out
    assert "run: 0 of 6 to do" in again.err
    assert "search: 0 of 2 to do" in again.err
