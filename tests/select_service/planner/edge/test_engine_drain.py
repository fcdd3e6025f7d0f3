"""A scale-down that cuts nobody off: two selectors, an API server, and what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from typing_extensions import override

from select_service.client import Options
from select_service.edge.app import create_app, create_driver
from select_service.edge.driver.driver import Driver
from select_service.planner.cli import main
from select_service.planner.core.scale_down import GONE_S
from select_service.planner.edge import selectors as selectors_module
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.connectors.pods import DELETION_COST
from select_service.planner.edge.connectors.virtual import VirtualConnector
from select_service.planner.edge.engine_drain import EngineDrain
from select_service.planner.edge.http_server import create_app as create_planner
from select_service.planner.edge.selectors import SelectorFleet
from select_service.planner.types import ModelKey, PoolKey, PoolState, ScalingDecision
from tests.coroutines import run_by
from tests.live.simulated_transport import answered_by
from tests.select_service.edge.serving import SETTINGS, seat
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, Clock, FakeKube, run, target
from tests.select_service.planner.edge.test_loop import Told, loop_of
from tests.wait import PATIENCE_S

NAMES = ("one", "two")
MOST_S = 300.0


class Selecting(httpx.AsyncBaseTransport):
    """Two selectors of one fleet, each at a host of its own."""

    def __init__(self) -> None:
        self.services: dict[str, Driver] = {}
        self.doors: dict[str, httpx.ASGITransport] = {}
        self.down: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []

    async def start(self, name: str) -> None:
        settings = replace(SETTINGS)
        self.services[name] = create_driver(settings)
        await self.services[name].start()
        self.doors[name] = httpx.ASGITransport(create_app(self.services[name], settings))

    def seat(self, worker_id: int, **fields: Any) -> None:
        plain = {"model_name": "m", "role": "decode", "endpoint": f"http://10.0.0.{worker_id}:8000"}
        for service in self.services.values():
            seat(service, worker_id, **plain | fields)

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        self.asked.append((name, request.method, request.url.path))
        if name in self.down:
            raise httpx.ConnectError("connection refused")
        return await self.doors[name].handle_async_request(request)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self)

    async def book(
        self, name: str, worker_id: int, reservation_id: str, model_name: str = "m"
    ) -> None:
        body = {"model_name": model_name, "sequence_hashes": [1], "isl_tokens": 16}
        body |= {"worker_id": worker_id}
        body |= {"reservation_id": reservation_id, "effective_prefill_tokens": 16, "dp_rank": 0}
        async with self.client() as client:
            answer = await client.post(f"http://{name}/reservations", json=body)
            assert answer.is_success, answer.text

    async def end(self, name: str, reservation_id: str) -> None:
        async with self.client() as client:
            assert (await client.delete(f"http://{name}/reservations/{reservation_id}")).is_success

    def drained(self, name: str = "one") -> dict[int, str]:
        """Who drains, and why, by one of them."""
        core = self.services[name].core
        found = {one.worker_id: core.drains.status(one.worker_id) for one in core.workers.workers()}
        return {id_: str(one.reason) for id_, one in found.items() if one.drains}

    async def close(self) -> None:
        for service in self.services.values():
            await service.close()


def selectors_at(urls: list[str], transport: httpx.AsyncBaseTransport) -> SelectorFleet:
    selectors = SelectorFleet(urls)
    for client in selectors._clients.values():
        answered_by(client, transport)
    return selectors


class House:
    """Selectors, an API server, and who lets engines go."""

    def __init__(self, plural: str = "deployments") -> None:
        self.selecting = Selecting()
        self.fake = FakeKube()
        self.plural = plural
        self.clock = Clock()
        self.connector = KubernetesConnector(
            self.fake.kube(), {DECODE: f"{plural}/decode", PREFILL: "deployments/prefill"}
        )
        self.retiring = self.another()
        self.kept = 0

    def another(self) -> EngineDrain:
        """A planner, as if the one before had ended."""
        urls = [f"http://{name}" for name in NAMES]
        selectors = selectors_at(urls, self.selecting)
        return EngineDrain(selectors, self.connector.pods(), self.clock, MOST_S)

    async def wants(self, replicas: int, desired: int, ready: int | None = None) -> str:
        """Return what the lower count waits for."""
        state = PoolState(desired, desired if ready is None else ready)
        waiting = await self.retiring.settle([target(DECODE, replicas)], {DECODE: state})
        for leaving in self.retiring.pools.values():
            leaving.check()
        self.kept = waiting[DECODE].replicas if DECODE in waiting else replicas
        return waiting[DECODE].why if DECODE in waiting else ""

    async def keeps_busy(self) -> None:
        """Book a request on each of four workers at the first selector."""
        for worker_id in (1, 2, 3, 4):
            await self.selecting.book("one", worker_id, f"r{worker_id}")

    async def drains_one(self) -> int:
        """Keep all four busy and want three of them: return who drains."""
        await self.keeps_busy()
        assert await self.wants(3, 4)
        (named,) = self.selecting.drained()
        return named

    def marked(self) -> set[str]:
        return {
            pod["status"]["podIP"]
            for pod in self.fake.pods.values()
            if DELETION_COST in pod["metadata"]["annotations"]
        }

    def scaled(self, replicas: int) -> set[int]:
        """The count is lowered, and the controllers act on it; returns whose pods went."""
        path = f"/apis/apps/v1/namespaces/inference/{self.plural}/decode"
        self.fake.objects[path]["spec"]["replicas"] = replicas
        gone = {int(ip.rpartition(".")[2]) for ip in self.fake.control("decode", self.plural)}
        for service in self.selecting.services.values():
            for worker_id in gone:
                service.delete_worker(worker_id)
        return gone


def housed(
    use: Callable[[House], Awaitable[None]], plural: str = "deployments", workers: int = 4
) -> None:
    async def whole() -> None:
        house = House(plural)
        try:
            for name in NAMES:
                await house.selecting.start(name)
            house.fake.deployment("decode", workers, workers, plural)
            house.fake.deployment("prefill", 1, 1)
            for worker_id in range(1, 1 + workers):
                house.selecting.seat(worker_id)
                house.fake.pod(f"decode-{worker_id}", "decode", f"10.0.0.{worker_id}")
            house.selecting.seat(50, role="prefill")
            house.fake.pod("prefill-z", "prefill", "10.0.0.50")
            await use(house)
        finally:
            await house.retiring.close()
            await house.selecting.close()

    run(whole)


@run_by(housed)
async def test_who_goes_is_idle_and_is_whom_kubernetes_takes(house: House) -> None:
    for worker_id in (1, 2, 3):  # the fourth is the cheapest: it does nothing
        await house.selecting.book("one", worker_id, f"r{worker_id}")
    await house.selecting.book("two", 4, "r4")  # but for what the other one books there
    why = await house.wants(3, 4)
    assert why == "worker 4: 1 reservation (0 s of 300)"
    assert house.selecting.drained("one") == house.selecting.drained("two")
    assert house.selecting.drained() == {4: "select-planner: m decode needs fewer"}
    assert not house.marked(), "not before it may go"
    house.clock.now += 20.0
    assert "(20 s of 300)" in await house.wants(3, 4)
    await house.selecting.end("two", "r4")
    assert await house.wants(3, 4) == ""
    assert house.marked() == {"10.0.0.4"}
    assert house.fake.pods["decode-4"]["metadata"]["annotations"]["kept"] == "yes"
    assert house.scaled(3) == {4}
    assert await house.wants(3, 3) == ""
    assert house.retiring.ends == {"idle": 1, "late": 0, "stayed": 0}
    asked = len(house.selecting.asked)
    assert await house.wants(3, 3) == ""
    assert len(house.selecting.asked) == asked, "nobody is asked while nobody goes"


@run_by(housed)
async def test_who_has_not_started_goes_without_a_drain(house: House) -> None:
    """Two of six never came; two workers that served were drained in their place."""
    await house.keeps_busy()
    assert await house.wants(4, 6, ready=4) == ""
    assert house.selecting.drained() == {}
    assert "worker" in await house.wants(3, 6, ready=4)
    assert len(house.selecting.drained()) == 1
    assert house.kept == 4, "who has not started need not wait for who finishes"


@run_by(housed)
async def test_who_is_needed_again_works_again_everywhere(house: House) -> None:
    await house.keeps_busy()
    assert "worker" in await house.wants(1, 4)
    first = list(house.selecting.drained())
    assert len(first) == 3
    for worker_id in (1, 2, 3, 4):
        await house.selecting.end("one", f"r{worker_id}")
    assert await house.wants(1, 4) == ""  # marked, but the count is not lowered yet
    assert len(house.marked()) == 3
    assert await house.wants(3, 4) == ""
    assert len(house.selecting.drained()) == len(house.marked()) == 1
    house.selecting.down.add("two")
    assert await house.wants(4, 4) == ""
    assert house.selecting.drained("two"), "it could not be told"
    assert not house.selecting.drained("one"), "the other one was"
    assert house.retiring.failures == 1
    house.selecting.down.clear()
    assert await house.wants(4, 4) == ""
    assert house.selecting.drained("one") == house.selecting.drained("two") == {}
    assert not house.marked()
    assert house.retiring.ends["stayed"] == 3


@run_by(housed)
async def test_nobody_waits_for_ever(house: House) -> None:
    await house.selecting.book("one", 1, "r1")
    for worker_id in (2, 3, 4):
        await house.selecting.book("one", worker_id, f"r{worker_id}")
    assert await house.wants(3, 4)
    house.clock.now += MOST_S - 1
    assert await house.wants(3, 4)
    house.clock.now += 1
    assert await house.wants(3, 4) == ""
    assert len(house.marked()) == 1, "it is still the one who was told to go"
    (late,) = house.selecting.drained()
    assert house.scaled(3) == {late}
    assert await house.wants(3, 3) == ""
    assert house.retiring.ends["late"] == 1


@run_by(housed)
async def test_selectors_that_do_not_answer_keep_engines_for_a_while_only(house: House) -> None:
    house.selecting.down |= set(NAMES)
    assert "connection refused" in await house.wants(3, 4)
    house.clock.now += MOST_S
    assert await house.wants(3, 4) == ""
    assert house.retiring.failures == 2
    house.selecting.down.clear()
    house.fake.forbids_pods = True
    house.retiring = house.another()
    why = await house.wants(3, 4)
    assert "403: pods is forbidden" in why, "drained in vain, if another one is taken"


def test_a_stateful_set_takes_the_highest_ordinals_and_so_do_we() -> None:
    async def use(house: House) -> None:
        for worker_id in (10, 11):
            house.selecting.seat(worker_id)
            house.fake.pod(f"decode-{worker_id}", "decode", f"10.0.0.{worker_id}")
        await house.selecting.book("one", 11, "r")  # not the cheapest
        path = "/apis/apps/v1/namespaces/inference/statefulsets/decode"
        house.fake.objects[path]["spec"]["replicas"] = 6
        assert "worker 11" in await house.wants(4, 6)
        assert set(house.selecting.drained()) == {10, 11}
        await house.selecting.end("one", "r")
        assert await house.wants(4, 6) == ""
        assert not house.marked(), "it would not be heard"
        assert house.scaled(4) == {10, 11}

    # ordinals are numbers in base 36 to the fake's Deployments, and these have one digit there
    housed(use, "statefulsets")


@run_by(housed)
async def test_a_planner_that_starts_again_goes_on_where_the_last_one_was(house: House) -> None:
    await house.keeps_busy()
    assert await house.wants(2, 4)
    before = house.selecting.drained()
    assert len(before) == 2
    house.retiring = house.another()
    assert "2 reservations" not in await house.wants(2, 4)
    assert house.selecting.drained() == before, "the same two"
    house.retiring = house.another()  # and now nobody is to go any more
    assert await house.wants(4, 4) == ""
    assert house.selecting.drained() == before, "their pods may be on the way out"
    house.clock.now += GONE_S
    assert await house.wants(4, 4) == ""
    assert house.selecting.drained("one") == house.selecting.drained("two") == {}


@run_by(housed)
async def test_who_was_not_taken_works_on(house: House) -> None:
    """An older controller, or somebody's hand: another pod went than the one that was marked."""
    assert await house.wants(3, 4) == ""
    (drained,) = house.selecting.drained()
    for service in house.selecting.services.values():
        service.delete_worker(1 if drained != 1 else 2)
    assert await house.wants(3, 3) == ""
    assert house.selecting.drained()
    house.clock.now += GONE_S
    assert await house.wants(3, 3) == ""
    assert not house.selecting.drained()


@run_by(housed)
async def test_whom_somebody_else_drains_goes_first_and_stays_his(house: House) -> None:
    for name in NAMES:
        async with house.selecting.client() as client:
            body = {"reason": "a broken fan"}
            await client.post(f"http://{name}/workers/2/drain", json=body)
    assert await house.wants(3, 4) == ""
    assert house.selecting.drained() == {2: "a broken fan"}
    assert house.marked() == {"10.0.0.2"}
    assert await house.wants(4, 4) == ""
    assert house.selecting.drained() == {2: "a broken fan"}
    assert not house.marked()


@run_by(housed)
async def test_who_is_gone_or_was_put_back_meanwhile_is_replaced_or_told_again(
    house: House,
) -> None:
    named = await house.drains_one()
    house.selecting.services["two"].undrain_worker(named)
    assert await house.wants(3, 4)
    assert named in house.selecting.drained("two")
    for service in house.selecting.services.values():
        service.delete_worker(named)
    house.selecting.seat(9)  # its replacement
    house.fake.pod("decode-9", "decode", "10.0.0.9")
    assert await house.wants(3, 4) == "", "the newcomer is idle"
    assert set(house.selecting.drained()) == {9}


@run_by(housed)
async def test_an_answer_that_hangs_keeps_no_other_pool(
    house: House, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors_module, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(selectors_module, "_ONCE", Options.single_attempt(0.1))

    async def hang(request: httpx.Request) -> httpx.Response:
        if "/workers" in request.url.path:
            await asyncio.sleep(3600)
        return httpx.Response(200, json={"candidates": []})

    fleet = selectors_at(["http://s"], httpx.MockTransport(hang))
    retiring = EngineDrain(fleet, {}, house.clock, MOST_S)
    targets = [target(DECODE, 1), target(PREFILL, 1)]
    states = {DECODE: PoolState(2, 2), PREFILL: PoolState(2, 2)}
    waiting = await asyncio.wait_for(retiring.settle(targets, states), PATIENCE_S)
    assert set(waiting) == {DECODE, PREFILL}
    assert "no whole answer within 0.1 s" in waiting[DECODE].why
    await retiring.close()


@run_by(housed, workers=20)
async def test_the_loop_holds_a_lower_count_back_and_says_so(house: House) -> None:
    loop = loop_of(house.connector)
    loop.retiring = house.retiring
    clock: Any = loop._clock
    for worker_id in range(1, 21):
        await house.selecting.book("two", worker_id, f"r{worker_id}")

    async def after(seconds: float) -> int:
        clock.now += seconds
        house.clock.now += seconds
        await loop.slow()
        path = "/apis/apps/v1/namespaces/inference/deployments/decode"
        return int(house.fake.objects[path]["spec"]["replicas"])

    while not any(one.waiting for one in loop.decisions):
        assert await after(180.0) == 20
    noted = loop.decisions[-1]
    assert ": 1 reservation" in noted.waiting["m decode"]
    assert not any("decode" in one for one in noted.changed)
    assert house.retiring.pools[DECODE].named
    page = httpx.AsyncClient(
        transport=httpx.ASGITransport(create_planner(loop)), base_url="http://p"
    )
    async with page:
        told = (await page.get("/metrics")).text
    leaving = 'select_planner_workers_leaving{model_name="m",role="decode",tenant_id="default"}'
    assert f"{leaving} {len(house.retiring.pools[DECODE].named)}.0" in told
    decisions = len(loop.decisions)
    await loop.fast()
    assert len(loop.decisions) == decisions, "it is told once, not at every look"
    named = set(house.selecting.drained())
    for worker_id in named:
        await house.selecting.end("two", f"r{worker_id}")
    count = await after(5.0)
    assert count == 20 - len(named)
    assert house.scaled(count) == named
    await after(5.0)
    assert house.retiring.ends["idle"] == len(named)


@run_by(housed)
async def test_who_is_idle_goes_and_who_was_named_later_has_as_much_time(house: House) -> None:
    await house.keeps_busy()
    assert await house.wants(3, 4)
    (first,) = house.selecting.drained()
    house.clock.now += MOST_S - 1
    why = await house.wants(2, 4)
    assert len(house.selecting.drained()) == 2
    (second,) = set(house.selecting.drained()) - {first}
    house.clock.now += 1
    why = await house.wants(2, 4)
    assert why == f"worker {second}: 1 reservation (1 s of 300)"
    assert house.kept == 3, "the first was late, the second has its time"
    assert house.marked() == {f"10.0.0.{first}"}
    assert house.scaled(3) == {first}
    assert await house.wants(2, 3)
    await house.selecting.end("one", f"r{second}")
    assert await house.wants(2, 3) == ""
    assert house.scaled(2) == {second}
    assert await house.wants(2, 2) == ""
    assert house.retiring.ends == {"idle": 1, "late": 1, "stayed": 0}


@run_by(housed)
async def test_of_several_the_idle_ones_do_not_wait_for_the_busy_one(house: House) -> None:
    for worker_id in (1, 2):
        await house.selecting.book("one", worker_id, f"r{worker_id}")
    assert "1 reservation" in await house.wants(1, 4)
    assert house.kept == 2
    assert house.marked() == {"10.0.0.3", "10.0.0.4"}
    assert house.scaled(2) == {3, 4}
    assert "1 reservation" in await house.wants(1, 2)
    assert house.kept == 2


def test_a_stateful_set_loses_nobody_out_of_order() -> None:
    async def use(house: House) -> None:
        await house.selecting.book("one", 4, "r4")
        assert await house.wants(2, 4) == "worker 4: 1 reservation (0 s of 300)"
        assert set(house.selecting.drained()) == {3, 4}
        assert house.kept == 4, "the third is idle, but the fourth would be stopped"
        await house.selecting.end("one", "r4")
        await house.selecting.book("one", 2, "r2")
        assert await house.wants(1, 4) == "worker 2: 1 reservation (0 s of 300)"
        assert house.kept == 2

    housed(use, "statefulsets")


@run_by(housed, workers=80)
async def test_more_go_than_a_selector_names_at_once(house: House) -> None:
    count = 80
    while count > 4:
        await house.wants(4, count)
        assert house.kept < count, "some of them are named and idle"
        count = house.kept
        house.scaled(count)
    assert await house.wants(4, 4) == ""
    assert house.retiring.ends == {"idle": 76, "late": 0, "stayed": 0}


@run_by(housed)
async def test_a_lower_count_whose_answer_was_lost_brings_nobody_back(house: House) -> None:
    """Its pods are being stopped: who is drained there must not be given work again."""
    assert await house.wants(3, 4) == ""
    (named,) = house.selecting.drained()
    # the API server has taken it, and the planner saw a timeout: at the next look it reads 3
    assert await house.wants(3, 3) == ""
    assert set(house.selecting.drained()) == {named}
    assert house.marked() == {f"10.0.0.{named}"}
    assert house.scaled(3) == {named}


@run_by(housed)
async def test_an_operator_who_takes_over_a_drain_of_ours_keeps_it(house: House) -> None:
    named = await house.drains_one()
    async with house.selecting.client() as client:
        for name in NAMES:
            body = {"reason": "a broken fan"}
            await client.post(f"http://{name}/workers/{named}/drain", json=body)
    assert await house.wants(4, 4) == ""
    assert house.selecting.drained() == {named: "a broken fan"}
    assert await house.wants(3, 4)
    assert set(house.selecting.drained()) == {named}, "it goes first, as it leaves anyway"
    for service in house.selecting.services.values():
        service.undrain_worker(named)  # it was mended
    assert await house.wants(3, 4)
    assert house.selecting.drained() == {named: "select-planner: m decode needs fewer"}


@run_by(housed)
async def test_a_mark_that_somebody_left_behind_is_taken_away(house: House) -> None:
    """A planner that was killed, and a hand that undid the drain: nobody knows of the mark."""
    await house.selecting.book("one", 1, "r1")
    await house.connector.pods()[DECODE].mark(
        (await house.connector.pods()[DECODE].there())[0], goes_first=True
    )
    assert house.marked() == {"10.0.0.1"}
    assert await house.wants(3, 4) == ""
    assert house.marked() == {f"10.0.0.{one}" for one in house.selecting.drained()}
    assert house.scaled(3).isdisjoint({1}), "who has a request in flight is not the first"


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://decode-{}.decode.inference.svc.cluster.local:8000",
        "http://decode-{}:8000",
        "10.0.0.{}:8000",
        "http://[FD00:0::{}]:8000",
    ],
)
@run_by(housed)
async def test_workers_are_found_in_their_pods_by_name_and_in_any_notation(
    house: House, *, endpoint: str
) -> None:
    for worker_id in range(1, 5):
        house.selecting.seat(worker_id, endpoint=endpoint.format(worker_id))
        ips = house.fake.pods[f"decode-{worker_id}"]["status"]["podIPs"]
        ips.append({"ip": f"fd00::{worker_id}"})
    assert await house.wants(3, 4) == ""
    assert house.marked() == {f"10.0.0.{one}" for one in house.selecting.drained()} != set()


@run_by(housed)
async def test_who_has_no_pod_is_not_named_in_the_place_of_one_that_has(house: House) -> None:
    """It crashed and was not taken out of the catalog: it does nothing, so it is the cheapest."""
    await house.keeps_busy()
    house.selecting.seat(9)
    assert "1 reservation" in await house.wants(3, 4)
    (named,) = house.selecting.drained()
    assert named != 9
    for worker_id in (1, 2, 3, 4):
        house.selecting.seat(worker_id, endpoint=f"http://192.168.0.{worker_id}:8000")
    house.retiring = house.another()
    for service in house.selecting.services.values():
        service.undrain_worker(named)
    assert "address or the name of one of its pods" in await house.wants(3, 4)
    assert not house.selecting.drained()


@run_by(housed)
async def test_a_planner_that_comes_back_later_asks_for_the_same_and_not_for_another(
    house: House,
) -> None:
    """At first nobody is to go: a planner that starts waits until it has seen enough."""
    named = await house.drains_one()
    house.retiring = house.another()
    assert await house.wants(4, 4) == ""
    house.clock.now += 20.0
    assert f"worker {named}: 1 reservation" in await house.wants(3, 4)
    assert set(house.selecting.drained()) == {named}
    house.retiring = house.another()
    assert await house.wants(4, 4) == ""
    house.fake.pods[f"decode-{named}"]["metadata"]["deletionTimestamp"] = "2026-11-26T13:00:00Z"
    assert f"worker {named}" not in await house.wants(3, 4), "that one is on its way out"


@run_by(housed)
async def test_an_api_server_that_wants_to_be_left_alone_is_left_alone(house: House) -> None:
    house.fake.refuses, house.fake.retry_after = 429, "30"
    assert "429" in await house.wants(3, 4)
    asked = len(house.fake.asked)
    for _ in range(5):
        assert await house.wants(3, 4)
    assert len(house.fake.asked) == asked


@run_by(housed)
async def test_who_is_being_stopped_gets_no_work_from_a_selector_that_forgot_it(
    house: House,
) -> None:
    assert await house.wants(3, 4) == ""
    (named,) = house.selecting.drained()
    assert await house.wants(3, 3) == ""  # it is lowered, and its pod takes its time to end
    house.selecting.services["two"].undrain_worker(named)
    assert await house.wants(3, 3) == ""
    assert named in house.selecting.drained("two")


@run_by(housed)
async def test_whom_only_a_selector_knows_that_does_not_answer_is_not_forgotten(
    house: House,
) -> None:
    for worker_id in (1, 2, 3, 4):
        house.selecting.services["one"].delete_worker(worker_id)
        await house.selecting.book("two", worker_id, f"r{worker_id}")
    assert await house.wants(3, 4)
    (named,) = house.selecting.drained("two")
    house.selecting.down.add("two")
    assert "connection refused" in await house.wants(3, 4)
    assert await house.wants(4, 4) == "", "nor is it while nobody is to go"
    house.selecting.down.clear()
    assert await house.wants(4, 4) == ""
    assert named not in house.selecting.drained("two")


@run_by(housed)
async def test_a_drain_of_ours_that_comes_back_to_light_is_ended(house: House) -> None:
    """It left every catalog, but one that nobody could reach; there it is still drained."""
    await house.keeps_busy()
    assert await house.wants(2, 4)
    before = house.selecting.drained()
    house.retiring.pools[DECODE].see([], 0.0)
    assert await house.wants(2, 4)
    assert house.selecting.drained() == before, "nobody else in their place"


@run_by(housed)
async def test_of_a_leader_worker_set_leaders_have_the_ordinals(house: House) -> None:
    for name in ("decode-9-1", "decode-10", "decode-10-1", "decode-x", "other-11"):
        house.fake.pod(name, "decode", "10.0.1.1")
    pods = house.connector.pods()[DECODE]
    found = [one.metadata.name for one in pods.by_ordinal(await pods.there())]
    assert found == ["decode-10", "decode-4", "decode-3", "decode-2", "decode-1"]


@run_by(housed)
async def test_workers_of_one_pod_go_together(house: House) -> None:
    """A data-parallel engine whose ranks are registered as workers with ports of their own."""
    for worker_id in (1, 2, 3, 4):
        for rank in (1, 2):
            endpoint = f"http://10.0.0.{worker_id}:{8000 + rank}"
            house.selecting.seat(100 * rank + worker_id, endpoint=endpoint)
        await house.selecting.book("one", 200 + worker_id, f"r{worker_id}")
    assert "1 reservation" in await house.wants(3, 4)
    assert house.kept == 4
    drained = set(house.selecting.drained())
    (pod,) = {worker_id % 100 for worker_id in drained}
    assert drained == {pod, 100 + pod, 200 + pod}
    assert await house.wants(4, 4) == ""
    assert not house.selecting.drained()
    assert await house.wants(3, 4)
    house.retiring = house.another()
    assert await house.wants(3, 4)
    (pod,) = {worker_id % 100 for worker_id in house.selecting.drained()}
    await house.selecting.end("one", f"r{pod}")
    assert await house.wants(3, 4) == ""
    assert house.marked() == {f"10.0.0.{pod}"}
    assert house.scaled(3) == {pod}


@run_by(housed)
async def test_who_moves_while_it_is_waited_for_is_marked_where_it_is(house: House) -> None:
    named = await house.drains_one()
    del house.fake.pods[f"decode-{named}"]  # its container's pod was replaced
    house.fake.pod("decode-9", "decode", "10.0.0.9")
    house.selecting.seat(named, endpoint="http://10.0.0.9:8000")
    await house.selecting.end("one", f"r{named}")
    assert await house.wants(3, 4) == ""
    assert house.marked() == {"10.0.0.9"}


@run_by(housed)
async def test_pods_that_share_an_address_are_not_told_apart(house: House) -> None:
    """In the network of one machine: a mark on both would stop either."""
    for name in ("decode-1", "decode-2"):
        house.fake.pods[name]["status"] = {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}
    for worker_id in (3, 4):
        await house.selecting.book("one", worker_id, f"r{worker_id}")
    assert await house.wants(2, 4)
    assert set(house.selecting.drained()) == {3, 4}, "whose pods are known"
    assert "2 of 3 could be named" in await house.wants(1, 4)


@run_by(housed)
async def test_a_name_longer_than_a_reason_may_be_drains_all_the_same(house: House) -> None:
    model = ModelKey("/models/" + "x" * 240)
    for worker_id in (61, 62):
        house.selecting.seat(worker_id, model_name=model.model_name)
        await house.selecting.book("one", worker_id, f"r{worker_id}", model.model_name)
    pool = PoolKey(model, "decode")
    for retiring in (house.another(), house.another()):  # the second knows the first one's
        retiring._pods = {}
        waiting = await retiring.settle([target(pool, 1)], {pool: PoolState(2, 2)})
        assert "1 reservation" in waiting[pool].why
        assert len(house.selecting.drained()) == 1


@run_by(housed)
async def test_what_fails_at_every_look_is_told_once(
    house: House, *, caplog: pytest.LogCaptureFixture
) -> None:
    house.selecting.down |= set(NAMES)
    for _ in range(10):
        house.clock.now += 5.0
        assert await house.wants(3, 4)
    assert caplog.text.count("connection refused") == 2, "one line, two selectors"
    assert house.retiring.failures == 10


@run_by(housed)
async def test_who_waits_for_gpus_of_those_that_finish_first_floods_nothing(
    house: House, *, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(house.connector, gpus_max=5)
    loop.retiring = house.retiring
    loop.is_leader = True
    for worker_id in (1, 2, 3, 4):
        await house.selecting.book("two", worker_id, f"r{worker_id}")
    decision = ScalingDecision((target(PREFILL, 2), target(DECODE, 3)), (), (), 5, {})
    ids = set()
    for _ in range(20):
        await loop._look()
        await loop._act(decision, "fast")
        ids.add(loop.decision_id)
    assert len(ids) == 1, "it is told once"
    assert set(loop.decisions[-1].waiting) == {"m prefill", "m decode"}
    assert loop.counts.failures == 0
    errors = [one for one in caplog.records if one.levelname == "ERROR"]
    # the service beside it has a doctor of its own, which speaks once it has looked
    assert not [one for one in errors if one.name.startswith("select_planner")]
    (named,) = house.selecting.drained()
    await house.selecting.end("two", f"r{named}")
    await loop._act(decision, "fast")
    counts = [one["spec"]["replicas"] for one in house.fake.objects.values()]
    assert counts == [3, 2]
    assert not loop._waits


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--drain"], "--drain needs --selector URL"),
        (["--drain", "--selector", "http://s"], "not for us to say with dry-run"),
        (["--selector", "http://s"], "--selector is of --metrics-source selector and of --drain"),
    ],
)
def test_drains_that_nobody_could_carry_out_are_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.select_service.planner.golden import PROFILE

    plain = ["run", "--model-name", "m", "--profile-results-dir", str(PROFILE), "--port", "0"]
    assert main([*plain, *flags]) in {1, 2}
    assert says in capsys.readouterr().err


@run_by(housed)
async def test_readers_of_the_virtual_connector_are_told_by_the_selectors_who_goes(
    house: House,
) -> None:
    connector = VirtualConnector({DECODE: PoolState(4, 4)}, house.clock, lambda: 0.0, 60.0)
    selectors = selectors_at(["http://one", "http://two"], house.selecting)
    retiring = EngineDrain(selectors, {}, house.clock, MOST_S)
    states = await connector.states([DECODE])
    assert await retiring.settle([target(DECODE, 3)], states) == {}
    async with house.selecting.client() as client:
        path = "http://two/scale_down_candidates?model_name=m&role=decode"
        (told,) = (await client.get(path)).json()["candidates"]
    assert told["drains"]
    assert set(house.selecting.drained()) == {told["worker_id"]}
    await retiring.close()


class Never:
    """The lease of somebody else."""

    is_sure = False
    problem = ""
    failures = 0

    async def held(self) -> bool:
        return False

    async def close(self) -> None:
        pass


@run_by(housed)
async def test_who_does_not_act_says_once_what_it_would_do_while_another_one_drains(
    house: House,
) -> None:
    loop = loop_of(house.connector, lease=Never())
    decision = ScalingDecision((target(DECODE, 3),), (), (), 4, {})
    await loop._look()
    for _ in range(20):
        await loop._act(decision, "fast")
    (noted,) = loop.decisions
    assert (noted.changed, noted.acted) == (["m decode: 4 to 3"], False)
    await loop._act(ScalingDecision((target(DECODE, 2),), (), (), 4, {}), "fast")
    assert loop.decision_id == 2


@run_by(housed)
async def test_a_fleet_in_which_nobody_acts_drains_nobody(house: House) -> None:
    loop = loop_of(house.connector, lease=Never(), source=Told())
    loop.retiring = house.retiring
    for _ in range(6):
        loop._clock.now += 180.0  # type: ignore[attr-defined]
        await loop.slow()
    assert not house.selecting.asked
    assert not house.retiring.pools


@run_by(housed)
async def test_no_pods_are_listed_as_null(house: House) -> None:
    house.fake.pods.clear()
    assert await house.connector.pods()[DECODE].there() == []


@run_by(housed)
async def test_a_worker_that_is_not_ready_is_nobodys_drain(house: House) -> None:
    """A person's drain is left alone, and its worker is kept; this one may be let go."""
    for service in house.selecting.services.values():
        for worker_id in (1, 2, 3, 4):
            service.hold_worker_back(worker_id, "api", "not ready")
    assert await house.wants(3, 4) == "", "nothing is in flight"
    assert len(house.selecting.drained()) == 1, "it is drained as any other"
