"""Who may act: however messages are lost and late and actors die, never two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.planner.edge.leases.file_lease import FileLease, model_locks
from select_service.planner.edge.leases.lease import DURATION_S, Timed, duration_of
from select_service.planner.edge.leases.lease_actor import LeaseActor
from select_service.planner.errors import ConnectorError, PlannerError, SettingsError
from select_service.planner.types import ModelKey
from tests.live.ports import free_port
from tests.select_service.planner.edge.fakes import Clock
from tests.select_service.planner.golden import PROFILE
from tests.wait import PATIENCE_S, block_until, run

ACTING_S = DURATION_S / 3
"""What a holder begins when it learns that it holds is over within that time."""


def answer(asked: Coroutine[Any, Any, bool | None]) -> bool:
    """Of a coroutine that awaits nothing."""
    try:
        asked.send(None)
    except StopIteration as ended:
        return bool(ended.value)
    raise AssertionError("it awaits")


class World:
    """An actor that may die, at the other end of a line that may be slow or cut."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.actor = LeaseActor(self.clock)
        self.late_s = (0.0, 0.0)  # there, and back
        self.is_cut = (False, False)


class ByWorld(Timed):
    """As `RayLease`, without Ray."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.clock, DURATION_S)
        self._world = world
        self._name = name

    async def _ask(self) -> bool:
        world, holds = self._world, self.is_sure
        there_s, back_s = world.late_s
        world.clock.now += there_s
        if world.is_cut[0]:
            raise ConnectorError("it was not received")
        holder = world.actor.hold(self._name, DURATION_S, holds=holds)
        world.clock.now += back_s
        if world.is_cut[1]:
            raise ConnectorError("nobody answered")
        return holder == self._name

    async def _give_back(self) -> None:
        if self._world.is_cut[0]:
            raise ConnectorError("it was not received")
        self._world.actor.release(self._name)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # planner
        st.sampled_from(("look", "look", "look", "leave", "actor dies")),
        st.sampled_from((0.0, 0.1, 5.0, 12.0, 29.0, 31.0)),  # passes before
        st.tuples(*[st.sampled_from((0.0, 0.0, 4.0, 15.0, 40.0))] * 2),
        st.tuples(*[st.sampled_from((False, False, False, True))] * 2),
    ),
    min_size=10,
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_two_never_act_at_once(steps: list[Any]) -> None:
    world = World()
    planners = [ByWorld(world, name) for name in "abc"]
    busy_until = [-1.0] * len(planners)
    for planner, what, passes_s, late_s, is_cut in steps:
        world.clock.now += passes_s
        world.late_s, world.is_cut = late_s, is_cut
        if what == "actor dies":
            world.actor = LeaseActor(world.clock)
        elif what == "leave":
            world.clock.now = max(world.clock.now, busy_until[planner])  # it ends what it has begun
            answer(planners[planner].close())
        elif answer(planners[planner].held()):
            now = world.clock.now
            assert all(now >= until for other, until in enumerate(busy_until) if other != planner)
            busy_until[planner] = now + ACTING_S


def test_a_new_actor_waits_for_who_held_it_before() -> None:
    world = World()
    one, two = ByWorld(world, "one"), ByWorld(world, "two")
    assert not answer(one.held())  # who knows what was before
    world.clock.now += DURATION_S
    assert answer(one.held())
    world.actor = LeaseActor(world.clock)
    assert not answer(two.held())
    assert answer(one.held())
    world.clock.now += DURATION_S - 1
    assert not answer(two.held())
    world.clock.now += 1
    assert answer(two.held())
    assert not answer(one.held())
    answer(one.close())  # it has nothing to give back
    assert answer(two.held())
    answer(two.close())
    assert answer(one.held())  # at once


def test_who_looks_seldom_has_a_lease_that_lasts() -> None:
    assert duration_of(5.0) == DURATION_S
    assert duration_of(60.0) == 180.0


async def test_planners_meet_over_any_model_they_share(tmp_path: Path) -> None:
    a, b, c = (ModelKey(name) for name in "abc")
    one = FileLease(*model_locks([a, b], "x", tmp_path), identity="process 1")
    two = FileLease(*model_locks([b, c], "x", tmp_path), identity="process 2")
    other = FileLease(*model_locks([a, b], "y", tmp_path))
    assert await one.held()
    assert not await two.held()
    assert two.holder == "process 1"
    assert await other.held()  # another fleet
    three = FileLease(*model_locks([c], "x", tmp_path))
    assert await three.held()  # what it could not have it has let go of
    await one.close()
    assert not await two.held()
    await three.close()
    assert await two.held()


async def test_files_that_are_cleaned_away_are_locked_again(tmp_path: Path) -> None:
    path = tmp_path / "there" / "lock"
    path.parent.mkdir()
    one, two = FileLease(path), FileLease(path)
    assert await one.held()
    path.unlink()
    assert await one.held()
    assert not await two.held()
    path.unlink()
    assert await two.held()
    assert not await one.held()
    path.unlink()
    path.parent.rmdir()
    assert await two.held()  # nobody can have locked anything there
    with pytest.raises(PlannerError, match="No such file"):
        await one.held()


def test_the_text_in_a_lock_file_decides_nothing(tmp_path: Path) -> None:
    """It is for people: the lock is the kernel's, whatever a disk has made of the text."""
    path = tmp_path / "planner.lock"
    text = b"process 7, port 8093, m/default"
    for at in range(len(text) + 1):
        for bent in (text[:at], text[:at] + b"\xff\0" + text[at:], text[:at] + text[at + 1 :]):
            path.write_bytes(bent)
            one, other = FileLease(path, identity="one"), FileLease(path, identity="other")
            assert answer(one.held())
            assert not answer(other.held())
            assert other.holder == "one"
            path.write_bytes(bent)  # by somebody else, while it is held
            assert answer(one.held())
            assert not answer(other.held())
            assert isinstance(other.holder, str)
            run(one.close())


def test_no_lock_is_where_others_can_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (lock,) = model_locks([ModelKey("m")], "x")
    folder = tmp_path / "select-planner"
    assert lock.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(SettingsError, match="others can change"):
        model_locks([ModelKey("m")], "x")
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="others can change"):
        model_locks([ModelKey("m")], "x")
    lock.parent.unlink()
    folder.mkdir(mode=0o700)
    lock.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PlannerError, match="symbolic"):
        answer(FileLease(lock).held())


def test_locks_are_where_something_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = [ModelKey("m")]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (lock,) = model_locks(models, "x", state_dir=tmp_path / "state")
    assert lock.parent == tmp_path / f"select-planner-{os.getuid()}"
    assert not caplog.messages
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    (lock,) = model_locks(models, "x", state_dir=tmp_path)
    assert lock.parent == tmp_path
    assert "is not noticed" in caplog.text
    with pytest.raises(SettingsError, match="--state-dir, XDG_RUNTIME_DIR or TMPDIR"):
        model_locks(models, "x")


def test_a_lock_of_who_was_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold = (
        "import asyncio, sys; from pathlib import Path; "
        "from select_service.planner.edge.leases.file_lease import FileLease; "
        "lease = FileLease(Path(sys.argv[1]), identity='it'); "
        "print(asyncio.run(lease.held()), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, os.fspath(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"

    async def use() -> None:
        lease = FileLease(path)
        assert not await lease.held()
        assert lease.holder == "it"
        process.kill()
        process.communicate()
        assert await lease.held()

    run(use())


def _planner(port: int, runtime: Path, *more: object) -> subprocess.Popen[str]:
    command = (
        *(sys.executable, "-m", "select_service.planner", "run", "--connector", "virtual"),
        *("--model-name", "m", "--profile-results-dir", PROFILE, "--metrics-source", "selector"),
        *("--selector", "http://127.0.0.1:9", "--port", port, *more),
    )
    return subprocess.Popen(
        [str(one) for one in command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )


def _wait_until_up(port: int) -> None:
    block_until(lambda: _is_up(port), lambda: "nobody answers")


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.heavy
def test_a_second_planner_of_a_model_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Two processes at two ports, each with a state of its own: only a warning showed it."""
    ports = [free_port() for _ in range(3)]
    first = _planner(ports[0], tmp_path, "--state-dir", tmp_path / "one")
    others = []
    try:
        _wait_until_up(ports[0])
        second = _planner(ports[1], tmp_path, "--state-dir", tmp_path / "two")
        others.append(second)
        assert second.stderr is not None
        output = second.stderr.read()
        assert second.wait() == 1
        assert f"another planner is here (process {first.pid}, port {ports[0]}, m)" in output
        others.append(_planner(ports[1], tmp_path, "--lease-name", "another fleet"))
        _wait_until_up(ports[1])
        first.kill()
        first.wait()
        others.append(_planner(ports[2], tmp_path, "--state-dir", tmp_path / "one"))
        _wait_until_up(ports[2])
    finally:
        for one in (first, *others):
            one.kill()
            one.wait()
            assert one.stderr is not None
            one.stderr.close()


@pytest.mark.heavy
def test_who_waits_for_a_decision_keeps_no_planner_from_its_end(tmp_path: Path) -> None:
    """A long poll of a minute kept it, and its lock, for as long: a restart was refused."""
    port = free_port()
    planner = _planner(port, tmp_path)
    try:
        _wait_until_up(port)
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /v1/decision?wait_s=60 HTTP/1.1\r\nHost: p\r\n\r\n")
            assert _is_up(port), "it has been received by now"
            planner.terminate()
            assert planner.wait(timeout=PATIENCE_S) == 0
            assert waiting.recv(4_096).startswith(b"HTTP/1.1 204 ")
    finally:
        planner.kill()
        planner.wait()
        assert planner.stderr is not None
        planner.stderr.close()
