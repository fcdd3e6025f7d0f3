"""Sources against a running service: what they name is registered, and nothing else is touched."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from select_service.edge.discovery.dns import DnsReplicas
from select_service.edge.discovery.followers import Discovery, ReplicaFollower
from select_service.edge.driver.driver import Driver
from tests.live.ports import free_port
from tests.select_service.edge.serving import app_client, worker
from tests.wait import until


def write(path: Path, *bodies: dict[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(bodies))
    new.replace(path)


def sources(service: Driver) -> dict[int, str]:
    return {record.worker_id: record.source for record in service.workers()}


async def test_a_file_of_workers_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write(path, worker(1), worker(2))
    chosen = {"workers_file": str(path), "workers_file_poll_s": 0.01}
    async with app_client(**chosen) as (client, service):
        await until(lambda: sources(service) == {1: "file", 2: "file"})
        while (ready := (await client.get("/ready")).json())["waiting_for"]:  # it is a pass's last
            await asyncio.sleep(0.005)
        assert ready["ready"]
        assert (await client.post("/workers", json=worker(7))).json()["source"] == "api"
        refused = await client.post("/workers", json=worker(1, endpoint="http://mine"))
        assert (refused.status_code, refused.json()["code"]) == (409, "worker_conflict")
        assert (await client.delete("/workers/1")).status_code == 409
        write(path, worker(2, endpoint="http://new"), worker(7, endpoint="http://theirs"))
        await until(lambda: sources(service) == {2: "file", 7: "api"})
        assert service.discovery is not None
        (follower,) = service.discovery.followers
        await until(lambda: follower.conflicts == 1)
        records = {record.worker_id: record.endpoint for record in service.workers()}
        assert records == {2: "http://new", 7: "http://w7"}
        path.write_text("[{")
        await until(lambda: follower.source.failures.get("malformed") == 1)
        assert sources(service) == {2: "file", 7: "api"}
        metrics = (await client.get("/metrics")).text
        assert 'discovery_failures_total{kind="malformed",source="file"} 1.0' in metrics
        assert 'discovery_rejected{reason="conflict",source="file"} 1.0' in metrics
        await client.delete("/workers/7")
        write(path, worker(7))
        await until(lambda: sources(service) == {7: "file"})


async def test_a_worker_that_nobody_else_keeps_any_more_comes_from_the_file(tmp_path: Path) -> None:
    """The file does not change for that: it was right all the time."""
    path = tmp_path / "workers.json"
    chosen = {"workers_file": str(path), "workers_file_poll_s": 0.01}
    async with app_client(**chosen) as (client, service):
        await client.post("/workers", json=worker(7))
        write(path, worker(1), worker(7))
        await until(lambda: sources(service) == {1: "file", 7: "api"})
        await client.delete("/workers/7")
        await until(lambda: sources(service) == {1: "file", 7: "file"})


async def test_ready_waits_for_the_first_look(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    chosen = {"workers_file": str(path), "workers_file_poll_s": 0.01}
    async with app_client(**chosen) as (client, service):
        await client.post("/workers", json=worker(9))
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["waiting_for"] == ["discovery"]
        write(path, worker(1))
        await until(lambda: service.ready().ready)


async def test_what_the_catalog_refuses_and_what_is_too_much(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write(path, worker(1, data_parallel_size=5000), *(worker(n) for n in range(2, 9)))
    chosen = {"workers_file": str(path), "workers_file_poll_s": 0.01, "discovery_workers_max": 3}
    async with app_client(**chosen) as (_, service):
        await until(lambda: sources(service) == {2: "file", 3: "file"})
        assert service.discovery is not None
        (follower,) = service.discovery.followers
        await until(lambda: follower.is_settled)
        assert (follower.refused, follower.left_out) == (1, 5)


async def test_replicas_behind_a_name() -> None:
    addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.9"]

    async def resolver(host: str, port: int) -> list[str]:
        assert (host, port) == ("peers", 9092)
        if not addresses:
            raise OSError("no such name")
        return addresses

    async with app_client(replica_sync_port=free_port()) as (client, service):
        by_hand = "tcp://127.0.0.4:9092"
        await client.post("/replica_sync/register_peer", json={"endpoint": by_hand})
        source = DnsReplicas("peers:9092", 0.01, ["127.0.0.9"], resolver)
        follower = ReplicaFollower(source, service.replica_plane, service.now, grace_s=0.0)
        discovery = Discovery(service.readiness, [follower])
        discovery.start()

        def peers(*numbers: int) -> bool:
            return service.replica_plane().peers() == [f"tcp://127.0.0.{n}:9092" for n in numbers]

        await until(lambda: peers(2, 3, 4))
        addresses.remove("127.0.0.2")
        await until(lambda: peers(3, 4))
        addresses.clear()
        await until(lambda: source.failures.get("unresolved", 0) > 1)
        assert peers(3, 4)
        addresses.extend(["127.0.0.4", "127.0.0.5"])
        await until(lambda: peers(4, 5))
        assert follower.conflicts == 1
        addresses.remove("127.0.0.4")
        await until(lambda: follower.conflicts == 0)
        assert peers(4, 5), "who registered it keeps it"
        addresses[:] = ["fd00::5", "127.0.0.5", "127.0.0.6", "fd00::6", "fd00::9", "127.0.0.9"]
        await until(lambda: peers(4, 5, 6))  # of both families: once each
        await discovery.close()
