"""No answer before the disk has it, and what follows when the disk refuses."""

import asyncio
import contextlib
import random
import shutil
import sqlite3
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from select_service.edge.driver.driver import Driver
from select_service.edge.state import journal as journal_module
from select_service.errors import StateDirUnusable
from select_service.settings import Durability
from select_service.types import ReservationRequest
from tests.coroutines import run_by
from tests.select_service.edge.serving import PROMPT, worker
from tests.select_service.edge.state.lives import body, life, post
from tests.wait import until


class Disk:
    """A store whose commits fail on demand, as SQLite does."""

    def __init__(self, service: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        assert service.keeper is not None
        monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
        self.journal = service.keeper.journal
        self._commit = self.journal.store.commit
        self._limits = self.journal.limits
        self.code: int | None = None
        self.moves = threading.Event()
        self.moves.set()
        monkeypatch.setattr(self.journal.store, "commit", self.commit)

    def commit(self, batch: Any) -> None:
        self.moves.wait()
        if self.code is not None:
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self.code
            raise error
        self._commit(batch)

    def stops(self) -> None:
        """Stand still, and soon count as stalled; before and after, a slow writer does not."""
        self.journal.limits = replace(self._limits, stall_s=0.05)
        self.moves.clear()
        if self.journal._watch is not None:  # it would first look when the former limit is over
            self.journal._watch.cancel()
            self.journal._look()

    def goes_on(self) -> None:
        self.journal.limits = self._limits
        self.moves.set()

    async def heals(self) -> None:
        self.code = None
        await until(lambda: self.journal.refusal is None)


@run_by(life, "tmp_path")
async def test_no_answer_before_the_disk_has_it(client: httpx.AsyncClient, service: Driver) -> None:
    assert service.keeper is not None
    await post(client, "/workers", worker(1))
    store = service.keeper.journal.store

    def on_disk(name: str) -> bool:
        return ("reservation", name) in store._places

    for number in range(20):
        answer = await post(client, "/reservations", body(f"r{number}", worker_id=1))
        assert answer.status_code == 201
        assert on_disk(f"r{number}")
    calls = (post(client, "/reservations", body(f"p{n}", worker_id=1)) for n in range(50))
    commits = service.keeper.journal.commits
    assert {answer.status_code for answer in await asyncio.gather(*calls)} == {201}
    assert all(on_disk(f"p{number}") for number in range(50))
    assert service.keeper.journal.commits - commits < 50, "commits are shared"


def wave(name: str, **fields: Any) -> dict[str, Any]:
    item = {**PROMPT, "reservation_id": name, "n": WAVE, **fields}
    return {"requests": [item], "reserve": True, "atomic": True}


WAVE = 3 * journal_module.BATCH_ROWS_MAX
"""More than a commit has otherwise."""


@pytest.mark.parametrize("durability", list(Durability))
def test_all_or_none_is_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    commits: list[set[str]] = []

    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        store = service.keeper.journal.store
        commit = store.commit

        def note(batch: Any) -> None:
            commits.append({name for (_, name), value in batch if value is not None})
            commit(batch)

        monkeypatch.setattr(store, "commit", note)
        await post(client, "/workers", worker())
        names = [f"alone-{number}" for number in range(40)]
        calls = [post(client, "/reservations", body(name, worker_id=1)) for name in names]
        waves = [post(client, "/select_batch", wave(name)) for name in ("a", "b")]
        answers = await asyncio.gather(*calls[:20], *waves, *calls[20:])
        assert {one.status_code for one in answers} == {200, 201}
        early = await client.delete("/reservations/a.0")
        assert early.status_code == 200

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        assert len(service.core.lifecycle.bookings) == 2 * WAVE - 1 + 40

    life(tmp_path, first, durability=durability)
    for name in "ab":
        whole = {f"{name}.{number}" for number in range(WAVE)}
        assert any(whole <= commit for commit in commits)
        begun = next(commit for commit in commits if whole & commit)
        assert whole <= begun, "nothing of it is there before all of it is"
    life(tmp_path, second)


def test_a_wave_that_is_undone_leaves_no_booking(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker())
        wants = wave("a")
        wants["requests"].append({**PROMPT, "reservation_id": "other", "allowed_worker_ids": [9]})
        refused = await post(client, "/select_batch", wants)
        assert refused.status_code >= 400
        cut = asyncio.create_task(post(client, "/select_batch", wave("b")))
        while not len(service.core.lifecycle.bookings):
            await asyncio.sleep(0)
        cut.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cut
        await until(lambda: not len(service.core.lifecycle.bookings))
        assert (await post(client, "/select_batch", wave("c"))).status_code == 200

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        live = {
            one.reservation.reservation_id for one in service.core.lifecycle.bookings.newest(10_000)
        }
        assert live == {f"c.{number}" for number in range(WAVE)}
        assert (await client.delete("/reservations/b.0")).status_code == 200, "it is remembered"

    life(tmp_path, first)
    life(tmp_path, second)


@run_by(life, "tmp_path")
async def test_a_disk_that_refuses_a_wave_has_none_of_it(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(client, "/workers", worker())
    disk = Disk(service, monkeypatch)
    disk.code = sqlite3.SQLITE_FULL
    assert (await post(client, "/select_batch", wave("a"))).status_code == 503
    assert not len(service.core.lifecycle.bookings)
    await disk.heals()
    assert (await post(client, "/select_batch", wave("a"))).status_code == 200
    assert len(service.core.lifecycle.bookings) == WAVE


def test_relaxed_answers_at_once_and_writes_within_its_window(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        await post(client, "/workers", worker(1))
        await post(client, "/reservations", body("r", worker_id=1))
        assert service.keeper.journal.pending

    async def second(_: httpx.AsyncClient, service: Driver) -> None:
        assert len(service.core.lifecycle.bookings) == 1

    relaxed: dict[str, Any] = {"durability": Durability.RELAXED, "durability_window_s": 3600.0}
    life(tmp_path, first, **relaxed)  # a proper end writes the rest
    life(tmp_path, second, **relaxed)


RELAXED: dict[str, Any] = {"durability": Durability.RELAXED, "durability_window_s": 0.02}


async def acknowledged_until_one_waits(
    client: httpx.AsyncClient, disk: Disk
) -> asyncio.Future[httpx.Response]:
    """Book on a disk that stands still until a call is not answered any more; return that."""
    calls: list[asyncio.Future[httpx.Response]] = []

    def waits() -> bool:
        if not calls or calls[-1].done():
            assert all(call.result().status_code == 201 for call in calls)
            asking = post(client, "/reservations", body(f"r{len(calls)}", worker_id=1))
            calls.append(asyncio.ensure_future(asking))
        return disk.journal.waiting > 0

    await until(waits, lambda: "whatever a crash takes with it was acknowledged")
    assert not calls[-1].done()
    return calls[-1]


@run_by(life, "tmp_path", **RELAXED)
async def test_relaxed_does_not_run_ahead_of_a_disk_that_stands_still(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.keeper is not None
    await post(client, "/workers", worker(1))
    disk = Disk(service, monkeypatch)
    disk.moves.clear()
    before = disk.journal.window_waits  # by then a slow writer may have been waited for
    waits = await acknowledged_until_one_waits(client, disk)
    assert (await client.get("/loads")).status_code == 200, "who only asks does not wait"
    metrics = (await client.get("/metrics")).text
    disk.moves.set()
    assert (await waits).status_code == 201
    assert f"select_service_state_window_waits_total {before + 1}.0" in metrics


@run_by(life, "tmp_path", **RELAXED)
async def test_relaxed_takes_back_what_waited_for_a_disk_that_refuses(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that was acknowledged before."""
    assert service.keeper is not None
    await post(client, "/workers", worker(1))
    disk = Disk(service, monkeypatch)
    disk.moves.clear()
    waits = await acknowledged_until_one_waits(client, disk)
    booked = len(service.core.lifecycle.bookings)
    disk.code = sqlite3.SQLITE_FULL
    disk.moves.set()
    assert (await waits).json()["code"] == "state_disk_full"
    assert len(service.core.lifecycle.bookings) == booked - 1
    await disk.heals()
    assert (await post(client, "/reservations", body("new", worker_id=1))).status_code == 201


class SetLoop:
    """The running loop, but for what time it is."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Turnstile(threading.Event):
    """Lets one through for each time it is opened, and everybody once it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)

    def open_once(self) -> None:
        self._permits.release()

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set() or self._permits.acquire(timeout=timeout)

    def set(self) -> None:
        super().set()
        self._permits.release()


class Window:
    """Bookings on a disk that moves when we let it, and what may be known of them."""

    def __init__(self, service: Driver, disk: Disk, window_s: float) -> None:
        self.service, self.disk, self.window_s = service, disk, window_s
        self.turnstile = disk.moves = Turnstile()
        self.loop = SetLoop()
        disk.journal._loop = cast("Any", self.loop)
        self.made: dict[str, float] = {}
        self.waits: dict[asyncio.Future[None], str] = {}
        self.counts = {"at once": 0, "late": 0}

    def book(self) -> None:
        name = f"r{len(self.made)}"
        self.made[name] = self.loop.now
        request = ReservationRequest(reservation_id=name, worker_id=1, token_ids=[1] * 16)
        self.service.reserve(request)
        one = self.disk.journal.settled()
        if one is None:
            self.acknowledged(name, "at once")
        else:
            self.waits[one] = name

    def acknowledged(self, name: str, how: str) -> None:
        self.counts[how] += 1
        there = self.disk.journal.store._places
        if ("reservation", name) in there:
            return  # whoever waited no longer risks anything, nor does this say anything of others
        since = [at for name, at in self.made.items() if ("reservation", name) not in there]
        assert self.loop.now - min(since, default=self.loop.now) < self.window_s, how

    async def see(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for one in [one for one in self.waits if one.done()]:
            self.acknowledged(self.waits.pop(one), "late")

    async def commit(self) -> None:
        commits = self.disk.journal.commits
        self.turnstile.open_once()
        while self.disk.journal.commits == commits:
            await self.see()


@pytest.mark.parametrize("seed", range(6))
def test_relaxed_keeps_its_window_to_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whenever a change that is not on disk is acknowledged, none such is older than the window."""
    window_s = 1000.0  # by a clock that we set; no timer runs out meanwhile
    rng = random.Random(seed)

    async def use(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        journal = service.keeper.journal
        await post(client, "/workers", worker(1))
        while journal.pending:
            journal._flush()
            await asyncio.sleep(0.001)
        disk = Disk(service, monkeypatch)
        window = Window(service, disk, window_s)
        try:
            for _ in range(600):
                window.loop.now += rng.choice((0.0, 1.0, 20.0, 90.0))
                window.book()
                if rng.random() < 0.1:
                    journal._flush()
                if rng.random() < 0.08 and journal._busy:
                    await window.commit()
                await window.see()
        finally:
            disk.moves.set()
        assert min(window.counts.values()) > 20, window.counts

    life(tmp_path, use, durability=Durability.RELAXED, durability_window_s=window_s)


@pytest.mark.parametrize("durability", list(Durability))
def test_a_disk_that_stands_still_is_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """Nobody waits for ever; what was refused is not there when the disk moves again."""

    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        await post(client, "/workers", worker(1))
        await post(client, "/reservations", body("old", worker_id=1))
        disk = Disk(service, monkeypatch)
        disk.journal._flush()
        await until(lambda: not disk.journal.pending)
        disk.stops()
        calls = [post(client, "/reservations", body(f"r{n}", worker_id=1)) for n in range(3)]
        for answer in await asyncio.gather(*calls):
            assert answer.status_code == 201 or answer.json()["code"] == "state_stalled"
        disk.journal._flush()
        await until(lambda: disk.journal.refusal is not None)
        told = {
            one.reservation.reservation_id for one in service.core.lifecycle.bookings.newest(10)
        }
        refused = await client.delete("/reservations/old")
        assert (refused.status_code, refused.json()["code"]) == (503, "state_stalled")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await post(client, "/select", PROMPT)).status_code == 200, "reads go on"
        assert not (await client.get("/ready")).json()["state"]["writable"]
        assert "select_service_state_stalls_total 1.0" in (await client.get("/metrics")).text
        disk.goes_on()
        await disk.heals()
        assert (await post(client, "/reservations", body("new", worker_id=1))).status_code == 201
        kept.extend((*told, "new"))

    async def second(_: httpx.AsyncClient, service: Driver) -> None:
        live = {
            one.reservation.reservation_id for one in service.core.lifecycle.bookings.newest(10)
        }
        assert live == set(kept)

    kept: list[str] = []
    # who need not wait is told at once, and what is not on disk is written when we say so
    life(tmp_path, first, durability=durability, durability_window_s=3600.0)
    life(tmp_path, second)
    assert len(kept) == (2 if durability is Durability.STRICT else 5)


def test_a_process_that_stood_still_is_no_disk_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, frozen with its container, moved with its machine: the writer was, too."""
    monkeypatch.setattr(journal_module, "LAST_CHANCE", 1e4, raising=False)

    async def use(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1))
        disk = Disk(service, monkeypatch)
        disk.moves.clear()
        booking = asyncio.ensure_future(post(client, "/reservations", body("r", worker_id=1)))
        await until(lambda: disk.journal.waiting > 0)
        time.sleep(0.1)  # noqa: ASYNC251 - nobody else does anything meanwhile
        disk.moves.set()
        assert (await booking).status_code == 201
        assert disk.journal.stalls == 0

    life(tmp_path, use, state_stall_s=0.05)


def test_nobody_leaves_a_disk_that_stands_still_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends; the directory is let go of when the disk moves."""
    disks: list[Disk] = []
    writers: list[threading.Thread] = []

    async def use(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1))
        disks.append(Disk(service, monkeypatch))
        disks[0].stops()
        writers.extend(one for one in threading.enumerate() if one.name == "state-writer")
        waits = asyncio.ensure_future(post(client, "/reservations", body("r", worker_id=1)))
        await until(lambda: disks[0].journal.waiting or waits.done())
        await service.close()
        assert (await waits).json()["code"] == "state_stalled"

    async def again(_: httpx.AsyncClient, service: Driver) -> None:
        assert len(service.core.catalog) == 1

    life(tmp_path, use)
    with pytest.raises(StateDirUnusable, match="in use"):
        life(tmp_path, again)
    disks[0].goes_on()
    for writer in writers:
        writer.join()
    life(tmp_path, again)


@run_by(life, "tmp_path", state_waiting_max=3)
async def test_so_many_answers_wait_and_no_more(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks again and again, and hangs up each time, leaves no more behind than that."""
    assert service.keeper is not None
    await post(client, "/workers", worker(1))
    disk = Disk(service, monkeypatch)
    disk.moves.clear()
    for _ in range(3):
        call = asyncio.ensure_future(post(client, "/reservations", body("same", worker_id=1)))
        waiting = disk.journal.waiting
        while disk.journal.waiting == waiting:
            await asyncio.sleep(0)
        call.cancel()
    answer = await post(client, "/reservations", body("other", worker_id=1))
    assert (answer.status_code, answer.json()["code"]) == (503, "state_stalled")
    assert service.core.lifecycle.bookings.live("other") is None, "refused before it began"
    metrics = (await client.get("/metrics")).text
    assert "select_service_state_waiting 3.0" in metrics
    assert "select_service_state_turned_away_total 1.0" in metrics
    disk.moves.set()
    await until(lambda: not disk.journal.waiting)
    assert (await post(client, "/reservations", body("other", worker_id=1))).status_code == 201


@run_by(life, "tmp_path")
async def test_a_refusal_keeps_nothing_of_those_who_heard_it(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one error for all, for as long as a disk stands still."""
    assert service.keeper is not None
    await post(client, "/workers", worker(1))
    disk = Disk(service, monkeypatch)
    disk.stops()
    for number in range(20):
        answer = await post(client, "/reservations", body(f"r{number}", worker_id=1))
        assert answer.json()["code"] == "state_stalled"
    assert disk.journal.refusal is not None
    depth = sum(1 for _ in traceback.walk_tb(disk.journal.refusal.__traceback__))
    assert depth < 20, "the frames of one request, and not of all"
    disk.goes_on()
    await disk.heals()


@pytest.mark.parametrize("durability", list(Durability))
def test_many_that_waited_are_answered_a_few_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """And nobody overtakes them: else what is refused would be kept."""
    monkeypatch.setattr(journal_module, "ANSWERS_PER_TURN", 1)

    async def use(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        journal = service.keeper.journal
        await post(client, "/workers", worker(1))
        disk = Disk(service, monkeypatch)
        disk.moves.clear()
        service.reserve(ReservationRequest(reservation_id="r", worker_id=1, token_ids=[1] * 16))
        waits: list[asyncio.Future[None]] = []
        while len(waits) < 3:
            if (one := journal.settled()) is not None:
                waits.append(one)
            await asyncio.sleep(0.001)
        disk.moves.set()
        await waits[0]
        assert [one.done() for one in waits] == [True, False, False]
        late = journal.settled()
        if late is not None:
            await late
            assert all(one.done() for one in waits)
        await asyncio.gather(*waits)

    life(tmp_path, use, durability=durability, durability_window_s=0.02)


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (sqlite3.SQLITE_FULL, 503, "state_disk_full"),
        (sqlite3.SQLITE_IOERR_FSYNC, 503, "state_unwritable"),
    ],
)
def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: int, name: str
) -> None:
    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1))
        await post(client, "/reservations", body("old", worker_id=1))
        disk = Disk(service, monkeypatch)
        loads = (await client.get("/loads")).json()
        disk.code = code

        refused = await post(client, "/select_and_reserve", body("new"))
        assert (refused.status_code, refused.json()["code"]) == (status, name)
        assert (await client.get("/loads")).json() == loads, "a booking nobody knows of is none"

        for call in (
            post(client, "/reservations", body("new", worker_id=1)),
            post(client, "/reservations/old/output_block", {}),
            client.delete("/reservations/old"),
            client.delete("/workers/1"),
        ):
            assert (await call).json()["code"] == name
        assert (await client.get("/loads")).json() == loads, "refused before it began"
        assert (await post(client, "/select", PROMPT)).status_code == 200, "reads go on"
        assert not (await client.get("/ready")).json()["state"]["writable"]

        await disk.heals()
        assert (await post(client, "/select_and_reserve", body("new"))).status_code == 200
        assert (await client.delete("/reservations/old")).status_code == 200

    async def second(_: httpx.AsyncClient, service: Driver) -> None:
        assert service.core.lifecycle.bookings.live("new") is not None
        assert len(service.core.lifecycle.bookings) == 1

    life(tmp_path, first, kill=True)
    life(tmp_path, second)


def test_what_was_under_way_when_the_disk_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bookings are taken back; a booking acknowledged before is not, whatever hit it since."""

    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1))
        await post(client, "/reservations", body("old", worker_id=1))
        await post(client, "/reservations", body("ends", worker_id=1))
        disk = Disk(service, monkeypatch)
        disk.code = sqlite3.SQLITE_FULL
        answers = await asyncio.gather(
            *(post(client, "/reservations", body(f"new{n}", worker_id=1)) for n in range(5)),
            post(client, "/reservations", body("new1", worker_id=1)),  # a repeat
            post(client, "/reservations/old/prefill_complete"),
            client.delete("/reservations/ends"),
        )
        assert {answer.status_code for answer in answers} == {503}
        assert service.core.lifecycle.bookings.live("old") is not None
        assert len(service.core.lifecycle.bookings) == 1, "ended, although it could not be said"
        await disk.heals()
        assert (await client.delete("/reservations/ends")).status_code == 200
        booked = await post(client, "/reservations", body("new1", worker_id=1))
        assert booked.status_code == 201

    async def second(_: httpx.AsyncClient, service: Driver) -> None:
        bookings = service.core.lifecycle.bookings
        old = bookings.live("old")
        assert old is not None
        assert old.reservation.prefill_done
        assert bookings.live("new1") is not None
        assert len(bookings) == 2

    life(tmp_path, first, kill=True)
    life(tmp_path, second)


@run_by(life, "tmp_path")
async def test_a_request_that_waited_is_not_let_in_by_a_broken_disk(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(client, "/workers", worker(1, max_num_batched_tokens=1))
    await post(client, "/select_and_reserve", body("busy"))
    waiting = asyncio.ensure_future(post(client, "/select_and_reserve", body("waits")))
    while not service.core.queries.loads()[0].pending_count:
        await asyncio.sleep(0)
    disk = Disk(service, monkeypatch)
    disk.code = sqlite3.SQLITE_FULL
    assert (await client.delete("/reservations/busy")).status_code == 503
    assert (await waiting).status_code == 503
    assert not len(service.core.lifecycle.bookings)
    await disk.heals()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which root may make."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    filler = small_disk / "filler"
    acknowledged: list[str] = []

    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        await post(client, "/workers", worker(1))
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        answer = await post(client, "/reservations", body("r", worker_id=1))
        while answer.status_code == 201:
            acknowledged.append(answer.json()["reservation_id"])
            name = f"r{len(acknowledged)}"
            answer = await post(client, "/reservations", body(name, worker_id=1))
        assert (answer.status_code, answer.json()["code"]) == (503, "state_disk_full")
        assert len(service.core.lifecycle.bookings) == len(acknowledged)
        assert (await post(client, "/select", PROMPT)).status_code == 200
        filler.unlink()
        journal = service.keeper.journal
        await until(lambda: journal.refusal is None)
        assert (await post(client, "/reservations", body("after", worker_id=1))).status_code == 201
        acknowledged.append("after")

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        assert (await client.get("/ready")).json()["state"]["damage"] == []
        bookings = service.core.lifecycle.bookings
        assert all(bookings.live(name) is not None for name in acknowledged)
        assert len(bookings) == len(acknowledged)

    life(small_disk / "state", first, kill=True)
    life(small_disk / "state", second)


def test_a_life_begins_on_a_disk_that_is_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be why the one before has ended: what is known is served, as by one that runs."""
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    filler, crashed = small_disk / "filler", small_disk / "crashed"
    names = [f"r{number}" for number in range(6)]

    async def first(client: httpx.AsyncClient, _: Driver) -> None:
        await post(client, "/workers", worker(1))
        for name in names:  # pages that are in the log and beyond the end of the file
            hashes = [*range(4000)]
            one = body(name, worker_id=1, sequence_hashes=hashes, isl_tokens=64_000)
            assert (await post(client, "/reservations", one)).status_code == 201
        shutil.copytree(small_disk / "state", crashed)

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        assert (await client.get("/ready")).json()["state"]["damage"] == []
        assert len(service.core.lifecycle.bookings) == len(names)
        assert (await post(client, "/select", PROMPT)).status_code == 200
        journal = service.keeper.journal
        await until(lambda: journal.refusal is not None)
        answer = await post(client, "/reservations", body("none", worker_id=1))
        assert (answer.status_code, answer.json()["code"]) == (503, "state_disk_full")
        filler.unlink()
        await until(lambda: journal.refusal is None)
        assert (await post(client, "/reservations", body("after", worker_id=1))).status_code == 201

    async def third(client: httpx.AsyncClient, service: Driver) -> None:
        assert (await client.get("/ready")).json()["state"]["damage"] == []
        assert {
            one for one in (*names, "after", "none") if service.core.lifecycle.bookings.live(one)
        } == {
            *names,
            "after",
        }

    life(small_disk / "state", first)
    shutil.rmtree(small_disk / "state")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(b"0")
    life(crashed, second)
    life(crashed, third)
