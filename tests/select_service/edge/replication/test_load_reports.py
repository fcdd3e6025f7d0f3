"""What a client reports to one replica reaches all, over genuine sockets."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from tests.live.ports import free_port
from tests.select_service.edge.serving import PROMPT, add_worker, listening
from tests.wait import until


@contextlib.asynccontextmanager
async def two_replicas(**settings: Any) -> Any:
    """Both on ports of this machine, each registered at the other; one worker, known to both."""
    async with contextlib.AsyncExitStack() as stack:
        ports = [free_port(), free_port()]
        served = [
            await stack.enter_async_context(listening(replica_sync_port=port, **settings))
            for port in ports
        ]
        for (_, service, _), other in zip(served, reversed(ports), strict=True):
            add_worker(service, total_kv_blocks=1000)
            service.register_peer(f"tcp://127.0.0.1:{other}")
        services = [service for _, service, _ in served]
        await until(lambda: all(knows_one(service) for service in services))
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}"))
            for port, _, _ in served
        ]
        yield clients, services


def knows_one(service: Driver) -> bool:
    views = service.core.replicas.publishers.views.values()
    return sum(not one.gone for one in views) == 1


async def report(client: httpx.AsyncClient, **reported: Any) -> None:
    answer = await client.post("/workers/1/metrics", json={"ranks": [{"dp_rank": 0, **reported}]})
    assert answer.json() == {"accepted": [0], "dropped": []}


async def select(client: httpx.AsyncClient) -> int:
    answer = await client.post("/select", json={**PROMPT, "slo_class": "critical"})
    return answer.status_code


def used(service: Driver) -> float | None:
    reported = service.core.admission_controller.reports.by_worker.get(1, {}).get(0)
    return None if reported is None else reported.metrics.kv_used_blocks


async def test_a_report_to_one_replica_counts_at_both_and_may_move() -> None:
    busy = {"admission_control": "token-capacity", "active_decode_blocks_threshold": 0.8}
    async with two_replicas(**busy) as (clients, services):
        for received, other, blocks, status in ((0, 1, 900, 503), (1, 0, 100, 200)):
            await report(clients[received], kv_used_blocks=blocks)
            await until(lambda: used(services[other]) == blocks)
            assert [await select(client) for client in clients] == [status, status]
        for client in clients:
            shown = (await client.get("/metrics")).text
            assert "select_service_replica_load_reports_total 1.0" in shown


async def test_reports_that_moved_leave_no_replica_with_what_it_heard_first() -> None:
    async with two_replicas(admission_policy="slo-shed") as (clients, services):
        await report(clients[0], kv_used_blocks=1000, num_requests_waiting=50)
        await until(lambda: used(services[1]) == 1000)
        await report(clients[1], kv_used_blocks=0, num_requests_waiting=0)
        await until(lambda: used(services[0]) == 0)
        assert [await select(client) for client in clients] == [200, 200]


@pytest.mark.parametrize("is_ended", [False, True])
async def test_what_an_engine_found_is_compared_where_it_was_predicted(*, is_ended: bool) -> None:
    """As behind a load balancer: whichever replica receives it, also after the end."""
    async with two_replicas() as (clients, services):
        here, there = (one.core for one in services)
        body = {**PROMPT, "reservation_id": "r"}
        answer = await clients[0].post("/select_and_reserve", json=body)
        assert answer.status_code == 200, answer.text
        await until(lambda: there.lifecycle.bookings.live("r"))
        if is_ended:
            await clients[0].delete("/reservations/r")
            await until(lambda: not there.lifecycle.bookings.live("r"))
        done = {"op": "prefill_complete", "reservation_id": "r", "cached_tokens": 0}
        answer = await clients[1].post("/reservations/batch", json={"operations": [done]})
        (result,) = answer.json()["results"]
        assert (result["status"], "ended" in result) == (404 if is_ended else 200, is_ended)
        await until(lambda: here.counters.cached_token_reports == {"compared": 1})
        assert there.counters.cached_token_reports == {"told_replicas": 1}
