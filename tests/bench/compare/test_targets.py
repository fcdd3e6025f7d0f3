"""The one table of targets, and how a ratio is judged by it."""

from __future__ import annotations

import pytest

from bench.compare.suite import is_chosen, label, suite
from bench.compare.targets import NOISE, TARGETS, Verdict, verdict


@pytest.mark.parametrize(
    ("ratio", "target", "expected"),
    [
        (0.5, 0.8, Verdict.MET),
        (0.8, 0.8, Verdict.MET),
        (0.81, 0.8, Verdict.EQUAL),
        (0.8 * NOISE - 1e-9, 0.8, Verdict.EQUAL),
        (0.8 * NOISE + 1e-9, 0.8, Verdict.MISSED),
        (2.0, 0.8, Verdict.MISSED),
    ],
)
def test_verdicts(ratio: float, target: float, expected: Verdict) -> None:
    assert verdict(ratio, target) is expected


def test_every_target_is_measured_and_every_row_is_named_once() -> None:
    rows = [row for workload in suite() for row in workload.rows]
    assert len(rows) == len(set(rows))
    assert set(rows) >= TARGETS.keys()
    assert set(rows) - TARGETS.keys() == {
        "W1 paced 300/s, select, hashes, isl 512",
        "W4 lifecycle, shared prefixes, http.client, 256 standing, 200k blocks, isl 2048",
        "W8 memory, unique content, after a burst",
    }


def test_quick_measures_some_of_the_same_rows() -> None:
    whole = {row for workload in suite() for row in workload.rows}
    quick = {row for workload in suite(quick=True) for row in workload.rows}
    assert quick < whole


def test_workloads_are_in_the_order_of_their_numbers() -> None:
    numbers = [int(one.name.split()[0].removeprefix("W")) for one in suite()]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 12))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("W1 select, hashes, isl 512", "W1@512"),
        ("W4 lifecycle, isl 2048, 256 standing", "W4@2048"),
        ("W4 lifecycle, hashes that repeat, 256 standing, isl 2048", "W4@2048"),
        ("W6", "W6"),
        ("W10 start to /health", "W10"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert label(name) == short


def test_workloads_are_chosen_by_short_names_and_by_parts() -> None:
    def chosen(wanted: str | None) -> list[str]:
        return [one.name for one in suite() if is_chosen(one.name, wanted)]

    assert len(chosen(None)) == len(suite())
    assert [one.split()[0] for one in chosen("W4;W10")] == ["W4"] * 4 + ["W10"]
    assert chosen("that repeat") == ["W4 lifecycle, hashes that repeat, 256 standing, isl 2048"]
    assert "W1 select, hashes, isl 2048" in chosen("W1@2048")
    assert "W1 select, hashes, isl 512" not in chosen("W1@2048")
    assert {one.split()[0] for one in chosen("W1")} == {"W1"}  # and not W10
    assert [one.split()[0] for one in chosen("overlap")] == ["W2", "W2", "W2"]
    assert chosen("") == []
