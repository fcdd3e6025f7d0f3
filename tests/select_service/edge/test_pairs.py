"""Pairs over HTTP, embedded, and behind a disk that a killed process leaves as it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.live.server import Server
from tests.select_service.edge.http.test_api import JSON, problem
from tests.select_service.edge.serving import PROMPT, add_worker, app_client, worker
from tests.wait import until

PAIR: dict[str, Any] = PROMPT | {"reservation_id": "p"}


def loads(service: Driver) -> dict[int, tuple[int, int, int]]:
    return {
        row.worker_id: (
            row.potential_prefill_tokens,
            row.potential_decode_blocks,
            row.active_requests,
        )
        for scope in service.loads()
        for row in scope.loads
    }


@within(app_client)
async def test_the_life_of_a_pair(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1, role="prefill")
    add_worker(service, 2, role="decode")
    answer = await client.post("/select_pair", json=PAIR | {"selection_id": "s"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert list(body)[:6] == [
        *("selection_id", "reservation_id", "model_name", "tenant_id", "block_size", "mode")
    ]
    assert (body["prefill"]["worker_id"], body["decode"]["worker_id"]) == (1, 2)
    assert set(body["decode"]["overlap"]) == {"longest_matched", "gpu", "dp", "cpu", "disk"}
    again = await client.post("/select_pair", json=PAIR | {"selection_id": "s"})
    assert again.content == answer.content
    taken = await client.post("/select_pair", json=PAIR)
    problem(taken, 409, "reservation_conflict", "reservation_id")
    assert loads(service) == {1: (32, 0, 1), 2: (0, 2, 1)}
    block = await client.post("/reservations/p/output_block", content=b"{}", headers=JSON)
    assert block.status_code == 200
    operations = [{"op": "prefill_complete", "reservation_id": "p"}]
    done = await client.post("/reservations/batch", json={"operations": operations})
    assert done.json() == {"results": [{"status": 200}]}
    assert loads(service) == {1: (0, 0, 0), 2: (0, 3, 1)}
    assert (await client.delete("/reservations/p")).status_code == 200
    assert (await client.delete("/reservations/p")).status_code == 200
    assert loads(service) == {1: (0, 0, 0), 2: (0, 0, 0)}


@within(app_client)
async def test_refusals_have_a_code_and_name_the_role(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1, role="prefill")
    answer = await client.post("/select_pair", json=PAIR)
    assert (answer.status_code, answer.json()["code"]) == (503, "no_worker_for_role")
    assert answer.json()["details"] == {"role": "decode"}
    bad = await client.post("/workers", json=worker(3, role="encode"))
    assert (bad.status_code, bad.json()["field"]) == (422, "role")
    wrong = await client.post("/select_pair", json={"token_ids": []})
    assert (wrong.status_code, wrong.json()["field"]) == (400, "isl_tokens")
    metrics = (await client.get("/metrics")).text
    assert 'select_service_selections_failed_total{code="no_worker_for_role"} 1.0' in metrics


@within(app_client)
async def test_records_show_a_role_that_was_given_and_none_that_was_not(
    client: httpx.AsyncClient,
) -> None:
    assert "role" not in (await client.post("/workers", json=worker(1))).json()
    assert "advice" not in (await client.post("/select", json=PROMPT)).json()
    patched = await client.patch("/workers/1", json={"role": "aggregated"})
    assert patched.json()["role"] == "aggregated"
    advice = (await client.post("/select", json=PROMPT)).json()["advice"]
    assert advice == {
        "mode": "aggregated",
        "reason": "no_prefill_worker",
        "prefill": None,
        "aggregated_cost": 4.0,
        "disaggregated_cost": None,
    }
    metrics = (await client.get("/metrics")).text
    assert (
        'select_service_advised_total{mode="aggregated",reason="no_prefill_worker"} 1.0' in metrics
    )


@within(app_client, kv_transfer_cost_per_block=5.0)
async def test_the_price_of_moving_blocks_is_a_flag(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1, role="prefill")
    add_worker(service, 2, role="decode")
    body = (await client.post("/select_pair", json=PAIR)).json()
    assert body["disaggregated_cost"] == 2 + 2 + 2 * 5


@within(app_client)
async def test_a_waiting_pair_is_answered_when_a_prefill_ends(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1, role="prefill", max_num_batched_tokens=1)
    add_worker(service, 2, role="decode")
    await client.post("/select_pair", json=PAIR)
    waiting = asyncio.ensure_future(
        client.post("/select_pair", json=PAIR | {"reservation_id": "q"})
    )
    await until(lambda: service.loads()[0].pending_count > 0)
    await client.post("/reservations/p/prefill_complete")
    answer = await waiting
    assert answer.json()["prefill"]["reservation_id"] == "q:prefill"
    await client.delete("/reservations/q")
    await client.delete("/reservations/p")
    assert loads(service) == {1: (0, 0, 0), 2: (0, 0, 0)}


def ask(server: Server, method: str, path: str, body: object = None) -> Any:
    return server.request(method, path, body).json


@pytest.mark.e2e
def test_a_pair_survives_kill_9(tmp_path: Path) -> None:
    args = ("--state-dir", str(tmp_path / "state"))
    env = {"DYN_USE_KV_EVENTS": "false"}
    with Server(tmp_path / "first.log", args=args, env=env) as server:
        for worker_id, role in ((1, "prefill"), (2, "decode")):
            server.request("POST", "/workers", worker(worker_id, role=role))
        first = ask(server, "POST", "/select_pair", PAIR)
        assert first["mode"] == "disaggregated"
        assert server.process is not None
        server.process.kill()
    with Server(tmp_path / "second.log", args=args, env=env) as server:
        assert ask(server, "POST", "/select_pair", PAIR) == first
        rows = ask(server, "GET", "/loads")[0]["loads"]
        assert [
            (row["potential_prefill_tokens"], row["potential_decode_blocks"]) for row in rows
        ] == [(32, 0), (0, 2)]
        assert server.request("POST", "/reservations/p/prefill_complete").status == 200
        assert server.request("DELETE", "/reservations/p").status == 200
        rows = ask(server, "GET", "/loads")[0]["loads"]
        assert [row["active_requests"] for row in rows] == [0, 0]
