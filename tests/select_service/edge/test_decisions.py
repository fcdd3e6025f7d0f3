"""Decisions over HTTP: one, many, inline; in both forms; with the ring off; large fleets."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest

from select_service import WorkerSpec
from select_service.edge.decision_report import SLICE
from select_service.edge.driver.driver import Driver
from select_service.types.decisions import Candidate
from tests.coroutines import within
from tests.select_service.edge.http.test_api import problem
from tests.select_service.edge.serving import PROMPT, add_worker, app_client
from tests.wait import until

PACKED = {"accept": "application/msgpack"}
NAMES = ("selection_id", "reservation_id")


def without_ranks(decision: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in decision.items() if name != "candidates"}


def same_time(decision: dict[str, Any]) -> dict[str, Any]:
    """What is shown of the clock is shown by the wall clock of the moment."""
    assert decision["at_ms"] > 1e12
    return decision | {"at_ms": 0}


@within(app_client)
async def test_one_by_either_of_its_ids(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    add_worker(service, 2**64 - 1, taints=["gpu"])
    body = PROMPT | {"selection_id": "s/1", "reservation_id": "r"}
    body |= {"routing_constraints": {"required_taints": ["gpu"]}}
    answer = await client.post("/select_and_reserve", json=body)
    assert answer.json()["worker_id"] == 2**64 - 1
    one = await client.get("/decisions/r")
    assert one.status_code == 200
    reply = one.json()
    other = (await client.get("/decisions/s%2F1")).json()
    assert same_time(other) == same_time(reply)
    assert [reply[name] for name in NAMES] == ["s/1", "r"]
    assert reply["decision_id"] == "s/1"
    assert reply["route"] == "select_and_reserve"
    assert reply["chosen"]["worker_id"] == 2**64 - 1
    assert [one["excluded"] for one in reply["candidates"]] == ["taint", None]
    packed = await client.get("/decisions/r", headers=PACKED)
    assert packed.headers["content-type"] == "application/msgpack"
    assert same_time(msgspec.msgpack.decode(packed.content)) == same_time(reply)
    schemas = (await client.get("/openapi.json")).json()["components"]
    schema = {"$ref": "#/components/schemas/Decision", "components": schemas}
    jsonschema.validate(reply, schema)
    problem(await client.get("/decisions/other"), 404, "decision_not_found")


@within(app_client)
async def test_a_decision_told_twice_was_at_one_time(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readings of two clocks are never equally far apart; a wall clock that was set is."""
    apart = [1.75e9]
    monkeypatch.setattr(
        "select_service.edge.decision_report.time",
        SimpleNamespace(time=lambda: service._clock() + apart[0]),
    )
    add_worker(service, 1)
    await client.post("/select", json=PROMPT | {"selection_id": "s"})

    async def shown() -> dict[str, Any]:
        decision: dict[str, Any] = (await client.get("/decisions/s")).json()
        return decision

    first = await shown()
    apart[0] += 0.001
    assert await shown() == first
    apart[0] += 3600.0
    assert (await shown())["at_ms"] - first["at_ms"] == pytest.approx(3600e3, abs=2.0)


@within(app_client)
async def test_the_list_is_newest_first_and_filtered(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    add_worker(service, 2, model_name="m", tenant_id="t")
    for number in range(5):
        scope = {"model_name": "m", "routing_group": "t"} if number % 2 else {}
        await client.post("/select", json=PROMPT | scope)
    await client.post("/select", json=PROMPT | {"allowed_worker_ids": []})

    async def listed(query: str = "") -> list[dict[str, Any]]:
        answer = await client.get("/decisions" + query)
        assert answer.status_code == 200
        packed = await client.get("/decisions" + query, headers=PACKED)
        found: dict[str, Any] = answer.json()
        assert list(found) == ["decisions"]
        other = msgspec.msgpack.decode(packed.content)["decisions"]
        assert list(map(same_time, other)) == list(map(same_time, found["decisions"]))
        return [same_time(one) for one in found["decisions"]]

    everything = await listed()
    assert [one["outcome"] for one in everything] == ["refused"] + ["placed"] * 5
    models = [one["model_name"] for one in everything]
    assert models == ["default", "default", "m", "default", "m", "default"]
    assert not any("candidates" in one for one in everything)
    assert await listed("?worker_id=2") == await listed("?model_name=m&tenant_id=t")
    assert len(await listed("?routing_group=t")) == 2
    assert await listed("?limit=2") == everything[:2]
    assert await listed("?worker_id=2&limit=1") == [everything[2]]
    assert await listed("?worker_id=9") == []
    whole = await listed("?candidates=true")
    assert list(map(without_ranks, whole)) == everything
    assert [len(one["candidates"]) for one in whole] == [1] * 6
    for one in everything:  # minted ids name them, too
        again = (await client.get(f"/decisions/{one['decision_id']}")).json()
        assert without_ranks(same_time(again)) == one


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("worker_id=-1", "worker_id"),
        ("worker_id=18446744073709551616", "worker_id"),
        ("candidates=yes", "candidates"),
        ("limit=1&limit=2", "limit"),
    ],
)
@within(app_client)
async def test_bad_queries(client: httpx.AsyncClient, *, query: str, field: str) -> None:
    problem(await client.get("/decisions?" + query), 400, "invalid_query", field)


@pytest.mark.parametrize("ring", [0, 4])
async def test_explained_inline(ring: int) -> None:
    async with app_client(decision_ring=ring) as (client, service):
        add_worker(service, 1)
        plain = await client.post("/select", json=PROMPT)
        assert "decision" not in plain.json()
        for unasked in (None, False):
            body = PROMPT | {"explain": unasked}
            assert (await client.post("/select", json=body)).content == plain.content
        answer = await client.post("/select", json=PROMPT | {"explain": True})
        reply = answer.json()
        decision = reply.pop("decision")
        assert reply == plain.json()
        assert decision["chosen"]["worker_id"] == reply["worker_id"]
        assert len(decision["candidates"]) == 1
        held = PROMPT | {"explain": True, "cache_hit_threshold": 0.5}
        threshold = (await client.post("/select", json=held)).json()
        assert threshold["finish_reason"] == "cache_threshold"
        assert threshold["decision"]["outcome"] == "cache_threshold"
        assert threshold["decision"]["candidates"][0]["excluded"] == "cache_hit"
        refused = await client.post(
            "/select", json=PROMPT | {"explain": True, "allowed_worker_ids": []}
        )
        problem(refused, 503, "no_eligible_worker")
        assert refused.json()["decision"]["candidates"][0]["excluded"] == "not_allowed"
        packed = await client.post(
            "/select_and_reserve",
            json=PROMPT | {"explain": True, "reservation_id": "r"},
            headers=PACKED,
        )
        first = msgspec.msgpack.decode(packed.content)
        assert first["decision"]["reservation_id"] == "r"
        again = await client.post(
            "/select_and_reserve", json=PROMPT | {"explain": True, "reservation_id": "r"}
        )
        assert same_time(again.json()["decision"]) == same_time(first["decision"])
        other = await client.post("/select_and_reserve", json=PROMPT | {"reservation_id": "r"})
        assert "decision" not in other.json()
        listing = await client.get("/decisions")
        if ring:
            assert len(listing.json()["decisions"]) == ring
        else:
            problem(listing, 404, "decision_ring_off")
            problem(await client.get("/decisions/r"), 404, "decision_ring_off")


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve", "/select_pair"])
@pytest.mark.parametrize("value", [1, "true", [], {}])
@within(app_client)
async def test_explain_is_a_switch(
    client: httpx.AsyncClient, service: Driver, *, path: str, value: object
) -> None:
    add_worker(service, 1)
    answer = await client.post(path, json=PROMPT | {"explain": value})
    problem(answer, 422, "invalid_field", "explain")


@pytest.mark.parametrize("first", [True, False])
@within(app_client)
async def test_one_that_waited_is_explained_to_who_asked(
    client: httpx.AsyncClient, service: Driver, *, first: bool
) -> None:
    add_worker(service, 1, max_num_batched_tokens=1)
    await client.post("/select_and_reserve", json=PROMPT | {"reservation_id": "first"})
    body = PROMPT | {"reservation_id": "second"}
    three = [
        asyncio.ensure_future(client.post("/select_and_reserve", json=body | asked))
        for asked in ({"explain": first}, {"explain": not first}, {"explain": True})
    ]
    await until(lambda: service.core.counters.selections_waited > 0)
    for _ in range(100):  # the others have come, too: nothing on their way awaits but the app
        await asyncio.sleep(0)
    await client.post("/reservations/first/prefill_complete")
    one, other, last = [(await answer).json() for answer in three]
    silent, explained = (other, one) if first else (one, other)
    assert "decision" not in silent
    assert explained["decision"]["waited_s"] > 0.0
    assert same_time(explained["decision"]) == same_time(last["decision"])
    assert silent == {name: explained[name] for name in silent}


@within(app_client)
async def test_a_large_fleet_is_told_in_slices_and_whole(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id in range(3):
        add_worker(
            service,
            worker_id,
            data_parallel_size=SLICE,
            kv_events_endpoint=None,
            kv_events_endpoints={str(at): "tcp://127.0.0.1:9" for at in range(SLICE)},
        )
    service.upsert_worker(WorkerSpec(worker_id=9, data_parallel_size=2))
    answer = await client.post("/select", json=PROMPT | {"explain": True})
    ranks = answer.json()["decision"]["candidates"]
    expected = [(worker_id, rank) for worker_id in range(3) for rank in range(SLICE)]
    expected += [(9, 0), (9, 1)]
    assert [(one["worker_id"], one["dp_rank"]) for one in ranks] == expected
    (one,) = (await client.get("/decisions?candidates=true")).json()["decisions"]
    assert one["candidates"] == ranks


async def test_a_large_fleet_is_written_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write a thousand ranks at once took longer than to show them."""
    monkeypatch.setattr("select_service.edge.cooperative.SLICE_S", 0.0)
    written: list[int] = []

    def write(rank: Candidate) -> int:
        written.append(rank.dp_rank)
        return rank.dp_rank

    async with app_client() as (client, service):
        ranks = 3 * SLICE
        ends = {str(at): "tcp://127.0.0.1:9" for at in range(ranks)}
        more = {"kv_events_endpoint": None, "kv_events_endpoints": ends}
        add_worker(service, 1, data_parallel_size=ranks, **more)
        await client.post("/select", json=PROMPT | {"selection_id": "s"})
        record = service.decision_reports.find("s")
        reporting = asyncio.ensure_future(service.decision_reports.report(record, write))
        turns = [0]
        while not reporting.done():
            await asyncio.sleep(0)
            turns.append(len(written))
        assert max(after - before for before, after in pairwise(turns)) == SLICE
        candidates: object = reporting.result().candidates
        assert candidates == written == list(range(ranks))


@within(app_client)
async def test_a_sum_that_messagepack_cannot_say_is_told_as_the_nearest(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    huge = PROMPT | {"isl_tokens": 2**64 - 1}
    for _ in range(2):
        reply = await client.post("/select_and_reserve", json=huge)
        assert reply.status_code == 200
    for path in ("/select", "/select_pair"):
        asked = {"explain": True, "selection_id": path}
        answer = await client.post(path, json=PROMPT | asked, headers=PACKED)
        rank = msgspec.msgpack.decode(answer.content)["decision"]["candidates"][0]
        assert rank["worker_id"] == 1
        assert rank["prefill_tokens"] == 2**64 - 1


@within(app_client, decision_ring=2)
async def test_metrics_show_the_ring(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    for _ in range(3):
        await client.post("/select", json=PROMPT)
    lines = (await client.get("/metrics")).text.splitlines()
    assert "select_service_decision_records 2.0" in lines
    assert "select_service_decision_records_evicted_total 1.0" in lines
    assert f"select_service_decision_bytes {service.core.decisions.bytes:.1f}" in lines
