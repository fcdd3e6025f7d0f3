"""POST /select_batch: as JSON and as MessagePack, in slices, and for clients that go away."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from tests.coroutines import within
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, app_client, listening
from tests.wait import until

if TYPE_CHECKING:
    from pathlib import Path

    from select_service.edge.driver.driver import Driver

MSGPACK = "application/msgpack"


def batch(count: int, blocks: int = 4, **item: Any) -> list[dict[str, Any]]:
    """So many prompts that have nothing in common."""
    found = []
    for number in range(count):
        hashes = [1_000_000 * (number + 1) + block for block in range(blocks)]
        base = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 16 * blocks}
        found.append(base | item)
    return found


def requests(service: Driver) -> int:
    return sum(row.active_requests for one in service.loads() for row in one.loads)


@within(app_client)
async def test_a_batch_in_json_and_in_msgpack(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    add_worker(service, 2)
    body = {"requests": batch(2, n=2), "reserve": True}
    answer = await client.post("/select_batch", json=body)
    assert answer.status_code == 200
    said = answer.json()
    assert [one["request"] for one in said["results"]] == [0, 0, 1, 1]
    assert [one["status"] for one in said["results"]] == [200] * 4
    assert (said["placed"], said["groups"], said["prefixes_computed"]) == (4, 2, 2)
    first = said["results"][0]["selection"]
    assert first["effective_prefill_tokens"] == 64
    assert "sequence_hashes" not in first
    assert [one.get("shared_tokens", 0) for one in said["results"]] == [0, 64, 0, 64]
    assert {rank["requests"] for rank in said["ranks"]} == {2}
    assert requests(service) == 4

    packed = [
        one | {name: _packed(one[name]) for name in ("block_hashes", "sequence_hashes")}
        for one in batch(3)
    ]
    answer = await client.post(
        "/select_batch",
        content=msgspec.msgpack.encode({"requests": packed}),
        headers={"content-type": MSGPACK, "accept": MSGPACK},
    )
    assert answer.status_code == 200
    said = msgspec.msgpack.decode(answer.content)
    assert [one["status"] for one in said["results"]] == [200] * 3
    assert "reservation_id" not in said["results"][0]["selection"]
    assert requests(service) == 4


def _packed(hashes: list[int]) -> bytes:
    return b"".join(one.to_bytes(8, "little") for one in hashes)


@within(app_client, batch_samples_max=4)
async def test_what_is_wrong_with_one_is_told_of_that_one(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    items: list[Any] = [batch(1)[0] | {"oddity": 1}, batch(1, allowed_worker_ids=[9])[0]]
    answer = await client.post("/select_batch", json={"requests": items})
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 - "unknown field: oddity"'
    results = answer.json()["results"]
    assert [one["status"] for one in results] == [200, 503]
    assert results[1]["code"] == "no_eligible_worker"
    for wrong, field in (
        (batch(1)[0] | {"priority_jump": "high"}, "requests[1].priority_jump"),
        (17, "requests[1]"),
        (batch(1)[0] | {"n": 0}, "requests[1].n"),
    ):
        both = {"requests": [batch(1)[0], wrong], "reserve": True}
        answer = await client.post("/select_batch", json=both)
        assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert requests(service) == 0, "nothing of it was done"
    twice = b'{"requests": [{"n": 1, "n": 2}]}'
    answer = await client.post(
        "/select_batch", content=twice, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
    for body, field in (
        ({}, "requests"),
        ({"requests": {}}, "requests"),
        ({"requests": [], "load_limit": 0.5}, "load_limit"),
        ({"requests": [], "atomic": True}, "atomic"),
        ({"requests": batch(1, n=5)}, "requests"),
    ):
        answer = await client.post("/select_batch", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, field)
    answer = await client.post(
        "/select_batch",
        json={"requests": batch(1, allowed_worker_ids=[9]), "reserve": True, "atomic": True},
    )
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["code"] == "batch_not_placed"
    assert answer.json()["details"]["code"] == "no_eligible_worker"


@within(app_client)
async def test_decisions_are_told_with_the_samples_that_ask(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    add_worker(service, 2)
    items = [batch(1, explain=True)[0], batch(1)[0]]
    answer = await client.post("/select_batch", json={"requests": items})
    explained, plain = (one["selection"] for one in answer.json()["results"])
    assert [one["excluded"] for one in explained["decision"]["candidates"]].count("batch") == 1
    assert "decision" not in plain


@within(listening, batch_samples_max=1000)
async def test_others_are_answered_while_a_big_batch_is_placed_and_its_client_may_go(
    port: int, service: Driver
) -> None:
    for worker_id in range(1, 33):
        add_worker(service, worker_id)
    big, other = await Wire.to(port), await Wire.to(port)
    items = batch(400, blocks=32, reservation_id="r", n=2)
    for number, item in enumerate(items):
        item["reservation_id"] = f"r{number}"
    big.ask("POST", "/select_batch", {"requests": items, "reserve": True})
    await until(lambda: 0 < requests(service) < 800)
    assert await other.status("GET", "/health") == 200
    assert requests(service) < 800, "it is still under way"
    big.close()
    await until(lambda: requests(service) == 0)


async def test_a_tenant_sees_its_own_names_and_no_others_workers(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", "select", "lifecycle", tenants=["acme"])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id="acme")
        add_worker(service, 2, tenant_id="rival")
        wire = await Wire.to(port)
        items = [
            PROMPT | {"tenant_id": "acme", "reservation_id": "mine", "n": 2},
            PROMPT | {"tenant_id": "rival", "reservation_id": "theirs"},
            PROMPT | {"tenant_id": "acme", "reservation_id": "late", "lease_id": "none"},
        ]
        status, _, content = await wire.exchange(
            "POST", "/select_batch", {"requests": items, "reserve": True}, file.line("ours")
        )
        assert status == 200
        assert b"acme:" not in content
        said = json.loads(content)
        assert [one["status"] for one in said["results"]] == [200, 200, 503, 404]
        names = [one["selection"]["reservation_id"] for one in said["results"][:2]]
        assert names == ["mine.0", "mine.1"]
        for name in names:
            assert (
                await wire.status("DELETE", f"/reservations/{name}", None, file.line("ours")) == 200
            )
        assert requests(service) == 0
