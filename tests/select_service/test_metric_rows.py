"""A row says all of a metric: its table adds up what is read, and sets the labels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry

from select_service.metric_rows import (
    Buckets,
    MetricRow,
    MetricTable,
    Sum,
    histogram,
    summary,
    table,
    total,
    value,
)

Pool = dict[str, int]
ROWS: tuple[MetricRow[Pool], ...] = (
    total("served", "Served.", lambda pool: pool, "kind"),
    value("mean", "Mean.", lambda pool: Sum(len(pool), sum(pool.values()))),
    value("absent", "Absent.", lambda _: None),
    summary("sizes", "Sizes.", lambda pool: Sum(len(pool), sum(pool.values()))),
    histogram("spread", "Spread.", lambda pool: Buckets((1, 2), [1, 0, len(pool)], 3.0)),
    value("other_name", "Alias.", len, prefix=""),
)


def text(metrics: MetricTable[Pool]) -> list[str]:
    class Families:
        def collect(self) -> Iterator[Metric]:
            return (step for step in metrics.collect() if step is not None)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def pools() -> Iterator[tuple[tuple[str], list[Pool | None]] | None]:
    yield ("m",), [{"b": 2, "a": 4}, None, {"a": 6}]
    yield None
    yield ("n",), []


@pytest.mark.parametrize(
    ("own_first", "names"), [(False, ("model", "kind")), (True, ("kind", "model"))]
)
def test_what_is_read_under_the_same_labels_is_added_up(
    own_first: bool, names: tuple[str, ...]
) -> None:
    found = MetricTable(ROWS, pools, ("model",), own_first=own_first, prefix="p_")
    assert text(found) == [
        'p_served_total{kind="a",model="m"} 10.0',
        'p_served_total{kind="b",model="m"} 2.0',
        'p_mean{model="m"} 4.0',
        'p_sizes_count{model="m"} 3.0',
        'p_sizes_sum{model="m"} 12.0',
        'p_spread_bucket{le="1",model="m"} 2.0',
        'p_spread_bucket{le="2",model="m"} 2.0',
        'p_spread_bucket{le="+Inf",model="m"} 5.0',
        'p_spread_count{model="m"} 5.0',
        'p_spread_sum{model="m"} 6.0',
        'other_name{model="m"} 3.0',
    ]
    families = [step for step in found.collect() if step is not None]
    assert getattr(families[0], "_labelnames", ()) == names


def test_others_have_their_turn_where_the_sources_pause() -> None:
    steps = [step is None for step in MetricTable(ROWS, pools, ("model",)).collect()]
    assert steps == [True, True, *[False] * len(ROWS)]


def test_rows_of_what_is_not_in_use_have_no_series() -> None:
    assert text(table(ROWS, lambda: None)) == []


def test_a_label_is_named_once() -> None:
    rows = [value("v", "V.", lambda pool: pool, "model")]
    with pytest.raises(AssertionError, match="v"):
        [*MetricTable(rows, pools, ("model",)).collect()]
