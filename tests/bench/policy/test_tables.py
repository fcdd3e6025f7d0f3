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
    arguments = ["--shapes", "code", "--requests", "40", "--workers", "1", "--loads", "0.5", "1.0"]
    arguments += ["--seeds", "1", "--policies", "kv-cost", "first-token", "bound"]
    arguments += ["--jobs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench.policy.tables", *arguments])
    main()
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].startswith("| code, 1 workers, 1.6M tokens; at 0.5 / 1 | SLO capacity |")
    names = [line.split("|")[1].strip() for line in lines[2:5]]
    assert names == ["`kv-cost`", "`first-token`", "`bound`"]
    assert "* At 0.5: " in output.out
    rows = msgspec.convert(msgspec.json.decode(out.read_bytes())["rows"], list[Row])
    assert [row.policy for row in rows] == ["kv-cost", "first-token", "bound"]
    base, other, bound = rows
    assert base.against is not None
    assert base.against.mean == 0.0
    assert other.slo_capacity is not None
    assert f"| {other.slo_capacity.mean:.3f} (" in output.out
    assert bound.slo_capacity is None  # no router can be it
    head, _, asked = lines[-4:-1]
    columns = head.split("|")[2:-1]
    assert not any("lmetric" in label or "llm-d" in label for label in columns)  # not played
    assert asked.startswith("| code, 1 workers, 1.6M tokens | ")
    assert len(asked.split("|")[2:-1]) == len(columns)
    main()
    again = capsys.readouterr()
    assert again.out == output.out
    assert "run: 0 of 6 to do" in again.err
    assert "search: 0 of 2 to do" in again.err


def test_each_fleet_has_traces_of_its_own_and_searches_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shapes", "code", "--requests", "40", "--workers", "1", "32", "--loads", "0.5"]
    arguments += ["--kv-tokens", "400000", "1600000", "--seeds", "1", "--policies", "kv-cost"]
    arguments += ["--no-search", "--jobs", "1", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["bench.policy.tables", *arguments])
    main()
    output = capsys.readouterr()
    assert "search: 0 of 0 to do" in output.err
    scenes = [line.split(";")[0] for line in output.out.splitlines() if "; at 0.5" in line]
    assert scenes == [
        f"| code, {workers} workers, {kv}M tokens" for kv in ("0.4", "1.6") for workers in (1, 32)
    ]
    played = sorted(path.name for path in (tmp_path / "policy-traces").glob("*-1.jsonl"))
    assert played == [
        f"code-{workers}-{kv}-{requests}-1.jsonl"
        for workers, requests in ((1, 40), (32, 80))
        for kv in (1600000, 400000)
    ]
