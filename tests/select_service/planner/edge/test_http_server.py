"""What the planner answers over HTTP, and what its callers report."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from select_service.planner.edge.connectors.virtual import VirtualConnector
from select_service.planner.edge.leases.file_lease import FileLease
from select_service.planner.edge.loop import Loop
from select_service.planner.edge.run_command import _listeners
from select_service.planner.errors import SettingsError
from select_service.planner.types import IDLE, Missing, PoolState, Window
from tests.select_service.planner.core.planned_fleet import BUSY
from tests.select_service.planner.edge.fakes import Clock
from tests.select_service.planner.edge.loops import ONE_OF_EACH, SetSource, asking, fleet, loop_of


def test_a_port_that_is_taken_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--port {port}: Address already in use"):
            _listeners("127.0.0.1", port)


async def in_parts() -> AsyncIterator[bytes]:
    """A body that never says how long it will be."""
    for _ in range(17):
        yield b" " * 4_096


async def test_what_is_answered_over_http() -> None:
    clock = Clock()
    connector = VirtualConnector(ONE_OF_EACH, clock, lambda: 1000.0)
    loop = loop_of(connector)
    async with asking(loop) as client:
        assert (await client.get("/health")).status_code == 200
        page = await client.get("/ready")
        assert page.status_code == 503
        assert page.json()["waiting_for"] == ["the first interval is not over"]
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
            page = await client.get(f"/decisions?limit={limit}")
            assert len(page.json()["decisions"]) == 1
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
async def test_virtual_decisions_name_their_model_and_are_reported() -> None:
    """Fault 9: there the model's name is a coroutine nobody awaits, and asking for it fails."""
    name = "Org/Llama-3.1-8B"
    planned = fleet(name=name)
    pools = [pool.key for pool in planned.models[0].pools]
    clock = Clock()
    connector = VirtualConnector(dict.fromkeys(pools, PoolState(1, 1)), clock, lambda: 1000.0)
    loop = Loop(planned, SetSource(), connector, FileLease(), clock=clock, wall=lambda: 1000.0)  # type: ignore[arg-type]
    async with asking(loop) as client:
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
async def test_waits_that_are_none_are_no_waits(wait_s: str) -> None:
    loop = loop_of(VirtualConnector(ONE_OF_EACH, Clock(), lambda: 1000.0))
    async with asking(loop) as client:
        answer = await client.get(f"/v1/decision?wait_s={wait_s}")
        assert answer.status_code in (204, 400)
