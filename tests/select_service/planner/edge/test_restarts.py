"""What a planner that starts again remembers of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from select_service.planner.core.demand import Demand, Predictors
from select_service.planner.core.fleet_plan import FleetPlan
from select_service.planner.edge.connectors.connector import DryRun, ScalingOutcome
from select_service.planner.edge.connectors.virtual import Completion, VirtualConnector
from select_service.planner.edge.loop import Loop
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from select_service.planner.edge.state_file import Memory, StateFile
from select_service.planner.types import IDLE, Load, Missing, Target, Value, Window
from tests.select_service.planner.core.planned_fleet import BUSY
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, Clock
from tests.select_service.planner.edge.loops import ONE_OF_EACH, START, SetSource, loop_of

ONCE = ("constant", "constant")  # predictors of lengths


def unsigned(text: str) -> str:
    """A state file without its checksum, as older builds wrote it."""
    return text[: text.rindex(',"checksum":')] + "}"


async def test_a_restart_remembers(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    first = loop_of(state=StateFile(path))
    await first.slow()
    targets = {one.pool: one.replicas for one in first.decisions[-1].targets}
    again = loop_of(source=SetSource(Window(seconds=180.0, requests=Value(5400.0))))
    memory = StateFile(path).read(again.fleet)
    assert memory.decision_id == 1
    await again.slow()  # lengths come from before
    assert {one.pool: one.replicas for one in again.decisions[-1].targets} == targets
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


async def test_a_restart_with_another_interval_remembers_the_same_traffic(tmp_path: Path) -> None:
    """What came in three minutes was taken for what comes in one."""
    path = tmp_path / "planner.json"
    first = loop_of(state=StateFile(path))
    for _ in range(4):
        await first.slow()
    expected = first.fleet.models[0].forecast
    for interval_s in (60.0, 180.0, 420.0):
        again = loop_of(source=SetSource(Window(seconds=interval_s, requests=Missing("late"))))
        again.fleet.interval_s = interval_s
        StateFile(path).read(again.fleet)
        demand = again.fleet.models[0].demand
        assert len(demand.history) == int(4 * 180.0 / interval_s)
        forecast = demand.forecast(interval_s)
        assert forecast is not None
        assert expected is not None
        assert forecast.rate == pytest.approx(expected.rate)
        assert (forecast.lengths.mean, forecast.osl) == pytest.approx((3000.0, 300.0))
    path.write_text(unsigned(path.read_text()).replace('"interval_s":180.0,', ""))
    fleet = loop_of().fleet
    StateFile(path).read(fleet)
    assert len(fleet.models[0].demand.history) == 4


async def test_a_restart_knows_how_long_it_was_away(tmp_path: Path) -> None:
    """What comes again was expected later by as long as no planner had been there."""
    path, period = tmp_path / "planner.json", 15

    def recurring(source: SetSource) -> Loop:
        loop = loop_of(source=source, state=StateFile(path))
        predictors = (make_predictor(PredictorSettings(name="recurring")) for _ in range(3))
        loop.fleet.models[0].demand = Demand(Predictors(*predictors))
        return loop

    def forecast_after(at: float) -> float:
        again = recurring(SetSource())
        assert StateFile(path).read(again.fleet, at).decision_id
        forecast = again.fleet.models[0].demand.forecast(180.0)
        assert forecast is not None
        return forecast.rate * 180.0

    source = SetSource()
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
    rates = [one.forecast.rate for one in demand.stretches(180.0, 10)]
    StateFile(path).write(fleet, 1, {})
    fleet, demand = with_demand()
    StateFile(path).read(fleet)
    assert [one.forecast.rate for one in demand.stretches(180.0, 10)] == pytest.approx(rates)
    assert rates[0] > 4 * 900.0 / 180.0, "the next day begins"


async def test_a_restart_lets_an_idle_fleet_go(tmp_path: Path) -> None:
    """Nothing was taken for what comes before the first traffic: engines stayed for ever."""
    path = tmp_path / "planner.json"
    loop = loop_of(state=StateFile(path))
    for _ in range(5):
        loop._clock.now += 180.0  # type: ignore[attr-defined]
        await loop.slow()
    there = {one.pool: one.replicas for one in loop.decisions[-1].targets}
    assert min(there.values()) > 1
    again = loop_of(DryRun(there), source=SetSource(Window(seconds=180.0, requests=IDLE)))
    StateFile(path).read(again.fleet)
    for _ in range(10):
        again._clock.now += 180.0  # type: ignore[attr-defined]
        await again.slow()
    assert [one.replicas for one in again.decisions[-1].targets] == [1, 1]


async def test_a_restart_takes_nobody_away(tmp_path: Path) -> None:
    """Who cannot be asked what there is has to remember it: it began with the minima again."""
    path, clock = tmp_path / "planner.json", Clock()
    connector = VirtualConnector(ONE_OF_EACH, clock, lambda: 1000.0)
    first = loop_of(connector, state=StateFile(path), source=SetSource(BUSY))
    first.source.window = replace(BUSY, requests=Value(20_000.0))  # type: ignore[attr-defined]
    for _ in range(6):
        await first.slow()
        connector.complete(connector.decision_id, Completion("done"))
    targets = {one.pool: one.replicas for one in first.decisions[-1].targets}
    assert targets[DECODE] > 8 + ONE_OF_EACH[DECODE].desired, "more than one step from nothing"
    memory = StateFile(path).read(loop_of().fleet)
    again = VirtualConnector(memory.states, clock, lambda: 1000.0, first_id=memory.decision_id)
    second = loop_of(again, source=first.source)  # type: ignore[arg-type]
    assert await again.next(0, 0.0) is None, "all of it was done"
    decision = await second.slow()
    assert all(one.replicas >= targets[one.pool] - 2 for one in decision.targets), "a step down"


async def test_an_id_is_on_disk_before_anybody_gets_it(tmp_path: Path) -> None:
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
    memory = msgspec.json.decode(path.read_bytes(), type=Memory)
    asked = await loop.connector.states([PREFILL, DECODE])
    assert {one: state.desired for one, state in memory.states.items()} == {
        one: state.desired for one, state in asked.items()
    }
