"""The loop with its neighbours: who may act, what is reported, what a restart remembers."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge import loop as loop_module
from select_service.planner.edge.connectors.connector import DryRun
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.connectors.virtual import Completion, VirtualConnector
from select_service.planner.edge.leases.file_lease import FileLease
from select_service.planner.edge.leases.kubernetes_lease import KubeLease
from select_service.planner.edge.leases.lease import DURATION_S
from select_service.planner.edge.loop import _next
from select_service.planner.edge.predictors import PredictorSettings
from select_service.planner.edge.run_settings import build_fleet, read_targets
from select_service.planner.edge.sources.trace import TraceSource
from select_service.planner.errors import InfeasiblePlan, SettingsError, SourceError
from select_service.planner.types import (
    ModelKey,
    ScalingDecision,
    Value,
    Window,
)
from tests.select_service.planner.core.planned_fleet import BUSY
from tests.select_service.planner.edge.fakes import DECODE, KEY, PREFILL, Clock, FakeKube
from tests.select_service.planner.edge.loops import (
    ONE_OF_EACH,
    SetSource,
    asking,
    kube_loop,
    loop_of,
)
from tests.select_service.planner.golden import PROFILE
from tests.wait import PATIENCE_S


async def test_an_interval_changes_kubernetes_and_says_why() -> None:
    fake = FakeKube()
    loop = kube_loop(fake)
    await loop.slow()
    (noted,) = loop.decisions
    assert noted.acted
    assert noted.changed[1].startswith("m decode: 1 to ")
    wanted = {one.role: one.replicas for one in noted.targets}
    for name in ("prefill", "decode"):
        assert fake.replicas(name) == wanted[name] > 1
    del fake.objects["/apis/apps/v1/namespaces/inference/deployments/decode"]
    await loop.slow()
    assert not loop.is_ready
    assert any("could not be read" in one for one in loop.decisions[-1].reasons)


async def test_starts_that_matter_no_more_are_given_up_and_counted() -> None:
    """Pods without a machine: their count was not lowered for half an hour."""
    fake, clock = FakeKube(), Clock()
    loop = kube_loop(fake, prefill=(9, 3))
    loop._clock = clock
    idle = replace(BUSY, requests=Value(90.0))
    loop.source.window = idle  # type: ignore[attr-defined]
    await loop.slow()
    assert fake.replicas("prefill") == 9, "they were wanted a moment ago"
    clock.now += 301.0
    await loop.slow()
    assert fake.replicas("prefill") == 3
    reason = "6 of 6 that have not started are given up: 3 are ready, and 1 do"
    assert any(reason in one for one in loop.decisions[-1].reasons)
    async with asking(loop) as client:
        page = (await client.get("/metrics")).text
    assert "select_planner_starts_given_up_total 6.0" in page


async def test_another_scaler_of_a_pool_is_reported() -> None:
    """An autoscaler beside it: up and down by turns, and nothing said why."""
    fake = FakeKube()
    loop = kube_loop(fake)
    path = "/apis/apps/v1/namespaces/inference/deployments/decode"
    await loop.slow()
    asked = fake.objects[path]["spec"]["replicas"]
    await loop.fast()
    fake.objects[path]["spec"]["replicas"] = asked + 3
    await loop.fast()
    reason = f"m decode: something else scales it: {asked} were asked for, it says {asked + 3}"
    assert loop.decisions[-1].reasons[0] == reason
    for _ in range(3):
        await loop.fast()
    await loop.slow()
    assert sum(reason in one.reasons for one in loop.decisions) == 1
    assert loop.counts.overrides == 1


async def test_a_decision_that_failed_was_changed_by_nobody_else() -> None:
    connector = VirtualConnector(ONE_OF_EACH, Clock(), lambda: 1000.0)
    loop = loop_of(connector)
    await loop.slow()
    await loop.fast()  # what was asked for is read back
    connector.complete(connector.decision_id, Completion("failed"))
    await loop.slow()
    assert loop.counts.overrides == 0
    assert not any("somebody" in text for one in loop.decisions for text in one.reasons)


async def test_gpus_that_were_not_given_back_are_not_given_away() -> None:
    """The ceiling is hard: a refused scale-down beside one up went over it, and stayed there."""
    fake = FakeKube()
    loop = kube_loop(fake, prefill=(8, 8), decode=(2, 2), gpus_max=11)
    fake.frozen.add("prefill")
    for _ in range(3):
        loop._clock.now += 180.0  # type: ignore[attr-defined]
        await loop.slow()
        assert (fake.replicas("prefill"), fake.replicas("decode")) == (8, 3)
        failed = loop.decisions[-1].failed
        assert "403" in failed["m prefill"]
        assert "still in use" in failed["m decode"]
    fake.frozen.clear()
    loop._clock.now += 180.0  # type: ignore[attr-defined]
    await loop.slow()
    assert not loop.decisions[-1].failed
    wanted = {one.role: one.replicas for one in loop.decisions[-1].targets}
    assert (fake.replicas("prefill"), fake.replicas("decode")) == (
        wanted["prefill"],
        wanted["decode"],
    )
    assert fake.replicas("decode") > 3
    assert fake.replicas("prefill") + fake.replicas("decode") <= 11


async def test_only_the_holder_of_the_lease_acts(tmp_path: Path) -> None:
    first, second = (FileLease(tmp_path / "planner.lock") for _ in range(2))
    one, two = loop_of(lease=first), loop_of(lease=second)
    await one.slow()
    await two.slow()
    assert (one.is_leader, two.is_leader) == (True, False)
    assert not two.decisions[-1].acted
    assert (await two.connector.states([DECODE]))[DECODE].desired == 1
    assert two.decisions[-1].changed  # what it would have done is reported
    await one.close()
    await two.slow()
    assert two.is_leader
    assert (await two.connector.states([DECODE]))[DECODE].desired > 1
    await two.close()


async def test_a_kubernetes_lease_changes_hands_when_it_is_not_renewed() -> None:
    fake, clock = FakeKube(), Clock()
    one, two = (KubeLease(fake.kube(), "planner", name, clock) for name in ("one", "two"))
    assert await one.held()
    assert not await two.held()
    for _ in range(3):
        clock.now += DURATION_S - 1
        assert await one.held()
        assert not await two.held()
    fake.is_down = True
    clock.now += 1
    assert await one.held()  # nobody else can have taken it yet
    clock.now += DURATION_S
    assert not await one.held()
    fake.is_down = False
    assert await two.held()
    assert not await one.held()
    await two.close()
    assert await one.held()  # given back: no waiting


async def test_a_decision_that_takes_long_loses_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred models it takes longer than a lease lasts: planners took it by turns."""
    monkeypatch.setattr(loop_module, "RENEW_S", 0.01)
    renewed = threading.Event()

    class Renewed(FileLease):
        async def held(self) -> bool:
            renewed.set()
            return True

    loop = loop_of(lease=Renewed())
    await loop.slow()  # it leads now
    renewed.clear()
    decide, waited = loop.fleet.slow, []

    def slowly(*arguments: Any) -> ScalingDecision:
        waited.append(renewed.wait(PATIENCE_S))
        return decide(*arguments)

    monkeypatch.setattr(loop.fleet, "slow", slowly)
    await loop.slow()
    assert waited == [True]
    assert loop.is_leader


@pytest.mark.parametrize("is_taken", [False, True])
async def test_who_acts_for_longer_than_its_lease_asks_for_it_again(*, is_taken: bool) -> None:
    """It was asked for once for all pools: a slow API server's took a minute and a half."""
    fake, clock = FakeKube(), Clock()
    lease = "/apis/coordination.k8s.io/v1/namespaces/inference/leases/planner"

    def slowly(path: str) -> None:
        clock.now += DURATION_S
        if is_taken:
            fake.objects[lease]["spec"]["holderIdentity"] = "two"

    fake.patched = slowly
    loop = kube_loop(fake, KubeLease(fake.kube(), "planner", "one", clock))
    await loop.slow()
    first, second = (one.replicas for one in loop.decisions[-1].targets)
    states = await loop.connector.states([PREFILL, DECODE])
    assert first > 1
    assert second > 1
    assert states[PREFILL].desired == first
    assert states[DECODE].desired == (1 if is_taken else second)
    assert loop.is_leader is not is_taken
    failed = loop.decisions[-1].failed
    assert failed == ({"m decode": "m decode: the lease has run out"} if is_taken else {})


async def test_who_ends_gives_the_lease_back_and_the_next_need_not_wait() -> None:
    """The connector's client, which is the lease's, was closed before it could be said."""
    fake = FakeKube()
    fake.deployment("prefill", 1, 1)
    fake.deployment("decode", 1, 1)
    kube = fake.kube()
    resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
    lease = KubeLease(kube, "select-planner", "first", Clock())
    loop = loop_of(KubernetesConnector(kube, resources), lease)
    await loop.slow()
    assert loop.is_leader
    await loop.close()
    assert await KubeLease(fake.kube(), "select-planner", "second", Clock()).held()


async def test_why_the_lease_cannot_be_had_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A planner without the right to leases was said to stand by for another, which was none."""
    fake, clock = FakeKube(), Clock()
    fake.refuses_leases = 403
    loop = loop_of(lease=KubeLease(fake.kube(), "planner", "one", clock))
    with caplog.at_level("INFO", "select_planner"):
        await loop.slow()
        await loop.slow()
    assert not loop.is_leader
    why = "lease planner: 403: no"
    assert [one.getMessage() for one in caplog.records].count(why) == 1, "each is reported once"
    assert f"not acting, {why}: m prefill" in caplog.text
    assert "another planner" not in caplog.text
    async with asking(loop) as client:
        body = (await client.get("/ready")).json()
        assert why in body["waiting_for"]
        assert "select_planner_lease_failures_total 2.0" in (await client.get("/metrics")).text
    fake.refuses_leases = 0
    await loop.slow()
    assert (loop.is_leader, loop.lease.problem) == (True, "")


async def test_the_loop_ticks_and_survives_a_turn_that_fails() -> None:
    thrice = asyncio.Event()

    class Failing(SetSource):
        asked = 0

        async def windows(self, models: list[ModelKey], seconds: float) -> dict[ModelKey, Window]:
            self.asked += 1
            if self.asked == 6:
                thrice.set()
            if self.asked == 2:
                raise SourceError("a turn that fails")
            if self.asked == 3:
                raise ZeroDivisionError("a bug")
            return await super().windows(models, seconds)

    loop = loop_of(source=Failing())
    loop.fleet.interval_s = 0.01
    loop._clock = asyncio.get_running_loop().time
    loop._fast_s = None
    task = asyncio.ensure_future(loop.run())
    await thrice.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loop.counts.faults == 2
    assert len(loop.decisions) >= 2


async def test_no_interval_of_a_trace_is_left_out() -> None:
    """The first look, where counters begin, took the first one away."""
    trace = TraceSource([TracedRequest(at_s, 3000.0, 300.0) for at_s in (0.001, 9.0)])
    loop = loop_of(source=trace)  # type: ignore[arg-type] # a source
    loop.fleet.interval_s = 0.05
    loop._clock = asyncio.get_running_loop().time
    loop._asked_at = loop._clock()
    loop._fast_s = None
    task = asyncio.ensure_future(loop.run())
    while not loop.windows:
        await asyncio.sleep(0)
    task.cancel()
    assert loop.windows[KEY].requests == Value(1.0)


async def test_gpus_are_counted_for_as_long_as_they_were_there() -> None:
    """By the engines at the end of an interval, however many there were within it."""
    connector = DryRun({PREFILL: 1, DECODE: 1})
    loop = loop_of(connector)
    clock = loop._clock
    for seconds, there in ((5.0, 10), (170.0, 2), (5.0, 1)):
        clock.now += seconds  # type: ignore[attr-defined]
        connector._counts[PREFILL] = there
        connector._counts[DECODE] = 0
        await loop._look()
    assert loop.counts.gpu_seconds == 5.0 * 10 + 170.0 * 2 + 5.0 * 1


def test_missed_ticks_are_left_out() -> None:
    assert _next(100.0, 10.0, 99.0) == 100.0
    assert _next(100.0, 10.0, 100.0) == 110.0
    assert _next(100.0, 10.0, 134.0) == 140.0


def test_a_targets_file_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(
        "models:\n"
        f"- {{model_name: a, profile_results_dir: {PROFILE}, weight: 2.0,\n"
        "   pools: [{role: aggregated, gpus: 2, replicas_min: 2, resource: deployments/a}]}\n"
        f"- {{model_name: b, profile_results_dir: {PROFILE},\n"
        "   pools: [{role: prefill}, {role: decode}]}\n"
    )
    models = read_targets(path)
    tuning = PredictorSettings()
    assert len(build_fleet(models, tuning, 8).models) == 2
    with pytest.raises(InfeasiblePlan, match="the minima need 6 GPUs, 5 are allowed"):
        build_fleet(models, tuning, 5)
    with pytest.raises(SettingsError, match="a model is named twice"):
        build_fleet([models[0], models[0]], tuning, 64)
    path.write_text("models: [{model_name: a, pools: [], profile_results_dir: x, gpu: 1}]")
    with pytest.raises(SettingsError, match="gpu"):
        read_targets(path)
    path.write_text("models: [")
    with pytest.raises(SettingsError, match=r"targets\.yaml"):
        read_targets(path)


def test_keys_are_shown_as_people_write_them() -> None:
    assert str(KEY) == "m"
    assert str(ModelKey("m", "t")) == "m/t"
    assert str(PREFILL) == "m prefill"
