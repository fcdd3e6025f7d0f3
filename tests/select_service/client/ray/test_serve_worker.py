"""A replica registers, reports when prompts are computed, and takes itself out of the catalog."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from select_service.client import AsyncClient, Options
from select_service.client.ray.serve_worker import (
    Replica,
    ServeWorker,
    reservation_id_of,
    worker_id_of,
)
from tests.live.ports import free_port
from tests.live.server import OURS_EXTRA, Server
from tests.wait import POLL_S, until

REPLICA = Replica("x7f3", "app", "engine")
FIELDS: dict[str, Any] = {"block_size": 16, "kv_events_endpoint": "tcp://127.0.0.1:9"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Server(tmp_path_factory.mktemp("serving") / "log", args=OURS_EXTRA) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.mark.e2e
async def test_a_life(url: str) -> None:
    worker = ServeWorker(selectors=[url], replica=REPLICA, request_id=lambda: "request", **FIELDS)
    async with worker, AsyncClient(url) as client:
        (record,) = await client.workers()
        assert record.worker_id == worker.worker_id == worker_id_of("x7f3")
        assert record.endpoint == "ray://x7f3"
        assert record.lifecycle == "schedulable"
        name = reservation_id_of("app", "engine", "request")
        await client.reserve(token_ids=range(64), reservation_id=name)
        other = await client.reserve(token_ids=range(64))
        worker.prefill_complete(cached_tokens=16)
        worker.prefill_complete(reservation_id=other.reservation_id)
        await _until_computed(client)
        await client.call("DELETE", f"/reservations/{name}")
        unknown = await worker._report(client, {name: 16, "nobody's": 16})
        assert unknown == {"nobody's": 16}, "of what has ended no repeat is needed"
    async with AsyncClient(url) as client:
        assert await client.workers() == []
    await worker.aclose()


async def _until_computed(client: AsyncClient) -> None:
    while True:
        (scope,) = await client.loads()
        (row,) = scope.loads
        if row.potential_prefill_tokens == 0:
            assert row.active_requests == 2
            return
        await asyncio.sleep(POLL_S)


async def test_selectors_that_are_down_are_no_reason_not_to_serve() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    worker = ServeWorker(selectors=[nowhere], replica=REPLICA, request_id=lambda: None, **FIELDS)
    await worker.start()
    assert worker.failures == 1
    worker.prefill_complete()  # of a call that is no request
    assert not worker._prefilled
    await worker.aclose()


class Shown:
    """Stands for Ray's counter."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.seen = SHOWN.setdefault(name, [])
        assert set(tag_keys) == {"deployment", "what"}

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"deployment": "engine"}

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray takes no other"
        self.seen.append((tags["what"], value))


SHOWN: dict[str, list[tuple[str, float]]] = {}


async def test_what_came_to_nothing_is_among_rays_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    metrics = types.SimpleNamespace(Counter=Shown)
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    nowhere = f"http://127.0.0.1:{free_port()}"
    worker = ServeWorker(
        selectors=[nowhere], replica=REPLICA, client=Options(timeout_ms=50), **FIELDS
    )
    async with worker:
        worker.prefill_complete(reservation_id="somebody's")
        await until(lambda: worker.not_told)
    seen = SHOWN["select_service_worker_troubles"]
    assert sum(count for what, count in seen if what == "not_told") == worker.not_told == 1
    assert sum(count for what, count in seen if what == "failed") == worker.failures > 1


def test_what_makes_no_worker() -> None:
    with pytest.raises(TypeError, match="blocksize"):
        ServeWorker(selectors=[], replica=REPLICA, blocksize=16)
    with pytest.raises(msgspec.ValidationError):
        ServeWorker(selectors=[], replica=REPLICA, block_size="many")


def test_ids() -> None:
    assert worker_id_of("x7f3") == 2512060983863399747, "as Ray Serve LLM makes it"
    assert worker_id_of("a") != worker_id_of("b")
