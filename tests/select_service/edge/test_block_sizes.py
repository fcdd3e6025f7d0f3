"""A prompt of a million tokens, in blocks of any size and in every form that a client may send."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.types import Scope, Tier, WorkerRank
from select_service import SelectionService
from select_service.edge.driver.driver import Driver
from select_service.types import CoreLimits, SelectAndReserveRequest
from tests import wait
from tests.coroutines import within
from tests.live.ports import free_port
from tests.select_service.edge.serving import add_worker, app_client, listening

TOKENS = 1 << 20
PROMPT = array("I", range(100_000, 100_000 + TOKENS))  # six or seven digits each in JSON
PACKED = PROMPT.tobytes()
JSON, MSGPACK = "application/json", "application/msgpack"
ROUTES = ("/select", "/select_and_reserve", "/potential_loads", "/overlap_scores", "/reservations")


def hashed(size: int, path: str) -> dict[str, Any]:
    local = block_hashes(PACKED, size)
    fields = {"sequence_hashes": sequence_hashes(local), "isl_tokens": TOKENS}
    return fields if path == "/reservations" else fields | {"block_hashes": local}


def body_of(form: str, size: int, path: str) -> tuple[str, bytes]:
    if form == "hashes":
        prompt = hashed(size, path)
    else:
        prompt = {"token_ids": PACKED if form == "packed" else PROMPT.tolist()}
    if path in {"/select_and_reserve", "/reservations"}:
        prompt |= {"reservation_id": "r"}
    if path == "/reservations":
        prompt |= {"worker_id": 1}
    if form == "json":
        return JSON, msgspec.json.encode(prompt)
    return MSGPACK, msgspec.msgpack.encode(prompt)


@pytest.mark.parametrize(
    ("form", "size"),
    [("json", 3), ("list", 16), ("packed", 1), ("packed", 16), ("hashes", 1), ("hashes", 16)],
)
async def test_a_million_tokens(form: str, size: int) -> None:
    blocks = TOKENS // size
    more = {"max_body_bytes": 32 << 20} if form == "hashes" else {}
    async with app_client(**more) as (client, service):
        add_worker(service, block_size=size)
        for path in ROUTES:
            kind, body = body_of(form, size, path)
            answer = await client.post(path, content=body, headers={"content-type": kind})
            assert answer.status_code in {200, 201}, (path, answer.text[:200])
            said = answer.json()
            if path == "/select":
                assert said["effective_prefill_tokens"] == TOKENS
            elif path == "/overlap_scores":
                assert said["num_blocks"] == blocks
            elif path in {"/select_and_reserve", "/reservations"}:
                (row,) = (await client.get("/loads")).json()[0]["loads"]
                assert row["potential_decode_blocks"] == blocks
                assert row["potential_prefill_tokens"] == TOKENS
                assert (await client.delete("/reservations/r")).status_code == 200
        service.core.check()


@pytest.mark.parametrize("size", [1, 16])
@within(app_client)
async def test_a_million_tokens_that_an_engine_has_cached(
    client: httpx.AsyncClient, service: Driver, *, size: int
) -> None:
    add_worker(service, block_size=size)
    index = service.core.partitions[Scope("default", "default")].index
    local, parent = block_hashes(PACKED, size), None
    for start in range(0, TOKENS // size, 4096):
        run = local[8 * start : 8 * (start + 4096)]
        names = list(range(start + 1, start + 1 + len(run) // 8))
        index.store(WorkerRank(1, 0), Tier.DEVICE, parent, names, run)
        parent = names[-1]
    body = msgspec.msgpack.encode({"token_ids": PACKED})
    answer = await client.post("/select", content=body, headers={"content-type": MSGPACK})
    assert answer.json()["overlap"]["gpu"] == TOKENS
    assert answer.json()["effective_prefill_tokens"] == 0


def blocks_of(service: Driver) -> int:
    (model,) = service.loads()
    return model.loads[0].potential_decode_blocks


async def test_a_million_blocks_reach_a_replica() -> None:
    ports = [free_port(), free_port()]
    async with (
        listening(replica_sync_port=ports[0]) as (_, ours, _),
        listening(replica_sync_port=ports[1]) as (_, theirs, _),
    ):
        for service, other in ((ours, ports[1]), (theirs, ports[0])):
            add_worker(service, block_size=1)
            service.register_peer(f"tcp://127.0.0.1:{other}")
        await wait.until(lambda: all(map(hears_another, (ours, theirs))))
        request = SelectAndReserveRequest(token_ids=PACKED, reservation_id="r")
        await ours.select_and_reserve(request)
        await wait.until(lambda: blocks_of(theirs) == TOKENS)
        ours.free("r")
        await wait.until(lambda: blocks_of(theirs) == 0)


def hears_another(service: Driver) -> bool:
    views = service.core.replicas.publishers.views.values()
    return sum(not one.gone for one in views) == 1


async def test_a_million_blocks_outlive_a_restart(tmp_path: Path) -> None:
    worker = {"worker_id": 1, "endpoint": "http://w1", "block_size": 1}
    async with SelectionService(state_dir=tmp_path) as service:
        await service.upsert_worker(worker | {"kv_events_endpoint": "tcp://127.0.0.1:9"})
        await service.select_and_reserve({"token_ids": PACKED, "reservation_id": "r"})
    async with SelectionService(state_dir=tmp_path) as service:
        assert blocks_of(service.driver) == TOKENS


@pytest.mark.parametrize("size", [1, 7, 16, 4096])
async def test_the_limit_counts_tokens(size: int) -> None:
    """Of hashed prompts, those of their blocks."""
    most = CoreLimits().tokens_per_request_max
    assert most >= TOKENS
    limit = 4 * size
    async with app_client(tokens_per_request_max=limit) as (client, service):
        add_worker(service, block_size=size)
        for blocks, status in ((4, 200), (5, 422)):
            hashes = list(range(blocks))
            prompts: list[dict[str, Any]] = [
                {"token_ids": [1] * (limit + blocks - 4)},
                {"mm_routing_info": {"routing_token_ids": [1] * (limit + blocks - 4)}},
                {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 1},
            ]
            for prompt in prompts:
                answer = await client.post("/select", json=prompt)
                assert answer.status_code == status, answer.text
                if status == 422:
                    assert answer.json()["code"] == "too_many_tokens"
                    assert f"at most {limit} tokens" in answer.json()["error"]
