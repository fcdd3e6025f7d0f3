"""A service that comes back with its index snapshot: what is warm, and what must not be."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from indexer.core.hashing import block_hashes
from indexer.edge.snapshot_file import NAME, NEW
from indexer.types import Scope
from select_service.edge.app import create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.state.warm_start import WarmStart
from tests.indexer.edge.fake_engine import FakeEngine, serve_until
from tests.indexer.encoding import encode_batch, stored
from tests.select_service.edge.serving import SETTINGS, add_worker
from tests.wait import PATIENCE_S

SCOPE = Scope("default", "default")
PATIENT = {
    "replay_silence_s": 1_000.0, "replay_timeout_s": 10_000.0, "kv_poll_interval_s": 0.0,
    "index_snapshot_shutdown_s": PATIENCE_S,
}  # fmt: skip


def tokens(number: int) -> list[int]:
    return [number * 16 + at for at in range(16)]


def batch(number: int, shift: int = 0) -> bytes:
    return encode_batch([stored([number + 1], tokens(number + shift))], ts=number + shift)


class Restarts:
    """Engines that outlive the service, and the lives of the service over one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engines: list[FakeEngine] = []

    def engine(self, ports: tuple[int, int] = (0, 0)) -> FakeEngine:
        self.engines.append(FakeEngine(self.context, ports))
        return self.engines[-1]

    @contextlib.asynccontextmanager
    async def live(self, *, kill: bool = False, **settings: Any) -> AsyncIterator[Driver]:
        chosen = replace(SETTINGS, state_dir=str(self.directory), **({**PATIENT, **settings}))
        service = create_driver(chosen)
        await service.start()
        try:
            yield service
            service.core.check()
        finally:
            if kill:
                assert service.keeper is not None
                service.keeper.journal._changes = None
                await end_without_a_word(warm(service))
            await service.close()

    def forget_state(self) -> None:
        """The catalog is gone: workers must be registered again."""
        for name in ("state.db", "state.db-wal"):
            (self.directory / name).unlink(missing_ok=True)

    async def until(self, condition: Callable[[], Any]) -> None:
        await serve_until(self.engines, condition)

    async def fill(self, service: Driver, engine: FakeEngine, count: int = 5) -> None:
        """Register worker 1 and let it store `count` blocks."""
        replay = engine.replay_endpoint
        add_worker(service, kv_events_endpoint=engine.endpoint, replay_endpoint=replay)
        await self.until(engine.has_subscriber)
        for number in range(count):
            engine.publish(batch(number))
        await self.until(lambda: shown(service) == set(range(count)))


def warm(service: Driver) -> WarmStart:
    assert service.warm_start is not None
    return service.warm_start


async def end_without_a_word(of: WarmStart) -> None:
    assert of._writing is not None
    of._writing.cancel()
    of._writing = None  # as if it had not begun: then there is no last snapshot
    await of.close()


def shown(service: Driver, shift: int = 0) -> set[int]:
    """Blocks that any rank is credited with."""
    index = service.core.registry.index(SCOPE)
    if index is None:
        return set()
    return {n for n in range(40) if index.find_matches(block_hashes(tokens(n + shift), 16)).rows()}


def recalls(service: Driver) -> dict[str, int]:
    found = dict(warm(service).snapshots.rejected)
    for _, tallies in service.core.registry.tallied():
        found.update(tallies.recalls)
    return found


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[Restarts]:
    made = Restarts(tmp_path / "state")
    yield made
    made.context.destroy(linger=0)


async def test_an_engine_that_does_not_answer(restarts: Restarts) -> None:
    engine = restarts.engine()
    async with restarts.live() as service:
        await restarts.fill(service, engine=engine)
    async with restarts.live(replay_silence_s=0.2, replay_timeout_s=1.0) as service:
        engine.is_mute = True
        await restarts.until(lambda: recalls(service) == {"deadline": 1})
        assert shown(service) == set()
        assert service.ready().waiting_for == []


async def test_without_a_replay_endpoint(restarts: Restarts) -> None:
    engine = restarts.engine()
    async with restarts.live() as service:
        add_worker(service, kv_events_endpoint=engine.endpoint)
        await restarts.until(engine.has_subscriber)
        engine.publish(batch(0))
        await restarts.until(lambda: shown(service) == {0})
    async with restarts.live() as service:
        await restarts.until(engine.has_subscriber)
        await restarts.until(lambda: warm(service).unproven == 1 and not warm(service)._waiting)
        assert service.ready().waiting_for == [], "it may be silent for hours"
        assert shown(service) == set()
        engine.publish(batch(1))
        await restarts.until(lambda: shown(service) == {0, 1})


async def test_a_worker_that_moved_begins_anew(restarts: Restarts) -> None:
    engine, other = restarts.engine(), restarts.engine()
    async with restarts.live() as service:
        await restarts.fill(service, engine=engine)
    restarts.forget_state()
    async with restarts.live() as service:
        add_worker(
            service,
            kv_events_endpoint=other.endpoint,
            replay_endpoint=engine.replay_endpoint,
        )
        await restarts.until(lambda: "other_endpoint" in recalls(service))
        assert shown(service) == set()


async def test_what_nobody_claimed_goes_into_the_next_snapshot_too(restarts: Restarts) -> None:
    engine = restarts.engine()
    async with restarts.live() as service:
        await restarts.fill(service, engine=engine)
    restarts.forget_state()
    async with restarts.live() as service:
        assert len(warm(service).snapshots._entries) == 1
        assert await warm(service).write()
    async with restarts.live() as service:
        replay = engine.replay_endpoint
        add_worker(service, kv_events_endpoint=engine.endpoint, replay_endpoint=replay)
        await restarts.until(lambda: shown(service) == set(range(5)))


async def test_what_is_unproven_goes_into_the_next_snapshot_too(restarts: Restarts) -> None:
    engine = restarts.engine()
    async with restarts.live() as service:
        await restarts.fill(service, engine=engine)
    async with restarts.live(kill=True) as service:
        snapshots = warm(service).snapshots
        engine.is_mute = True
        await restarts.until(lambda: any(s.is_unproven for s in service.core.registry.streams()))
        assert await warm(service).write()
        assert snapshots.ranks == 1
        assert snapshots.blocks == 5
    async with restarts.live() as service:
        engine.is_mute = False
        await restarts.until(lambda: shown(service) == set(range(5)))


async def test_a_damaged_file_is_reported_and_costs_the_warmth_only(restarts: Restarts) -> None:
    engine = restarts.engine()
    async with restarts.live() as service:
        await restarts.fill(service, engine=engine)
    path = restarts.directory / NAME
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    async with restarts.live() as service:
        assert warm(service).snapshots.damage == {"frame": 1}
        await restarts.until(engine.has_subscriber)
        engine.publish(batch(5))  # the gap before it makes the stream ask
        await restarts.until(lambda: shown(service) == set(range(6)))
        assert engine.requests[-1] == 0, "as if there had been no snapshot"


async def test_a_full_disk_loses_the_snapshot_and_nothing_else(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = restarts.engine()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with restarts.live() as service:
        await restarts.fill(service, engine)
        assert await warm(service).write()
        good = (restarts.directory / NAME).read_bytes()
        engine.publish(batch(5))
        await restarts.until(lambda: 5 in shown(service))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            assert not await warm(service).write()
        snapshots = warm(service).snapshots
        assert snapshots.failures == {"disk_full": 1}
        assert (restarts.directory / NAME).read_bytes() == good
        await restarts.until(lambda: not (restarts.directory / NEW).exists())
        engine.publish(batch(6))
        await restarts.until(lambda: 6 in shown(service))
        assert await warm(service).write()
        assert snapshots.ranks == 1


async def test_ranks_beyond_the_limit_are_left_out(restarts: Restarts) -> None:
    engines = [restarts.engine(), restarts.engine()]
    async with restarts.live(index_snapshot_bytes_max=500) as service:
        for number, engine in enumerate(engines, 1):
            replay = engine.replay_endpoint
            add_worker(service, number, kv_events_endpoint=engine.endpoint, replay_endpoint=replay)
            await restarts.until(engine.has_subscriber)
            for block in range(5):
                engine.publish(batch(10 * number + block))
        await restarts.until(lambda: len(shown(service)) == 10)
        assert await warm(service).write()
        snapshots = warm(service).snapshots
        assert snapshots.left_out == {"no_room": 1}
        assert snapshots.ranks == 1
        assert not await warm(service).write(), "nothing has moved"


async def test_off_means_neither_written_nor_read(restarts: Restarts) -> None:
    engine = restarts.engine()
    async with restarts.live() as service:
        await restarts.fill(service, engine=engine)
    written = (restarts.directory / NAME).read_bytes()
    async with restarts.live(index_snapshot_interval_s=0.0, kill=False) as service:
        assert service.warm_start is None
        assert "index_snapshot" not in service.ready().waiting_for
    assert (restarts.directory / NAME).read_bytes() == written
