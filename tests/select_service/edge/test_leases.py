"""Leases and batches over HTTP and embedded: shapes, statuses, slices, clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from select_service import (
    BatchFree,
    LeaseRequest,
    ReservationRequest,
)
from select_service.edge.driver.driver import Driver
from select_service.edge.driver.reservation_operations import LifecycleBatches
from select_service.types import BatchAnswer, Operation, OperationResult
from tests.coroutines import within
from tests.select_service.edge.http.test_api import JSON, problem
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, app_client, listening
from tests.wait import until

BOOKING: dict[str, Any] = {"worker_id": 1, "sequence_hashes": [1, 2], "isl_tokens": 32}


def requests(service: Driver) -> int:
    return sum(row.active_requests for scope in service.loads() for row in scope.loads)


@within(app_client)
async def test_the_life_of_a_lease(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    answer = await client.post("/leases", json={"owner": "me", "ttl_s": 30, "lease_id": "a/b"})
    assert answer.status_code == 201
    record = answer.json()
    assert record.pop("expires_in_s") == pytest.approx(30, abs=5)
    assert record == {"lease_id": "a/b", "owner": "me", "ttl_s": 30.0, "reservations": 0}
    for number in range(3):
        body = {**BOOKING, "reservation_id": f"r{number}", "lease_id": "a/b"}
        assert (await client.post("/reservations", json=body)).status_code == 201
    body = {**PROMPT, "reservation_id": "s", "lease_id": "a/b"}
    assert (await client.post("/select_and_reserve", json=body)).status_code == 200
    for content, headers in ((None, {}), (b"", JSON), (b"{}", JSON), (b'{"ttl_s": 60}', JSON)):
        answer = await client.post("/leases/a%2Fb/renew", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
    assert (answer.json()["ttl_s"], answer.json()["reservations"]) == (60.0, 4)
    listed = (await client.get("/leases?owner=me&limit=1")).json()
    assert [one["lease_id"] for one in listed["leases"]] == ["a/b"]
    assert listed["total"] == 1
    assert (await client.get("/leases?owner=you")).json() == {"leases": [], "total": 0}
    assert (await client.delete("/leases/a%2Fb")).json() == {"status": "ok"}
    assert requests(service) == 0
    assert (await client.delete("/leases/a%2Fb")).status_code == 200
    assert (await client.delete("/reservations/r0")).status_code == 200, "freed lately"
    problem(await client.post("/leases/a%2Fb/renew"), 404, "lease_closed", "lease_id")
    problem(await client.delete("/leases/x"), 404, "lease_not_found", "lease_id")


@within(app_client, leases_max=1)
async def test_refusals(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    for path, extra in (("/reservations", BOOKING), ("/select_and_reserve", PROMPT)):
        body: dict[str, Any] = {**extra, "reservation_id": "r", "lease_id": "nobody's"}
        problem(await client.post(path, json=body), 404, "lease_not_found", "lease_id")
        del body["lease_id"]
        for ttl_s in (0, -1, 1e9, "5"):
            answer = await client.post(path, json={**body, "ttl_s": ttl_s})
            problem(answer, 422, "invalid_field", "ttl_s")
    assert requests(service) == 0
    lease = {"owner": "me", "ttl_s": 30, "lease_id": "l"}
    assert (await client.post("/leases", json=lease)).status_code == 201
    answer = await client.post("/leases", json={**lease, "owner": "you"})
    problem(answer, 409, "lease_conflict", "lease_id")
    answer = await client.post("/leases", json={**lease, "lease_id": "m"})
    problem(answer, 503, "too_many_leases")
    for wrong in ({"owner": ""}, {"owner": 5}, {"ttl_s": 0.5}, {"ttl_s": None}):
        answer = await client.post("/leases", json=lease | wrong)
        problem(answer, 422, "invalid_field", next(iter(wrong)))
    problem(await client.post("/leases/l/renew", content=b"{}"), 415, "unsupported_media_type")
    answer = await client.post("/leases/l/renew", json={"ttl_s": 4000})
    problem(answer, 422, "invalid_field", "ttl_s")
    for query in ("limit=0", "limit=x", "limit=1&limit=1", "limit=-1"):
        problem(await client.get(f"/leases?{query}"), 400, "invalid_query", "limit")
    both = {**BOOKING, "reservation_id": "r", "lease_id": "l", "ttl_s": 5}
    problem(await client.post("/reservations", json=both), 422, "invalid_field", "ttl_s")


@within(app_client, batch_operations_max=5)
async def test_a_batch_answers_each_for_itself(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    for name in ("a", "batch"):
        await client.post("/reservations", json={**BOOKING, "reservation_id": name})
    operations = [
        {"op": "prefill_complete", "reservation_id": "a"},
        {"op": "output_block", "reservation_id": "a", "count": 3},
        {"op": "output_block", "reservation_id": "a", "decay_fraction": 7},
        {"op": "free", "reservation_id": "a"},
        {"op": "free", "reservation_id": "x"},
    ]
    answer = await client.post("/reservations/batch", json={"operations": operations})
    assert answer.status_code == 200
    assert answer.json()["results"] == [
        {"status": 200},
        {"status": 200},
        {
            "status": 400,
            "error": "decay_fraction must be between 0.0 and 1.0",
            "code": "invalid_request",
            "field": "decay_fraction",
        },
        {"status": 200},
        {
            "status": 404,
            "error": "reservation x not found",
            "code": "reservation_not_found",
        },
    ]
    answer = await client.delete("/reservations/batch")
    assert answer.status_code == 200, "an id like any other"
    assert requests(service) == 0
    answer = await client.get("/reservations/batch")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, POST"
    for wrong, field in (
        ({"op": "vanish", "reservation_id": "a"}, "operations[0].op"),
        ({"op": "free"}, "operations[0].reservation_id"),
        (
            {"op": "output_block", "reservation_id": "a", "count": 0},
            "operations[0].count",
        ),
    ):
        answer = await client.post("/reservations/batch", json={"operations": [wrong]})
        problem(answer, 422, "invalid_field", field)
    answer = await client.post("/reservations/batch", json={"operations": operations * 2})
    problem(answer, 422, "invalid_field", "operations")
    answer = await client.post("/reservations/batch", json={"operations": []})
    assert answer.json() == {"results": []}


@within(listening)
async def test_long_batches_and_big_leases_go_in_slices_and_are_finished_without_their_client(
    port: int, service: Driver
) -> None:
    add_worker(service)
    service.open_lease(LeaseRequest(owner="o", ttl_s=30.0, lease_id="l"))

    def book(prefix: str, **more: Any) -> list[str]:
        names = [f"{prefix}{number}" for number in range(1000)]
        for name in names:
            service.reserve(
                ReservationRequest(
                    reservation_id=name, worker_id=1, sequence_hashes=[1], isl_tokens=9, **more
                )
            )
        return names

    def free_all(names: list[str]) -> dict[str, Any]:
        return {"operations": [{"op": "free", "reservation_id": name} for name in names]}

    wire = await Wire.to(port)
    status, _headers, body = await wire.exchange("POST", "/reservations/batch", free_all(book("a")))
    assert status == 200
    assert body.count(b'{"status":200}') == 1000
    names = book("b")
    wire.ask("POST", "/reservations/batch", free_all(names))
    left = len(names)
    while left == len(names):  # every turn of the loop
        await asyncio.sleep(0)
        left = requests(service)
    assert left > 0, "others come between"
    wire.close()
    await until(lambda: requests(service) == 0)
    book("c", lease_id="l")
    other = await Wire.to(port)
    assert await other.status("DELETE", "/leases/l") == 200
    assert requests(service) == 0


async def test_a_batch_under_way_is_finished_before_the_end() -> None:
    done: list[Operation] = []
    now = [0.0]

    def operate(operation: Operation) -> OperationResult:
        now[0] += 1.0  # every one takes a slice
        done.append(operation)
        return OperationResult(200)

    batches = LifecycleBatches(operate, lambda: now[0])
    operations = [BatchFree(reservation_id=str(number)) for number in range(5)]
    answer = batches.begin(operations)
    assert isinstance(answer, asyncio.Task)
    assert len(done) == 1
    await batches.close()
    assert done == operations
    assert answer.result() == BatchAnswer([OperationResult(200)] * 5)


@within(app_client)
async def test_metrics(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    for name in ("a", "b"):
        await client.post("/leases", json={"owner": "me", "ttl_s": 30, "lease_id": name})
    body = {**BOOKING, "reservation_id": "r", "lease_id": "a"}
    await client.post("/reservations", json=body)
    await client.post("/leases/b/renew")
    await client.delete("/leases/a")
    text = (await client.get("/metrics")).text
    for line in (
        "leases 1.0",
        "ended_leases 1.0",
        'lease_events_total{event="opened"} 2.0',
        'lease_events_total{event="renewed"} 1.0',
        'lease_events_total{event="closed"} 1.0',
        'lease_events_total{event="expired"} 0.0',
        'reservation_events_total{event="lease_ended"} 1.0',
    ):
        assert f"select_service_{line}\n" in text
