"""Who holds what of a prompt: as /overlap_scores says, per tier and range, best first."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.core.packing import unpack_u64
from indexer.types import Tier, WorkerRank
from select_service.edge.console import prefix
from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.select_service.edge.serving import add_worker, app_client

TOKENS = list(range(64))
HASHES = block_hashes(TOKENS, 16)
BIG = 2**64 - 1


def hold(
    service: Driver, worker_id: int, blocks: int, tier: Tier = Tier.DEVICE, at: int = 0
) -> None:
    """Let a rank hold blocks of the prompt, from `at` on."""
    (partition,) = service.core.partitions.values()
    names = [1000 + at + number for number in range(blocks)]
    parent = 1000 + at - 1 if at else None
    local = HASHES[at * 8 : (at + blocks) * 8]
    rank = WorkerRank(worker_id, 0)
    assert partition.index.store(rank, tier, parent, names, local) == blocks


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/console/api/prefix", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


@within(app_client)
async def test_ranges_by_tier_and_depth(client: httpx.AsyncClient, service: Driver) -> None:
    for worker_id in (1, 2, BIG):
        add_worker(service, worker_id)
    hold(service, 1, 1)
    hold(service, BIG, 2)
    hold(service, BIG, 1, Tier.HOST_PINNED, at=2)
    answer = await ask(client, token_ids=TOKENS)
    assert (answer["blocks"], answer["isl_tokens"], answer["block_size"]) == (4, 64, 16)
    assert (answer["holders_total"], answer["ranks_total"]) == (2, 3)
    assert [(one["worker_id"], one["ranges"]) for one in answer["holders"]] == [
        (str(BIG), [["device", 0, 2], ["host", 2, 3]]),
        ("1", [["device", 0, 1]]),
    ]
    by_hashes = await ask(client, block_hashes=[str(one) for one in unpack_u64(HASHES)])
    assert by_hashes["holders"] == answer["holders"]
    body = {
        "block_hashes": list(unpack_u64(HASHES)),
        "sequence_hashes": list(unpack_u64(sequence_hashes(HASHES))),
        "isl_tokens": 64,
    }
    scores = (await client.post("/overlap_scores", json=body)).json()["workers"]
    assert {one["worker_id"]: one["disk_blocks"] for one in scores if one["disk_blocks"]} == {
        int(one["worker_id"]): one["ranges"][-1][2] for one in answer["holders"]
    }


@within(app_client)
async def test_nobody_holds_it(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    answer = await ask(client, token_ids=TOKENS)
    assert (answer["holders_total"], answer["holders"]) == (0, [])
    hold(service, 1, 4)
    assert (await ask(client, token_ids=TOKENS, lora_name="x"))["holders"] == []


async def test_the_deepest_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "HOLDERS_MAX", 2)
    async with app_client() as (client, service):
        for worker_id in range(1, 5):
            add_worker(service, worker_id)
            hold(service, worker_id, worker_id)
        answer = await ask(client, token_ids=TOKENS)
        assert answer["holders_total"] == 4
        assert [one["worker_id"] for one in answer["holders"]] == ["4", "3"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 422),
        (b"[" * 100_000, 422),
        (b'{"token_ids": [-1]}', 422),
        (b'{"token_ids": [4294967296]}', 422),
        (b'{"block_hashes": ["x"]}', 422),
        (b'{"block_hashes": ["18446744073709551616"]}', 422),
        (b'{"block_hashes": ["-9223372036854775809"]}', 422),
        ('{"block_hashes": ["\u0661"]}'.encode(), 422),
        (b'{"block_hashes": [1]}', 422),
        (b'{"token_ids": []}', 400),
        (b"{}", 400),
        (b'{"model_name": "nobody", "token_ids": [1]}', 503),
        (b'{"model_name": "nobody", "block_hashes": ["1"]}', 503),
    ],
)
@within(app_client)
async def test_what_is_no_question_is_refused(
    client: httpx.AsyncClient, service: Driver, *, body: bytes, status: int
) -> None:
    add_worker(service, 1)
    headers = {"content-type": "application/json"}
    answer = await client.post("/console/api/prefix", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["code"]
