"""No answer before the disk has it, and what follows when the disk refuses."""

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.state import journal as journal_module
from select_service.errors import StateDirUnusable
from select_service.settings import Durability
from select_service.types import ReservationRequest
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, worker
from tests.select_service.edge.state.disk import Disk
from tests.select_service.edge.state.lives import body, life, post
from tests.wait import run, until


@within(life, "tmp_path")
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


@pytest.mark.parametrize("durability", list(Durability))
async def test_a_disk_that_stands_still_is_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """Nobody waits for ever; what was refused is not there when the disk moves again."""
    # who need not wait is answered at once, and what is not on disk is written when we say so
    async with life(tmp_path, durability=durability, durability_window_s=3600.0) as (
        client,
        service,
    ):
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
        expected = {
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
        kept = {*expected, "new"}
    async with life(tmp_path) as (_, service):
        live = {
            one.reservation.reservation_id for one in service.core.lifecycle.bookings.newest(10)
        }
        assert live == kept
    assert len(kept) == (2 if durability is Durability.STRICT else 5)


async def test_a_process_that_stood_still_is_no_disk_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, frozen with its container, moved with its machine: the writer was, too."""
    monkeypatch.setattr(journal_module, "LAST_CHANCE", 1e4, raising=False)
    async with life(tmp_path, state_stall_s=0.05) as (client, service):
        await post(client, "/workers", worker(1))
        disk = Disk(service, monkeypatch)
        disk.moves.clear()
        booking = asyncio.ensure_future(post(client, "/reservations", body("r", worker_id=1)))
        await until(lambda: disk.journal.waiting > 0)
        time.sleep(0.1)  # noqa: ASYNC251 - nobody else does anything meanwhile
        disk.moves.set()
        assert (await booking).status_code == 201
        assert disk.journal.stalls == 0


def test_nobody_leaves_a_disk_that_stands_still_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends, and its loop; the directory is let go of when the disk moves."""

    async def first() -> tuple[Disk, list[threading.Thread]]:
        async with life(tmp_path) as (client, service):
            await post(client, "/workers", worker(1))
            disk = Disk(service, monkeypatch)
            disk.stops()
            writers = [one for one in threading.enumerate() if one.name == "state-writer"]
            waits = asyncio.ensure_future(post(client, "/reservations", body("r", worker_id=1)))
            await until(lambda: disk.journal.waiting or waits.done())
            await service.close()
            assert (await waits).json()["code"] == "state_stalled"
        return disk, writers

    async def again() -> None:
        async with life(tmp_path) as (_, service):
            assert len(service.core.catalog) == 1

    disk, writers = run(first())
    with pytest.raises(StateDirUnusable, match="in use"):
        run(again())
    disk.goes_on()
    for writer in writers:
        writer.join()
    run(again())


@within(life, "tmp_path", state_waiting_max=3)
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


@within(life, "tmp_path")
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
async def test_many_that_waited_are_answered_a_few_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """And nobody overtakes them: else what is refused would be kept."""
    monkeypatch.setattr(journal_module, "ANSWERS_PER_TURN", 1)
    async with life(tmp_path, durability=durability, durability_window_s=0.02) as (client, service):
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


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (sqlite3.SQLITE_FULL, 503, "state_disk_full"),
        (sqlite3.SQLITE_IOERR_FSYNC, 503, "state_unwritable"),
    ],
)
async def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: int, name: str
) -> None:
    async with life(tmp_path, kill=True) as (client, service):
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
    async with life(tmp_path) as (_, service):
        assert service.core.lifecycle.bookings.live("new") is not None
        assert len(service.core.lifecycle.bookings) == 1


async def test_what_was_under_way_when_the_disk_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bookings are taken back; a booking acknowledged before is not, whatever hit it since."""
    async with life(tmp_path, kill=True) as (client, service):
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
    async with life(tmp_path) as (_, service):
        bookings = service.core.lifecycle.bookings
        old = bookings.live("old")
        assert old is not None
        assert old.reservation.prefill_done
        assert bookings.live("new1") is not None
        assert len(bookings) == 2


@within(life, "tmp_path")
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


async def test_a_disk_that_is_really_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    filler = small_disk / "filler"
    acknowledged: list[str] = []
    async with life(small_disk / "state", kill=True) as (client, service):
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
    async with life(small_disk / "state") as (client, service):
        assert (await client.get("/ready")).json()["state"]["damage"] == []
        bookings = service.core.lifecycle.bookings
        assert all(bookings.live(name) is not None for name in acknowledged)
        assert len(bookings) == len(acknowledged)


async def test_a_life_begins_on_a_disk_that_is_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be why the one before has ended: what is known is served, as by one that runs."""
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    filler, crashed = small_disk / "filler", small_disk / "crashed"
    names = [f"r{number}" for number in range(6)]
    async with life(small_disk / "state") as (client, _):
        await post(client, "/workers", worker(1))
        for name in names:  # pages that are in the log and beyond the end of the file
            hashes = [*range(4000)]
            one = body(name, worker_id=1, sequence_hashes=hashes, isl_tokens=64_000)
            assert (await post(client, "/reservations", one)).status_code == 201
        shutil.copytree(small_disk / "state", crashed)
    shutil.rmtree(small_disk / "state")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(b"0")
    async with life(crashed) as (client, service):
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
    async with life(crashed) as (client, service):
        assert (await client.get("/ready")).json()["state"]["damage"] == []
        assert {
            one for one in (*names, "after", "none") if service.core.lifecycle.bookings.live(one)
        } == {
            *names,
            "after",
        }
