"""A table of policies that ran at two times is that of one run, or it is refused."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.policy.shapes import drawn, write
from bench.simulator.__main__ import Before, main

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = ("kv-cost", "first-token", "random")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write(drawn("code", random.Random(5), 60, 20.0), path)
    return path


def table(
    monkeypatch: pytest.MonkeyPatch, trace: Path, out: Path, policies: tuple[str, ...], *more: str
) -> Before:
    words = ["--trace", str(trace), "--seeds", "2", "--workers", "2", "--loads", "0.8", "1.2"]
    words += ["--jobs", "1", "--out", str(out), "--policies", *policies, *more]
    monkeypatch.setattr(sys, "argv", ["bench.simulator", *words])
    main()
    return msgspec.json.decode(out.read_bytes(), type=Before)


def test_cells_of_others_are_taken_over(
    monkeypatch: pytest.MonkeyPatch, trace: Path, tmp_path: Path
) -> None:
    earlier, later = tmp_path / "earlier.json", tmp_path / "later.json"
    whole = table(monkeypatch, trace, earlier, POLICIES)
    mixed = table(monkeypatch, trace, later, ("first-token",), "--others", str(earlier))
    assert mixed.cells == whole.cells  # to the last digit, in the same order
    told = msgspec.json.decode(later.read_bytes())["others"]
    assert told["policies"] == ["kv-cost", "random"]
    assert told["provenance"] == whole.provenance
    latest = tmp_path / "latest.json"
    table(monkeypatch, trace, latest, ("first-token",), "--others", str(later))
    assert msgspec.json.decode(latest.read_bytes())["others"] == told, "where they were run"
    with pytest.raises(ValueError, match="settings"):
        table(
            monkeypatch, trace, later, ("first-token",), "--others", str(earlier), "--limit", "50"
        )
    with pytest.raises(ValueError, match="2 seeds, this run 3"):
        whole.expect(whole.settings, 3, {})
    with pytest.raises(ValueError, match="capacity of 2 workers"):
        whole.expect(whole.settings, 2, {2: 1.0})
    some = [one for one in whole.cells if one.policy == "random" and one.load == 1.2]
    others = [one for one in whole.cells if one.policy != "random"]
    left = whole.with_anew(some)
    assert len(left) == len(others) + 1  # of who ran nothing earlier
    assert all(one in left for one in [*others, *some])
