"""Admission over HTTP: refusals on both ways through the server, what is set, and what is shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.edge.app import create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.exposition import Metrics
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.http.test_api import problem
from tests.select_service.edge.serving import (
    PROMPT,
    SETTINGS,
    Wire,
    add_worker,
    app_client,
    listening,
)
from tests.sliced import answer_of
from tests.wait import until

SLOW = "expect: 100-continue"
"""A header that takes the ASGI way."""
BOOK: dict[str, Any] = {**PROMPT, "reservation_id": "a"}
BUSY: dict[str, Any] = {"admission_control": "token-capacity", "active_prefill_tokens_threshold": 1}


async def asked(
    port: int, path: str, body: object, *headers: str, method: str = "POST"
) -> tuple[int, dict[str, str], Any]:
    wire = await Wire.to(port)
    wire.ask(method, path, body, *headers)
    if headers:
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    status, got, content = await wire.answer()
    return status, got, json.loads(content)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [(), (SLOW,)], ids=["fast lane", "asgi"])
@within(listening, **BUSY)
async def test_a_refusal_for_load_says_why_and_when_to_come_again(
    port: int, service: Driver, *, headers: tuple[str, ...]
) -> None:
    add_worker(service)
    assert (await asked(port, "/select_and_reserve", BOOK))[0] == 200
    status, got, body = await asked(port, "/select", PROMPT, *headers)
    assert status == 503
    assert int(got["retry-after"]) >= body["retry_after_s"] >= 0
    assert body["message"] == (
        "Service temporarily unavailable: All workers are busy, please retry later"
    )
    assert (body["type"], body["code"]) == ("service_unavailable", 503)
    assert (body["reason"], body["gate"], body["policy"]) == (
        "all-workers-busy",
        "busy",
        "always-admit",
    )
    assert (body["knob"], body["value"], body["limit"]) == (
        "active_prefill_tokens_threshold",
        32,
        1,
    )


@pytest.mark.parametrize("headers", [(), (SLOW,)], ids=["fast lane", "asgi"])
@pytest.mark.parametrize("status", [429, 529, 999])
async def test_the_status_of_overload_is_configurable(
    status: int, headers: tuple[str, ...]
) -> None:
    chosen = {"overload_status_code": status, "admission_policy": "reject-all"}
    async with listening(**chosen) as (port, service, _):
        add_worker(service)
        got, answer_headers, body = await asked(port, "/select", PROMPT, *headers)
        assert (got, body["reason"]) == (status, "reject-all")
        assert int(answer_headers["retry-after"]) >= 1


@within(listening)
async def test_every_503_says_when_to_come_again(
    port: int, service: Driver, server: Server
) -> None:
    for path, body, method in (
        ("/ready", None, "GET"),
        ("/select", PROMPT, "POST"),
        ("/potential_loads", PROMPT, "POST"),
    ):
        status, headers, _ = await asked(port, path, body, method=method)
        assert status == 503
        assert int(headers["retry-after"]) >= 1
    add_worker(service)
    nobody = {**PROMPT, "allowed_worker_ids": [7]}
    status, headers, got = await asked(port, "/select", nobody)
    assert (status, got["code"]) == (503, "no_eligible_worker")
    assert int(headers["retry-after"]) >= 1
    await asked(port, "/select", PROMPT)
    status, headers, _ = await asked(port, "/select", {**PROMPT, "isl_tokens": -1})
    assert status == 422
    assert "retry-after" not in headers


@pytest.mark.parametrize("headers", [(), (SLOW,)], ids=["hot route", "asgi"])
@pytest.mark.parametrize("status", [503, 529])
async def test_what_never_fits_is_told_so_and_no_time(
    status: int, headers: tuple[str, ...]
) -> None:
    config = {"capacity": 1000, "refill_rate": 100}
    settings = {"admission_policy": "token-bucket", "admission_config": config}
    async with listening(overload_status_code=status, **settings) as (port, service, _):
        add_worker(service)
        body = {**PROMPT, "isl_tokens": 5000}
        got, answer_headers, answer = await asked(port, "/select", body, *headers)
        assert (got, answer["reason"], answer["code"]) == (status, *["exceeds-capacity"] * 2)
        assert (answer["retry_after_s"], answer["promised"]) == (None, False)
        assert (answer["knob"], answer["value"], answer["limit"]) == ("capacity", 5000, 1000)
        assert "retry-after" not in answer_headers


@within(listening, connections_max=1)
async def test_too_many_connections_are_told_when_to_come_again(port: int) -> None:
    first = await Wire.to(port)
    await first.exchange("GET", "/health")
    second = await Wire.to(port)
    status, headers, _body = await second.exchange("POST", "/select", PROMPT)
    assert (status, int(headers["retry-after"])) == (503, 1)


# -- waiting ---------------------------------------------------------------------------------------


def _waiting(service: Driver) -> int:
    return sum(scope.pending_count for scope in service.loads())


@pytest.mark.parametrize("headers", [(), (SLOW,)], ids=["fast lane", "asgi"])
@within(listening)
async def test_a_client_that_leaves_the_queue_gives_its_place_back(
    port: int, service: Driver, *, headers: tuple[str, ...]
) -> None:
    add_worker(service, max_inflight=1, max_queued=1)
    assert (await asked(port, "/select_and_reserve", BOOK))[0] == 200
    waits = await Wire.to(port)
    waits.ask("POST", "/select_and_reserve", {**BOOK, "reservation_id": "b"}, *headers)
    await until(lambda: _waiting(service) == 1)
    status, _headers, body = await asked(
        port, "/select_and_reserve", {**BOOK, "reservation_id": "c"}
    )
    assert (status, body["reason"], body["gate"]) == (503, "workers-at-capacity", "capacity")
    waits.close()
    await until(lambda: _waiting(service) == 0)
    again = await Wire.to(port)
    again.ask("POST", "/select_and_reserve", {**BOOK, "reservation_id": "c"})
    await until(lambda: _waiting(service) == 1)
    service.free("a")
    assert (await again.answer())[0] == 200
    counters = answer_of(service.core.admission.status()).counters["standard"]
    assert (counters.offered, counters.admitted) == (4, 2)
    assert (counters.refused, counters.withdrawn, counters.waiting) == (1, 1, 0)
    service.core.check()


@within(listening, queue_deadline_s=0.05)
async def test_who_waits_too_long_is_answered(port: int, service: Driver) -> None:
    add_worker(service, max_inflight=1)
    assert (await asked(port, "/select_and_reserve", BOOK))[0] == 200
    status, headers, body = await asked(
        port, "/select_and_reserve", {**BOOK, "reservation_id": "b"}
    )
    assert (status, body["reason"], body["gate"]) == (503, "expired-waiting", "waiting")
    assert int(headers["retry-after"]) >= 1
    assert len(service.core.lifecycle.bookings) == 1


@within(listening)
async def test_another_policy_reaches_who_waits(port: int, service: Driver) -> None:
    add_worker(service, max_inflight=1)
    assert (await asked(port, "/select_and_reserve", BOOK))[0] == 200
    waits = await Wire.to(port)
    waits.ask("POST", "/select_and_reserve", {**BOOK, "reservation_id": "b"})
    await until(lambda: _waiting(service) == 1)
    change = {"policy": "reject-all"}
    status, _headers, body = await asked(port, "/admission", change, method="PUT")
    assert (status, body["policy"]) == (200, "reject-all")
    status, _headers, content = await waits.answer()
    assert (status, json.loads(content)["reason"]) == (503, "reject-all")


# -- cache hits ------------------------------------------------------------------------------------


@within(app_client)
async def test_a_cache_hit_threshold_nobody_reaches_is_no_error(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    ask = {**BOOK, "selection_id": "s", "cache_hit_threshold": 0.5}
    answer = await client.post("/select_and_reserve", json=ask)
    assert answer.status_code == 200
    assert answer.json() == {
        "selection_id": "s",
        "finish_reason": "cache_threshold",
        "model_name": "default",
        "tenant_id": "default",
        "best_hit_rate": 0.0,
        "threshold": 0.5,
        "threshold_source": "request",
        "best_worker": {"worker_id": 1, "dp_rank": 0, "endpoint": "http://w1"},
    }
    assert service.loads()[0].loads[0].active_requests == 0
    ask["on_cache_threshold"] = "fallback"
    placed = (await client.post("/select_and_reserve", json=ask)).json()
    assert placed["needs_prefill"] is True
    assert placed["cache_hit"] == {
        "best_hit_rate": 0.0,
        "threshold": 0.5,
        "threshold_source": "request",
    }
    answer = await client.post("/select", json=PROMPT)
    assert "cache_hit" not in answer.json()


@pytest.mark.parametrize("value", ["-0.1", "1.0001", "NaN", "1e400", '"0.5"', "true"])
@within(app_client)
async def test_what_is_no_threshold_is_refused(
    client: httpx.AsyncClient, service: Driver, *, value: str
) -> None:
    add_worker(service)
    body = json.dumps(PROMPT)[:-1] + f', "cache_hit_threshold": {value}}}'
    answer = await client.post(
        "/select", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in {400, 422}


# -- policies, workers, metrics --------------------------------------------------------------------


@within(app_client)
async def test_the_policy_is_read_and_changed(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    before = (await client.get("/admission")).json()
    assert (before["policy"], before["mode"], before["scopes"]) == ("always-admit", "none", [])
    change = {"policy": "token-bucket", "config": {"capacity": 32, "refill_rate": 1}}
    after = (await client.put("/admission", json=change)).json()
    assert (after["policy"], after["config"]) == ("token-bucket", change["config"])
    assert (await client.post("/select", json=PROMPT)).status_code == 200
    refused = await client.post("/select", json={**PROMPT, "fairness_id": "t"})
    assert refused.json()["error"] == "insufficient tokens"
    assert (refused.json()["code"], refused.json()["policy"]) == (
        "insufficient-tokens",
        "token-bucket",
    )
    counters = (await client.get("/admission")).json()["counters"]["standard"]
    assert counters == {
        "offered": 2,
        "admitted": 1,
        "refused": 1,
        "withdrawn": 0,
        "waiting": 0,
    }
    for wrong in ({"policy": "nonsense"}, {"policy": "token-bucket", "config": {"x": 1}}):
        assert (await client.put("/admission", json=wrong)).status_code == 422
    odd = {**PROMPT, "slo_class": "batch", "priority": 4}
    answer = await client.post("/select", json=odd)
    assert (answer.status_code, answer.json()["field"]) == (422, "priority")


@within(app_client, admission_control="token-capacity", active_decode_blocks_threshold=0.85)
async def test_a_worker_tells_its_load_and_shows_its_caps(
    client: httpx.AsyncClient, service: Driver
) -> None:
    spec: dict[str, Any] = {"max_inflight": 3, "max_queued": 2, "max_num_seqs": 256}
    spec["role"] = "aggregated"
    add_worker(service, total_kv_blocks=100, **spec)
    record = (await client.get("/workers")).json()[0]
    assert {name: record[name] for name in spec} == spec
    spec = {"ranks": [{"kv_used_blocks": 90}, {"dp_rank": 4, "kv_used_blocks": 1}]}
    answer = await client.post("/workers/1/metrics", json=spec)
    assert (answer.status_code, answer.json()) == (200, {"accepted": [0], "dropped": [4]})
    refused = await client.post("/select", json=PROMPT)
    assert (refused.json()["value"], refused.json()["limit"]) == (90.0, 85.0)
    assert (await client.post("/workers/2/metrics", json=spec)).status_code == 404
    for ranks in ([], [{"kv_total_blocks": 1 << 64}]):
        answer = await client.post("/workers/1/metrics", json={"ranks": ranks})
        assert answer.status_code == 422
    assert answer.json()["field"] == "ranks[0].kv_total_blocks"
    patched = await client.patch("/workers/1", json={"max_inflight": 0})
    assert patched.status_code == 422


@within(app_client, **BUSY)
async def test_metrics_of_admission_and_their_aliases(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    assert (await client.post("/select_and_reserve", json=BOOK)).status_code == 200
    assert (await client.post("/select", json=PROMPT)).status_code == 503
    text = (await client.get("/metrics")).text
    for line in (
        'select_service_admission_requests_total{model_name="default",outcome="admitted",'
        'slo_class="standard",tenant_id="default"} 1.0',
        'dynamo_frontend_model_rejection_total{endpoint="select",model="default"} 1.0',
        'dynamo_frontend_worker_active_prefill_tokens{dp_rank="0",worker_id="1",'
        'worker_type="aggregated"} 32.0',
        "dynamo_engine_request 1.0",
        'select_service_admission_busy_ranks{model_name="default",tenant_id="default"} 1.0',
    ):
        assert line in text
    assert 'gate="busy"' in text
    service.delete_worker(1)
    text = (await client.get("/metrics")).text
    assert "dynamo_frontend_worker_active_prefill_tokens{" not in text
    assert "select_service_admission_rank_busy{" not in text


@within(app_client, max_inflight_default=1, max_queued_default=0)
async def test_counters_of_all_scopes_do_not_fall_when_one_is_empty(
    client: httpx.AsyncClient, service: Driver
) -> None:
    """To Prometheus one that falls began anew: what is there again later would count twice."""
    add_worker(service)
    assert (await client.post("/select_and_reserve", json=BOOK)).status_code == 200
    assert (await client.post("/select", json=PROMPT)).status_code == 503
    other = {"worker_id": 2, "endpoint": "e", "block_size": 16, "tenant_id": "t"}
    other["kv_events_endpoint"] = "tcp://127.0.0.1:9"
    assert (await client.post("/workers", json=other)).status_code == 201
    service.delete_worker(1)
    text = (await client.get("/metrics")).text
    assert "dynamo_rejection_request_total 1.0" in text
    assert 'dynamo_frontend_model_rejection_total{endpoint="select",model="default"} 1' in text
    tenants = "select_service_admission_tenant_requests_total"
    for outcome in ("admitted", "refused"):
        assert f'{tenants}{{fairness_id="default",outcome="{outcome}"}} 1.0' in text


@within(app_client, admission_policy="reject-all", tenant_labels_max=4)
async def test_tenants_have_few_labels(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    for number in range(20):
        ask = {**PROMPT, "fairness_id": f"t{number}"}
        assert (await client.post("/select", json=ask)).status_code == 503
    families = Metrics(service, Traffic(), SETTINGS).families()
    found = next(one for one in families if one.name.endswith("admission_tenant_requests"))
    assert len({one.labels["fairness_id"] for one in found.samples}) <= 5
    assert sum(one.value for one in found.samples if one.labels["outcome"] == "refused") == 20


async def test_what_an_operator_set_outlives_the_process(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "admission_control": "token-capacity",
    }
    async with app_client(**settings) as (client, service):
        add_worker(service)
        change = {"policy": "token-bucket", "config": {"capacity": 77}}
        assert (await client.put("/admission", json=change)).status_code == 200
        for body in (
            {"model": "default", "active_prefill_tokens_threshold": 10},
            {"model": "default", "tenant_id": "default", "active_decode_blocks_threshold": 0.5},
        ):
            assert (await client.post("/busy_threshold", json=body)).status_code == 200
    async with app_client(**settings) as (client, _):
        status = (await client.get("/admission")).json()
        assert (status["policy"], status["config"]) == ("token-bucket", {"capacity": 77})
        assert [one["active_prefill_tokens_threshold"] for one in status["thresholds"]] == [10, 10]
        assert status["thresholds"][1]["active_decode_blocks_threshold"] == 0.5
        refused = await client.post("/select", json={**PROMPT, "isl_tokens": 40})
        assert refused.status_code in {200, 400, 503}
        assert status["scopes"][0]["model_name"] == "default", "the gate is open again"
        gone = await client.delete("/busy_threshold", params={"model": "default"})
        assert gone.status_code == 200
    async with app_client(**settings) as (client, _):
        thresholds = (await client.get("/admission")).json()["thresholds"]
        assert [one["active_prefill_tokens_threshold"] for one in thresholds] == [None, None]


def test_settings_that_make_no_sense_do_not_start() -> None:
    with pytest.raises(ValueError, match="capacity"):
        create_driver(
            type(SETTINGS)(admission_policy="token-bucket", admission_config={"capacity": -1})
        )


@within(listening, max_inflight_default=1)
async def test_who_leaves_with_more_requests_behind_the_waiting_one_waits_no_longer(
    port: int, service: Driver
) -> None:
    add_worker(service)
    assert (await asked(port, "/select_and_reserve", BOOK))[0] == 200
    wire = await Wire.to(port)
    wire.ask("POST", "/select_and_reserve", {**BOOK, "reservation_id": "b"})
    wire.ask("GET", "/health")
    await until(lambda: answer_of(service.core.admission.status()).scopes[0].waiting == 1)
    wire.close()
    await until(lambda: answer_of(service.core.admission.status()).scopes[0].waiting == 0)


async def test_a_change_of_policy_lets_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gates for 1,024 models it held the loop for 300 ms; it is finished whoever goes."""
    monkeypatch.setattr("select_service.edge.cooperative.SLICE_S", 0.0)
    async with app_client() as (client, service):
        for number in range(20):
            add_worker(service, number, model_name=f"m{number:02}")
        plain = (await client.get("/admission")).json()
        assert plain["scopes"] == []
        asking = asyncio.ensure_future(client.put("/admission", json={"policy": "reject-all"}))
        partitions = list(service.core.partitions.values())
        seen = set[int]()
        for _ in range(200):
            await asyncio.sleep(0)
            seen.add(sum(one.admission is not None for one in partitions))
            if len(seen) >= 5:
                break
        assert len(seen) >= 5, "some gates at a time"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: all(one.admission is not None for one in partitions))
        answer = await client.put("/admission", json={"policy": "slo-shed"})
        assert {one.admission.gate.policy.name for one in partitions if one.admission} == {
            "slo-shed"
        }
        assert answer.json() == (await client.get("/admission")).json()
        assert [one["model_name"] for one in answer.json()["scopes"]] == [
            f"m{number:02}" for number in range(20)
        ]
        bad = await client.put("/admission", json={"policy": "nobody"})
        problem(bad, 422, "invalid_field", "policy")
        service.core.check()
