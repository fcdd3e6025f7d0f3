"""Noise or worse: the decision by which `--compare-with` fails."""

from __future__ import annotations

from random import Random

import pytest

from bench.compare.regression import allowed_growth, regressions
from bench.compare.results import ResultRatio, ResultRow
from bench.compare.targets import NOISE

PAIR = "ours / 1.6.1"


def row(rounds: list[float], name: str = "W1", pair: str = PAIR) -> ResultRow:
    ordered = sorted(rounds)
    median = ordered[len(ordered) // 2]
    ratio = ResultRatio(median, ordered[0], ordered[-1], rounds)
    return ResultRow(name, "µs", None, {}, {pair: ratio})


STEADY = [0.50, 0.51, 0.49, 0.50, 0.50, 0.505, 0.495]


def test_the_same_again_is_no_regression() -> None:
    assert regressions([row(STEADY)], [row(STEADY)]) == []


def test_better_is_no_regression() -> None:
    assert regressions([row(STEADY)], [row([one / 2 for one in STEADY])]) == []


def test_less_than_the_floor_is_noise_however_steady_the_rounds() -> None:
    assert allowed_growth(STEADY, STEADY) == NOISE
    assert regressions([row(STEADY)], [row([one * 1.07 for one in STEADY])]) == []


def test_more_than_the_floor_is_worse_when_the_rounds_are_steady() -> None:
    (worse,) = regressions([row(STEADY)], [row([one * 1.10 for one in STEADY])])
    assert (worse.row, worse.pair, worse.before) == ("W1", PAIR, 0.50)
    assert worse.now == pytest.approx(0.55)
    assert "was 0.50, is 0.55 (1.10 times; noise is up to 1.08)" in worse.text()


def test_rounds_that_differ_allow_more_and_not_everything() -> None:
    restless = [0.3, 0.7, 0.5, 0.4, 0.6, 0.45, 0.55]
    allowed = allowed_growth(restless, restless)
    assert 1.3 < allowed < 2.0
    assert regressions([row(restless)], [row([one * 1.2 for one in restless])]) == []
    assert regressions([row(restless)], [row([one * 2.0 for one in restless])])


def test_one_odd_round_changes_little() -> None:
    assert allowed_growth(STEADY, [*STEADY[:-1], 5.0]) < 1.12


@pytest.mark.parametrize("rounds", [[0.5], [0.5, 0.5], [0.5, 0.52, 0.48]])
def test_few_rounds_are_judged_too(rounds: list[float]) -> None:
    assert regressions([row(rounds)], [row([one * 2.0 for one in rounds])])
    assert regressions([row(rounds)], [row(rounds)]) == []


def test_a_single_round_allows_at_least_a_quarter() -> None:
    assert allowed_growth([0.5], [0.5, 0.5, 0.5]) == pytest.approx(1.25)


def test_rows_and_pairs_of_one_run_only_are_not_compared() -> None:
    doubled = [one * 2 for one in STEADY]
    assert regressions([row(STEADY, "W1")], [row(doubled, "W2")]) == []
    assert regressions([row(STEADY)], [row(doubled, pair="ours-pure / 1.6.1")]) == []


def test_false_alarms_are_rare_and_a_third_more_is_found() -> None:
    rng = Random(7)

    def run(factor: float) -> list[float]:
        return [factor * rng.lognormvariate(0.0, 0.05) for _ in range(7)]

    trials = 400
    alarms = sum(bool(regressions([row(run(1.0))], [row(run(1.0))])) for _ in range(trials))
    found = sum(bool(regressions([row(run(1.0))], [row(run(1.33))])) for _ in range(trials))
    assert alarms < trials * 0.02
    assert found > trials * 0.95
