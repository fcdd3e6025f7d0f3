"""The loop with its neighbours: who may act, what is told, what a restart remembers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from select_service.planner.core.demand import Demand, Predictors
from select_service.planner.core.fleet_plan import FleetPlan
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge import loop as loop_module
from select_service.planner.edge.connectors.connector import Connector, DryRun, ScalingOutcome
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.connectors.virtual import Completion, VirtualConnector
from select_service.planner.edge.http_server import create_app
from select_service.planner.edge.leases.file_lease import FileLease
from select_service.planner.edge.leases.kubernetes_lease import KubeLease
from select_service.planner.edge.leases.lease import DURATION_S, LeaderLease, NoLease
from select_service.planner.edge.loop import Loop, _next
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from select_service.planner.edge.run_command import _listeners, single_model
from select_service.planner.edge.run_settings import build_fleet, read_targets
from select_service.planner.edge.sources.trace import TraceSource
from select_service.planner.edge.state_file import Memory, StateFile
from select_service.planner.errors import InfeasiblePlan, SettingsError, SourceError
from select_service.planner.types import (
    IDLE,
    Load,
    Missing,
    ModelKey,
    PoolState,
    ScalingDecision,
    Target,
    Value,
    Window,
)
from tests.coroutines import run_by
from tests.select_service.planner.core.test_fleet_plan import BUSY
from tests.select_service.planner.edge.fakes import DECODE, KEY, PREFILL, Clock, FakeKube, run
from tests.select_service.planner.golden import PROFILE
from tests.wait import PATIENCE_S

ONCE = ("constant", "constant")  # predictors of lengths
START = {PREFILL: 1, DECODE: 1}
ONE_OF_EACH = {PREFILL: PoolState(1, 1), DECODE: PoolState(1, 1)}


class Told:
    """A source that says what it is told to."""

    warnings: tuple[str, ...] = ()

    def __init__(self, window: Window = BUSY) -> None:
        self.window = window
        self.load = Load()

    async def begin(self, models: list[ModelKey]) -> None:
        pass

    async def windows(self, models: list[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        return dict.fromkeys(models, self.window)

    async def loads(self, models: list[ModelKey]) -> dict[ModelKey, Load]:
        return dict.fromkeys(models, self.load)

    async def close(self) -> None:
        pass


def fleet(gpus_max: int = 64) -> FleetPlan:
    model = single_model(
        *("m", "default", str(PROFILE)),
        resources=("deployments/prefill", "deployments/decode"),
        gpus=(1, 1),
        endpoints_min=1,
        start_s=120.0,
        goals=(500.0, 20.0, None),
    )
    return build_fleet([model], PredictorSettings(name="constant"), gpus_max)


def unsigned(text: str) -> str:
    """A state file without its checksum, as older builds wrote it."""
    return text[: text.rindex(',"checksum":')] + "}"


def loop_of(
    connector: Connector | None = None,
    lease: LeaderLease | None = None,
    state: StateFile | None = None,
    source: Told | None = None,
    gpus_max: int = 64,
) -> Loop:
    return Loop(
        fleet(gpus_max),
        source or Told(),  # type: ignore[arg-type] # lists are sequences
        connector or DryRun(START),
        lease or NoLease(),
        clock=Clock(),
        wall=lambda: 1000.0,
        state=state,
    )


def test_an_interval_changes_kubernetes_and_says_why() -> None:
    fake = FakeKube()
    fake.deployment("prefill", 1, 1)
    fake.deployment("decode", 1, 1)

    async def use() -> None:
        resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
        loop = loop_of(KubernetesConnector(fake.kube(), resources))
        await loop.slow()
        (noted,) = loop.decisions
        assert noted.acted
        assert noted.changed[1].startswith("m decode: 1 to ")
        wanted = {one.role: one.replicas for one in noted.targets}
        for name in ("prefill", "decode"):
            path = f"/apis/apps/v1/namespaces/inference/deployments/{name}"
            assert fake.objects[path]["spec"]["replicas"] == wanted[name] > 1
        del fake.objects["/apis/apps/v1/namespaces/inference/deployments/decode"]
        await loop.slow()
        assert not loop.is_ready
        assert any("could not be read" in one for one in loop.decisions[-1].reasons)

    run(use)


def test_starts_that_matter_no_more_are_given_up_and_counted() -> None:
    """Pods without a machine: their count was not lowered for half an hour."""
    fake = FakeKube()
    fake.deployment("prefill", 9, 3)
    fake.deployment("decode", 1, 1)

    async def use() -> None:
        resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
        clock = Clock()
        loop = loop_of(KubernetesConnector(fake.kube(), resources))
        loop._clock = clock
        idle = replace(BUSY, requests=Value(90.0))
        loop.source.window = idle  # type: ignore[attr-defined]
        await loop.slow()
        path = "/apis/apps/v1/namespaces/inference/deployments/prefill"
        assert fake.objects[path]["spec"]["replicas"] == 9, "they were wanted a moment ago"
        clock.now += 301.0
        await loop.slow()
        assert fake.objects[path]["spec"]["replicas"] == 3
        told = "6 of 6 that have not started are given up: 3 are ready, and 1 do"
        assert any(told in one for one in loop.decisions[-1].reasons)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(loop)), base_url="http://planner"
        ) as client:
            page = (await client.get("/metrics")).text
        assert "select_planner_starts_given_up_total 6.0" in page

    run(use)


def test_who_else_scales_a_pool_is_told() -> None:
    """An autoscaler beside it: up and down by turns, and nothing said why."""
    fake = FakeKube()
    fake.deployment("prefill", 1, 1)
    fake.deployment("decode", 1, 1)
    path = "/apis/apps/v1/namespaces/inference/deployments/decode"

    async def use() -> None:
        resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
        loop = loop_of(KubernetesConnector(fake.kube(), resources))
        await loop.slow()
        asked = fake.objects[path]["spec"]["replicas"]
        await loop.fast()
        fake.objects[path]["spec"]["replicas"] = asked + 3
        await loop.fast()
        words = f"m decode: somebody else scales it: {asked} were asked for, it says {asked + 3}"
        assert loop.decisions[-1].reasons[0] == words
        for _ in range(3):
            await loop.fast()
        await loop.slow()
        assert sum(words in one.reasons for one in loop.decisions) == 1
        assert loop.counts.overrides == 1

    run(use)


@run_by(run)
async def test_a_decision_that_failed_was_changed_by_nobody_else() -> None:
    connector = VirtualConnector(ONE_OF_EACH, Clock(), lambda: 1000.0)
    loop = loop_of(connector)
    await loop.slow()
    await loop.fast()  # what was asked for is read back
    connector.complete(connector.decision_id, Completion("failed"))
    await loop.slow()
    assert loop.counts.overrides == 0
    assert not any("somebody" in text for one in loop.decisions for text in one.reasons)


def test_gpus_that_were_not_given_back_are_not_given_away() -> None:
    """The ceiling is hard: a refused scale-down beside one up went over it, and stayed there."""
    fake = FakeKube()
    fake.deployment("prefill", 8, 8)
    fake.deployment("decode", 2, 2)
    fake.frozen.add("prefill")

    def replicas(name: str) -> int:
        path = f"/apis/apps/v1/namespaces/inference/deployments/{name}"
        return int(fake.objects[path]["spec"]["replicas"])

    async def use() -> None:
        resources = {DECODE: "deployments/decode", PREFILL: "deployments/prefill"}
        loop = loop_of(KubernetesConnector(fake.kube(), resources), gpus_max=11)
        for _ in range(3):
            loop._clock.now += 180.0  # type: ignore[attr-defined]
            await loop.slow()
            assert (replicas("prefill"), replicas("decode")) == (8, 3)
            failed = loop.decisions[-1].failed
            assert "403" in failed["m prefill"]
            assert "still in use" in failed["m decode"]
        fake.frozen.clear()
        loop._clock.now += 180.0  # type: ignore[attr-defined]
        await loop.slow()
        assert not loop.decisions[-1].failed
        wanted = {one.role: one.replicas for one in loop.decisions[-1].targets}
        assert (replicas("prefill"), replicas("decode")) == (wanted["prefill"], wanted["decode"])
        assert replicas("decode") > 3
        assert replicas("prefill") + replicas("decode") <= 11

    run(use)


@run_by(run)
async def test_only_the_holder_of_the_lease_acts(*, tmp_path: Path) -> None:
    first, second = (FileLease(tmp_path / "planner.lock") for _ in range(2))
    one, two = loop_of(lease=first), loop_of(lease=second)
    await one.slow()
    await two.slow()
    assert (one.is_leader, two.is_leader) == (True, False)
    assert not two.decisions[-1].acted
    assert (await two.connector.states([DECODE]))[DECODE].desired == 1
    assert two.decisions[-1].changed  # what it would have done is told
    await one.close()
    await two.slow()
    assert two.is_leader
    assert (await two.connector.states([DECODE]))[DECODE].desired > 1
    await two.close()


@run_by(run)
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


def test_a_decision_that_takes_long_loses_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred models it takes longer than a lease lasts: planners took it by turns."""
    monkeypatch.setattr(loop_module, "RENEW_S", 0.01)
    renewed = threading.Event()

    class Renewed(NoLease):
        async def held(self) -> bool:
            renewed.set()
            return True

    async def use() -> None:
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

    run(use)


@pytest.mark.parametrize("is_taken", [False, True])
def test_who_acts_for_longer_than_its_lease_asks_for_it_again(*, is_taken: bool) -> None:
    """It was asked for once for all pools: a slow API server's took a minute and a half."""
    fake, clock = FakeKube(), Clock()
    fake.deployment("prefill", 1, 1)
    fake.deployment("decode", 1, 1)
    lease = "/apis/coordination.k8s.io/v1/namespaces/inference/leases/planner"

    async def use() -> None:
        def slowly(path: str) -> None:
            clock.now += DURATION_S
            if is_taken:
                fake.objects[lease]["spec"]["holderIdentity"] = "two"

        fake.patched = slowly
        resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
        connector = KubernetesConnector(fake.kube(), resources)
        loop = loop_of(connector, KubeLease(fake.kube(), "planner", "one", clock))
        await loop.slow()
        first, second = (one.replicas for one in loop.decisions[-1].targets)
        states = await connector.states([PREFILL, DECODE])
        assert first > 1
        assert second > 1
        assert states[PREFILL].desired == first
        assert states[DECODE].desired == (1 if is_taken else second)
        assert loop.is_leader is not is_taken
        failed = loop.decisions[-1].failed
        assert failed == ({"m decode": "m decode: the lease has run out"} if is_taken else {})

    run(use)


def test_who_ends_gives_the_lease_back_and_the_next_need_not_wait() -> None:
    """The connector's client, which is the lease's, was closed before it could be said."""
    fake = FakeKube()
    fake.deployment("prefill", 1, 1)
    fake.deployment("decode", 1, 1)

    async def use() -> None:
        kube = fake.kube()
        resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
        lease = KubeLease(kube, "select-planner", "first", Clock())
        loop = loop_of(KubernetesConnector(kube, resources), lease)
        await loop.slow()
        assert loop.is_leader
        await loop.close()
        assert await KubeLease(fake.kube(), "select-planner", "second", Clock()).held()

    run(use)


@run_by(run)
async def test_why_the_lease_cannot_be_had_is_told(*, caplog: pytest.LogCaptureFixture) -> None:
    """A planner without the right to leases was said to stand by for another, which was none."""
    fake, clock = FakeKube(), Clock()
    fake.refuses_leases = 403
    loop = loop_of(lease=KubeLease(fake.kube(), "planner", "one", clock))
    with caplog.at_level("INFO", "select_planner"):
        await loop.slow()
        await loop.slow()
    assert not loop.is_leader
    why = "lease planner: 403: no"
    assert [one.getMessage() for one in caplog.records].count(why) == 1, "each is told once"
    assert f"not acting, {why}: m prefill" in caplog.text
    assert "another planner" not in caplog.text
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(loop)), base_url="http://planner"
    ) as client:
        body = (await client.get("/ready")).json()
        assert why in body["waiting_for"]
        assert "select_planner_lease_failures_total 2.0" in (await client.get("/metrics")).text
    fake.refuses_leases = 0
    await loop.slow()
    assert (loop.is_leader, loop.lease.problem) == (True, "")


@run_by(run)
async def test_a_restart_remembers(*, tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    first = loop_of(state=StateFile(path))
    await first.slow()
    told = {one.pool: one.replicas for one in first.decisions[-1].targets}
    again = loop_of(source=Told(Window(seconds=180.0, requests=Value(5400.0))))
    memory = StateFile(path).read(again.fleet)
    assert memory.decision_id == 1
    await again.slow()  # lengths come from before
    assert {one.pool: one.replicas for one in again.decisions[-1].targets} == told
    whole = unsigned(path.read_text())
    assert '"p_correction":1.0' in whole
    for broken in (
        "{broken",
        "",
        "[]",
        whole.replace('"p_correction":1.0', '"p_correction":0.0'),
        whole.replace('"computed":1.0', '"computed":-1.0'),
        whole.replace("5400.0", "-5400.0"),
        whole.replace('"ready":1', '"ready":-1'),
        whole.replace('"version":1', '"version":2'),  # nobody knows what its numbers mean
        whole.replace('"m"', '"\udcff"'),  # a page of the disk that was lost
    ):
        path.write_bytes(broken.encode(errors="surrogateescape"))
        damaged = StateFile(path)
        assert damaged.read(loop_of().fleet).decision_id == 0
        assert damaged.damaged
        aside = (tmp_path / "planner.damaged").read_bytes()
        assert aside == broken.encode(errors="surrogateescape")
    parts = "[5400.0,3000.0,300.0,[900.0,900.0,900.0,900.0,900.0,900.0]]"
    for history in ("[5400.0,3000.0,300.0]", parts):  # the first is how it was once written
        path.write_text(whole.replace("[5400.0,3000.0,300.0,[]]", history))
        fleet = loop_of().fleet
        assert StateFile(path).read(fleet).decision_id == 1
        assert fleet.models[0].demand.history[0][:3] == (5400.0, 3000.0, 300.0)
    path.write_text(whole.replace("[5400.0,3000.0,300.0,[]]", parts.replace("[900.0", "[-900.0")))
    assert StateFile(path).read(loop_of().fleet).decision_id == 0


@run_by(run)
async def test_a_restart_with_another_interval_remembers_the_same_traffic(
    *, tmp_path: Path
) -> None:
    """What came in three minutes was taken for what comes in one."""
    path = tmp_path / "planner.json"
    first = loop_of(state=StateFile(path))
    for _ in range(4):
        await first.slow()
    told = first.fleet.models[0].forecast
    for interval_s in (60.0, 180.0, 420.0):
        again = loop_of(source=Told(Window(seconds=interval_s, requests=Missing("late"))))
        again.fleet.interval_s = interval_s
        StateFile(path).read(again.fleet)
        demand = again.fleet.models[0].demand
        assert len(demand.history) == int(4 * 180.0 / interval_s)
        forecast = demand.forecast(interval_s)
        assert forecast is not None
        assert told is not None
        assert forecast.rate == pytest.approx(told.rate)
        assert (forecast.lengths.mean, forecast.osl) == pytest.approx((3000.0, 300.0))
    path.write_text(unsigned(path.read_text()).replace('"interval_s":180.0,', ""))
    fleet = loop_of().fleet
    StateFile(path).read(fleet)
    assert len(fleet.models[0].demand.history) == 4


def test_a_restart_knows_how_long_it_was_away(tmp_path: Path) -> None:
    """What comes again was expected later by as long as no planner had been there."""
    path, period = tmp_path / "planner.json", 15

    def recurring(source: Told) -> Loop:
        loop = loop_of(source=source, state=StateFile(path))
        predictors = (make_predictor(PredictorSettings(name="recurring")) for _ in range(3))
        loop.fleet.models[0].demand = Demand(Predictors(*predictors))
        return loop

    def forecast_after(at: float) -> float:
        again = recurring(Told())
        assert StateFile(path).read(again.fleet, at).decision_id
        forecast = again.fleet.models[0].demand.forecast(180.0)
        assert forecast is not None
        return forecast.rate * 180.0

    async def use() -> None:
        source = Told()
        loop = recurring(source)
        for step in range(90):  # the next burst comes after 13 more
            loop._clock.now += 180.0  # type: ignore[attr-defined]
            source.window = replace(BUSY, requests=Value(9000.0 if step % period >= 13 else 900.0))
            await loop.slow()
        for away, requests in ((0, 900.0), (12, 900.0), (13, 9000.0), (28, 9000.0), (-50, 900.0)):
            assert forecast_after(1000.0 + 180.0 * away) == pytest.approx(requests)
        assert forecast_after(1e300) > 0
        source.window = Window(seconds=180.0, requests=Missing("no Prometheus"))
        await loop.slow()
        assert forecast_after(1000.0 + 180.0 * 12) == pytest.approx(9000.0)
        whole = path.read_bytes()
        for name, value in (("at", -1.0), ("missed", -1)):
            memory = msgspec.json.decode(whole)
            del memory["checksum"]
            where = memory if name == "at" else memory["models"][0]
            where[name] = value
            path.write_bytes(msgspec.json.encode(memory))
            assert StateFile(path).read(loop_of().fleet).decision_id == 0

    run(use)


def test_a_restart_remembers_a_day(tmp_path: Path) -> None:
    """Of three-minute intervals a day has 480, and has to be seen twice: 500 were kept."""
    path, day = tmp_path / "planner.json", 480

    def with_demand() -> tuple[FleetPlan, Demand]:
        fleet = loop_of().fleet
        made = (make_predictor(PredictorSettings(name=name)) for name in ("recurring", *ONCE))
        demand = fleet.models[0].demand = Demand(Predictors(*made))
        return fleet, demand

    fleet, demand = with_demand()
    for step in range(3 * day):
        requests = 9_000.0 if step % day < 100 else 900.0
        demand.observe(replace(BUSY, requests=Value(requests)), 180.0 * step)
    told = [one.forecast.rate for one in demand.stretches(180.0, 10)]
    StateFile(path).write(fleet, 1, {})
    fleet, demand = with_demand()
    StateFile(path).read(fleet)
    assert [one.forecast.rate for one in demand.stretches(180.0, 10)] == pytest.approx(told)
    assert told[0] > 4 * 900.0 / 180.0, "the next day begins"


def test_a_restart_lets_an_idle_fleet_go(tmp_path: Path) -> None:
    """Nothing was taken for what comes before the first traffic: engines stayed for ever."""
    path = tmp_path / "planner.json"

    async def use() -> None:
        loop = loop_of(state=StateFile(path))
        for _ in range(5):
            loop._clock.now += 180.0  # type: ignore[attr-defined]
            await loop.slow()
        there = {one.pool: one.replicas for one in loop.decisions[-1].targets}
        assert min(there.values()) > 1
        again = loop_of(DryRun(there), source=Told(Window(seconds=180.0, requests=IDLE)))
        StateFile(path).read(again.fleet)
        for _ in range(10):
            again._clock.now += 180.0  # type: ignore[attr-defined]
            await again.slow()
        assert [one.replicas for one in again.decisions[-1].targets] == [1, 1]

    run(use)


@run_by(run)
async def test_a_restart_takes_nobody_away(*, tmp_path: Path) -> None:
    """Who cannot be asked what there is has to remember it: it began with the minima again."""
    path, clock = tmp_path / "planner.json", Clock()
    connector = VirtualConnector(ONE_OF_EACH, clock, lambda: 1000.0)
    first = loop_of(connector, state=StateFile(path), source=Told(BUSY))
    first.source.window = replace(BUSY, requests=Value(20_000.0))  # type: ignore[attr-defined]
    for _ in range(6):
        await first.slow()
        connector.complete(connector.decision_id, Completion("done"))
    told = {one.pool: one.replicas for one in first.decisions[-1].targets}
    assert told[DECODE] > 8 + ONE_OF_EACH[DECODE].desired, "more than one step from nothing"
    memory = StateFile(path).read(loop_of().fleet)
    again = VirtualConnector(memory.states, clock, lambda: 1000.0, first_id=memory.decision_id)
    second = loop_of(again, source=first.source)  # type: ignore[arg-type]
    assert await again.next(0, 0.0) is None, "all of it was done"
    decision = await second.slow()
    assert all(one.replicas >= told[one.pool] - 2 for one in decision.targets), "a step down"


@run_by(run)
async def test_an_id_is_on_disk_before_anybody_hears_of_it(*, tmp_path: Path) -> None:
    path, seen = tmp_path / "planner.json", []

    class Watched(DryRun):
        async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> ScalingOutcome:
            seen.append(msgspec.json.decode(path.read_bytes(), type=Memory))
            return await super().apply(targets, reasons)

    loop = loop_of(Watched(START), state=StateFile(path))
    await loop.slow()
    loop.source.load = Load(prefill_backlog_tokens=Value(1e7), concurrency=Value(1e3))  # type: ignore[attr-defined]
    await loop.fast()
    assert [one.decision_id for one in seen] == [1, 2]
    told = msgspec.json.decode(path.read_bytes(), type=Memory)
    asked = await loop.connector.states([PREFILL, DECODE])
    assert {one: state.desired for one, state in told.states.items()} == {
        one: state.desired for one, state in asked.items()
    }


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--port {port}: Address already in use"):
            _listeners("127.0.0.1", port)


async def in_parts() -> AsyncIterator[bytes]:
    """A body that never says how long it will be."""
    for _ in range(17):
        yield b" " * 4_096


@run_by(run)
async def test_what_is_told_over_http() -> None:
    clock = Clock()
    connector = VirtualConnector(ONE_OF_EACH, clock, lambda: 1000.0)
    loop = loop_of(connector)
    transport = httpx.ASGITransport(create_app(loop))
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
        assert (await client.get("/health")).status_code == 200
        told = await client.get("/ready")
        assert told.status_code == 503
        assert told.json()["waiting_for"] == ["the first interval is not over"]
        assert (await client.get("/v1/decision")).status_code == 204
        await loop.slow()
        assert (await client.get("/ready")).status_code == 200
        issued = (await client.get("/v1/decision?after=0&wait_s=1")).json()
        assert issued["decision_id"] == 1
        assert "requests/s are expected" in issued["reason"]
        done = {"status": "done"}
        path = "/v1/decision/1/complete"
        assert (await client.post(path, json=done)).status_code == 200
        assert (await client.post(path, json={"status": "x"})).status_code == 400
        assert (await client.post(path, content=b'{"status":"\xff"}')).status_code == 400
        assert (await client.post("/v1/decision/9/complete", json=done)).status_code == 404
        assert (await client.post(path, content=b" " * 65_537)).status_code == 413
        assert (await client.post(path, content=in_parts())).status_code == 413
        endless = "9" * 5_000  # more digits than `int` reads
        for after in ("x", "-1", str(2**53), endless):
            assert (await client.get(f"/v1/decision?after={after}")).status_code == 400
        path = f"/v1/decision/{endless}/complete"
        assert (await client.post(path, json=done)).status_code == 404
        assert (await client.get("/decisions?limit=0")).json() == {"decisions": []}
        for limit in ("1", "x", "-1", endless):
            told = await client.get(f"/decisions?limit={limit}")
            assert len(told.json()["decisions"]) == 1
        (noted,) = (await client.get("/decisions")).json()["decisions"]
        assert noted["acted"]
        loop.source.window = Window(seconds=180.0, requests=IDLE)  # type: ignore[attr-defined]
        await loop.slow()
        idle = 'select_planner_observed{model_name="m",tenant_id="default",what="requests"} 0.0'
        assert idle in (await client.get("/metrics")).text, "nobody came: that is known"
        loop.source.window = replace(BUSY, requests=Missing("gone"))  # type: ignore[attr-defined]
        await loop.slow()
        metrics = (await client.get("/metrics")).text
        assert 'select_planner_missing_intervals{model_name="m",tenant_id="default"} 1.0' in metrics
        assert idle not in metrics
        assert 'what="isl"} 3000.0' in metrics
        assert "select_planner_leader 1.0" in metrics
        assert "select_planner_state_damaged 0.0" in metrics
        assert 'select_planner_replicas_overdue{model_name="m",' in metrics
        assert 'select_planner_decision_ends_total{end="done"} 1.0' in metrics
        assert 'select_planner_decision_ends_total{end="timed_out"} 0.0' in metrics


@pytest.mark.filterwarnings("error")
@run_by(run)
async def test_virtual_decisions_name_their_model_and_hear_of_it() -> None:
    """Fault 9: there the model's name is a coroutine nobody awaits, and asking for it fails."""
    name = "Org/Llama-3.1-8B"
    model = single_model(
        *(name, "default", str(PROFILE)),
        resources=("", ""),
        gpus=(1, 1),
        endpoints_min=1,
        start_s=120.0,
        goals=(500.0, 20.0, None),
    )
    planned = build_fleet([model], PredictorSettings(name="constant"), 64)
    pools = [pool.key for pool in planned.models[0].pools]
    clock = Clock()
    connector = VirtualConnector(dict.fromkeys(pools, PoolState(1, 1)), clock, lambda: 1000.0)
    loop = Loop(planned, Told(), connector, NoLease(), clock=clock, wall=lambda: 1000.0)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_app(loop))
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
        await loop.slow()
        issued = (await client.get("/v1/decision?wait_s=1")).json()
        assert [one["model_name"] for one in issued["targets"]] == [name, name]
        there = [{**one, "replicas": 2} for one in issued["targets"]]
        done = {"status": "done", "replicas": there}
        path = f"/v1/decision/{issued['decision_id']}/complete"
        assert (await client.post(path, json=done)).status_code == 200
        states = await connector.states(pools)
        assert [one.ready for one in states.values()] == [2, 2]


@pytest.mark.parametrize("wait_s", ["nan", "-1", "-inf"])
@run_by(run)
async def test_waits_that_are_none_are_no_waits(*, wait_s: str) -> None:
    loop = loop_of(VirtualConnector(ONE_OF_EACH, Clock(), lambda: 1000.0))
    transport = httpx.ASGITransport(create_app(loop))
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
        answer = await client.get(f"/v1/decision?wait_s={wait_s}")
        assert answer.status_code in (204, 400)


@run_by(run)
async def test_the_loop_ticks_and_survives_a_turn_that_fails() -> None:
    thrice = asyncio.Event()

    class Failing(Told):
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


@run_by(run)
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


@run_by(run)
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


def test_keys_are_told_as_people_say_them() -> None:
    assert str(KEY) == "m"
    assert str(ModelKey("m", "t")) == "m/t"
    assert str(PREFILL) == "m prefill"
