"""Medians, ratios, their spread and verdict."""

from __future__ import annotations

import pytest

from bench.compare.report import document, number, pairs, rows, table
from bench.compare.run import Sample


def sample(contender: str, round_number: int, value: float, row: str = "W one") -> Sample:
    return Sample("W", row, "CPU µs / select", contender, round_number, value, {"units": 1000})


def samples(costs: dict[str, list[float]], row: str = "W one") -> list[Sample]:
    return [
        sample(name, number, cost, row)
        for name, series in costs.items()
        for number, cost in enumerate(series, 1)
    ]


def test_ratio_of_medians_and_spread_of_rounds() -> None:
    (row,) = rows(samples({"ours": [10.0, 30.0, 20.0], "1.6.1": [10.0, 10.0, 40.0]}))
    assert row.medians == {"ours": 20.0, "1.6.1": 10.0}
    ratio = row.ratios["ours / 1.6.1"]
    assert ratio.of_medians == 2.0
    assert ratio.rounds == [1.0, 3.0, 0.5]
    assert (ratio.low, ratio.high) == pytest.approx((0.6, 2.6))
    assert (row.target, ratio.verdict) == (None, None)
    assert table([row], ("ours", "1.6.1")).splitlines()[-1] == (
        "| W one | CPU µs / select | 20.0 | 10.0 | - | 2.00 (0.60 to 2.60) |"
    )


def test_a_row_with_a_target_is_judged() -> None:
    costs = {"ours": [5.0], "1.6.1": [10.0]}
    (row,) = rows(samples(costs, row="W1 select, hashes, isl 512"))
    assert (row.target, row.ratios["ours / 1.6.1"].verdict) == (0.5, "met")
    assert table([row], ("ours", "1.6.1")).endswith("| ≤ 0.5 | 0.50 (0.50 to 0.50) met |")


def test_without_kernels_no_row_has_a_target() -> None:
    costs = {"ours": [9.0], "ours-pure": [11.0], "1.6.1": [10.0]}
    (row,) = rows(samples(costs, row="W1 select, hashes, isl 2048"))
    assert table([row], ("ours", "ours-pure", "1.6.1")).endswith(
        "| ≤ 0.5 | 0.90 (0.90 to 0.90) missed | 1.10 (1.10 to 1.10) |"
    )


def test_every_variant_of_ours_is_set_against_every_peer() -> None:
    assert pairs(("ours", "1.6.1", "ours-pure", "1.3.1")) == [
        ("ours", "1.6.1"),
        ("ours", "1.3.1"),
        ("ours-pure", "1.6.1"),
        ("ours-pure", "1.3.1"),
    ]
    (row,) = rows(samples({"ours": [1.0], "ours-pure": [3.0], "1.6.1": [2.0]}))
    assert {pair: one.of_medians for pair, one in row.ratios.items()} == {
        "ours / 1.6.1": 0.5,
        "ours-pure / 1.6.1": 1.5,
    }


def test_without_ours_there_are_no_ratios() -> None:
    found = rows([sample("a", 1, 1.0), sample("b", 1, 2.0)])
    assert found[0].ratios == {}
    assert "ours" not in table(found, ("a", "b"))


def test_what_a_contender_did_not_measure_is_a_dash() -> None:
    found = rows([sample("ours", 1, 1.0)])
    assert "| 1.00 | - | - | - |" in table(found, ("ours", "1.6.1"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1171.4, "1171"), (100.0, "100"), (26.04, "26.0"), (1.304, "1.30"), (0.1046, "0.105")],
)
def test_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_document_keeps_every_sample() -> None:
    taken = samples({"ours": [1.0, 2.0], "1.6.1": [2.0, 2.0]})
    found = document({"commit": "abc"}, {"rounds": 2}, taken)
    assert (found["format"], found["commit"], len(found["samples"])) == (2, "abc", 4)
    assert found["samples"][0]["detail"] == {"units": 1000}
