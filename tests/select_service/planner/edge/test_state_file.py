"""What a planner remembers where the disk lets it not, or has changed it: told, never trusted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import httpx
import pytest

from select_service.planner.core.demand import Interval
from select_service.planner.core.fleet_plan import FleetPlan
from select_service.planner.edge.http_server import create_app
from select_service.planner.edge.state_file import StateFile, signed
from select_service.planner.errors import PlannerError
from select_service.planner.types import Moments, PoolState
from tests.harms import HARMS, Harm, flipped
from tests.select_service.planner.edge.loops import loop_of
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


def remembering() -> FleetPlan:
    """A fleet with a history."""
    fleet = loop_of().fleet
    for model in fleet.models:
        for requests in (5400.0, 10.25):
            model.demand.history.append(Interval(requests, 3000.0, None))
        model.speed.recall("decode", ITLS, 60.0)
    return fleet


def written(path: Path) -> bytes:
    fleet = remembering()
    pools = {pool.key: PoolState(3, 2) for model in fleet.models for pool in model.pools}
    StateFile(path).write(fleet, 1234, pools, 1_700_000_000.5)
    return path.read_bytes()


def past_of(path: Path) -> tuple[bool, object]:
    """Whether the file counts as damaged, and what a fleet remembers after it."""
    fleet, state = loop_of().fleet, StateFile(path)
    memory = state.read(fleet)
    histories = [
        (list(one.demand.history), one.speed.learnt["decode"].sums) for one in fleet.models
    ]
    return state.damaged, (memory.decision_id, memory.at, memory.states, histories)


def with_a_blank(data: bytes, at: int) -> bytes:
    return data[:at] + b" " + data[at:]


def with_a_digit(data: bytes, at: int) -> bytes:
    return data[:at] + b"1" + data[at:]


def with_another_digit(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("harm", [*HARMS, with_a_blank, with_a_digit, with_another_digit])
def test_a_file_changed_anywhere_is_set_aside(tmp_path: Path, harm: Harm) -> None:
    path = tmp_path / "planner.json"
    data = written(path)
    damaged, whole = past_of(path)
    assert not damaged
    nothing = past_of(tmp_path / "none")[1]
    assert whole != nothing
    for at in range(len(data)):
        bent = harm(data, at)
        path.write_bytes(bent)
        assert past_of(path) == (True, nothing), f"at {at}: {bent[max(0, at - 20) : at + 20]!r}"
        assert (tmp_path / "planner.damaged").read_bytes() == bent
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
    transport = httpx.ASGITransport(create_app(loop))
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
        assert "select_planner_state_damaged 1.0" in (await client.get("/metrics")).text
