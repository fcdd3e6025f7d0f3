"""A scrape is read in small steps, is shared, and is what prometheus_client would write."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from select_service.edge.app import create_driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.admission_metrics import admission_tables
from select_service.edge.metrics.exposition import Metrics
from select_service.edge.metrics.scope_series import ScopeGroups
from select_service.edge.metrics.text import LINES_PER_STEP, text_of
from select_service.metric_rows import Steps
from select_service.types import ReservationRequest
from select_service.types.workers import DrainRequest
from tests.select_service.edge.serving import (
    PROMPT,
    SETTINGS,
    add_worker,
    app_client,
)


def test_a_text_is_what_prometheus_client_writes() -> None:
    """In pieces as in one go, families of odd labels and numbers included."""
    odd = GaugeMetricFamily("odd", 'a \\ "text"\nof lines', None, ("b", "a"))
    for number, label in enumerate(('"', "\\", "\n", "é", "", "plain", *map(str, range(100)))):
        odd.add_metric((label, "same"), number / 3)
    for value in (math.inf, -math.inf, math.nan, 1e20, 123456789.0, -1234567.5, 1e-9, 0):
        odd.add_metric(("value", str(value)), value)
    families = [odd, UnknownMetricFamily("unknown", "", 1.0), InfoMetricFamily("info", "")]
    families += [*Metrics(create_driver(SETTINGS), Traffic(), SETTINGS).families()]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Said(families))
    ours = [piece for family in families for piece in text_of(family)]
    assert b"".join(ours) == generate_latest(registry)
    assert max(piece.count(b"\n") for piece in ours) <= LINES_PER_STEP + 2


class Said(Collector):
    """Says what it is given."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def test_a_scrape_is_read_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks, scopes and drains there are: their series are made a few at a time."""
    service = create_driver(replace(SETTINGS, max_inflight_default=100))
    for number in range(300):
        add_worker(service, number, model_name="many" if number < 200 else f"m{number % 50}")
    metrics = Metrics(service, Traffic(), SETTINGS)
    made, add = 0, Metric.add_sample

    def added(*sample: Any, **more: Any) -> None:
        nonlocal made
        made += 1
        add(*sample, **more)

    monkeypatch.setattr(Metric, "add_sample", added)
    most: dict[str, int] = {}
    family = "(first)"
    for step in metrics._steps():
        family = family if step is None else step.name
        most[family] = max(most.get(family, 0), made)
        made = 0
    worst = max(most, key=lambda name: most[name])
    assert most[worst] <= 200, f"{most[worst]} series at once, after {worst}"


async def test_a_scrape_lives_with_workers_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its steps anybody may come and go; no series comes twice for it."""
    monkeypatch.setattr("select_service.edge.cooperative.SLICE_S", 0.0)
    async with app_client(max_inflight_default=10) as (client, service):
        for number in range(100):
            add_worker(service, number)
            if number % 3 == 0:
                service.drain_worker(number, DrainRequest())
        scraping = asyncio.ensure_future(client.get("/metrics"))
        number = 0
        while not scraping.done():
            await asyncio.sleep(0)
            if number < 100:
                service.delete_worker(number)
                add_worker(service, 1000 + number, model_name=f"m{number % 7}")
            number += 1
        text = (await scraping).text
        lines = [line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(lines) == len(set(lines))


def test_a_rank_is_told_with_its_own_load_wherever_it_sits_by_then() -> None:
    service = create_driver(replace(SETTINGS, max_inflight_default=10))
    for number in range(1, 21):
        add_worker(service, number)
    shown: dict[str, float] = {}
    tables = admission_tables(service, SETTINGS, ScopeGroups(service.core, 10))
    (by_rank,) = (
        table
        for table in tables
        if any(step is not None and step.name.endswith("rank_busy") for step in table.collect())
    )
    steps = by_rank.collect()
    assert next(steps) is None, "the last few are written in a turn to come"
    for number in (19, 20):
        service.delete_worker(number)
    for number in (20, 19):  # each where the other was
        add_worker(service, number)
    service.reserve(ReservationRequest(reservation_id="r", worker_id=20, **PROMPT))
    for family in steps:
        if family is not None and family.name.endswith("active_decode_blocks"):
            shown = {one.labels["worker_id"]: one.value for one in family.samples}
    assert shown == {str(number): 2.0 * (number == 20) for number in range(1, 21)}


async def test_who_scrapes_meanwhile_shares_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select_service.edge.cooperative.SLICE_S", 0.0)
    begun = 0
    steps = Metrics._steps

    def counted(metrics: Metrics) -> Steps:
        nonlocal begun
        begun += 1
        return steps(metrics)

    monkeypatch.setattr(Metrics, "_steps", counted)
    async with app_client() as (client, service):
        add_worker(service)
        first = asyncio.ensure_future(client.get("/metrics"))
        while not begun:
            await asyncio.sleep(0)
        await client.post("/select", json=PROMPT)
        later = [asyncio.ensure_future(client.get("/metrics")) for _ in range(8)]
        texts = {(await one).text for one in later}
        assert len(texts) == 1
        assert "select_service_selections_total 1.0" in texts.pop()
        assert (await first).status_code == 200
        assert begun == 2


async def test_a_scraper_that_goes_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select_service.edge.cooperative.SLICE_S", 0.0)
    metrics = Metrics(create_driver(SETTINGS), Traffic(), SETTINGS)
    steps, alive = metrics._steps, 0

    def counted() -> Steps:
        nonlocal alive
        alive += 1
        try:
            yield from steps()
        finally:
            alive -= 1

    metrics._steps = counted  # type: ignore[method-assign]
    scrapers = [asyncio.ensure_future(metrics.render()) for _ in range(2)]
    while not alive:
        await asyncio.sleep(0)
    waiting = asyncio.ensure_future(metrics.render())
    await asyncio.sleep(0)
    for one in (*scrapers, waiting):
        assert not one.done()
        one.cancel()
    await asyncio.wait((*scrapers, waiting))
    while alive:
        await asyncio.sleep(0)
    text, _ = await metrics.render()  # nobody who went stands in the way
    assert b"process_cpu_seconds_total" in text
