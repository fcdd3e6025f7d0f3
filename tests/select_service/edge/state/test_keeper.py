"""A service with a state directory: what comes back."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from select_service.core.changes import StateKey
from select_service.edge.app import create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.state.keeper import EPOCHS_SINCE, next_epoch
from select_service.edge.state.store import Store
from select_service.errors import StateDirUnusable
from tests.coroutines import within
from tests.live.ports import free_port
from tests.select_service.core.replication.replica import Replica
from tests.select_service.edge.serving import SETTINGS, worker
from tests.select_service.edge.state.lives import body, life, post


async def test_everything_comes_back(tmp_path: Path) -> None:
    async with life(tmp_path, kill=True) as (client, _):
        for number in (1, 2):
            assert (await post(client, "/workers", worker(number))).status_code == 201
        await client.patch("/workers/2", json={"taints": ["gpu"]})
        chosen = await post(client, "/select_and_reserve", body("a", selection_id="s"))
        booked = await post(client, "/reservations", body("b", worker_id=2, lora_name="l"))
        answers = [chosen.json(), booked.json()]
        await post(client, "/reservations/b/prefill_complete")
        await post(client, "/reservations/b/output_block", {})
        await post(client, "/reservations/b/output_block", {"decay_fraction": 0.25})
        await post(client, "/reservations", body("gone", worker_id=1))
        await client.delete("/reservations/gone")
        loads = (await client.get("/loads")).json()
        workers = (await client.get("/workers")).json()
    async with life(tmp_path, kill=True) as (client, _):
        assert (await client.get("/loads")).json() == loads
        assert (await client.get("/workers")).json() == workers
        chosen = await post(client, "/select_and_reserve", body("a", selection_id="s"))
        booked = await post(client, "/reservations", body("b", worker_id=2, lora_name="l"))
        assert [chosen.json(), booked.json()] == answers, "a repeat gets the first answer"
        other = await post(client, "/reservations", body("b", worker_id=1))
        assert other.status_code == 409
        assert (await client.delete("/reservations/gone")).status_code == 200
        assert (await client.delete("/reservations/never")).status_code == 404
        assert (await post(client, "/reservations/s/prefill_complete")).status_code == 200
        state = (await client.get("/ready")).json()["state"]
        assert (state["restored"]["reservation"], state["damage"]) == (3, [])
        for name in ("a", "b"):
            assert (await client.delete(f"/reservations/{name}")).status_code == 200
        left = (await client.get("/loads")).json()[0]["loads"]
        assert all(not row["potential_decode_blocks"] for row in left)
    async with life(tmp_path) as (client, service):
        assert not len(service.core.lifecycle.bookings)
        for name in ("a", "b", "s", "gone"):
            assert (await client.delete(f"/reservations/{name}")).status_code == 200


async def test_a_record_that_contradicted_its_scope_does_so_again(tmp_path: Path) -> None:
    """Restored first, it would pin the scope's block size, and nobody else could be scheduled."""
    async with life(tmp_path, kill=True) as (client, _):
        for number in (1, 2):
            assert (await post(client, "/workers", worker(number))).status_code == 201
        booked = await post(client, "/reservations", body("a", worker_id=2))
        assert booked.status_code == 201
        changed = await client.patch("/workers/1", json={"block_size": 7})
        assert changed.json()["lifecycle"] == "incomplete"
        workers = (await client.get("/workers")).json()
        loads = (await client.get("/loads")).json()
    async with life(tmp_path) as (client, _):
        assert (await client.get("/workers")).json() == workers
        assert (await client.get("/loads")).json() == loads
        state = (await client.get("/ready")).json()["state"]
        assert state["dropped"]["reservation"] == 0
        assert (await client.delete("/workers/2")).status_code == 200
    async with life(tmp_path) as (client, _):
        alone = (await client.get("/workers")).json()
        assert [one["lifecycle"] for one in alone] == ["schedulable"], "nobody contradicts it"


async def test_who_we_are_stays(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        async with life(tmp_path) as (_, service):
            assert service.keeper is not None
            await service.settle()
            seen.append((service.keeper.router_id, service.keeper.epoch))
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


async def test_load_of_a_worker_that_is_gone_is_dropped_and_counted(tmp_path: Path) -> None:
    async with life(tmp_path) as (client, service):
        for number in (1, 2):
            await post(client, "/workers", worker(number))
            await post(client, "/reservations", body(f"r{number}", worker_id=number))
        bookings = service.core.lifecycle.bookings
        assert bookings.changes is not None
        # what it does is not written any more ...
        bookings.changes = bookings.freed.changes = None
        await client.delete("/workers/1")  # ... but that the worker goes is
    async with life(tmp_path) as (client, service):
        state = (await client.get("/ready")).json()["state"]
        assert (state["restored"], state["dropped"]) == (
            state["restored"] | {"worker": 1, "reservation": 1},
            state["dropped"] | {"reservation": 1},
        )
        assert (await client.delete("/reservations/r1")).status_code == 200, "ended with its rank"
        assert len(service.core.lifecycle.bookings) == 1


@within(life, "tmp_path")
async def test_two_processes_and_one_directory(*, tmp_path: Path) -> None:
    with pytest.raises(StateDirUnusable, match="in use"):
        create_driver(replace(SETTINGS, state_dir=str(tmp_path)))


async def test_damage_is_told(tmp_path: Path) -> None:
    async with life(tmp_path) as (client, _):
        await post(client, "/workers", worker(1))
        for number in range(50):
            await post(client, "/reservations", body(f"r{number}", worker_id=1))
    path = tmp_path / "state.db"
    data = bytearray(path.read_bytes())
    data[-100] ^= 0xFF
    path.write_bytes(data)
    async with life(tmp_path) as (client, _):
        state = (await client.get("/ready")).json()["state"]
        assert state["damage"]
        assert state["rows_saved"] + state["rows_lost"] == 51
        assert state["rows_lost"]
    assert (tmp_path / "state.db.corrupt").exists()


async def test_leases_and_what_is_under_them(tmp_path: Path) -> None:
    async with life(tmp_path, kill=True) as (client, _):
        await post(client, "/workers", worker(1))
        lease = {"owner": "me", "ttl_s": 30.0, "lease_id": "l"}
        assert (await post(client, "/leases", lease)).status_code == 201
        assert (await post(client, "/leases", lease | {"lease_id": "closed"})).status_code == 201
        for name, lease_id in (("a", "l"), ("b", "closed")):
            booked = await post(client, "/reservations", body(name, worker_id=1, lease_id=lease_id))
            assert booked.status_code == 201
        await post(client, "/reservations", body("own", worker_id=1, ttl_s=7.0))
        assert (await client.delete("/leases/closed")).status_code == 200
    async with life(tmp_path) as (client, service):
        leases = (await client.get("/leases")).json()["leases"]
        assert [(one["lease_id"], one["owner"], one["reservations"]) for one in leases] == [
            ("l", "me", 1)
        ]
        own = service.core.lifecycle.bookings.live("own")
        assert own is not None
        assert own.reservation.ttl_s == 7.0
        assert len(service.core.lifecycle.bookings) == 2
        assert (await client.delete("/leases/l")).status_code == 200
        assert service.core.lifecycle.bookings.live("a") is None


async def test_what_replicas_know_of_us_stays_true(tmp_path: Path) -> None:
    """The same publisher in its next life, with the same claims under the same numbers."""
    peer = f"tcp://127.0.0.1:{free_port()}"

    def claims(service: Driver) -> set[tuple[str, int]]:
        own = service.core.lifecycle.announcer.claims.own.by_id
        return {(name, claim.born) for name, claim in own.items()}

    async with life(tmp_path, kill=True, replica_sync_port=free_port()) as (client, service):
        await post(client, "/workers", worker(1))
        for name in ("a", "b", "c"):
            await post(client, "/reservations", body(name, worker_id=1))
        await client.delete("/reservations/b")
        answer = await post(client, "/replica_sync/register_peer", {"endpoint": peer})
        assert answer.status_code == 201
        claimed = claims(service)
        assert len(claimed) == 2
    async with life(tmp_path, kill=True, replica_sync_port=free_port()) as (client, service):
        assert claims(service) == claimed
        announcer = service.core.lifecycle.announcer.claims
        assert service.keeper is not None
        assert announcer.outbox.epoch == service.keeper.epoch
        assert announcer.router_id == service.keeper.router_id
        assert (await client.get("/replica_sync/peers")).json() == [peer]
        await post(client, "/replica_sync/deregister_peer", {"endpoint": peer})
    async with life(tmp_path, replica_sync_port=free_port()) as (client, service):
        assert claims(service) == claimed
        assert (await client.get("/replica_sync/peers")).json() == []


async def test_a_free_is_remembered_until_the_owner_is_back(tmp_path: Path) -> None:
    """The owner is away when its reservations end here, and we are away before it is back."""
    owner = Replica(2000)
    sent: list[Any] = []
    for name in ("freed", "adopted", "f" * 100):
        owner.book(name, 1, 5)
        sent += owner.effects.published

    def apply(service: Driver, messages: Iterable[Any]) -> None:
        for message in messages:
            service._carry_out(
                service.core.replica_operations.receive("tcp://p:1", message, service._clock())
            )

    async with life(tmp_path, kill=True, replica_sync_port=free_port()) as (client, service):
        await post(client, "/workers", worker(1))
        apply(service, sent)
        for name in ("freed", "f" * 100):
            assert (await client.delete(f"/reservations/{name}")).status_code == 200
        service.core.replicas.publishers.views[2000].heard_at -= 1e6
        service.core.replica_operations.tick(service._clock())
        answer = await post(client, "/reservations/adopted/prefill_complete")
        assert answer.status_code == 200
        await service.settle()
    async with life(tmp_path, replica_sync_port=free_port()) as (client, service):
        apply(service, sent)
        (loads,) = (await client.get("/loads")).json()[0]["loads"]
        assert loads["active_requests"] == 1
        assert loads["potential_prefill_tokens"] == 0
        assert (await client.delete("/reservations/adopted")).status_code == 200
        (loads,) = (await client.get("/loads")).json()[0]["loads"]
        assert loads["active_requests"] == 0


def rewritten(directory: Path, key: StateKey, change: Callable[[bytes], bytes]) -> None:
    """Write one row anew, as another build may have written it."""
    store = Store(directory)
    store.lock()
    try:
        (value,) = (row.value for row in store.load().rows if (row.kind, row.name) == key)
        store.commit([(key, change(value))])
    finally:
        store.close()


@pytest.mark.parametrize(
    ("key", "said", "why"),
    [
        (("worker", "1"), (b"\xa7prefill", b"\xa7encoder"), "worker 1: .*'encoder'.*role"),
        (("admission", "policy"), (b"\xacalways-admit", b"\xacalways-a-b-c"), "always-a-b-c"),
    ],
    ids=["worker", "admission"],
)
async def test_what_another_build_has_written_is_not_given_up(
    tmp_path: Path, key: StateKey, said: tuple[bytes, bytes], why: str
) -> None:
    """A rollback that cannot read what the newer build wrote says so, and nothing is lost by it."""
    async with life(tmp_path) as (client, _):
        await post(client, "/workers", worker(1, role="prefill"))
        await post(client, "/reservations", body("a", worker_id=1))
        assert (await client.put("/admission", json={"policy": "always-admit"})).status_code == 200
    rewritten(tmp_path, key, lambda value: value.replace(*said))
    for _ in range(2):
        with pytest.raises(StateDirUnusable, match=why):
            async with life(tmp_path):
                pytest.fail("it has started")
    rewritten(tmp_path, key, lambda value: value.replace(said[1], said[0]))
    async with life(tmp_path) as (client, service):
        assert (await client.get("/ready")).json()["state"]["dropped"]["reservation"] == 0
        assert len(service.core.lifecycle.bookings) == 1
        assert service.core.admission_controller.policy == "always-admit"
