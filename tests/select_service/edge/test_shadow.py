"""The shadow over HTTP: GET /shadow, records, metrics, settings that change, and other tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from indexer.core.packing import pack_u64
from indexer.types import Scope, Tier, WorkerRank
from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.select_service.edge.http.test_api import problem
from tests.select_service.edge.metrics.test_exposition import SCOPE, scrape, value
from tests.select_service.edge.security.askers import OURS, THEIRS, asked_by, two_tenants
from tests.select_service.edge.serving import add_worker, app_client

HASHES = [1, 2, 3, 4]
BODY: dict[str, Any] = {"block_hashes": HASHES, "sequence_hashes": HASHES, "isl_tokens": 64}
ON: dict[str, Any] = {
    "shadow_weights": {"overlap_score_credit": 0.0},
    "shadow_sample": 1.0,
    "shadow_cost_max": 1.0,  # it looks on however busy this machine is
}
LOAD = {"reservation_id": "load", "worker_id": 1, "sequence_hashes": [90, 91], "isl_tokens": 16}


async def prepare(client: httpx.AsyncClient, service: Driver) -> None:
    """Worker 1 holds the prompt and has a little to do; worker 2 is idle."""
    for worker_id in (1, 2):
        add_worker(service, worker_id)
    index = service.core.partitions[Scope("default", "default")].index
    names = [1000 + one for one in HASHES]
    index.store(WorkerRank(1, 0), Tier.DEVICE, None, names, pack_u64(HASHES))
    assert (await client.post("/reservations", json=LOAD)).status_code == 201


@within(app_client, **ON)
async def test_what_is_told_of_it(client: httpx.AsyncClient, service: Driver) -> None:
    await prepare(client, service)
    answer = await client.post("/select", json=BODY | {"explain": True, "selection_id": "s"})
    assert answer.json()["worker_id"] == 1
    choice = {"dp_rank": 0, "queued_prefill_tokens": 0, "cached_tokens": 0}
    expected = {
        "weights": {
            "overlap_score_credit": 0.0,
            "overlap_score_credit_decay": 0.0,
            "prefill_load_scale": 1.0,
            "host_cache_hit_weight": 0.75,
            "disk_cache_hit_weight": 0.25,
            "temperature": 0.0,
            "track_prefill_tokens": True,
            "decode_load_scale": 1.0,
            "delay_weight": 0.0,
            "eviction_weight": 0.0,
            "expects_booked": False,
            "context_load_scale": 0.0,
            "pace": 0.0,
            "interference": 0.0,
            "decode_active_request_weight": 0.0,
            "slowness": 0.0,
        },
        "agrees": False,
        "regret_by_live_weights": 1.0,
        "regret_by_shadow_weights": 3.0,
        "live": choice
        | {"worker_id": 1, "cost_by_live_weights": 7.0, "cost_by_shadow_weights": 11.0}
        | {"prefill_tokens": 0, "cached_tokens": 64}
        | {"queued_prefill_tokens": 16, "decode_blocks": 6},
        "shadow": choice
        | {"worker_id": 2, "cost_by_live_weights": 8.0, "cost_by_shadow_weights": 8.0}
        | {"prefill_tokens": 64, "decode_blocks": 4},
    }
    assert answer.json()["decision"]["shadow"] == expected
    assert (await client.get("/decisions/s")).json()["shadow"] == expected
    body = (await client.get("/shadow")).json()
    assert body["enabled"]
    assert (body["sample"], body["cost_max"]) == (1.0, 1.0)
    assert body["cost_s"] > 0.0
    assert body["shadow_weights"] == expected["weights"]
    assert body["live_weights"]["overlap_score_credit"] == 1.0
    assert body["total"] == body["scopes"][0]["numbers"]
    assert body["total"]["agreement"] == 0.0
    assert body["total"]["choices"]["gain"]["prefill_tokens"] == -64.0
    assert len(body["regret_bounds"]) + 1 == len(body["total"]["regret_by_live_weights"]["counts"])
    other = (await client.get("/shadow?tenant_id=other")).json()
    assert (other["scopes_total"], other["total"]["scored"]) == (0, 0)
    problem(await client.get("/shadow?limit=201"), 400, "invalid_query", "limit")


async def test_the_other_policy_looks_on() -> None:
    """Worker 1 decodes 3 blocks, worker 2 computes one: each says otherwise which is worse."""
    other = {"policy": "first-token", "pace_scale": 0.0}  # else the block is done in 2 ms
    async with app_client(shadow_weights=other, shadow_sample=1.0) as (client, service):
        for worker_id in (1, 2):
            add_worker(service, worker_id)
        for name, worker_id, hashes in (("wide", 1, [91, 92, 93]), ("short", 2, [94])):
            body = {"reservation_id": name, "worker_id": worker_id, "isl_tokens": 16}
            answer = await client.post("/reservations", json=body | {"sequence_hashes": hashes})
            assert answer.status_code == 201
        assert (await client.post("/reservations/wide/prefill_complete")).is_success
        answer = await client.post("/select", json=BODY | {"explain": True})
        assert answer.json()["worker_id"] == 2
        shadow = answer.json()["decision"]["shadow"]
        assert shadow["shadow"]["worker_id"] == 1
        weights = shadow["weights"]
        assert (weights["decode_load_scale"], weights["expects_booked"]) == (0.0, True)
        assert weights["context_load_scale"] == 0.0625
        assert weights["delay_weight"] == 0.5, "one prompt is computed, on two ranks"
        assert weights["eviction_weight"] == 0.0, "nothing of any prompt was found"
        whole = (await client.get("/shadow")).json()
        assert whole["shadow_weights"]["delay_weight"] == 1.0
        assert (whole["total"]["scored"], whole["total"]["agreed"]) == (1, 0)
        config = (await client.get("/config")).json()["settings"]
        assert config["shadow_weights"]["value"] == other


@within(app_client, **ON)
async def test_a_decision_that_was_not_scored_says_nothing_of_it(
    client: httpx.AsyncClient, service: Driver
) -> None:
    await prepare(client, service)
    only = BODY | {"explain": True, "allowed_worker_ids": [1]}
    assert "shadow" not in (await client.post("/select", json=only)).json()["decision"]


@within(app_client, decision_ring=0, **ON)
async def test_it_is_told_also_where_no_records_are_kept(
    client: httpx.AsyncClient, service: Driver
) -> None:
    await prepare(client, service)
    await client.post("/select", json=BODY)
    assert (await client.get("/shadow")).json()["total"]["scored"] == 1
    answer = await client.post("/select", json=BODY | {"explain": True})
    assert not answer.json()["decision"]["shadow"]["agrees"]


@within(app_client, **ON)
async def test_prometheus_is_told(client: httpx.AsyncClient, service: Driver) -> None:
    await prepare(client, service)
    for body in (BODY, BODY, BODY | {"allowed_worker_ids": [2]}):
        await client.post("/select", json=body)
    await client.post("/select", json={"isl_tokens": 16, "block_hashes": [], "sequence_hashes": []})
    samples = await scrape(client)
    assert value(samples, "shadow_decisions_total", outcome="agreed", **SCOPE) == 1
    assert value(samples, "shadow_decisions_total", outcome="differed", **SCOPE) == 2
    assert value(samples, "shadow_skipped_total", reason="only", **SCOPE) == 1
    for side, regret, tokens, cached in (("live", 2.0, 16, 128), ("shadow", 6.0, 144, 0)):
        name = {"weights": side, **SCOPE}
        assert value(samples, "shadow_regret_blocks_sum", **name) == regret
        assert value(samples, "shadow_regret_blocks_count", **name) == 3
        assert value(samples, "shadow_regret_blocks_bucket", le="0.0", **name) == 1
        assert value(samples, "shadow_regret_blocks_bucket", le="+Inf", **name) == 3
        name = {"choice": side, **SCOPE}
        assert value(samples, "shadow_chosen_prefill_tokens_total", **name) == tokens
        assert value(samples, "shadow_chosen_cached_tokens_total", **name) == cached
    live = {"choice": "live", **SCOPE}
    assert value(samples, "shadow_chosen_queued_prefill_tokens_total", **live) == 32
    assert value(samples, "shadow_chosen_decode_blocks_total", **live) == 12
    text = (await client.get("/metrics")).text
    assert 'select_service_shadow_weight{name="overlap_score_credit"} 0.0\n' in text
    assert 'select_service_limit{name="shadow_cost_max"} 1.0\n' in text
    assert value(samples, "shadow_cost_seconds_total") > 0.0


@within(app_client)
async def test_it_comes_and_goes_while_the_service_runs(
    client: httpx.AsyncClient, service: Driver
) -> None:
    await prepare(client, service)

    async def put(**settings: Any) -> httpx.Response:
        return await client.put("/config", json={"settings": settings})

    off = (await client.get("/shadow")).json()
    assert (off["enabled"], off["shadow_weights"], off["total"]) == (False, None, None)
    assert "shadow_decisions_total{" not in (await client.get("/metrics")).text
    weights = {"overlap_score_credit": 0, "track_prefill_tokens": True}
    assert (await put(shadow_weights=weights, shadow_sample=1)).status_code == 200
    await client.post("/select", json=BODY)
    assert (await client.get("/shadow")).json()["total"]["scored"] == 1
    wrong = await put(shadow_weights={"overlap_score_credit": -1}, shadow_sample=0.5)
    problem(wrong, 422, "invalid_field", "settings.shadow_weights")
    assert "overlap_score_credit must be a number" in wrong.json()["error"]
    answer = (await client.get("/shadow")).json()
    assert (answer["sample"], answer["total"]["scored"]) == (1.0, 1)
    assert (await put(shadow_cost_max=0.5)).status_code == 200
    answer = (await client.get("/shadow")).json()
    assert (answer["cost_max"], answer["total"]["scored"]) == (0.5, 1), "the same go on"
    shown = (await client.get("/config")).json()["settings"]["shadow_weights"]
    assert (shown["value"], shown["source"]) == (weights, "put")
    assert (await put(shadow_weights={"temperature": 1})).status_code == 200
    assert (await client.get("/shadow")).json()["total"]["scored"] == 0, "others begin anew"
    assert (await put(shadow_weights=None)).status_code == 200
    assert not (await client.get("/shadow")).json()["enabled"]


async def test_a_tenant_is_told_of_its_own(tmp_path: Path) -> None:
    async with asked_by(two_tenants(tmp_path), **ON) as (do, service):
        for worker_id, tenant in enumerate((OURS, OURS, THEIRS, THEIRS), 1):
            add_worker(service, worker_id, tenant_id=tenant)
        for tenant in (OURS, THEIRS, THEIRS):
            assert (await do("all", "POST", "/select", BODY | {"tenant_id": tenant}))[0] == 200
        status, answer = await do("ours", "GET", "/shadow")
        assert status == 200
        assert [one["tenant_id"] for one in answer["scopes"]] == [OURS]
        assert (answer["total"]["scored"], answer["scopes_total"]) == (1, 1)
        assert "cost_s" not in answer, "that is of all"
        others = (await do("ours", "GET", f"/shadow?tenant_id={THEIRS}"))[1]
        assert others["total"]["scored"] == 0
        everything = (await do("all", "GET", "/shadow"))[1]
        assert (everything["total"]["scored"], everything["scopes_total"]) == (3, 2)
        assert everything["cost_s"] > 0.0
        assert len((await do("all", "GET", "/shadow?limit=1"))[1]["scopes"]) == 1
