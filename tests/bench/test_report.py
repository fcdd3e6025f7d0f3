"""Medians and ratios."""

from __future__ import annotations

from bench.compare.report import rows, table
from bench.compare.run import Sample


def sample(contender: str, round_number: int, cpu_us: float) -> Sample:
    return Sample(
        workload="W",
        phase="W one",
        unit="select",
        contender=contender,
        round_number=round_number,
        units=1000,
        cpu_s=cpu_us * 1000 / 1e6,
        wall_s=1.0,
        memory_bytes=1,
    )


def test_ratio_of_medians_and_spread_of_rounds() -> None:
    costs = {"ours": [10.0, 30.0, 20.0], "peer": [10.0, 10.0, 40.0]}
    (row,) = rows(
        sample(name, number, cost)
        for name, series in costs.items()
        for number, cost in enumerate(series, 1)
    )
    assert round(row.cpu_us["ours"], 6) == 20.0
    ratio = row.ratios["peer"]
    found = (ratio.of_medians, ratio.lowest, ratio.highest)
    assert tuple(round(value, 6) for value in found) == (2.0, 0.5, 3.0)
    text = table([row], ("ours", "peer"))
    assert text.splitlines()[-1] == "| W one | select | 20.00 | 10.00 | 2.00 (0.50 to 3.00) |"


def test_without_ours_there_are_no_ratios() -> None:
    found = rows([sample("a", 1, 1.0), sample("b", 1, 2.0)])
    assert found[0].ratios == {}
    assert "ours" not in table(found, ("a", "b"))
