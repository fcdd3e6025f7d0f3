"""What a planner remembers where the disk lets it not, or has changed it: reported, never
trusted."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from select_service.planner.core.demand import Interval
from select_service.planner.core.engine_speed import EngineSpeed, KnownEngines
from select_service.planner.core.fleet_plan import FleetPlan
from select_service.planner.edge.state_file import StateFile, signed
from select_service.planner.errors import PlannerError
from select_service.planner.types import Missing, Moments, PoolState, Value
from tests.harms import HARMS, Harm, flipped
from tests.select_service.planner.core import planned_fleet
from tests.select_service.planner.core.planned_fleet import SURFACE, Run
from tests.select_service.planner.core.test_engine_speed import measured, window
from tests.select_service.planner.edge.loops import asking, loop_of
from tests.select_service.planner.edge.test_restarts import unsigned

ITLS = Moments(100.0, 4e6, 1.25, 1.7e11, 5e4)


def test_a_damaged_file_that_cannot_be_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    path.write_text("{")
    (tmp_path / "planner.damaged").mkdir()
    with pytest.raises(PlannerError, match=r"planner\.json.*cannot be set aside: Is a directory"):
        StateFile(path).read(loop_of().fleet)
    assert path.read_text() == "{"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays, and half of a new one does not keep the room it has taken."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "planner.json"
    state, fleet = StateFile(path), loop_of().fleet
    state.write(fleet, 1, {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PlannerError, match=r"planner\.json: No space left on device"):
            state.write(fleet, 2, {})
    assert os.listdir(tmp_path) == ["planner.json"]
    assert StateFile(path).read(fleet).decision_id == 1
    state.write(fleet, 3, {})
    assert StateFile(path).read(fleet).decision_id == 3


KNOWN = KnownEngines(400e3, 90e3, 30.0, {"prefill": 8.0}, {"decode": 2.5})


def remembering() -> FleetPlan:
    """A fleet with a history."""
    fleet = loop_of().fleet
    for model in fleet.models:
        for requests in (5400.0, 10.25):
            model.demand.history.append(Interval(requests, 3000.0, None))
        model.speed.recall(KNOWN, {"decode": (ITLS, 60.0)})
    return fleet


def written(path: Path) -> bytes:
    fleet = remembering()
    pools = {pool.key: PoolState(3, 2) for model in fleet.models for pool in model.pools}
    StateFile(path).write(fleet, 1234, pools, 1_700_000_000.5)
    return path.read_bytes()


def past_of(path: Path, fleet: FleetPlan | None = None) -> tuple[bool, object]:
    """Whether the file counts as damaged, and what a fleet, mostly a new one, then remembers."""
    fleet, state = fleet or loop_of().fleet, StateFile(path)
    memory = state.read(fleet)
    histories = [
        (list(one.demand.history), one.speed.learnt["decode"].sums, one.speed.known)
        for one in fleet.models
    ]
    return state.damaged, (memory.decision_id, memory.at, memory.states, histories)


def with_a_blank(data: bytes, at: int) -> bytes:
    return data[:at] + b" " + data[at:]


def with_a_digit(data: bytes, at: int) -> bytes:
    return data[:at] + b"1" + data[at:]


def with_another_digit(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("harm", [*HARMS, with_a_blank, with_a_digit, with_another_digit])
def test_a_file_changed_anywhere_is_set_aside(memory_path: Path, harm: Harm) -> None:
    path = memory_path / "planner.json"
    data = written(path)
    damaged, whole = past_of(path)
    assert not damaged
    fleet = loop_of().fleet  # one for all: what is set aside changes nothing in it
    nothing = past_of(memory_path / "none", fleet)[1]
    assert whole != nothing
    for at in range(len(data)):
        bent = harm(data, at)
        path.write_bytes(bent)
        assert past_of(path, fleet) == (True, nothing), (
            f"at {at}: {bent[max(0, at - 20) : at + 20]!r}"
        )
        assert (memory_path / "planner.damaged").read_bytes() == bent
        assert not path.exists()


def test_what_was_measured_ages_while_no_planner_runs(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    written(path)
    fleet = loop_of().fleet
    StateFile(path).read(fleet, 1_700_000_000.5 + 3600.0)
    for model in fleet.models:
        assert model.speed.learnt["decode"].sums == ITLS
        assert model.speed.learnt["decode"].age_s == 3660.0
        assert not model.speed.learnt["prefill"].sums.samples
        assert model.speed.known == replace(KNOWN, room_age_s=3630.0)


def test_a_file_from_before_engines_were_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    memory = json.loads(unsigned(written(path).decode()))
    for one in memory["models"]:
        del one["engines"]
    path.write_bytes(signed(json.dumps(memory, separators=(",", ":")).encode()))
    state, fleet = StateFile(path), loop_of().fleet
    assert state.read(fleet).decision_id == 1234
    assert not state.damaged
    for model in fleet.models:
        assert model.speed.learnt["decode"].sums == ITLS
        assert model.speed.known == KnownEngines()


@pytest.mark.parametrize(
    "harm", [{"room": -1.0}, {"kv_tokens": 0.0}, {"ranks": {"prefill": 0.0}}, {"room_age_s": -1.0}]
)
def test_engines_that_cannot_be_are_damage(tmp_path: Path, harm: dict[str, object]) -> None:
    path = tmp_path / "planner.json"
    memory = json.loads(unsigned(written(path).decode()))
    memory["models"][0]["engines"] |= harm
    path.write_bytes(signed(json.dumps(memory, separators=(",", ":")).encode()))
    state = StateFile(path)
    state.read(loop_of().fleet)
    assert state.damaged


@pytest.mark.parametrize(("isl", "osl"), [(0.0, 300.0), (0.0, 0.0)])
def test_an_interval_of_empty_prompts_alone_leaves_a_state_that_can_be_read(
    tmp_path: Path, isl: float, osl: float
) -> None:
    """Their times divided by nothing, and a profile was wrong by a factor of 0: damage."""
    run, path = Run(), tmp_path / "planner.json"
    prefills = measured(0.0, 28e-6, (500.0, 3000.0), 100)
    run.slow(window(isl=Value(isl), osl=Value(osl), prefill_moments=prefills))
    assert run.fleet.models[0].speed.known.wrong == {}
    StateFile(path).write(run.fleet, 1, run.states)
    state = StateFile(path)
    assert state.read(Run().fleet).decision_id == 1
    assert not state.damaged


@pytest.mark.parametrize("times", [1.0, 3.0])
@pytest.mark.parametrize("has_profile", [True, False])
def test_the_plan_after_a_restart_is_the_one_before(
    tmp_path: Path, times: float, has_profile: bool
) -> None:
    """With room that was learnt, ranks, corrections, and a profile that is not believed."""

    def planner() -> Run:
        planned = planned_fleet.model()
        planned.speed = EngineSpeed(SURFACE if has_profile else None)
        return Run(planned, prefill=3, decode=2, correct=True)

    full = window(
        prefill_moments=measured(times * 0.012, times * 28e-6, (500.0, 3000.0, 9000.0), 100),
        itl_moments=measured(0.006, 0.12e-6, (58e3, 60e3, 62e3), 100),
        itl_ms=Value(60.0),
        concurrency=Value(40.0),
        decode_worker_ranks=Value(2.0),
    )
    run = planner()
    for _ in range(3):
        run.slow(full)
    path = tmp_path / "planner.json"
    StateFile(path).write(run.fleet, 1, run.states, 1e9)
    again = planner()
    StateFile(path).read(again.fleet, 1e9)
    before, after = run.fleet.models[0], again.fleet.models[0]
    assert after.speed.by_measurement == before.speed.by_measurement
    assert after.speed.known == before.speed.known
    again.states = dict(run.states)
    quiet = window(
        prefill_moments=Moments(),
        itl_moments=Moments(),
        rank_kv_tokens=Missing("no worker reported"),
        decode_worker_ranks=Missing("no answer"),
    )
    decisions = [one.slow(quiet) for one in (run, again)]
    assert decisions[0].targets == decisions[1].targets
    names = ("m prefill:engines", "m decode:engines")
    assert [decisions[1].terms[name] for name in names] == pytest.approx(
        [decisions[0].terms[name] for name in names]
    )


def test_a_file_of_an_older_build_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    data = written(path)
    _, whole = past_of(path)
    path.write_text(unsigned(data.decode()))
    assert past_of(path) == (False, whole)


def test_a_file_of_a_newer_build_may_have_more_members(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    text = unsigned(written(path).decode())
    _, whole = past_of(path)
    path.write_bytes(signed(text[:-1].encode() + b',"later":[1,2]}'))
    assert past_of(path) == (False, whole)


async def test_damage_is_said_in_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "planner.json"
    path.write_bytes(flipped(written(path), 100))
    state = StateFile(path)
    loop = loop_of(state=state)
    state.read(loop.fleet)
    async with asking(loop) as client:
        assert "select_planner_state_damaged 1.0" in (await client.get("/metrics")).text
