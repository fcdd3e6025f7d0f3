"""Streams whose endpoints are names: where they lead, move to, must not lead, and lead in vain."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from msgspec.structs import replace

from indexer.edge import endpoint_follower
from indexer.edge.addresses import Addresses
from indexer.errors import EndpointRefused
from indexer.types import EgressSettings, WorkerRank
from tests.indexer.edge.harness import IMPATIENT, SCOPE, Harness, batch, with_harness

DENIED = ["169.254.169.254"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_S", 0.01)
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_MAX_S", 0.02)


class Scene:
    """A harness whose engines are known by name."""

    def __init__(self, harness: Harness, **names: list[str]) -> None:
        self.harness = harness
        self.names = names
        self.asked = 0
        self.refused: list[EndpointRefused] = []
        self.addresses = Addresses(
            replace(EgressSettings(), lookup_cache_s=0.0), look_up=self._look_up
        )
        harness.look_up_at(self.addresses)
        harness.listeners._on_refused = lambda _, error: self.refused.append(error)

    def _look_up(self, host: str) -> list[str]:
        self.asked += 1
        return self.names[host]

    def follow(self, endpoint: str, replay: str | None = None) -> Any:
        stream = self.harness.registry.open_stream(
            SCOPE, WorkerRank(1, 0), worker_ranks=range(1), has_replay=replay is not None
        )
        self.harness.listeners.start(stream, endpoint, replay)
        return stream


def named(endpoint: str, name: str = "engine") -> str:
    return endpoint.replace("127.0.0.1", name)


@with_harness()
async def test_a_name_is_followed_and_asked_for_replays(harness: Harness) -> None:
    scene = Scene(harness, engine=["127.0.0.1"])
    engine = harness.engine()
    stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint))
    await harness.until(engine.has_subscriber)
    await harness.mend_a_gap(engine, stream)


@with_harness()
async def test_a_name_that_leads_nowhere_is_asked_for_again(harness: Harness) -> None:
    scene = Scene(harness, engine=[])
    engine = harness.engine()
    stream = scene.follow(named(engine.endpoint))
    await harness.until(lambda: scene.asked > 1)
    scene.names["engine"] = ["127.0.0.1"]
    await harness.until(engine.has_subscriber)
    engine.publish(batch(0))
    await harness.until(lambda: harness.holds(stream, 0))
    assert not scene.refused


@pytest.mark.parametrize("is_replay", [False, True])
@with_harness()
async def test_a_name_that_leads_where_nobody_may_go(harness: Harness, is_replay: bool) -> None:
    scene = Scene(harness, engine=["127.0.0.1"], bad=DENIED)
    engine = harness.engine()
    ends = [named(engine.endpoint), named(engine.replay_endpoint)]
    ends[is_replay] = ends[is_replay].replace("engine", "bad")
    scene.follow(*ends)
    await harness.until(lambda: scene.refused)
    assert scene.addresses.refused["resolved"] >= 1
    assert "bad" in str(scene.refused[0])


@with_harness()
async def test_a_name_that_turns_elsewhere_is_not_followed_there(harness: Harness) -> None:
    scene = Scene(harness, engine=["127.0.0.1"])
    engine = harness.engine()
    stream = scene.follow(named(engine.endpoint))
    await harness.until(engine.has_subscriber)
    engine.publish(batch(0))
    await harness.until(lambda: harness.holds(stream, 0))
    scene.names["engine"] = DENIED
    ports = harness.end(engine)
    await harness.until(lambda: scene.addresses.refused["resolved"] > 1)
    heir = await harness.reborn(ports)  # where the name led before, and leads no more
    assert not scene.refused, "it was an engine once: it stays, and is asked for again"
    scene.names["engine"] = ["127.0.0.1"]
    await harness.until(heir.has_subscriber)
    heir.publish(batch(7, ts=1_000.0))
    await harness.until(lambda: harness.holds(stream, 7))


@with_harness()
async def test_an_engine_that_moves_is_found_again(harness: Harness) -> None:
    scene = Scene(harness, engine=["127.0.0.3"])  # nobody is there
    engine = harness.engine()
    stream = scene.follow(named(engine.endpoint))
    await harness.until(lambda: scene.asked > 1)
    scene.names["engine"] = ["127.0.0.1"]
    await harness.until(engine.has_subscriber)
    engine.publish(batch(0))
    await harness.until(lambda: harness.holds(stream, 0))


@with_harness()
async def test_one_that_is_stopped_is_followed_no_more(harness: Harness) -> None:
    scene = Scene(harness, engine=[])
    stream = scene.follow("tcp://engine:1")
    harness.registry.close_stream(stream)
    harness.listeners.stop(stream)
    asked = scene.asked
    await asyncio.sleep(0.05)
    assert scene.asked <= asked + 1


# -- names with several addresses, some of them dead -----------------------------------------------

DEAD, ALIVE, OTHER = "127.0.0.2", "127.0.0.1", "127.0.0.3"


@with_harness()
async def test_a_dead_first_address_makes_nobody_deaf(harness: Harness) -> None:
    scene = Scene(harness, engine=[DEAD, ALIVE])
    engine = harness.engine()
    stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint))
    await harness.until(engine.has_subscriber)
    await harness.mend_a_gap(engine, stream)


@with_harness()
async def test_when_the_living_one_dies_another_is_found(harness: Harness) -> None:
    scene = Scene(harness, engine=[DEAD, ALIVE, OTHER])
    engine = harness.engine()
    stream = scene.follow(named(engine.endpoint))
    for number, host in enumerate((OTHER, ALIVE, DEAD)):
        await harness.until(engine.has_subscriber)
        engine.publish(batch(number, ts=1_000.0 * number))
        await harness.until(lambda: harness.holds(stream, number))
        engine = await harness.reborn(harness.end(engine), host)


@with_harness()
async def test_who_accepts_connections_and_is_no_engine_is_left(harness: Harness) -> None:
    scene = Scene(harness, engine=[DEAD, ALIVE])
    engine = harness.engine()
    with socket.create_server((DEAD, engine.ports[0])):  # nothing is ever said there
        stream = scene.follow(named(engine.endpoint))
        await harness.until(engine.has_subscriber)
        engine.publish(batch(0))
        await harness.until(lambda: harness.holds(stream, 0))


@with_harness(IMPATIENT)
async def test_a_mute_replay_endpoint_is_followed_by_another_address(harness: Harness) -> None:
    scene = Scene(harness, engine=[ALIVE], replays=[DEAD, ALIVE])
    engine = harness.engine()
    with socket.create_server((DEAD, engine.ports[1])) as mute:
        stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint, "replays"))
        await harness.until(engine.has_subscriber)
        await harness.mend_a_gap(engine, stream)
        mute.setblocking(False)
        mute.accept()[0].close()
