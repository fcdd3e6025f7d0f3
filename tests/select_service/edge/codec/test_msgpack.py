"""What clients that speak MessagePack get, and how they stand to those that speak JSON."""

from __future__ import annotations

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.http.routes import ROUTES
from select_service.settings import FieldValidation
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, add_worker, app_client, worker
from tests.wait import until

TYPE = "application/msgpack"
PACKED = {"content-type": TYPE}
WANTED = {"accept": TYPE}
HASHES = [1, -2, 2**64 - 3]
LISTS = {"block_hashes": HASHES, "sequence_hashes": HASHES, "isl_tokens": 48}
BINARIES = {
    **LISTS,
    **dict.fromkeys(
        ("block_hashes", "sequence_hashes"), array("Q", [h % 2**64 for h in HASHES]).tobytes()
    ),
}
SIGNED = [1, -2, -3]


async def ask(
    client: httpx.AsyncClient,
    path: str,
    value: object,
    *,
    packed: bool = True,
    wanted: bool = True,
    method: str = "POST",
    status: int = 200,
) -> Any:
    """The decoded answer."""
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    headers = (PACKED if packed else {"content-type": "application/json"}) | (
        WANTED if wanted else {}
    )
    answer = await client.request(method, path, content=encode(value), headers=headers)
    assert answer.status_code == status, answer.content
    assert answer.headers["vary"] == "accept"
    assert answer.headers["content-type"] == (TYPE if wanted else "application/json")
    return msgspec.msgpack.decode(answer.content) if wanted else answer.json()


@within(app_client)
async def test_hashes_come_back_packed(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    asked = BINARIES | {"reservation_id": "r"}
    answer = await ask(client, "/select_and_reserve", asked)
    assert answer["sequence_hashes"] == BINARIES["sequence_hashes"]
    same = await ask(client, "/select_and_reserve", asked, wanted=False)
    assert same == answer | {"sequence_hashes": SIGNED}


@pytest.mark.parametrize("first", ["JSON", "lists", "binaries"])
@within(app_client)
async def test_a_repeat_in_another_form_is_the_same_request(
    client: httpx.AsyncClient, service: Driver, *, first: str
) -> None:
    forms: dict[str, tuple[dict[str, Any], bool]] = {
        "JSON": (LISTS, False),
        "lists": (LISTS, True),
        "binaries": (BINARIES, True),
    }
    add_worker(service)
    for path, more, status in (
        ("/select_and_reserve", {"reservation_id": "a"}, 200),
        ("/reservations", {"reservation_id": "b", "worker_id": 1}, 201),
    ):
        body, packed = forms[first]
        answer = await ask(client, path, body | more, packed=packed, status=status)
        for body, packed in forms.values():
            assert answer == await ask(client, path, body | more, packed=packed, status=status)
        for body, packed in forms.values():
            other = body | more | {"isl_tokens": 47}
            refused = await ask(client, path, other, packed=packed, status=409)
            assert refused["code"] == "reservation_conflict"
    assert service.loads()[0].loads[0].active_requests == 2


@within(app_client)
async def test_unknown_members_of_a_repeat_count_in_either_form(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    asked = {**PROMPT, "reservation_id": "r", "surprise": {"b": [1, 2.5], "a": None}}
    for packed in (True, False, True):
        await ask(client, "/select_and_reserve", asked, packed=packed)
    other = asked | {"surprise": {"b": [1, 2.5], "a": 0}}
    await ask(client, "/select_and_reserve", other, status=409)


@within(app_client, max_body_bytes=1000)
async def test_refusals_are_packed_as_well(client: httpx.AsyncClient) -> None:
    for method, path, content, headers, status, code in (
        ("GET", "/nowhere", b"", {}, 404, "route_not_found"),
        ("PUT", "/workers", b"", {}, 405, "method_not_allowed"),
        ("POST", "/select", b"x", {}, 415, "unsupported_media_type"),
        ("POST", "/select", b"\xc1", PACKED, 400, "invalid_msgpack"),
        ("POST", "/select", b"{", {"content-type": "application/json"}, 400, "invalid_json"),
        ("POST", "/select", b"\x90", PACKED, 422, "invalid_field"),
        ("POST", "/select", bytes(2000), PACKED, 413, "body_too_large"),
        ("GET", "/workers?model_name=a&model_name=b", b"", {}, 400, "invalid_query"),
        ("DELETE", "/workers/1", b"", {}, 404, "worker_not_found"),
    ):
        answer = await client.request(method, path, content=content, headers={**headers, **WANTED})
        assert answer.headers["content-type"] == TYPE
        body = msgspec.msgpack.decode(answer.content)
        assert (answer.status_code, body["code"]) == (status, code), body
        assert body["error"]
    assert (await client.put("/workers", headers=WANTED)).headers["allow"]


async def test_unknown_members_are_told_of_and_refused() -> None:
    async with app_client() as (client, service):
        add_worker(service)
        content = msgspec.msgpack.encode({**BINARIES, "surprise": 1})
        answer = await client.post("/select", content=content, headers=PACKED | WANTED)
        assert answer.headers["warning"] == '299 - "unknown field: surprise"'
        assert answer.headers["content-type"] == TYPE
    async with app_client(field_validation=FieldValidation.STRICT) as (client, _):
        body = await ask(client, "/select", {"surprise": 1}, status=422)
        assert (body["code"], body["field"]) == ("unknown_field", "surprise")


@within(app_client)
async def test_a_body_that_may_be_absent_may_be_empty(client: httpx.AsyncClient) -> None:
    await ask(client, "/leases", {"owner": "o", "ttl_s": 9, "lease_id": "l"}, status=201)
    for content, headers in ((b"", {}), (b"", PACKED), (b"\x80", PACKED)):
        answer = await client.post(
            "/leases/l/renew", content=content, headers={**headers, **WANTED}
        )
        assert answer.status_code == 200
        assert msgspec.msgpack.decode(answer.content)["lease_id"] == "l"


async def test_who_waited_is_answered_as_asked(tmp_path: Path) -> None:
    """Through the queue, and with a disk to wait for."""
    async with app_client(state_dir=str(tmp_path)) as (client, service):
        await ask(client, "/workers", worker(max_inflight=1, max_queued=1), status=201)
        await ask(client, "/select_and_reserve", {**BINARIES, "reservation_id": "a"})
        waiting = client.post(
            "/select_and_reserve",
            content=msgspec.msgpack.encode({**BINARIES, "reservation_id": "b"}),
            headers=PACKED | WANTED,
        )
        task = asyncio.ensure_future(waiting)
        await until(lambda: service.loads()[0].pending_count > 0)
        await client.delete("/reservations/a")
        answer = msgspec.msgpack.decode((await task).content)
        assert answer["reservation_id"] == "b"
        assert answer["sequence_hashes"] == BINARIES["sequence_hashes"]


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics", "/dump"])
@within(app_client)
async def test_what_has_one_form_keeps_it(client: httpx.AsyncClient, *, path: str) -> None:
    plain, asked = await client.get(path), await client.get(path, headers=WANTED)
    assert asked.headers["content-type"] == plain.headers["content-type"]
    assert "vary" not in asked.headers
    if path != "/metrics":
        assert asked.json() == plain.json()


@within(app_client)
async def test_sums_that_no_64_bits_hold_are_told_as_the_most_they_do(
    client: httpx.AsyncClient, service: Driver
) -> None:
    """Two clients that say their prompts have 2^64-1 tokens must not blind who reads the loads."""
    most = 2**64 - 1
    huge = {"block_hashes": [], "sequence_hashes": [], "isl_tokens": most}
    add_worker(service)
    for _ in range(2):
        await ask(client, "/select_and_reserve", huge)
    packed = await client.get("/loads", headers=WANTED)
    (row,) = msgspec.msgpack.decode(packed.content)[0]["loads"]
    assert row["potential_prefill_tokens"] == most
    (row,) = (await client.get("/loads")).json()[0]["loads"]
    assert row["potential_prefill_tokens"] == 2 * most
    (row,) = await ask(client, "/potential_loads", huge)
    assert (row["potential_prefill_tokens"], row["active_requests"]) == (most, 2)
    asked = huge | {"explain": True}
    answer = await ask(client, "/select_and_reserve", asked)
    (rank,) = answer["decision"]["candidates"]
    assert rank["prefill_tokens"] == most
    assert "sequence_hashes" in answer


async def test_whatever_comes_there_is_an_answer() -> None:
    """Bodies with bytes changed, cut and doubled, on every route that takes one."""
    rng = random.Random(8)
    values: list[dict[str, Any]] = [
        BINARIES | {"reservation_id": "r", "worker_id": 1, "dp_rank": 0, "ttl_s": 5.0},
        {"token_ids": array("I", range(64)).tobytes(), "pinned_worker": {"worker_id": 1}},
        {"operations": [{"op": "free", "reservation_id": "r"}], "owner": "o", "ttl_s": 3},
        worker(2, taints=["a"], kv_events_endpoints={"0": "tcp://127.0.0.1:9"}),
    ]
    routes = [route for route in ROUTES if route.takes is not None]
    async with app_client() as (client, service):
        add_worker(service)
        answered = set()
        for number in range(1500):
            body = bytearray(msgspec.msgpack.encode(rng.choice(values)))
            for _ in range(rng.randrange(4)):
                at = rng.randrange(len(body))
                body[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
            route = routes[number % len(routes)]
            path = route.pattern.replace("{worker_id}", "1").replace("{", "").replace("}", "")
            answer = await client.request(
                route.method, path, content=bytes(body), headers=PACKED | WANTED
            )
            assert answer.status_code < 500 or answer.status_code == 503, (path, bytes(body))
            assert isinstance(msgspec.msgpack.decode(answer.content), dict | list)
            answered.add(answer.status_code)
        assert {200, 400, 422} <= answered
        service.core.check()
