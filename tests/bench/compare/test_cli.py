"""The command line: what it prints, writes and ends with. Contenders and workloads are made up."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from bench.compare import cli
from bench.compare.results import read
from bench.compare.run import Reading
from bench.compare.servers import Contender
from bench.load.http import BadAnswer
from bench.neighbours import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ROW = "W1 select, hashes, isl 512"


@dataclass
class Steady:
    """Costs that depend on the contender alone, in every round a little other."""

    costs: dict[str, float]
    name: str = ROW
    rounds_max: int | None = None
    warms_up: bool = True
    fails_in: int | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.name,)

    @contextmanager
    def session(self, contender: Contender, connections: int) -> Iterator[Steady.Session]:
        assert connections == 16
        yield Steady.Session(self, contender.name)

    @dataclass
    class Session:
        of: Steady
        contender: str

        def round(self, number: int) -> list[Reading]:
            if number == self.of.fails_in:
                raise BadAnswer("wrong on purpose")
            cost = self.of.costs[self.contender] * (1.0 if number else 100.0)
            return [Reading(self.of.name, "µs", cost * (1 + number % 3 / 100))]


def run(
    monkeypatch: pytest.MonkeyPatch,
    workloads: Sequence[Steady],
    out: Path,
    *arguments: str,
    others: float = 0.0,
) -> int:
    monkeypatch.setattr(Watch, "share", lambda *_: others)
    monkeypatch.setattr(cli, "suite", lambda **_: list(workloads))
    monkeypatch.setattr(cli, "contenders", lambda names: [Contender(one, ()) for one in names])
    monkeypatch.setattr(cli, "raise_descriptor_limit", lambda: None)
    return cli.main([*arguments, "--out", str(out)])


def test_a_table_a_summary_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert run(monkeypatch, [Steady({"ours": 4.0, "1.6.1": 10.0})], out) == 0
    printed = capsys.readouterr().out
    assert f"| {ROW} | µs | 4.04 | 10.1 | ≤ 0.5 | 0.40 (0.40 to 0.40) met |" in printed
    assert "ours / 1.6.1: 1 met, 0 equal within noise, 0 missed" in printed
    (row,) = read(out).rows
    assert len(row.ratios["ours / 1.6.1"].rounds) == 7  # the warm-up is not among them


def test_worse_than_before_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    assert run(monkeypatch, [Steady({"ours": 8.0, "1.6.1": 10.0})], before) == 0
    compare = ("--compare-with", str(before))
    same = [Steady({"ours": 16.0, "1.6.1": 20.0})]  # another machine, the same ratio
    assert run(monkeypatch, same, now, *compare) == 0
    assert "compared with before.json" in capsys.readouterr().out
    worse = [Steady({"ours": 12.0, "1.6.1": 10.0})]
    assert run(monkeypatch, worse, now, *compare) == 2
    assert f"worse: {ROW}: ours / 1.6.1 was 0.80, is 1.20" in capsys.readouterr().out
    assert read(now).rows[0].medians["ours"] == pytest.approx(12.12)  # written all the same


def test_what_others_have_disturbed_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    assert run(monkeypatch, [Steady({"ours": 8.0, "1.6.1": 10.0})], before) == 0
    worse = [Steady({"ours": 12.0, "1.6.1": 10.0})]
    assert run(monkeypatch, worse, now, "--compare-with", str(before), others=0.5) == 0
    printed = capsys.readouterr().out
    assert f"looks worse, disturbed: {ROW}: ours / 1.6.1 was 0.80, is 1.20" in printed
    assert "0 worse" in printed


def test_a_wrong_answer_voids_its_workload_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {"ours": 8.0, "1.6.1": 10.0}
    workloads = [Steady(costs, "W1 one", fails_in=2), Steady(costs, "W2 two")]
    assert run(monkeypatch, workloads, tmp_path / "a.json") == 1
    captured = capsys.readouterr()
    assert "W1 one is void: wrong on purpose" in captured.err
    assert [row.row for row in read(tmp_path / "a.json").rows] == ["W2 two"]


def test_some_of_the_workloads_and_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"ours": 8.0, "ours-pure": 9.0, "1.6.1": 10.0}
    workloads = [Steady(costs, "W1 one"), Steady(costs, "W2 two", rounds_max=2)]
    out = tmp_path / "a.json"
    chosen = ("--only", "W2", "--rounds", "5", "--contenders", "ours,ours-pure,1.6.1")
    assert run(monkeypatch, workloads, out, *chosen) == 0
    (row,) = read(out).rows
    assert row.row == "W2 two"
    assert {pair: len(one.rounds) for pair, one in row.ratios.items()} == {
        "ours / 1.6.1": 2,
        "ours-pure / 1.6.1": 2,
    }


def test_a_result_that_cannot_be_read_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    missing = ("--compare-with", str(tmp_path / "missing.json"))
    assert run(monkeypatch, [Steady({})], out, *missing) == 1
    assert "missing.json" in capsys.readouterr().err
    assert not out.exists()
