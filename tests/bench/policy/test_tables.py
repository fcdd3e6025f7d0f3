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
    words += ["--seeds", "1", "--policies", "kv-cost", "random", "--jobs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench.policy.tables", *words])
    main()
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("| code, 1 workers | SLO capacity |")
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["`kv-cost`", "`random`"]
    assert "* At 0.5: " in told.out
    rows = msgspec.convert(msgspec.json.decode(out.read_bytes())["rows"], list[Row])
    assert [row.policy for row in rows] == ["kv-cost", "random"]
    assert rows[0].against.mean == 0.0
    assert f"| {rows[1].slo_capacity.mean:.3f} (" in told.out
    main()
    again = capsys.readouterr()
    assert again.out == told.out
    assert ", 0 to do" in again.err
