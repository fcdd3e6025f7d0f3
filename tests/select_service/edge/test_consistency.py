"""GET /debug/consistency: what is carried, beside what is booked."""

from __future__ import annotations

import httpx
import pytest

from indexer.types import Scope
from select_service.edge.driver.driver import Driver
from select_service.edge.driver.query_operations import DIFFERENCES_LISTED
from tests.coroutines import within
from tests.select_service.edge.metrics.test_exposition import scrape, value
from tests.select_service.edge.serving import PROMPT, add_worker, app_client


@within(app_client)
async def test_a_ledger_that_adds_up_says_so(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    add_worker(service, worker_id=2)
    for name in "abc":
        answer = await client.post("/select_and_reserve", json=PROMPT | {"reservation_id": name})
        assert answer.status_code == 200
    await client.post("/reservations/a/prefill_complete")
    await client.delete("/reservations/b")
    body = (await client.get("/debug/consistency")).json()
    assert body.pop("seconds") >= 0.0
    assert body == {
        "consistent": True,
        "scopes": 1,
        "ranks": 2,
        "reservations": 2,
        "differences_total": 0,
        "differences": [],
    }


async def test_what_does_not_add_up_is_told_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with app_client() as (client, service):
        add_worker(service, worker_id=7)
        await client.post("/select_and_reserve", json=PROMPT | {"reservation_id": "a"})
        ledger = service.core.partitions[Scope("default", "default")].ledger
        ledger.loads.decode[0] += 5
        answer = await client.get("/debug/consistency")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["consistent"], body["differences_total"]) == (False, 1)
        [one] = body["differences"]
        assert (one["worker_id"], one["dp_rank"], one["what"]) == (7, 0, "decode")
        assert one["carried"] == one["recomputed"] + 5
        samples = await scrape(client)
        assert value(samples, "consistency_checks_total", outcome="different") == 1
        assert value(samples, "consistency_checks_total", outcome="consistent") == 0
        ledger.loads.decode[0] -= 5
        assert (await client.get("/debug/consistency")).json()["consistent"]
    assert "differs from its reservations in 1 places" in caplog.text


@within(app_client)
async def test_of_many_the_first_are_told_and_all_are_counted(
    client: httpx.AsyncClient, service: Driver
) -> None:
    count = DIFFERENCES_LISTED + 20
    for worker_id in range(count):
        add_worker(service, worker_id=worker_id)
    service.core.partitions[Scope("default", "default")].ledger.loads.context += 1.0
    answer = (await client.get("/debug/consistency")).json()
    assert len(answer["differences"]) == DIFFERENCES_LISTED
    assert answer["differences_total"] >= count
