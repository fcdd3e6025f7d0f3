"""Warm-up traces, read as the reference does and as we do."""

from __future__ import annotations

import json
import math

import pytest

from select_service.planner.core.demand import HISTORY_MAX, Interval, intervals_of, resampled
from select_service.planner.core.prediction import Predictor
from select_service.planner.core.warm_up import (
    Bin,
    TracedRequest,
    compatible_bins,
    whole_bins,
)
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from tests.select_service.planner.golden import GOLDEN, golden

EXPECTED = golden("warmup_golden")
INTERVAL = EXPECTED["adjustment_interval"]


def trace() -> list[TracedRequest]:
    lines = (GOLDEN / "warmup_trace.jsonl").read_text().splitlines()
    return [
        TracedRequest(one["timestamp"] / 1e3, one["input_length"], one["output_length"])
        for one in map(json.loads, lines)
    ]


def warmed(name: str, bins: list[Bin], field: str) -> Predictor:
    predictor = make_predictor(PredictorSettings(name=name, compatible=True))
    for one in bins:
        predictor.add(getattr(one, field))
    predictor.begin_live()
    for _ in range(2):
        predictor.add(0.0)  # nobody came yet: no value
    return predictor


def test_compatible_bins_are_the_reference_s() -> None:
    bins = compatible_bins(trace(), INTERVAL)
    assert [one.start_s for one in bins] == [one["interval_start"] for one in EXPECTED["metrics"]]
    for one, expected in zip(bins, EXPECTED["metrics"], strict=True):
        assert one.requests == expected["request_count"]
        assert one.isl == pytest.approx(expected["avg_isl"], rel=1e-12)
        assert one.osl == pytest.approx(expected["avg_osl"], rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "kalman"])
def test_compatible_forecast_after_a_warm_up(name: str) -> None:
    bins = compatible_bins(trace(), INTERVAL)
    for series, field in (("num_req", "requests"), ("isl", "isl"), ("osl", "osl")):
        predictor = warmed(name, bins, field)
        assert predictor.points == EXPECTED["after_warmup"][name][f"{series}_n"]
        expected = EXPECTED["after_warmup"][name][series]
        assert predictor.predict() == pytest.approx(expected, rel=1e-12)


def test_an_empty_interval_is_one_and_a_partial_one_is_none() -> None:
    """Fault 10: empty bins vanish, and the last request of the trace predicts a load of one."""
    bins = whole_bins(trace(), INTERVAL)
    assert [one.start_s for one in bins] == [INTERVAL * index for index in range(10)]
    assert bins[4].requests == 0
    assert math.isnan(bins[4].isl)
    assert warmed("constant", bins, "requests").predict() == 205
    assert warmed("constant", compatible_bins(trace(), INTERVAL), "requests").predict() == 1


@pytest.mark.parametrize("stray", [-1e297, -1.7e9, 1.7e9, 1e297])
def test_one_stray_time_does_not_make_ages_of_nothing(stray: float) -> None:
    """A trace of epoch times with one that was 0 took all the memory there is."""
    requests = [TracedRequest(stray, 10.0, 10.0), *trace()]
    past = intervals_of(requests, INTERVAL)
    assert len(past) == HISTORY_MAX
    came = sum(one.requests for one in whole_bins(trace(), INTERVAL))
    assert sum(one.requests for one in past) == (came if stray < 0 else 0)


def test_no_trace_has_no_intervals() -> None:
    assert whole_bins([], 180.0) == compatible_bins([], 180.0) == []
    assert whole_bins([TracedRequest(5.0, 10, 10)], 180.0) == []


def test_a_past_in_intervals_of_another_length_is_the_same_past() -> None:
    past = [
        Interval(60.0, 100.0, 10.0, (60.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
        Interval(0.0, None, None),
        Interval(120.0, 400.0, None),
    ]
    assert resampled(past, 60.0, 60.0) == past
    assert resampled([], 60.0, 30.0) == []
    assert resampled(past, 60.0, 30.0) == [
        (60.0, 100.0, 10.0, ()),
        *((0.0, None, None, ()),) * 3,
        *((60.0, 400.0, None, ()),) * 2,
    ]
    # up to the end: what is too old for a whole interval is left out
    (last,) = resampled(past, 60.0, 120.0)
    assert last == (120.0, 400.0, None, ())
    assert resampled(past, 60.0, 180.0) == [(180.0, 300.0, 10.0, ())]
    assert resampled(past, 60.0, 200.0) == []
    assert len(resampled(past, 1e300, 1.0)) == HISTORY_MAX  # of a file somebody has edited
