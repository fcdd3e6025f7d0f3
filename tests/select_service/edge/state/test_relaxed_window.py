"""With relaxed durability no answer runs further ahead of the disk than its window."""

import asyncio
import random
import sqlite3
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from select_service.settings import Durability
from select_service.types import ReservationRequest
from tests.coroutines import within
from tests.select_service.edge.serving import worker
from tests.select_service.edge.state.disk import Disk
from tests.select_service.edge.state.lives import body, life, post
from tests.wait import until


async def test_relaxed_answers_at_once_and_writes_within_its_window(tmp_path: Path) -> None:
    relaxed: dict[str, Any] = {"durability": Durability.RELAXED, "durability_window_s": 3600.0}
    async with life(tmp_path, **relaxed) as (client, service):
        assert service.keeper is not None
        await post(client, "/workers", worker(1))
        await post(client, "/reservations", body("r", worker_id=1))
        assert service.keeper.journal.pending  # a proper end writes the rest
    async with life(tmp_path, **relaxed) as (_, service):
        assert len(service.core.lifecycle.bookings) == 1


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


@within(life, "tmp_path", **RELAXED)
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


@within(life, "tmp_path", **RELAXED)
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
async def test_relaxed_keeps_its_window_to_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whenever a change that is not on disk is acknowledged, none such is older than the window."""
    window_s = 1000.0  # by a clock that we set; no timer runs out meanwhile
    rng = random.Random(seed)
    async with life(tmp_path, durability=Durability.RELAXED, durability_window_s=window_s) as (
        client,
        service,
    ):
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
