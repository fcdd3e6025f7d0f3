"""The router as Serve drives it, step by step: moved, refused, cancelled and forgotten requests.

Serve's own classes and a real selector; no cluster, and replicas that only have a name.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from select_service.client import Client
from select_service.client.ray.serve_worker import reservation_id_of, worker_id_of
from select_service.types import LoadRow, WorkerSpec
from tests.coroutines import run_by
from tests.live.ports import free_port
from tests.live.server import OURS_EXTRA, Server
from tests.wait import PATIENCE_S

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

NAMES = ["one", "two", "three"]
TOKENS = list(range(64))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    with Server(tmp_path_factory.mktemp("router") / "log", args=OURS_EXTRA) as running:
        with Client(url(running)) as client:
            for name in NAMES:
                client.upsert_worker(
                    WorkerSpec(
                        worker_id=worker_id_of(name),
                        endpoint=f"ray://{name}",
                        block_size=16,
                        kv_events_endpoint="tcp://127.0.0.1:9",
                    )
                )
        yield running


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


class Scene:
    """A router, its replicas, and whoever looks at the selector."""

    def __init__(self, server: Server, **options: Any) -> None:
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

        from select_service.client.ray.request_router import SelectServiceRouter

        where = DeploymentID(name="engine", app_name="app")
        self.router: Any = SelectServiceRouter(
            deployment_id=where, handle_source=DeploymentHandleSource.REPLICA
        )
        given: dict[str, Any] = {"selectors": [url(server)], "timeout_ms": 5_000.0} | options
        self.router.initialize_state(**given)
        self.replicas = [
            SimpleNamespace(
                replica_id=ReplicaID(name, where),
                max_ongoing_requests=5,
                node_id="node",
                availability_zone=None,
                multiplexed_model_ids=set(),
                push_proxy_handle=lambda _: None,
            )
            for name in NAMES
        ]
        self.router.update_replicas(self.replicas)
        self.url = url(server)
        self.client = Client(self.url)

    def request(self, name: str = "r", **kwargs: Any) -> Any:
        from ray.serve._private.common import RequestMetadata
        from ray.serve.request_router import PendingRequest

        metadata = RequestMetadata(request_id="x", internal_request_id=name)
        return PendingRequest(args=[], kwargs=kwargs or {"token_ids": TOKENS}, metadata=metadata)

    async def choose(self, request: Any) -> list[list[str]]:
        groups = await self.router.choose_replicas(self.replicas, request)
        return [[one.replica_id.unique_id for one in group] for group in groups]

    def send(self, request: Any, name: str) -> None:
        """As Serve does once a replica has room."""
        (replica,) = (one for one in self.replicas if one.replica_id.unique_id == name)
        request.future.set_result(replica)

    def complete(self, name: str, request: str = "r") -> None:
        (replica,) = (one for one in self.replicas if one.replica_id.unique_id == name)
        self.router.on_request_completed(replica.replica_id, request)

    def booked(self) -> dict[str, int]:
        """Active requests by replica."""
        rows: list[LoadRow] = [row for scope in self.client.loads() for row in scope.loads]
        names = {worker_id_of(name): name for name in NAMES}
        return {names[row.worker_id]: row.active_requests for row in rows if row.active_requests}

    async def until(self, booked: dict[str, int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(self.booked) != booked:
                await asyncio.sleep(0.01)


def play(server: Server, act: Callable[[Scene], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        scene = Scene(server, **options)
        try:
            await act(scene)
            if scene.router._routing is not None:
                scene.router._routing.check()
            await scene.until({})
            if scene.router._routing is not None:
                assert not scene.router._routing._tickets
                assert not scene.router._routing._under_way
                await scene.router._routing._client_pool.aclose()
        finally:
            scene.client.close()

    asyncio.run(run())


@run_by(play, "server")
async def test_ranked_booked_and_freed(scene: Scene) -> None:
    request = scene.request()
    groups = await scene.choose(request)
    assert sorted(one for group in groups for one in group) == sorted(NAMES)
    assert [len(group) for group in groups] == [1, 1, 1], "each has a cost, and its rank"
    best = groups[0][0]
    await scene.until({best: 1})
    scene.send(request, best)
    await asyncio.sleep(0)
    del request
    gc.collect()  # Serve keeps a request no longer than until it is sent
    await asyncio.sleep(0.05)
    assert scene.booked() == {best: 1}
    name = reservation_id_of("app", "engine", "r")
    assert scene.client.call("POST", f"/reservations/{name}/prefill_complete") is not None
    scene.complete(best)
    assert scene.router.choices == {"ranked": 1}


@run_by(play, "server")
async def test_one_that_goes_elsewhere_takes_its_booking_along(scene: Scene) -> None:
    request = scene.request()
    groups = await scene.choose(request)
    last = groups[-1][0]
    scene.send(request, last)
    await scene.until({last: 1})
    scene.complete(last)


@run_by(play, "server")
async def test_one_that_is_refused_is_asked_for_again(scene: Scene) -> None:
    request = scene.request()
    first = (await scene.choose(request))[0][0]
    scene.send(request, first)
    await asyncio.sleep(0)
    request.reset_future()  # its queue was full after all
    second = (await scene.choose(request))[0][0]
    await scene.until({second: 1})
    scene.complete(first)  # of the attempt that was refused, and late
    scene.send(request, second)
    await asyncio.sleep(0.05)
    assert scene.booked() == {second: 1}
    scene.complete(second)


@run_by(play, "server")
async def test_nobody_has_room_for_a_while(scene: Scene) -> None:
    request = scene.request()
    for _ in range(3):
        await scene.choose(request)
    best = (await scene.choose(request))[0][0]
    await scene.until({best: 1})
    request.future.cancel()  # whoever asked has given up


@run_by(play, "server")
async def test_a_choice_without_a_request_is_not_kept(scene: Scene) -> None:
    await scene.choose(scene.request())  # `handle.choose_replica` of one who sends it himself
    gc.collect()


@run_by(play, "server")
async def test_calls_that_share_a_request(scene: Scene) -> None:
    requests = [scene.request("same") for _ in range(6)]
    for request in requests:
        best = (await scene.choose(request))[0][0]
        scene.send(request, best)
    await asyncio.sleep(0)
    assert sum(scene.booked().values()) == 6
    for request in requests:
        scene.complete(request.future.result().replica_id.unique_id, "same")


@run_by(play, "server")
async def test_what_has_no_prompt_is_left_to_serve(scene: Scene) -> None:
    for kwargs in ({"x": 1}, {"prompt": "text"}, {"token_ids": ["a"]}, {"token_ids": [-1]}):
        groups = await scene.choose(scene.request(**kwargs))
        assert [len(group) for group in groups] == [2]
    assert scene.router.choices == {"no_prompt": 3, "error": 1}
    assert await scene.choose(None) != []


@run_by(play, "server", tokenizer="tests.on_ray.test_router_alone:tokenize")
async def test_text_becomes_tokens(scene: Scene) -> None:
    request = scene.request(body={"messages": [{"role": "user", "content": "hi " * 50}]})
    best = (await scene.choose(request))[0][0]
    await scene.until({best: 1})
    request.future.cancel()


def tokenize(payload: Any) -> list[int]:
    return list(payload["messages"][0]["content"].encode())


def test_nobody_answers(server: Server) -> None:
    async def act(scene: Scene) -> None:
        for _ in range(3):
            assert [len(group) for group in await scene.choose(scene.request())] == [2]
        assert scene.router.choices == {"unreachable": 3}

    play(server, act, selectors=[f"http://127.0.0.1:{free_port()}"])


def test_who_serve_takes_first_of_its_own_choice_is_not_always_the_same(server: Server) -> None:
    """A choice without a reservation takes the first of the first group: it must be anybody."""

    async def act(scene: Scene) -> None:
        groups = [await scene.choose(scene.request()) for _ in range(64)]
        assert {group[0][0] for group in groups} == set(NAMES)

    play(server, act, selectors=[f"http://127.0.0.1:{free_port()}"])


def test_an_agent_that_takes_two_hours_is_not_forgotten(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from select_service.client.ray import routing

    clock = [0.0]
    monkeypatch.setattr(routing, "monotonic", lambda: clock[0])

    async def act(scene: Scene) -> None:
        agent = scene.request("agent")
        one = (await scene.choose(agent))[0][0]
        scene.send(agent, one)
        (replica,) = (it for it in scene.replicas if it.replica_id.unique_id == one)
        scene.router.on_request_routed(agent, replica.replica_id, None)
        await asyncio.sleep(0)
        clock[0] += 2 * 3600.0
        chat = scene.request("chat", token_ids=list(range(1000, 1064)))
        other = (await scene.choose(chat))[0][0]
        await scene.until({one: 1, other: 1})
        chat.future.cancel()
        await scene.until({one: 1})
        scene.complete(one, "agent")

    play(server, act)


@run_by(play, "server")
async def test_a_replica_that_raises_ends_as_failed(scene: Scene) -> None:
    request = scene.request()
    best = (await scene.choose(request))[0][0]
    scene.send(request, best)
    (replica,) = (one for one in scene.replicas if one.replica_id.unique_id == best)
    callbacks: list[Callable[[object], None]] = []
    result = SimpleNamespace(add_done_callback=callbacks.append)
    scene.router.on_request_routed(request, replica.replica_id, result)
    await asyncio.sleep(0)
    scene.complete(best)  # Serve reports the end first
    callbacks[0](RuntimeError("the engine is dead"))
    time.sleep(0.05)  # noqa: ASYNC251 - the loop comes back after reports are sent for as long
    await scene.until({})
    text = (await asyncio.to_thread(httpx.get, f"{scene.url}/metrics")).text
    assert 'reservation_outcomes_total{outcome="failed"} 1.0' in text


@run_by(play, "server")
async def test_replicas_nobody_has_registered(scene: Scene) -> None:
    from ray.serve._private.common import ReplicaID

    strangers = [
        SimpleNamespace(**{**vars(one), "replica_id": ReplicaID(f"s{n}", "d")})
        for n, one in enumerate(scene.replicas)
    ]
    scene.router.update_replicas(strangers)
    groups = await scene.router.choose_replicas(strangers, scene.request())
    assert [len(group) for group in groups] == [2]
    assert scene.router.choices == {"unknown_replicas": 1}


@pytest.mark.parametrize(
    "options", [{"timeout": 3}, {"timeout_ms": 0.0}, {"client": {"attempts_max": 0}}]
)
def test_arguments_that_are_none(server: Server, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Scene(server, **options)
