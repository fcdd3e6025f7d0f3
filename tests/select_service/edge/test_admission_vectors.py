"""The recorded vectors of admission over HTTP: every decision as a client sees it.

The core is held to the same vectors (`core/admission`); here they go over HTTP, with the
routes that bring load: bookings, lifecycle calls, reports of workers.
"""

from __future__ import annotations

import asyncio
import math
from itertools import count
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from indexer.core.packing import pack_u64
from indexer.types import Scope, Tier, WorkerRank
from tests.coroutines import within
from tests.select_service.core.admission.golden import BUSY, CASES
from tests.select_service.edge.serving import app_client, worker
from tests.sliced import answer_of
from tests.wait import until

if TYPE_CHECKING:
    from select_service.edge.driver.driver import Driver

_ONE: dict[str, Any] = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}
_hashes = count(1 << 20)


def known(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}


async def register(client: httpx.AsyncClient, **record: Any) -> None:
    answer = await client.post("/workers", json=known(worker(1, **record)))
    assert (answer.status_code, answer.json()["lifecycle"]) == (201, "schedulable")


async def book(client: httpx.AsyncClient, name: str, rank: int, blocks: int, tokens: int) -> None:
    body = {
        "reservation_id": name,
        "worker_id": 1,
        "dp_rank": rank,
        "sequence_hashes": [next(_hashes) for _ in range(blocks)],
        "isl_tokens": max(1, tokens),
        "effective_prefill_tokens": tokens,
    }
    assert (await client.post("/reservations", json=body)).status_code == 201


async def is_refused(client: httpx.AsyncClient, rank: int | None = None) -> bool:
    own = [next(_hashes)]  # who asks again may have been promised a place
    ask: dict[str, Any] = {"block_hashes": own, "sequence_hashes": own, "isl_tokens": 16}
    if rank is not None:
        ask["pinned_worker"] = {"worker_id": 1, "dp_rank": rank}
    answer = await client.post("/select", json=ask)
    if answer.status_code == 200:
        assert rank is None or answer.json()["dp_rank"] == rank
        return False
    assert (answer.status_code, answer.json()["reason"]) == (503, "all-workers-busy")
    assert int(answer.headers["retry-after"]) >= 1
    return True


@pytest.mark.parametrize("case", BUSY["cases"], ids=lambda case: case["name"])
@within(app_client, admission_control="token-capacity")
async def test_busy_thresholds_as_recorded(
    client: httpx.AsyncClient, service: Driver, *, case: dict[str, Any]
) -> None:
    ranks = case["ranks"]
    await register(
        client,
        data_parallel_size=len(ranks),
        kv_events_endpoint=None,
        kv_events_endpoints={str(rank): "tcp://127.0.0.1:9" for rank in range(len(ranks))},
        total_kv_blocks=ranks[0].get("kv_total_blocks") or None,
        max_num_batched_tokens=ranks[0].get("max_num_batched_tokens"),
    )
    for number, rank in enumerate(ranks):
        blocks, tokens = rank.get("active_decode_blocks", 0), rank.get("active_prefill_tokens")
        await book(client, f"r{number}", number, blocks, tokens or 0)
        if rank.get("kv_total_blocks") == 0:
            report = {"ranks": [{"dp_rank": number, "kv_total_blocks": 0}]}
            assert (await client.post("/workers/1/metrics", json=report)).status_code == 200
    thresholds = {"model": "default", **known(case["thresholds"])}
    assert (await client.post("/busy_threshold", json=thresholds)).status_code == 200
    assert [await is_refused(client, rank) for rank in range(len(ranks))] == case["rank_busy"]
    assert await is_refused(client) == case["worker_busy"]
    for number in range(len(ranks)):
        assert (await client.delete(f"/reservations/r{number}")).status_code < 300
    assert not await is_refused(client), "what has ended makes nobody busy"
    service.core.check()


@within(app_client, admission_control="token-capacity", active_decode_blocks_threshold=0.85)
async def test_the_latch_as_recorded(client: httpx.AsyncClient) -> None:
    await register(client, total_kv_blocks=100)
    name = ""
    for number, step in enumerate(BUSY["latch"]["steps"]):
        if step["active_decode_blocks"] is not None:
            if name:
                assert (await client.delete(f"/reservations/{name}")).status_code < 300
            name = f"r{number}"
            await book(client, name, 0, step["active_decode_blocks"], 0)
        if step["kv_used_blocks"] is not None:
            report = {"ranks": [{"kv_used_blocks": step["kv_used_blocks"]}]}
            assert (await client.post("/workers/1/metrics", json=report)).status_code == 200
        assert await is_refused(client) == step["busy_after"], step


@pytest.mark.parametrize(
    "case", CASES["worker_admission"], ids=lambda case: f"N{case['N']}-Q{case['Q']}"
)
@within(app_client)
async def test_n_and_q_as_recorded(
    client: httpx.AsyncClient, service: Driver, *, case: dict[str, Any]
) -> None:
    await register(client, max_inflight=case["N"], max_queued=case["Q"])
    engine: list[str] = []
    queue: list[tuple[str, asyncio.Task[httpx.Response]]] = []
    rejected = 0

    def waiting() -> int:
        return answer_of(service.core.admission.status()).counters["standard"].waiting

    async def arrive(name: str) -> str:
        nonlocal rejected
        body = {**_ONE, "reservation_id": name}
        asked = asyncio.ensure_future(client.post("/select_and_reserve", json=body))
        await until(lambda: asked.done() or waiting() > len(queue))
        if not asked.done():
            queue.append((name, asked))
            return "queued"
        answer = await asked
        if answer.status_code == 200:
            engine.append(name)
            return "engine"
        assert (answer.status_code, answer.json()["gate"]) == (503, "capacity")
        assert answer.json()["error"] == "Server overloaded: worker at capacity"
        assert int(answer.headers["retry-after"]) >= 1
        rejected += 1
        return "rejected"

    async def finish() -> str:
        assert (await client.delete(f"/reservations/{engine.pop(0)}")).status_code < 300
        if queue:
            name, asked = queue.pop(0)
            answer = await asked
            assert (answer.status_code, answer.json()["reservation_id"]) == (200, name)
            engine.append(name)
        return "finish"

    log = []
    for number, (event, *_) in enumerate(case["log_event_outcome_engine_queue_rejected"]):
        outcome = await (arrive(f"r{number}") if event == "+" else finish())
        log.append([event, outcome, len(engine), waiting(), rejected])
    assert log == case["log_event_outcome_engine_queue_rejected"]
    held = (await client.get("/loads")).json()[0]["loads"][0]["active_requests"]
    assert held == len(engine)
    while engine:
        await finish()
    service.core.check()


@pytest.mark.parametrize("case", CASES["cache_hit"], ids=lambda case: str(case["name"]))
async def test_cache_hits_as_recorded(case: dict[str, Any]) -> None:
    tokens, held = case["prompt_tokens"], case["local_cached"] + case["external_cached"]
    size = math.gcd(16, tokens or 16, case["local_cached"], case["external_cached"])
    blocks = list(range(1, tokens // size + 1))
    chosen = {"global_cache_hit_threshold": case["global_threshold"]}
    async with app_client(**chosen) as (client, service):
        await register(client, block_size=size)
        if held:
            index = service.core.partitions[Scope("default", "default")].index
            packed = pack_u64(blocks[: held // size])
            sequence = [1000 + block for block in blocks[: held // size]]
            index.store(WorkerRank(1, 0), Tier.DEVICE, None, sequence, packed)
        ask = {"block_hashes": blocks, "sequence_hashes": blocks, "isl_tokens": tokens}
        asked = {"cache_hit_threshold": case["request_threshold"], "reservation_id": "r"}
        answer = await client.post("/select_and_reserve", json=known({**ask, **asked}))
        said = answer.json()
        if not tokens:  # the contract refuses it before anybody judges what is cached
            assert (answer.status_code, said["field"]) == (400, "isl_tokens")
            assert said["error"] == "isl_tokens must be greater than 0"
            booked = 0
        elif not case["reject"]:
            assert answer.status_code == 200
            assert "finish_reason" not in said
            booked = 1
        else:
            assert (answer.status_code, said["finish_reason"]) == (200, "cache_threshold")
            assert said["best_hit_rate"] == pytest.approx(case["hit_rate"])
            assert said["threshold"] == case["effective_threshold"]
            is_global = case["request_threshold"] is None
            assert said["threshold_source"] == ("global" if is_global else "request")
            booked = 0
        assert (await client.get("/loads")).json()[0]["loads"][0]["active_requests"] == booked
