"""What is found at the meeting point is followed; what changes the catalog reaches everybody."""

from __future__ import annotations

from typing import Any, cast

import httpx
import msgspec
import pytest

from select_service.client import AsyncClient
from select_service.client.ray.registry import Present, SelectorRegistry
from select_service.edge.discovery.source import SourceFailed
from select_service.edge.driver.driver import Driver
from select_service.ray_discovery import RayDiscovery
from select_service.types import WorkerSpec
from tests.live.simulated_transport import answered_by

ME = ("http://me", "tcp://me:1")
OTHER = ("http://other", "tcp://other:1")
WORKER = {"worker_id": 2**63, "endpoint": "ray://x", "block_size": 16}


class Place:
    """A meeting point in this process."""

    def __init__(self) -> None:
        self.others = {"other": OTHER}
        self.workers: dict[int, dict[str, Any]] = {}
        self.is_down = False
        self.left: list[str] = []

    async def selector(self, name: str, url: str, endpoint: str) -> Present:
        if self.is_down:
            raise RuntimeError("no actor")
        return Present({name: (url, endpoint), **self.others}, self.workers)

    async def leave(self, selector: str) -> None:
        self.left.append(selector)


def company_at(place: Place, answer: Any = None) -> RayDiscovery:
    company = RayDiscovery(cast(SelectorRegistry, place), *ME)
    made = company._client

    def client(url: str, token: str | None) -> AsyncClient:
        return answered_by(made(url, token), httpx.MockTransport(answer))

    company._client = client  # type: ignore[method-assign]
    return company


async def test_others_are_followed_and_oneself_is_not() -> None:
    place = Place()
    place.workers = {2**63: WORKER, 7: {"worker_id": 7, "block_size": "many"}}
    company = company_at(place)
    await company.look()
    assert company._peers.latest == {OTHER[1]}
    assert company._workers.latest == {2**63: msgspec.convert(WORKER, WorkerSpec)}
    assert company._workers.rejected.keys() == {"7"}
    updates = company._workers.updates
    await company.look()
    assert company._workers.updates == updates, "nothing is new"
    place.is_down = True
    with pytest.raises(SourceFailed):
        await company.look()
    assert company._peers.latest == {OTHER[1]}, "the last good state stays"
    await company.leave()
    assert len(place.left) == 1


async def test_changes_of_the_catalog_are_passed_on() -> None:
    received: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "deaf":
            raise httpx.ConnectError("nobody there")
        received.append(request)
        return httpx.Response(201)

    place = Place()
    place.others["deaf"] = ("http://deaf", "tcp://deaf:1")
    company = company_at(place, answer)
    scope = {
        "method": "DELETE",
        "raw_path": b"/workers/7%2F",
        "headers": [(b"authorization", b"Bearer t"), (b"host", b"proxy")],
    }
    await company.pass_on(scope, b'{"reason": "a fan"}')
    (request,) = received
    assert (request.method, str(request.url)) == ("DELETE", "http://other/workers/7%2F")
    assert request.headers["authorization"] == "Bearer t"
    assert request.headers["host"] == "other"
    assert msgspec.msgpack.decode(request.content) == {"reason": "a fan"}
    assert company.not_passed_on == 1


async def test_a_new_one_begins_with_the_catalog_of_another() -> None:
    service, source = Driver(), Driver()
    source.upsert_worker(msgspec.convert(WORKER, WorkerSpec))
    records = msgspec.to_builtins(source.workers(None, None))
    records.append({**records[0], "worker_id": 5, "source": "ray"})

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "old":
            return httpx.Response(401, json={})
        if request.url.host == "garbled":
            return httpx.Response(200, content=b'[{"\xff":1}]')
        return httpx.Response(200, content=msgspec.json.encode(records))

    place = Place()
    place.others = {
        "garbled": ("http://garbled", "tcp://garbled:1"),
        "old": ("http://old", "tcp://old:1"),
        "other": OTHER,
    }
    await company_at(place, answer).copy_catalog(service)
    (record,) = service.workers(None, None)
    assert record.worker_id == 2**63, "what is followed comes by itself"
    assert record.source == "api"
    await service.close()
    await source.close()
