"""The verdict at the end of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from select_service.demo.stats import DecisionLine, DemoStats, Summary, percentile

GOOD = Summary(
    requests=10,
    finished=10,
    lost=1,
    failed=0,
    first_failure=None,
    seconds=2.0,
    hit_rate_actual=0.5,
    hit_rate_predicted=0.49,
    prediction_error=0.02,
    latency_p50_s=0.001,
    latency_p99_s=0.002,
    batches_published=5,
    blocks_stored=100,
    blocks_removed=20,
    replays_served=1,
    restarts=1,
    load_left=None,
    audit_checks=40,
    audit_wrong=0,
)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"load_left": "worker 1 1 requests"}, "load did not return to zero"),
        ({"failed": 2, "first_failure": "no luck"}, "2 requests were not served: no luck"),
        ({"prediction_error": 0.4}, "off by 40%"),
        ({"audit_wrong": 3}, "wrong in 3 of 40 checks"),
    ],
)
def test_every_fault_is_named(fault: dict[str, object], text: str) -> None:
    summary = replace(GOOD, **fault)  # type: ignore[arg-type]
    (problem,) = summary.problems()
    assert text in problem
    assert problem in summary.lines()[-1]


def test_tallies_add_up() -> None:
    stats = DemoStats()
    stats.prefilled(1, prompt=10, predicted=4, actual=6)
    stats.prefilled(2, prompt=5, predicted=5, actual=4)
    stats.prefilled(1, prompt=1, predicted=0, actual=0)
    total = stats.total()
    assert (total.requests, total.prompt_blocks, total.error_blocks) == (3, 16, 3)
    assert (total.predicted_blocks, total.actual_blocks) == (9, 10)
    assert stats.tallies[1].requests == 2


def test_only_the_first_failure_is_quoted_and_the_last_decisions_kept() -> None:
    stats = DemoStats()
    for number in range(20):
        stats.gave_up(f"reason {number}")
        stats.decided(DecisionLine(str(number), 1, 2, 1, 0.001))
    assert (stats.failed, stats.first_failure) == (20, "reason 0")
    assert [d.request_id for d in stats.decisions] == [str(n) for n in range(12, 20)]


def test_percentile() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 1.0) == 3.0
