"""Points of the last minutes: what they count, how many are kept, and that they cost little."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from indexer.core.hashing import block_hashes
from indexer.types import Tier
from select_service.edge.app import create_driver
from select_service.edge.console import history
from select_service.edge.console.history import HISTORY_POINTS, POINT, RANKS_EVERY, History
from select_service.edge.driver.driver import Driver
from select_service.edge.http.traffic import LATENCY_BUCKETS_S, RouteTraffic, Traffic
from tests.coroutines import within
from tests.select_service.edge.serving import SETTINGS, add_worker, app_client
from tests.wait import until


def read(point: bytes) -> dict[str, Any]:
    numbers = json.loads(point)
    return dict(zip(POINT, numbers, strict=False)) | {"buckets": numbers[len(POINT) :]}


def test_a_point_counts_selections_and_their_time() -> None:
    traffic = Traffic()
    for seconds in (0.00004, 0.003, 100.0):
        traffic.routes.setdefault(("POST", "/select"), RouteTraffic()).observe(200, seconds)
    traffic.routes.setdefault(("GET", "/health"), RouteTraffic()).observe(200, 9.0)
    point = read(History(create_driver(SETTINGS), traffic).now())
    assert point["answered"] == 3
    assert point["seconds"] == pytest.approx(100.00304)
    assert len(point["buckets"]) == len(LATENCY_BUCKETS_S) + 1
    assert sum(point["buckets"]) == 3
    assert (point["buckets"][0], point["buckets"][-1]) == (1, 1)


@within(app_client)
async def test_a_point_knows_what_was_cached_and_refused(
    client: httpx.AsyncClient, service: Driver
) -> None:
    book = History(service, Traffic())
    await client.post("/select", json={"token_ids": [1]})
    assert read(book.now())["failed"] == 1
    add_worker(service)
    (partition,) = service.core.partitions.values()
    (rank, _), *_ = partition.fleet_slots.ranks_and_slots()
    tokens = list(range(64))
    partition.index.store(rank, Tier.DEVICE, None, [1, 2], block_hashes(tokens[:32], 16))
    for body in ({"token_ids": tokens}, {"token_ids": tokens, "reservation_id": "a"}):
        path = "/select_and_reserve" if "reservation_id" in body else "/select"
        assert (await client.post(path, json=body)).status_code == 200
    book.start(asyncio.get_running_loop())
    book.close()
    (_, rows), *_ = map(json.loads, book.chosen)
    assert rows == [["1/0", 2, 128, 64]]
    point = read(book.now())
    assert (point["selections"], point["failed"], point["reservations"]) == (2, 1, 1)
    assert (point["isl_tokens"], point["prefill_tokens"]) == (128, 64)
    text = (await client.get("/metrics")).text
    assert "select_service_selected_isl_tokens_total 128.0" in text
    assert "select_service_selected_prefill_tokens_total 64.0" in text


async def test_points_come_by_themselves_and_old_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HISTORY_STEP_S", 0.0)
    book = History(create_driver(SETTINGS), Traffic())
    book.start(asyncio.get_running_loop())
    book.start(asyncio.get_running_loop())  # once is enough
    await until(lambda: len(book.points) == HISTORY_POINTS)
    oldest = book.points[0]
    await until(lambda: book.points[0] is not oldest)
    assert len(book.points) == HISTORY_POINTS
    book.close()
    book.close()
    assert len(book.chosen) == HISTORY_POINTS // RANKS_EVERY
    kept = list(book.points)
    await asyncio.sleep(0.01)
    assert list(book.points) == kept
