"""A scale-down that cuts nobody off: two selectors, an API server, and what is in flight."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.planner.cli import main
from select_service.planner.edge.connectors.virtual import VirtualConnector
from select_service.planner.edge.engine_drain import EngineDrain
from select_service.planner.types import ModelKey, PoolKey, PoolState, ScalingDecision
from tests.coroutines import run_by
from tests.select_service.planner.edge.drained_fleet import MOST_S, House, housed, selectors_at
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, target
from tests.select_service.planner.edge.loops import Told, asking, loop_of


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


@run_by(housed, plural="statefulsets")
async def test_a_stateful_set_takes_the_highest_ordinals_and_so_do_we(house: House) -> None:
    # ordinals are numbers in base 36 to the fake's Deployments, and these have one digit there
    for worker_id in (10, 11):
        house.selecting.add_worker(worker_id)
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
        return house.fake.replicas("decode")

    while not any(one.waiting for one in loop.decisions):
        assert await after(180.0) == 20
    noted = loop.decisions[-1]
    assert ": 1 reservation" in noted.waiting["m decode"]
    assert not any("decode" in one for one in noted.changed)
    assert house.retiring.pools[DECODE].named
    async with asking(loop) as client:
        told = (await client.get("/metrics")).text
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


@run_by(housed, plural="statefulsets")
async def test_a_stateful_set_loses_nobody_out_of_order(house: House) -> None:
    await house.selecting.book("one", 4, "r4")
    assert await house.wants(2, 4) == "worker 4: 1 reservation (0 s of 300)"
    assert set(house.selecting.drained()) == {3, 4}
    assert house.kept == 4, "the third is idle, but the fourth would be stopped"
    await house.selecting.end("one", "r4")
    await house.selecting.book("one", 2, "r2")
    assert await house.wants(1, 4) == "worker 2: 1 reservation (0 s of 300)"
    assert house.kept == 2


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
        house.selecting.add_worker(worker_id, endpoint=endpoint.format(worker_id))
        ips = house.fake.pods[f"decode-{worker_id}"]["status"]["podIPs"]
        ips.append({"ip": f"fd00::{worker_id}"})
    assert await house.wants(3, 4) == ""
    assert house.marked() == {f"10.0.0.{one}" for one in house.selecting.drained()} != set()


@run_by(housed)
async def test_who_has_no_pod_is_not_named_in_the_place_of_one_that_has(house: House) -> None:
    """It crashed and was not taken out of the catalog: it does nothing, so it is the cheapest."""
    await house.keeps_busy()
    house.selecting.add_worker(9)
    assert "1 reservation" in await house.wants(3, 4)
    (named,) = house.selecting.drained()
    assert named != 9
    for worker_id in (1, 2, 3, 4):
        house.selecting.add_worker(worker_id, endpoint=f"http://192.168.0.{worker_id}:8000")
    house.retiring = house.another()
    for service in house.selecting.services.values():
        service.undrain_worker(named)
    assert "address or the name of one of its pods" in await house.wants(3, 4)
    assert not house.selecting.drained()


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
            house.selecting.add_worker(100 * rank + worker_id, endpoint=endpoint)
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
        house.selecting.add_worker(worker_id, model_name=model.model_name)
        await house.selecting.book("one", worker_id, f"r{worker_id}", model.model_name)
    pool = PoolKey(model, "decode")
    for retiring in (house.another(), house.another()):  # the second knows the first one's
        retiring._pods = {}
        waiting = await retiring.settle([target(pool, 1)], {pool: PoolState(2, 2)})
        assert "1 reservation" in waiting[pool].why
        assert len(house.selecting.drained()) == 1


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
