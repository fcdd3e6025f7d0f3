"""Cores and the table of a scaling run."""

from __future__ import annotations

import pytest

from bench.scaling.cli import Measured, Setting, table
from bench.scaling.cores import other_cores, parse_cores


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
