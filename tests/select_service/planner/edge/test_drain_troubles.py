"""A scale-down while selectors fail, planners restart, and others drain or scale, too."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from select_service.client import Options
from select_service.planner.core.scale_down import GONE_S
from select_service.planner.edge import selectors as selectors_module
from select_service.planner.edge.engine_drain import EngineDrain
from select_service.planner.types import PoolState
from tests.coroutines import run_by
from tests.select_service.planner.edge.drained_fleet import (
    MOST_S,
    NAMES,
    DrainedFleet,
    in_cluster,
    selectors_at,
)
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, target
from tests.wait import PATIENCE_S


@run_by(in_cluster)
async def test_selectors_that_do_not_answer_keep_engines_for_a_while_only(
    cluster: DrainedFleet,
) -> None:
    cluster.selecting.down |= set(NAMES)
    assert "connection refused" in await cluster.wants(3, 4)
    cluster.clock.now += MOST_S
    assert await cluster.wants(3, 4) == ""
    assert cluster.retiring.failures == 2
    cluster.selecting.down.clear()
    cluster.fake.forbids_pods = True
    cluster.retiring = cluster.another()
    why = await cluster.wants(3, 4)
    assert "403: pods is forbidden" in why, "drained in vain, if another one is taken"


@run_by(in_cluster)
async def test_a_planner_that_starts_again_goes_on_where_the_last_one_was(
    cluster: DrainedFleet,
) -> None:
    await cluster.keeps_busy()
    assert await cluster.wants(2, 4)
    before = cluster.selecting.drained()
    assert len(before) == 2
    cluster.retiring = cluster.another()
    assert "2 reservations" not in await cluster.wants(2, 4)
    assert cluster.selecting.drained() == before, "the same two"
    cluster.retiring = cluster.another()  # and now nobody is to go any more
    assert await cluster.wants(4, 4) == ""
    assert cluster.selecting.drained() == before, "their pods may be on the way out"
    cluster.clock.now += GONE_S
    assert await cluster.wants(4, 4) == ""
    assert cluster.selecting.drained("one") == cluster.selecting.drained("two") == {}


@run_by(in_cluster)
async def test_who_was_not_taken_works_on(cluster: DrainedFleet) -> None:
    """An older controller, or somebody's hand: another pod went than the one that was marked."""
    assert await cluster.wants(3, 4) == ""
    (drained,) = cluster.selecting.drained()
    for service in cluster.selecting.services.values():
        service.delete_worker(1 if drained != 1 else 2)
    assert await cluster.wants(3, 3) == ""
    assert cluster.selecting.drained()
    cluster.clock.now += GONE_S
    assert await cluster.wants(3, 3) == ""
    assert not cluster.selecting.drained()


@run_by(in_cluster)
async def test_whom_somebody_else_drains_goes_first_and_stays_his(cluster: DrainedFleet) -> None:
    for name in NAMES:
        async with cluster.selecting.client() as client:
            body = {"reason": "a broken fan"}
            await client.post(f"http://{name}/workers/2/drain", json=body)
    assert await cluster.wants(3, 4) == ""
    assert cluster.selecting.drained() == {2: "a broken fan"}
    assert cluster.marked() == {"10.0.0.2"}
    assert await cluster.wants(4, 4) == ""
    assert cluster.selecting.drained() == {2: "a broken fan"}
    assert not cluster.marked()


@run_by(in_cluster)
async def test_who_is_gone_or_was_put_back_meanwhile_is_replaced_or_drained_again(
    cluster: DrainedFleet,
) -> None:
    named = await cluster.drains_one()
    cluster.selecting.services["two"].undrain_worker(named)
    assert await cluster.wants(3, 4)
    assert named in cluster.selecting.drained("two")
    for service in cluster.selecting.services.values():
        service.delete_worker(named)
    cluster.selecting.add_worker(9)  # its replacement
    cluster.fake.pod("decode-9", "decode", "10.0.0.9")
    assert await cluster.wants(3, 4) == "", "the newcomer is idle"
    assert set(cluster.selecting.drained()) == {9}


@run_by(in_cluster)
async def test_an_answer_that_hangs_keeps_no_other_pool(
    cluster: DrainedFleet, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors_module, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(selectors_module, "_ONCE", Options.single_attempt(0.1))

    async def hang(request: httpx.Request) -> httpx.Response:
        if "/workers" in request.url.path:
            await asyncio.sleep(3600)
        return httpx.Response(200, json={"candidates": []})

    fleet = selectors_at(["http://s"], httpx.MockTransport(hang))
    retiring = EngineDrain(fleet, {}, cluster.clock, MOST_S)
    targets = [target(DECODE, 1), target(PREFILL, 1)]
    states = {DECODE: PoolState(2, 2), PREFILL: PoolState(2, 2)}
    waiting = await asyncio.wait_for(retiring.settle(targets, states), PATIENCE_S)
    assert set(waiting) == {DECODE, PREFILL}
    assert "no whole answer within 0.1 s" in waiting[DECODE].why
    await retiring.close()


@run_by(in_cluster)
async def test_a_lower_count_whose_answer_was_lost_brings_nobody_back(
    cluster: DrainedFleet,
) -> None:
    """Its pods are being stopped: who is drained there must not be given work again."""
    assert await cluster.wants(3, 4) == ""
    (named,) = cluster.selecting.drained()
    # the API server has taken it, and the planner saw a timeout: at the next look it reads 3
    assert await cluster.wants(3, 3) == ""
    assert set(cluster.selecting.drained()) == {named}
    assert cluster.marked() == {f"10.0.0.{named}"}
    assert cluster.scaled(3) == {named}


@run_by(in_cluster)
async def test_an_operator_who_takes_over_a_drain_of_ours_keeps_it(cluster: DrainedFleet) -> None:
    named = await cluster.drains_one()
    async with cluster.selecting.client() as client:
        for name in NAMES:
            body = {"reason": "a broken fan"}
            await client.post(f"http://{name}/workers/{named}/drain", json=body)
    assert await cluster.wants(4, 4) == ""
    assert cluster.selecting.drained() == {named: "a broken fan"}
    assert await cluster.wants(3, 4)
    assert set(cluster.selecting.drained()) == {named}, "it goes first, as it leaves anyway"
    for service in cluster.selecting.services.values():
        service.undrain_worker(named)  # it was mended
    assert await cluster.wants(3, 4)
    assert cluster.selecting.drained() == {named: "select-planner: m decode needs fewer"}


@run_by(in_cluster)
async def test_a_mark_that_somebody_left_behind_is_taken_away(cluster: DrainedFleet) -> None:
    """A planner that was killed, and a hand that undid the drain: nobody knows of the mark."""
    await cluster.selecting.book("one", 1, "r1")
    await cluster.connector.pods()[DECODE].mark(
        (await cluster.connector.pods()[DECODE].there())[0], goes_first=True
    )
    assert cluster.marked() == {"10.0.0.1"}
    assert await cluster.wants(3, 4) == ""
    assert cluster.marked() == {f"10.0.0.{one}" for one in cluster.selecting.drained()}
    assert cluster.scaled(3).isdisjoint({1}), "who has a request in flight is not the first"


@run_by(in_cluster)
async def test_a_planner_that_comes_back_later_asks_for_the_same_and_not_for_another(
    cluster: DrainedFleet,
) -> None:
    """At first nobody is to go: a planner that starts waits until it has seen enough."""
    named = await cluster.drains_one()
    cluster.retiring = cluster.another()
    assert await cluster.wants(4, 4) == ""
    cluster.clock.now += 20.0
    assert f"worker {named}: 1 reservation" in await cluster.wants(3, 4)
    assert set(cluster.selecting.drained()) == {named}
    cluster.retiring = cluster.another()
    assert await cluster.wants(4, 4) == ""
    cluster.fake.pods[f"decode-{named}"]["metadata"]["deletionTimestamp"] = "2026-11-26T13:00:00Z"
    assert f"worker {named}" not in await cluster.wants(3, 4), "that one is on its way out"


@run_by(in_cluster)
async def test_an_api_server_that_wants_to_be_left_alone_is_left_alone(
    cluster: DrainedFleet,
) -> None:
    cluster.fake.refuses, cluster.fake.retry_after = 429, "30"
    assert "429" in await cluster.wants(3, 4)
    asked = len(cluster.fake.asked)
    for _ in range(5):
        assert await cluster.wants(3, 4)
    assert len(cluster.fake.asked) == asked


@run_by(in_cluster)
async def test_who_is_being_stopped_gets_no_work_from_a_selector_that_forgot_it(
    cluster: DrainedFleet,
) -> None:
    assert await cluster.wants(3, 4) == ""
    (named,) = cluster.selecting.drained()
    assert await cluster.wants(3, 3) == ""  # it is lowered, and its pod takes its time to end
    cluster.selecting.services["two"].undrain_worker(named)
    assert await cluster.wants(3, 3) == ""
    assert named in cluster.selecting.drained("two")


@run_by(in_cluster)
async def test_whom_only_a_selector_knows_that_does_not_answer_is_not_forgotten(
    cluster: DrainedFleet,
) -> None:
    for worker_id in (1, 2, 3, 4):
        cluster.selecting.services["one"].delete_worker(worker_id)
        await cluster.selecting.book("two", worker_id, f"r{worker_id}")
    assert await cluster.wants(3, 4)
    (named,) = cluster.selecting.drained("two")
    cluster.selecting.down.add("two")
    assert "connection refused" in await cluster.wants(3, 4)
    assert await cluster.wants(4, 4) == "", "nor is it while nobody is to go"
    cluster.selecting.down.clear()
    assert await cluster.wants(4, 4) == ""
    assert named not in cluster.selecting.drained("two")


@run_by(in_cluster)
async def test_a_drain_of_ours_that_comes_back_to_light_is_ended(cluster: DrainedFleet) -> None:
    """It left every catalog, but one that nobody could reach; there it is still drained."""
    await cluster.keeps_busy()
    assert await cluster.wants(2, 4)
    before = cluster.selecting.drained()
    cluster.retiring.pools[DECODE].see([], 0.0)
    assert await cluster.wants(2, 4)
    assert cluster.selecting.drained() == before, "nobody else in their place"


@run_by(in_cluster)
async def test_who_moves_while_it_is_waited_for_is_marked_where_it_is(
    cluster: DrainedFleet,
) -> None:
    named = await cluster.drains_one()
    del cluster.fake.pods[f"decode-{named}"]  # its container's pod was replaced
    cluster.fake.pod("decode-9", "decode", "10.0.0.9")
    cluster.selecting.add_worker(named, endpoint="http://10.0.0.9:8000")
    await cluster.selecting.end("one", f"r{named}")
    assert await cluster.wants(3, 4) == ""
    assert cluster.marked() == {"10.0.0.9"}


@run_by(in_cluster)
async def test_what_fails_at_every_look_is_logged_once(
    cluster: DrainedFleet, *, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.selecting.down |= set(NAMES)
    for _ in range(10):
        cluster.clock.now += 5.0
        assert await cluster.wants(3, 4)
    assert caplog.text.count("connection refused") == 2, "one line, two selectors"
    assert cluster.retiring.failures == 10


@run_by(in_cluster)
async def test_a_worker_that_is_not_ready_is_nobodys_drain(cluster: DrainedFleet) -> None:
    """A person's drain is left alone, and its worker is kept; this one may be let go."""
    for service in cluster.selecting.services.values():
        for worker_id in (1, 2, 3, 4):
            service.hold_worker_back(worker_id, "api", "not ready")
    assert await cluster.wants(3, 4) == "", "nothing is in flight"
    assert len(cluster.selecting.drained()) == 1, "it is drained as any other"
