"""A service with a state directory: what comes back, what the disk's refusal does."""

import asyncio
import contextlib
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from select_service.config import Durability
from select_service.edge.app import create_app, create_driver
from select_service.edge.driver import Driver
from select_service.edge.state import journal as journal_module
from select_service.edge.state.keeper import EPOCHS_SINCE, next_epoch
from select_service.errors import StateDirUnusable
from tests.live.ports import free_port
from tests.select_service.core.replicas.replica import Replica
from tests.select_service.edge.serving import DEADLINE_S, PROMPT, SETTINGS, until, worker

Use = Callable[[httpx.AsyncClient, Driver], Awaitable[None]]


def life(directory: Path, use: Use, *, kill: bool = False, **settings: Any) -> None:
    """One life of a service over the directory; killed, it writes and says no more."""

    async def run() -> None:
        chosen = replace(SETTINGS, state_dir=str(directory), **settings)
        service = create_driver(chosen)
        await service.start()
        transport = httpx.ASGITransport(create_app(service, chosen))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
                await use(client, service)
                service.core.check()
        finally:
            if kill:
                assert service.keeper is not None
                service.keeper.journal._changes = None
            await service.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def body(reservation_id: str, **fields: Any) -> dict[str, Any]:
    return {**PROMPT, "reservation_id": reservation_id, **fields}


async def post(client: httpx.AsyncClient, path: str, content: Any = None) -> httpx.Response:
    return await client.post(path, json=content)


class Disk:
    """A store whose commits fail on demand, as SQLite does."""

    def __init__(self, service: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        assert service.keeper is not None
        monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
        self.journal = service.keeper.journal
        self._commit = self.journal.store.commit
        self.code: int | None = None
        monkeypatch.setattr(self.journal.store, "commit", self.commit)

    def commit(self, batch: Any) -> None:
        if self.code is not None:
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self.code
            raise error
        self._commit(batch)

    async def heals(self) -> None:
        self.code = None
        while self.journal.refusal is not None:
            await asyncio.sleep(0.001)


def test_everything_comes_back(tmp_path: Path) -> None:
    answers: list[Any] = []

    async def first(client: httpx.AsyncClient, _: Driver) -> None:
        for number in (1, 2):
            assert (await post(client, "/workers", worker(number))).status_code == 201
        await client.patch("/workers/2", json={"taints": ["gpu"]})
        chosen = await post(client, "/select_and_reserve", body("a", selection_id="s"))
        booked = await post(client, "/reservations", body("b", worker_id=2, lora_name="l"))
        answers.extend((chosen.json(), booked.json()))
        await post(client, "/reservations/b/prefill_complete")
        await post(client, "/reservations/b/output_block", {})
        await post(client, "/reservations/b/output_block", {"decay_fraction": 0.25})
        await post(client, "/reservations", body("gone", worker_id=1))
        await client.delete("/reservations/gone")
        answers.append((await client.get("/loads")).json())
        answers.append((await client.get("/workers")).json())

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        assert (await client.get("/loads")).json() == answers[2]
        assert (await client.get("/workers")).json() == answers[3]
        chosen = await post(client, "/select_and_reserve", body("a", selection_id="s"))
        booked = await post(client, "/reservations", body("b", worker_id=2, lora_name="l"))
        assert [chosen.json(), booked.json()] == answers[:2], "a repeat gets the first answer"
        other = await post(client, "/reservations", body("b", worker_id=1))
        assert other.status_code == 409
        assert (await client.delete("/reservations/gone")).status_code == 200
        assert (await client.delete("/reservations/never")).status_code == 404
        assert (await post(client, "/reservations/s/prefill_complete")).status_code == 200
        state = (await client.get("/ready")).json()["state"]
        assert (state["restored"]["reservation"], state["damage"]) == (3, [])
        for name in ("a", "b"):
            assert (await client.delete(f"/reservations/{name}")).status_code == 200
        loads = (await client.get("/loads")).json()[0]["loads"]
        assert all(not row["potential_decode_blocks"] for row in loads)

    async def third(client: httpx.AsyncClient, service: Driver) -> None:
        assert not len(service.core.desk.bookings)
        for name in ("a", "b", "s", "gone"):
            assert (await client.delete(f"/reservations/{name}")).status_code == 200

    life(tmp_path, first, kill=True)
    life(tmp_path, second, kill=True)
    life(tmp_path, third)


def test_a_record_that_contradicted_its_scope_does_so_again(tmp_path: Path) -> None:
    """Restored first, it would pin the scope's block size, and nobody else could be scheduled."""
    before: list[Any] = []

    async def first(client: httpx.AsyncClient, _: Driver) -> None:
        for number in (1, 2):
            assert (await post(client, "/workers", worker(number))).status_code == 201
        booked = await post(client, "/reservations", body("a", worker_id=2))
        assert booked.status_code == 201
        changed = await client.patch("/workers/1", json={"block_size": 7})
        assert changed.json()["lifecycle"] == "incomplete"
        before.append((await client.get("/workers")).json())
        before.append((await client.get("/loads")).json())

    async def second(client: httpx.AsyncClient, _: Driver) -> None:
        assert (await client.get("/workers")).json() == before[0]
        assert (await client.get("/loads")).json() == before[1]
        state = (await client.get("/ready")).json()["state"]
        assert state["dropped"]["reservation"] == 0
        assert (await client.delete("/workers/2")).status_code == 200

    async def third(client: httpx.AsyncClient, _: Driver) -> None:
        alone = (await client.get("/workers")).json()
        assert [one["lifecycle"] for one in alone] == ["schedulable"], "nobody contradicts it"

    life(tmp_path, first, kill=True)
    life(tmp_path, second)
    life(tmp_path, third)


def test_who_we_are_stays(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    async def note(_: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        await service.settle()
        seen.append((service.keeper.router_id, service.keeper.epoch))

    for _ in range(3):
        life(tmp_path, note)
    assert len({router_id for router_id, _ in seen}) == 1
    assert seen[0][0]
    epochs = [epoch for _, epoch in seen]
    assert epochs == sorted(set(epochs)), "each life comes after the one before"


@pytest.mark.parametrize(
    ("last", "wall", "epoch"),
    [
        (0, EPOCHS_SINCE + 600, 10),
        (10, EPOCHS_SINCE + 600, 11),  # the second start in a minute
        (3, EPOCHS_SINCE + 600, 10),  # put back to what it was seven lives ago
        (500, EPOCHS_SINCE + 600, 501),  # the clock was set back
        (5, 0.0, 6),
        (5, 1e12, 1 << 23),  # the clock is out of its mind, and comes to its senses
        (1 << 23, EPOCHS_SINCE + 600, (1 << 23) + 1),
    ],
)
def test_epochs_ascend_whatever_is_put_back(last: int, wall: float, epoch: int) -> None:
    assert next_epoch(last, wall) == epoch


def test_load_of_a_worker_that_is_gone_is_dropped_and_counted(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        for number in (1, 2):
            await post(client, "/workers", worker(number))
            await post(client, "/reservations", body(f"r{number}", worker_id=number))
        changes = service.core.desk.bookings.changes
        assert changes is not None
        service.core.desk.bookings.changes = None  # what it does is not written any more ...
        await client.delete("/workers/1")  # ... but that the worker goes is

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        state = (await client.get("/ready")).json()["state"]
        assert (state["restored"], state["dropped"]) == (
            state["restored"] | {"worker": 1, "reservation": 1},
            state["dropped"] | {"reservation": 1},
        )
        assert (await client.delete("/reservations/r1")).status_code == 200, "ended with its rank"
        assert len(service.core.desk.bookings) == 1

    life(tmp_path, first)
    life(tmp_path, second)


def test_no_answer_before_the_disk_has_it(tmp_path: Path) -> None:
    async def use(client: httpx.AsyncClient, service: Driver) -> None:
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

    life(tmp_path, use)


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
        assert len(service.core.desk.bookings) == 2 * WAVE - 1 + 40

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
        while not len(service.core.desk.bookings):
            await asyncio.sleep(0)
        cut.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cut
        await until(lambda: not len(service.core.desk.bookings))
        assert (await post(client, "/select_batch", wave("c"))).status_code == 200

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        live = {one.reservation.reservation_id for one in service.core.desk.bookings.newest(10_000)}
        assert live == {f"c.{number}" for number in range(WAVE)}
        assert (await client.delete("/reservations/b.0")).status_code == 200, "it is remembered"

    life(tmp_path, first)
    life(tmp_path, second)


def test_a_disk_that_refuses_a_wave_has_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker())
        disk = Disk(service, monkeypatch)
        disk.code = sqlite3.SQLITE_FULL
        assert (await post(client, "/select_batch", wave("a"))).status_code == 503
        assert not len(service.core.desk.bookings)
        await disk.heals()
        assert (await post(client, "/select_batch", wave("a"))).status_code == 200
        assert len(service.core.desk.bookings) == WAVE

    life(tmp_path, use)


def test_relaxed_answers_at_once_and_writes_within_its_window(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        assert service.keeper is not None
        await post(client, "/workers", worker(1))
        await post(client, "/reservations", body("r", worker_id=1))
        assert service.keeper.journal.pending

    async def second(_: httpx.AsyncClient, service: Driver) -> None:
        assert len(service.core.desk.bookings) == 1

    relaxed: dict[str, Any] = {"durability": Durability.RELAXED, "durability_window_s": 0.02}
    life(tmp_path, first, **relaxed)  # a proper end writes the rest
    life(tmp_path, second, **relaxed)


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
        assert service.core.desk.bookings.live("new") is not None
        assert len(service.core.desk.bookings) == 1

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
        assert service.core.desk.bookings.live("old") is not None
        assert len(service.core.desk.bookings) == 1, "ended, although it could not be said"
        await disk.heals()
        assert (await client.delete("/reservations/ends")).status_code == 200
        booked = await post(client, "/reservations", body("new1", worker_id=1))
        assert booked.status_code == 201

    async def second(_: httpx.AsyncClient, service: Driver) -> None:
        bookings = service.core.desk.bookings
        old = bookings.live("old")
        assert old is not None
        assert old.reservation.prefill_done
        assert bookings.live("new1") is not None
        assert len(bookings) == 2

    life(tmp_path, first, kill=True)
    life(tmp_path, second)


def test_a_request_that_waited_is_not_let_in_by_a_broken_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1, max_num_batched_tokens=1))
        await post(client, "/select_and_reserve", body("busy"))
        waiting = asyncio.ensure_future(post(client, "/select_and_reserve", body("waits")))
        while not service.core.loads()[0].pending_count:
            await asyncio.sleep(0)
        disk = Disk(service, monkeypatch)
        disk.code = sqlite3.SQLITE_FULL
        assert (await client.delete("/reservations/busy")).status_code == 503
        assert (await waiting).status_code == 503
        assert not len(service.core.desk.bookings)
        await disk.heals()

    life(tmp_path, use)


def test_two_processes_and_one_directory(tmp_path: Path) -> None:
    async def use(_: httpx.AsyncClient, __: Driver) -> None:
        with pytest.raises(StateDirUnusable, match="in use"):
            create_driver(replace(SETTINGS, state_dir=str(tmp_path)))

    life(tmp_path, use)


def test_damage_is_told(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, _: Driver) -> None:
        await post(client, "/workers", worker(1))
        for number in range(50):
            await post(client, "/reservations", body(f"r{number}", worker_id=1))

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        state = (await client.get("/ready")).json()["state"]
        assert state["damage"]
        assert state["rows_saved"] + state["rows_lost"] == 51
        assert state["rows_lost"]

    life(tmp_path, first)
    path = tmp_path / "state.db"
    data = bytearray(path.read_bytes())
    data[-100] ^= 0xFF
    path.write_bytes(data)
    life(tmp_path, second)
    assert (tmp_path / "state.db.corrupt").exists()


def test_leases_and_what_is_under_them(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, _: Driver) -> None:
        await post(client, "/workers", worker(1))
        lease = {"owner": "me", "ttl_s": 30.0, "lease_id": "l"}
        assert (await post(client, "/leases", lease)).status_code == 201
        assert (await post(client, "/leases", lease | {"lease_id": "closed"})).status_code == 201
        for name, lease_id in (("a", "l"), ("b", "closed")):
            booked = await post(client, "/reservations", body(name, worker_id=1, lease_id=lease_id))
            assert booked.status_code == 201
        await post(client, "/reservations", body("own", worker_id=1, ttl_s=7.0))
        assert (await client.delete("/leases/closed")).status_code == 200

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        leases = (await client.get("/leases")).json()["leases"]
        assert [(one["lease_id"], one["owner"], one["reservations"]) for one in leases] == [
            ("l", "me", 1)
        ]
        own = service.core.desk.bookings.live("own")
        assert own is not None
        assert own.reservation.ttl_s == 7.0
        assert len(service.core.desk.bookings) == 2
        assert (await client.delete("/leases/l")).status_code == 200
        assert service.core.desk.bookings.live("a") is None

    life(tmp_path, first, kill=True)
    life(tmp_path, second)


def test_what_replicas_know_of_us_stays_true(tmp_path: Path) -> None:
    """The same publisher in its next life, with the same claims under the same numbers."""
    peer = f"tcp://127.0.0.1:{free_port()}"
    names: list[set[tuple[str, int]]] = []

    def claims(service: Driver) -> set[tuple[str, int]]:
        own = service.core.desk.announcer.claims.own.by_id
        return {(name, claim.born) for name, claim in own.items()}

    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1))
        for name in ("a", "b", "c"):
            await post(client, "/reservations", body(name, worker_id=1))
        await client.delete("/reservations/b")
        answer = await post(client, "/replica_sync/register_peer", {"endpoint": peer})
        assert answer.status_code == 201
        names.append(claims(service))

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        assert claims(service) == names[0]
        assert len(names[0]) == 2
        announcer = service.core.desk.announcer.claims
        assert service.keeper is not None
        assert announcer.epoch == service.keeper.epoch
        assert announcer.router_id == service.keeper.router_id
        assert (await client.get("/replica_sync/peers")).json() == [peer]
        await post(client, "/replica_sync/deregister_peer", {"endpoint": peer})

    async def third(client: httpx.AsyncClient, service: Driver) -> None:
        assert claims(service) == names[0]
        assert (await client.get("/replica_sync/peers")).json() == []

    for number, use in enumerate((first, second, third)):
        life(tmp_path, use, kill=number < 2, replica_sync_port=free_port())


def test_a_free_is_remembered_until_the_owner_is_back(tmp_path: Path) -> None:
    """The owner is away when its reservations end here, and we are away before it is back."""
    owner = Replica(2000)
    told: list[Any] = []
    for name in ("freed", "adopted", "f" * 100):
        owner.book(name, 1, 5)
        told += owner.effects.published

    def hear(service: Driver, messages: Iterable[Any]) -> None:
        for message in messages:
            service._carry_out(service.core.replica_heard("tcp://p:1", message, service._clock()))

    async def first(client: httpx.AsyncClient, service: Driver) -> None:
        await post(client, "/workers", worker(1))
        hear(service, told)
        for name in ("freed", "f" * 100):
            assert (await client.delete(f"/reservations/{name}")).status_code == 200
        service.core.replicas.publishers.views[2000].heard_at -= 1e6
        service.core.replica_tick(service._clock())
        answer = await post(client, "/reservations/adopted/prefill_complete")
        assert answer.status_code == 200
        await service.settle()

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        hear(service, told)
        (loads,) = (await client.get("/loads")).json()[0]["loads"]
        assert loads["active_requests"] == 1
        assert loads["potential_prefill_tokens"] == 0
        assert (await client.delete("/reservations/adopted")).status_code == 200
        (loads,) = (await client.get("/loads")).json()[0]["loads"]
        assert loads["active_requests"] == 0

    life(tmp_path, first, kill=True, replica_sync_port=free_port())
    life(tmp_path, second, replica_sync_port=free_port())


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
        assert len(service.core.desk.bookings) == len(acknowledged)
        assert (await post(client, "/select", PROMPT)).status_code == 200
        filler.unlink()
        while service.keeper.journal.refusal is not None:
            await asyncio.sleep(0.001)
        assert (await post(client, "/reservations", body("after", worker_id=1))).status_code == 201
        acknowledged.append("after")

    async def second(client: httpx.AsyncClient, service: Driver) -> None:
        assert (await client.get("/ready")).json()["state"]["damage"] == []
        bookings = service.core.desk.bookings
        assert all(bookings.live(name) is not None for name in acknowledged)
        assert len(bookings) == len(acknowledged)

    life(small_disk / "state", first, kill=True)
    life(small_disk / "state", second)
