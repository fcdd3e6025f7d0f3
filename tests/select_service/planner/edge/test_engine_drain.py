"""A scale-down that cuts nobody off: two selectors, an API server, and what is in flight."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.planner.cli import main
from select_service.planner.edge.connectors.virtual import VirtualConnector
from select_service.planner.edge.engine_drain import EngineDrain
from select_service.planner.types import ModelKey, PoolKey, PoolState, ScalingDecision
from tests.coroutines import run_by
from tests.select_service.planner.edge.drained_fleet import (
    MOST_S,
    DrainedFleet,
    in_cluster,
    selectors_at,
)
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, target
from tests.select_service.planner.edge.loops import SetSource, asking, loop_of


@run_by(in_cluster)
async def test_who_goes_is_idle_and_is_whom_kubernetes_takes(cluster: DrainedFleet) -> None:
    for worker_id in (1, 2, 3):  # the fourth is the cheapest: it does nothing
        await cluster.selecting.book("one", worker_id, f"r{worker_id}")
    await cluster.selecting.book("two", 4, "r4")  # but for what the other one books there
    why = await cluster.wants(3, 4)
    assert why == "worker 4: 1 reservation (0 s of 300)"
    assert cluster.selecting.drained("one") == cluster.selecting.drained("two")
    assert cluster.selecting.drained() == {4: "select-planner: m decode needs fewer"}
    assert not cluster.marked(), "not before it may go"
    cluster.clock.now += 20.0
    assert "(20 s of 300)" in await cluster.wants(3, 4)
    await cluster.selecting.end("two", "r4")
    assert await cluster.wants(3, 4) == ""
    assert cluster.marked() == {"10.0.0.4"}
    assert cluster.fake.pods["decode-4"]["metadata"]["annotations"]["kept"] == "yes"
    assert cluster.scaled(3) == {4}
    assert await cluster.wants(3, 3) == ""
    assert cluster.retiring.ends == {"idle": 1, "late": 0, "stayed": 0}
    asked = len(cluster.selecting.asked)
    assert await cluster.wants(3, 3) == ""
    assert len(cluster.selecting.asked) == asked, "nobody is asked while nobody goes"


@run_by(in_cluster)
async def test_who_has_not_started_goes_without_a_drain(cluster: DrainedFleet) -> None:
    """Two of six never came; two workers that served were drained in their place."""
    await cluster.keeps_busy()
    assert await cluster.wants(4, 6, ready=4) == ""
    assert cluster.selecting.drained() == {}
    assert "worker" in await cluster.wants(3, 6, ready=4)
    assert len(cluster.selecting.drained()) == 1
    assert cluster.kept == 4, "who has not started need not wait for who finishes"


@run_by(in_cluster)
async def test_who_is_needed_again_works_again_everywhere(cluster: DrainedFleet) -> None:
    await cluster.keeps_busy()
    assert "worker" in await cluster.wants(1, 4)
    first = list(cluster.selecting.drained())
    assert len(first) == 3
    for worker_id in (1, 2, 3, 4):
        await cluster.selecting.end("one", f"r{worker_id}")
    assert await cluster.wants(1, 4) == ""  # marked, but the count is not lowered yet
    assert len(cluster.marked()) == 3
    assert await cluster.wants(3, 4) == ""
    assert len(cluster.selecting.drained()) == len(cluster.marked()) == 1
    cluster.selecting.down.add("two")
    assert await cluster.wants(4, 4) == ""
    assert cluster.selecting.drained("two"), "it could not be reached"
    assert not cluster.selecting.drained("one"), "the other one was"
    assert cluster.retiring.failures == 1
    cluster.selecting.down.clear()
    assert await cluster.wants(4, 4) == ""
    assert cluster.selecting.drained("one") == cluster.selecting.drained("two") == {}
    assert not cluster.marked()
    assert cluster.retiring.ends["stayed"] == 3


@run_by(in_cluster)
async def test_nobody_waits_for_ever(cluster: DrainedFleet) -> None:
    await cluster.selecting.book("one", 1, "r1")
    for worker_id in (2, 3, 4):
        await cluster.selecting.book("one", worker_id, f"r{worker_id}")
    assert await cluster.wants(3, 4)
    cluster.clock.now += MOST_S - 1
    assert await cluster.wants(3, 4)
    cluster.clock.now += 1
    assert await cluster.wants(3, 4) == ""
    assert len(cluster.marked()) == 1, "it is still the one that was named first"
    (late,) = cluster.selecting.drained()
    assert cluster.scaled(3) == {late}
    assert await cluster.wants(3, 3) == ""
    assert cluster.retiring.ends["late"] == 1


@run_by(in_cluster, plural="statefulsets")
async def test_a_stateful_set_takes_the_highest_ordinals_and_so_do_we(
    cluster: DrainedFleet,
) -> None:
    # ordinals are numbers in base 36 to the fake's Deployments, and these have one digit there
    for worker_id in (10, 11):
        cluster.selecting.add_worker(worker_id)
        cluster.fake.pod(f"decode-{worker_id}", "decode", f"10.0.0.{worker_id}")
    await cluster.selecting.book("one", 11, "r")  # not the cheapest
    path = "/apis/apps/v1/namespaces/inference/statefulsets/decode"
    cluster.fake.objects[path]["spec"]["replicas"] = 6
    assert "worker 11" in await cluster.wants(4, 6)
    assert set(cluster.selecting.drained()) == {10, 11}
    await cluster.selecting.end("one", "r")
    assert await cluster.wants(4, 6) == ""
    assert not cluster.marked(), "it would not be read"
    assert cluster.scaled(4) == {10, 11}


@run_by(in_cluster, workers=20)
async def test_the_loop_holds_a_lower_count_back_and_says_so(cluster: DrainedFleet) -> None:
    loop = loop_of(cluster.connector)
    loop.retiring = cluster.retiring
    clock: Any = loop._clock
    for worker_id in range(1, 21):
        await cluster.selecting.book("two", worker_id, f"r{worker_id}")

    async def after(seconds: float) -> int:
        clock.now += seconds
        cluster.clock.now += seconds
        await loop.slow()
        return cluster.fake.replicas("decode")

    while not any(one.waiting for one in loop.decisions):
        assert await after(180.0) == 20
    noted = loop.decisions[-1]
    assert ": 1 reservation" in noted.waiting["m decode"]
    assert not any("decode" in one for one in noted.changed)
    assert cluster.retiring.pools[DECODE].named
    async with asking(loop) as client:
        metrics = (await client.get("/metrics")).text
    leaving = 'select_planner_workers_leaving{model_name="m",role="decode",tenant_id="default"}'
    assert f"{leaving} {len(cluster.retiring.pools[DECODE].named)}.0" in metrics
    decisions = len(loop.decisions)
    await loop.fast()
    assert len(loop.decisions) == decisions, "it is reported once, not at every look"
    named = set(cluster.selecting.drained())
    for worker_id in named:
        await cluster.selecting.end("two", f"r{worker_id}")
    count = await after(5.0)
    assert count == 20 - len(named)
    assert cluster.scaled(count) == named
    await after(5.0)
    assert cluster.retiring.ends["idle"] == len(named)


@run_by(in_cluster)
async def test_who_is_idle_goes_and_who_was_named_later_has_as_much_time(
    cluster: DrainedFleet,
) -> None:
    await cluster.keeps_busy()
    assert await cluster.wants(3, 4)
    (first,) = cluster.selecting.drained()
    cluster.clock.now += MOST_S - 1
    why = await cluster.wants(2, 4)
    assert len(cluster.selecting.drained()) == 2
    (second,) = set(cluster.selecting.drained()) - {first}
    cluster.clock.now += 1
    why = await cluster.wants(2, 4)
    assert why == f"worker {second}: 1 reservation (1 s of 300)"
    assert cluster.kept == 3, "the first was late, the second has its time"
    assert cluster.marked() == {f"10.0.0.{first}"}
    assert cluster.scaled(3) == {first}
    assert await cluster.wants(2, 3)
    await cluster.selecting.end("one", f"r{second}")
    assert await cluster.wants(2, 3) == ""
    assert cluster.scaled(2) == {second}
    assert await cluster.wants(2, 2) == ""
    assert cluster.retiring.ends == {"idle": 1, "late": 1, "stayed": 0}


@run_by(in_cluster)
async def test_of_several_the_idle_ones_do_not_wait_for_the_busy_one(cluster: DrainedFleet) -> None:
    for worker_id in (1, 2):
        await cluster.selecting.book("one", worker_id, f"r{worker_id}")
    assert "1 reservation" in await cluster.wants(1, 4)
    assert cluster.kept == 2
    assert cluster.marked() == {"10.0.0.3", "10.0.0.4"}
    assert cluster.scaled(2) == {3, 4}
    assert "1 reservation" in await cluster.wants(1, 2)
    assert cluster.kept == 2


@run_by(in_cluster, plural="statefulsets")
async def test_a_stateful_set_loses_nobody_out_of_order(cluster: DrainedFleet) -> None:
    await cluster.selecting.book("one", 4, "r4")
    assert await cluster.wants(2, 4) == "worker 4: 1 reservation (0 s of 300)"
    assert set(cluster.selecting.drained()) == {3, 4}
    assert cluster.kept == 4, "the third is idle, but the fourth would be stopped"
    await cluster.selecting.end("one", "r4")
    await cluster.selecting.book("one", 2, "r2")
    assert await cluster.wants(1, 4) == "worker 2: 1 reservation (0 s of 300)"
    assert cluster.kept == 2


@run_by(in_cluster, workers=80)
async def test_more_go_than_a_selector_names_at_once(cluster: DrainedFleet) -> None:
    count = 80
    while count > 4:
        await cluster.wants(4, count)
        assert cluster.kept < count, "some of them are named and idle"
        count = cluster.kept
        cluster.scaled(count)
    assert await cluster.wants(4, 4) == ""
    assert cluster.retiring.ends == {"idle": 76, "late": 0, "stayed": 0}


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://decode-{}.decode.inference.svc.cluster.local:8000",
        "http://decode-{}:8000",
        "10.0.0.{}:8000",
        "http://[FD00:0::{}]:8000",
    ],
)
@run_by(in_cluster)
async def test_workers_are_found_in_their_pods_by_name_and_in_any_notation(
    cluster: DrainedFleet, *, endpoint: str
) -> None:
    for worker_id in range(1, 5):
        cluster.selecting.add_worker(worker_id, endpoint=endpoint.format(worker_id))
        ips = cluster.fake.pods[f"decode-{worker_id}"]["status"]["podIPs"]
        ips.append({"ip": f"fd00::{worker_id}"})
    assert await cluster.wants(3, 4) == ""
    assert cluster.marked() == {f"10.0.0.{one}" for one in cluster.selecting.drained()} != set()


@run_by(in_cluster)
async def test_who_has_no_pod_is_not_named_in_the_place_of_one_that_has(
    cluster: DrainedFleet,
) -> None:
    """It crashed and was not taken out of the catalog: it does nothing, so it is the cheapest."""
    await cluster.keeps_busy()
    cluster.selecting.add_worker(9)
    assert "1 reservation" in await cluster.wants(3, 4)
    (named,) = cluster.selecting.drained()
    assert named != 9
    for worker_id in (1, 2, 3, 4):
        cluster.selecting.add_worker(worker_id, endpoint=f"http://192.168.0.{worker_id}:8000")
    cluster.retiring = cluster.another()
    for service in cluster.selecting.services.values():
        service.undrain_worker(named)
    assert "address or the name of one of its pods" in await cluster.wants(3, 4)
    assert not cluster.selecting.drained()


@run_by(in_cluster)
async def test_of_a_leader_worker_set_leaders_have_the_ordinals(cluster: DrainedFleet) -> None:
    for name in ("decode-9-1", "decode-10", "decode-10-1", "decode-x", "other-11"):
        cluster.fake.pod(name, "decode", "10.0.1.1")
    pods = cluster.connector.pods()[DECODE]
    found = [one.metadata.name for one in pods.by_ordinal(await pods.there())]
    assert found == ["decode-10", "decode-4", "decode-3", "decode-2", "decode-1"]


@run_by(in_cluster)
async def test_workers_of_one_pod_go_together(cluster: DrainedFleet) -> None:
    """A data-parallel engine whose ranks are registered as workers with ports of their own."""
    for worker_id in (1, 2, 3, 4):
        for rank in (1, 2):
            endpoint = f"http://10.0.0.{worker_id}:{8000 + rank}"
            cluster.selecting.add_worker(100 * rank + worker_id, endpoint=endpoint)
        await cluster.selecting.book("one", 200 + worker_id, f"r{worker_id}")
    assert "1 reservation" in await cluster.wants(3, 4)
    assert cluster.kept == 4
    drained = set(cluster.selecting.drained())
    (pod,) = {worker_id % 100 for worker_id in drained}
    assert drained == {pod, 100 + pod, 200 + pod}
    assert await cluster.wants(4, 4) == ""
    assert not cluster.selecting.drained()
    assert await cluster.wants(3, 4)
    cluster.retiring = cluster.another()
    assert await cluster.wants(3, 4)
    (pod,) = {worker_id % 100 for worker_id in cluster.selecting.drained()}
    await cluster.selecting.end("one", f"r{pod}")
    assert await cluster.wants(3, 4) == ""
    assert cluster.marked() == {f"10.0.0.{pod}"}
    assert cluster.scaled(3) == {pod}


@run_by(in_cluster)
async def test_pods_that_share_an_address_are_not_distinguished(cluster: DrainedFleet) -> None:
    """In the network of one machine: a mark on both would stop either."""
    for name in ("decode-1", "decode-2"):
        cluster.fake.pods[name]["status"] = {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}
    for worker_id in (3, 4):
        await cluster.selecting.book("one", worker_id, f"r{worker_id}")
    assert await cluster.wants(2, 4)
    assert set(cluster.selecting.drained()) == {3, 4}, "whose pods are known"
    assert "2 of 3 could be named" in await cluster.wants(1, 4)


@run_by(in_cluster)
async def test_a_name_longer_than_a_reason_may_be_drains_all_the_same(
    cluster: DrainedFleet,
) -> None:
    model = ModelKey("/models/" + "x" * 240)
    for worker_id in (61, 62):
        cluster.selecting.add_worker(worker_id, model_name=model.model_name)
        await cluster.selecting.book("one", worker_id, f"r{worker_id}", model.model_name)
    pool = PoolKey(model, "decode")
    for retiring in (cluster.another(), cluster.another()):  # the second knows the first one's
        retiring._pods = {}
        waiting = await retiring.settle([target(pool, 1)], {pool: PoolState(2, 2)})
        assert "1 reservation" in waiting[pool].why
        assert len(cluster.selecting.drained()) == 1


@run_by(in_cluster)
async def test_who_waits_for_gpus_of_those_that_finish_first_floods_nothing(
    cluster: DrainedFleet, *, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(cluster.connector, gpus_max=5)
    loop.retiring = cluster.retiring
    loop.is_leader = True
    for worker_id in (1, 2, 3, 4):
        await cluster.selecting.book("two", worker_id, f"r{worker_id}")
    decision = ScalingDecision((target(PREFILL, 2), target(DECODE, 3)), (), (), 5, {})
    ids = set()
    for _ in range(20):
        await loop._look()
        await loop._act(decision, "fast")
        ids.add(loop.decision_id)
    assert len(ids) == 1, "it is reported once"
    assert set(loop.decisions[-1].waiting) == {"m prefill", "m decode"}
    assert loop.counts.failures == 0
    errors = [one for one in caplog.records if one.levelname == "ERROR"]
    # the service beside it has a doctor of its own, which logs once it has looked
    assert not [one for one in errors if one.name.startswith("select_planner")]
    (named,) = cluster.selecting.drained()
    await cluster.selecting.end("two", f"r{named}")
    await loop._act(decision, "fast")
    counts = [one["spec"]["replicas"] for one in cluster.fake.objects.values()]
    assert counts == [3, 2]
    assert not loop._waits


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--drain"], "--drain needs --selector URL"),
        (["--drain", "--selector", "http://s"], "not ours to say with dry-run"),
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


@run_by(in_cluster)
async def test_readers_of_the_virtual_connector_learn_from_the_selectors_which_worker_goes(
    cluster: DrainedFleet,
) -> None:
    connector = VirtualConnector({DECODE: PoolState(4, 4)}, cluster.clock, lambda: 0.0, 60.0)
    selectors = selectors_at(["http://one", "http://two"], cluster.selecting)
    retiring = EngineDrain(selectors, {}, cluster.clock, MOST_S)
    states = await connector.states([DECODE])
    assert await retiring.settle([target(DECODE, 3)], states) == {}
    async with cluster.selecting.client() as client:
        path = "http://two/scale_down_candidates?model_name=m&role=decode"
        (candidate,) = (await client.get(path)).json()["candidates"]
    assert candidate["drains"]
    assert set(cluster.selecting.drained()) == {candidate["worker_id"]}
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


@run_by(in_cluster)
async def test_who_does_not_act_says_once_what_it_would_do_while_another_one_drains(
    cluster: DrainedFleet,
) -> None:
    loop = loop_of(cluster.connector, lease=Never())
    decision = ScalingDecision((target(DECODE, 3),), (), (), 4, {})
    await loop._look()
    for _ in range(20):
        await loop._act(decision, "fast")
    (noted,) = loop.decisions
    assert (noted.changed, noted.acted) == (["m decode: 4 to 3"], False)
    await loop._act(ScalingDecision((target(DECODE, 2),), (), (), 4, {}), "fast")
    assert loop.decision_id == 2


@run_by(in_cluster)
async def test_a_fleet_in_which_nobody_acts_drains_nobody(cluster: DrainedFleet) -> None:
    loop = loop_of(cluster.connector, lease=Never(), source=SetSource())
    loop.retiring = cluster.retiring
    for _ in range(6):
        loop._clock.now += 180.0  # type: ignore[attr-defined]
        await loop.slow()
    assert not cluster.selecting.asked
    assert not cluster.retiring.pools


@run_by(in_cluster)
async def test_no_pods_are_listed_as_null(cluster: DrainedFleet) -> None:
    cluster.fake.pods.clear()
    assert await cluster.connector.pods()[DECODE].there() == []
