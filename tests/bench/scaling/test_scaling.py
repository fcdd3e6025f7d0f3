"""Cores, the table of a scaling run, and the model and picture of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.scaling import plot
from bench.scaling.cli import Measured, Setting, table
from bench.scaling.cores import other_cores, parse_cores
from bench.scaling.model import scalings


def test_cores_are_parsed() -> None:
    assert parse_cores("all") == ()
    assert parse_cores("2,0,2") == (0, 2)
    with pytest.raises(ValueError, match="some"):
        parse_cores("some")


def test_clients_get_what_the_server_does_not_have() -> None:
    assert other_cores((0,), 2) == (1,)
    assert other_cores((0, 1), 2) == (0, 1)
    assert other_cores((), 3) == (0, 1, 2)


def test_a_line_is_the_medians_of_its_rounds() -> None:
    pinned, free = Setting("ours", 1, (0,)), Setting("ours", 2, ())
    rounds = [(pinned, 10_000.0, 50.0), (free, 12_000.0, 40.0)] * 2 + [(pinned, 13_000.0, 80.0)]
    text = table([Measured(512, setting, rate, cpu, 0.5) for setting, rate, cpu in rounds])
    assert text.splitlines()[2:] == [
        "| 512 | ours | 1 | 0 | 10000 | 50.0 | 0.500 |",
        "| 512 | ours | 2 | all | 12000 | 40.0 | 0.500 |",
    ]


def _document() -> dict[str, Any]:
    def sample(contender: str, processes: int, cores: tuple[int, ...], cpu: float) -> Measured:
        return Measured(2048, Setting(contender, processes, cores), 1.0, cpu, 0.5)

    samples = [
        *(sample("ours", 1, (0,), cpu) for cpu in (20.0, 25.0, 90.0)),
        sample("ours", 2, (0, 1), 30.0),
        sample("ours", 1, (0, 1), 1.0),  # leaves one of them idle
        sample("1.6.1", 1, (0,), 50.0),
        sample("1.6.1", 1, (), 40.0),  # all there are
        sample("ours-pure", 2, (0, 1), 60.0),  # never on one core
    ]
    return {"samples": [asdict(one) for one in samples], "machine": {"cpus": 2}}


def test_the_model_of_many_cores() -> None:
    ours, peer = scalings(_document(), 2048)
    assert ours.measured() == [(1, 20_000), (2, pytest.approx(2 * 0.5e6 / 30))]
    assert ours.growth == pytest.approx(1.2)
    assert ours.straight([16]) == [(16, 320_000)]
    assert ours.careful([2, 16])[0][1] == pytest.approx(2 * 0.5e6 / 30), "as measured"
    assert ours.careful([16])[0][1] == pytest.approx(320_000 / 1.2**4)
    assert peer.contender == "1.6.1"
    assert peer.growth == 1.0, "less is noise"
    assert scalings(_document(), 512) == []


def test_the_worst_of_all_lengths_is_what_a_doubling_costs() -> None:
    document = _document()
    for cores, processes, cpu in (((0,), 1, 10.0), ((0, 1), 2, 15.0)):
        one = Measured(512, Setting("ours", processes, cores), 1.0, cpu, 0.5)
        document["samples"].append(asdict(one))
    for isl in (512, 2048):
        assert scalings(document, isl)[0].growth == pytest.approx(1.5)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "some-scaling.json"
    assert plot.main([str(file)]) == 1
    file.write_text("[]")
    assert plot.main([str(file)]) == 1
    file.write_text(json.dumps(_document() | {"taken_at": "2026-11-22", "commit": "0" * 40}))
    assert plot.main([str(file), "--isl", "1"]) == 1
    assert plot.main([str(file)]) == 0
    assert "1.20 times" in (tmp_path / "some-scaling.svg").read_text()
