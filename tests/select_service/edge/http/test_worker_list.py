"""Records of many workers are read and written in slices, and say what those of few do."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.http.worker_list import AT_ONCE_MAX
from tests.coroutines import within
from tests.select_service.edge.serving import add_worker, app_client

MANY = 3 * AT_ONCE_MAX
MSGPACK = {"accept": "application/msgpack"}


@pytest.fixture(autouse=True)
def _every_record_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select_service.edge.cooperative.SLICE_S", 0.0, raising=False)


def people(service: Driver) -> None:
    for number in reversed(range(MANY)):
        add_worker(service, number, model_name=f"m{number % 2}", taints=["a"] * (number % 3))


@pytest.mark.parametrize("path", ["/workers", "/workers?model_name=m1", "/ready"])
@within(app_client)
async def test_many_are_told_as_few_are(
    client: httpx.AsyncClient, service: Driver, *, path: str
) -> None:
    people(service)
    model = "m1" if "m1" in path else None
    expected = msgspec.to_builtins(service.workers(model))
    answer = (await client.get(path)).json()
    assert (answer["workers"] if path == "/ready" else answer) == expected
    packed = msgspec.msgpack.decode((await client.get(path, headers=MSGPACK)).content)
    assert (packed["workers"] if path == "/ready" else packed) == expected
    if path == "/ready":
        whole = msgspec.json.encode(service.ready())
        assert (await client.get(path)).content == whole, "also in this order"
        verbose = (await client.get("/ready?verbose=true")).json()
        assert verbose["workers"] == expected
        assert verbose["ready"]
        assert verbose["schedulable_workers"] == answer["schedulable_workers"] == MANY


@pytest.mark.parametrize("path", ["/workers", "/ready", "/ready?verbose=true"])
@within(app_client)
async def test_others_have_their_turn_meanwhile(
    client: httpx.AsyncClient, service: Driver, *, path: str
) -> None:
    people(service)
    asking, turns = asyncio.ensure_future(client.get(path)), 0
    while not asking.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await asking).status_code == 200
    assert turns > MANY


@within(app_client)
async def test_who_goes_or_moves_meanwhile_is_told_of_no_more(
    client: httpx.AsyncClient, service: Driver
) -> None:
    people(service)
    asking = asyncio.ensure_future(client.get("/workers?model_name=m1"))
    for _ in range(AT_ONCE_MAX):
        await asyncio.sleep(0)
    service.delete_worker(MANY - 1)
    add_worker(service, MANY - 3, model_name="m0")
    ids = [one["worker_id"] for one in (await asking).json()]
    assert ids == list(range(1, MANY - 3, 2))
