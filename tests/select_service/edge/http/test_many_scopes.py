"""With a thousand models no answer about all of them holds the loop: others have their turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from indexer.types import Scope, Tier, WorkerRank
from select_service.edge import cooperative, dump_stream
from select_service.edge.driver.driver import Driver
from select_service.types import ReservationRequest, WorkerSpec
from tests.coroutines import within
from tests.select_service.edge.serving import app_client

MODELS = 40
NOBODY = "tcp://127.0.0.1:9"


def fill(service: Driver) -> None:
    for number in range(MODELS):
        model = f"model-{number}"
        record: dict[str, Any] = {"endpoint": "http://w", "kv_events_endpoint": NOBODY}
        service.upsert_worker(
            WorkerSpec(worker_id=number, model_name=model, block_size=16, **record)
        )
        index = service.core.partitions[Scope(model, "default")].index
        index.store(WorkerRank(number, 0), Tier.DEVICE, None, [number], bytes(8))
        booking = ReservationRequest(
            reservation_id=model,
            worker_id=number,
            model_name=model,
            sequence_hashes=[number],
            isl_tokens=16,
        )
        service.core.reservations.reserve(booking, asyncio.get_running_loop().time())


async def turns_of(answer: asyncio.Task[httpx.Response]) -> int:
    """How often others had their turn before it came."""
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.parametrize("path", ["/loads", "/admission", "/busy_threshold", "/dump", "/metrics"])
@within(app_client)
async def test_an_answer_about_all_models_is_made_in_turns(
    client: httpx.AsyncClient, service: Driver, *, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = (await client.get(path)).status_code
    fill(service)
    monkeypatch.setattr(cooperative, "SLICE_S", -1.0)
    monkeypatch.setattr(dump_stream, "SLICE_S", -1.0)
    answer = asyncio.create_task(client.get(path))
    turns = await turns_of(answer)
    assert empty == (await answer).status_code == 200
    assert turns >= MODELS


@within(app_client)
async def test_what_is_made_in_turns_is_what_was_made_at_once(
    client: httpx.AsyncClient, service: Driver
) -> None:
    fill(service)
    for path, expected in (
        ("/loads", service.loads()),
        ("/admission", await service.admission()),
        ("/busy_threshold", await service.busy_thresholds()),
    ):
        assert (await client.get(path)).json() == json.loads(msgspec.json.encode(expected))
        packed = {"accept": "application/msgpack"}
        content = (await client.get(path, headers=packed)).content
        assert msgspec.msgpack.decode(content) == msgspec.to_builtins(expected)
    dump: dict[str, Any] = (await client.get("/dump")).json()
    assert [*dump] == [f"model-{number}:default" for number in range(MODELS)]
    assert [len(one["events"]) for one in dump.values()] == [1] * MODELS


@pytest.mark.parametrize("path", ["/loads", "/dump"])
@within(app_client, scope_linger_s=0.0)
async def test_a_model_that_goes_meanwhile_is_left_out(
    client: httpx.AsyncClient, service: Driver, *, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(service)
    monkeypatch.setattr(cooperative, "SLICE_S", -1.0)
    monkeypatch.setattr(dump_stream, "SLICE_S", -1.0)
    answer = asyncio.create_task(client.get(path))
    for _ in range(10):
        await asyncio.sleep(0)
    for number in range(30, MODELS):
        service.delete_worker(number)
    while len(service.core.partitions) > 30:
        service.core.tick(1e9)
    body = (await answer).json()
    assert len(body) == 30
