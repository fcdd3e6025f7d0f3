"""What the planner reports of its looks at the load, and of looks that see no arrivals."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from select_service.planner.edge.loop import UNCOUNTED_AT_START, UNCOUNTED_REPORTED, Loop
from select_service.planner.edge.planner_metrics import PlannerMetrics
from select_service.planner.types import IDLE, Load, Missing, Value
from tests.select_service.planner.edge.loops import SetSource, loop_of
from tests.wait import run


def looked(loop: Loop) -> list[str]:
    registry = CollectorRegistry()
    registry.register(PlannerMetrics(loop))
    lines = generate_latest(registry).decode().splitlines()
    return sorted(
        line.partition('what="')[2] for line in lines if line.startswith("select_planner_looked{")
    )


async def test_a_look_is_in_the_metrics_with_the_age_of_its_counts() -> None:
    source = SetSource()
    loop = loop_of(source=source)
    assert looked(loop) == []
    await loop.slow()
    source.load = Load(concurrency=Value(7.0), arrived=Value(450.0), seconds=15.0, ago_s=4.0)
    await loop.fast()
    assert looked(loop) == [
        'arrivals_age_s"} 4.0',
        'arrivals_per_s"} 30.0',
        'concurrency"} 7.0',
    ]
    source.load = Load(arrived=IDLE, ago_s=9.0)
    await loop.fast()
    assert looked(loop) == ['arrivals_age_s"} 9.0', 'arrivals_per_s"} 30.0']
    source.load = Load(arrived=Missing("no series"))
    await loop.fast()
    assert looked(loop) == []


def test_looks_that_see_no_arrivals_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """A name that no frontend has leaves the fast loop blind, and nothing said so."""
    source = SetSource()
    loop = loop_of(source=source)

    async def use() -> None:
        for looks in (UNCOUNTED_AT_START - 1, UNCOUNTED_REPORTED - 1):
            source.load = Load(arrived=Missing("no series"))
            for _ in range(looks):  # as at a start, and while Prometheus restarts
                await loop.fast()
            source.load = Load(arrived=IDLE, seconds=5.0)
            await loop.fast()
        assert not caplog.messages
        source.load = Load(arrived=Missing("no series"))
        for _ in range(3 * UNCOUNTED_REPORTED):
            await loop.fast()
        assert caplog.messages == ["m: the fast loop counts no arrivals: no series"]
        source.load = Load(arrived=IDLE, seconds=5.0)
        for _ in range(2):
            await loop.fast()
        assert caplog.messages[1:] == ["m: the fast loop counts arrivals again"]

    with caplog.at_level(logging.INFO, "select_planner"):
        run(use())


def test_an_address_that_was_wrong_from_the_start_is_reported_sooner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = SetSource()
    loop = loop_of(source=source)

    async def use() -> None:
        source.load = Load(arrived=Missing("http://s: nobody answers"))
        for _ in range(UNCOUNTED_AT_START):
            await loop.fast()
        assert caplog.messages == [
            "m: the fast loop counts no arrivals: http://s: nobody answers",
        ]

    run(use())
