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
    House,
    housed,
    selectors_at,
)
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, target
from tests.wait import PATIENCE_S


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
    house.selecting.add_worker(9)  # its replacement
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
async def test_who_moves_while_it_is_waited_for_is_marked_where_it_is(house: House) -> None:
    named = await house.drains_one()
    del house.fake.pods[f"decode-{named}"]  # its container's pod was replaced
    house.fake.pod("decode-9", "decode", "10.0.0.9")
    house.selecting.add_worker(named, endpoint="http://10.0.0.9:8000")
    await house.selecting.end("one", f"r{named}")
    assert await house.wants(3, 4) == ""
    assert house.marked() == {"10.0.0.9"}


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
async def test_a_worker_that_is_not_ready_is_nobodys_drain(house: House) -> None:
    """A person's drain is left alone, and its worker is kept; this one may be let go."""
    for service in house.selecting.services.values():
        for worker_id in (1, 2, 3, 4):
            service.hold_worker_back(worker_id, "api", "not ready")
    assert await house.wants(3, 4) == "", "nothing is in flight"
    assert len(house.selecting.drained()) == 1, "it is drained as any other"
