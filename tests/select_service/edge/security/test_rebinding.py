"""DNS rebinding: a name leads to one address when it is judged, to a forbidden one ever after.

Both addresses are there and take connections. Whoever looked a name up once more when it connects,
be it libzmq, the HTTP client or we ourselves, would be seen at the forbidden one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from indexer.edge import endpoint_follower
from indexer.edge.addresses import Addresses
from indexer.types import EgressSettings
from select_service.core.effects import Pull
from select_service.edge.driver.driver import Driver
from select_service.edge.replication.pull import SnapshotPulls
from select_service.types import ReplicaLimits, WorkerSpec
from tests import wait
from tests.coroutines import run_by
from tests.live.ports import free_port
from tests.live.tcp_server import tcp_server
from tests.select_service.edge.replication.test_pull import ROUTER, Reader
from tests.select_service.edge.serving import listening, worker
from tests.wait import until

NAME = "turns.test"
GOOD, EVIL = "127.0.0.1", "127.0.0.66"
REACH = EgressSettings(deny=(EVIL,), lookup_cache_s=0.0)
SETTINGS: dict[str, Any] = {"connect_deny": REACH.deny, "connect_lookup_cache_s": 0.0}


class Name:
    """The name, and who stands where it leads; nobody there says a word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = 0
        self.turns_after = 1  # lookup
        self.turns_back = False  # with every second lookup after that
        self.came: dict[str, int] = {GOOD: 0, EVIL: 0}
        self._genuine = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)
        monkeypatch.setattr(endpoint_follower, "ASK_AFTER_S", 0.01)
        monkeypatch.setattr(endpoint_follower, "ASK_AFTER_MAX_S", 0.02)

    def _getaddrinfo(self, host: Any, *args: Any, **more: Any) -> Any:
        if host not in {NAME, NAME.encode()}:
            return self._genuine(host, *args, **more)
        self.lookups += 1
        after = self.lookups - self.turns_after
        is_good = after <= 0 or (self.turns_back and after % 2 == 0)
        return self._genuine(GOOD if is_good else EVIL, *args, **more)

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[int]:
        """Take connections at both addresses and end them at once; yields their port."""
        port = free_port()
        async with contextlib.AsyncExitStack() as stack:
            for address in self.came:

                async def come(_: Any, __: Any, address: str = address) -> None:
                    self.came[address] += 1

                await stack.enter_async_context(tcp_server(come, address, port))
            yield port

    def check(self) -> None:
        """The name was asked for again, it leads to somewhere else, and nobody went there."""
        assert self.lookups > 1
        assert self.came[GOOD]
        assert not self.came[EVIL]


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[Name]:
    found = Name(monkeypatch)
    yield found
    found.check()


def play(name: Name, scene: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        async with name.standing() as port:
            await scene(port)

    wait.run(run())


async def turned(name: Name, service: Driver) -> None:
    """Wait until somebody was at the good address, and the bad one was refused."""
    await until(lambda: name.came[GOOD] > 0 and service.addresses.refused["resolved"] > 2)


@pytest.mark.parametrize("field", ["kv_events_endpoint", "replay_endpoint"])
def test_endpoints_of_a_worker(name: Name, field: str) -> None:
    if field == "replay_endpoint":
        # It is judged when the worker comes, and once more with each replay; a replay that is given
        # up before it has connected is followed by one that may.
        name.turns_after, name.turns_back = 2, True

    async def scene(port: int) -> None:
        chosen = {"kv_poll_interval_s": 0.02, "replay_silence_s": 0.1, "replay_backoff_s": 0.01}
        chosen["replay_backoff_max_s"] = 0.02
        async with listening(**SETTINGS, **chosen) as (_, service, _server):
            record = worker() | {field: f"tcp://{NAME}:{port}"}
            service.upsert_worker(msgspec.convert(record, WorkerSpec))
            await turned(name, service)

    play(name, scene)


@run_by(play, "name")
async def test_a_replica(port: int, *, name: Name) -> None:
    async with listening(**SETTINGS, replica_sync_port=free_port()) as (_, service, _server):
        service.register_peer(f"tcp://{NAME}:{port}")
        await turned(name, service)


@run_by(play, "name")
async def test_a_replica_whose_snapshot_is_fetched(port: int) -> None:
    reader, addresses = Reader(), Addresses(REACH)
    limits = ReplicaLimits(pull_backoff_s=0.01, pull_backoff_max_s=0.01)
    client = SnapshotPulls(
        reader, lambda _: None, limits, time.monotonic, lambda _: None, addresses
    )
    counts = client.outcomes
    for outcome in ("unreachable", "denied"):
        while not counts[outcome]:  # what was found is good for a moment
            before = sum(counts.values())
            client.ask(Pull(f"tcp://{NAME}:1", ROUTER, port, None))
            await until(lambda: sum(counts.values()) > before and not client.running)
    await client.close()
    addresses.close()


@run_by(play, "name")
async def test_peers_whose_index_is_fetched(port: int) -> None:
    peers = (f"http://{NAME}:{port}",)
    chosen = {"recovery_attempts_max": 3, "recovery_backoff_s": 0.01}
    async with listening(**SETTINGS, **chosen, indexer_peers=peers) as (_, service, _server):
        recovery = service.recovery
        assert recovery is not None
        await until(lambda: recovery.outcome == "failed")
        assert recovery.failures == {"connection": 1, "denied": 2}
