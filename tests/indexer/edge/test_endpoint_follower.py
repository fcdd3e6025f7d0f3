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
from tests.indexer.edge.house import IMPATIENT, SCOPE, House, batch, housed

DENIED = ["169.254.169.254"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_S", 0.01)
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_MAX_S", 0.02)


class Scene:
    """A house whose engines are known by name."""

    def __init__(self, house: House, **names: list[str]) -> None:
        self.house = house
        self.names = names
        self.asked = 0
        self.refused: list[EndpointRefused] = []
        self.addresses = Addresses(
            replace(EgressSettings(), lookup_cache_s=0.0), look_up=self._look_up
        )
        house.look_up_at(self.addresses)
        house.listeners._on_refused = lambda _, error: self.refused.append(error)

    def _look_up(self, host: str) -> list[str]:
        self.asked += 1
        return self.names[host]

    def follow(self, endpoint: str, replay: str | None = None) -> Any:
        stream = self.house.registry.open_stream(
            SCOPE, WorkerRank(1, 0), worker_ranks=range(1), has_replay=replay is not None
        )
        self.house.listeners.start(stream, endpoint, replay)
        return stream


def named(endpoint: str, name: str = "engine") -> str:
    return endpoint.replace("127.0.0.1", name)


@housed()
async def test_a_name_is_followed_and_asked_for_replays(house: House) -> None:
    scene = Scene(house, engine=["127.0.0.1"])
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint))
    await house.until(engine.has_subscriber)
    await house.mend_a_gap(engine, stream)


@housed()
async def test_a_name_that_leads_nowhere_is_asked_for_again(house: House) -> None:
    scene = Scene(house, engine=[])
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint))
    await house.until(lambda: scene.asked > 1)
    scene.names["engine"] = ["127.0.0.1"]
    await house.until(engine.has_subscriber)
    engine.publish(batch(0))
    await house.until(lambda: house.holds(stream, 0))
    assert not scene.refused


@pytest.mark.parametrize("is_replay", [False, True])
@housed()
async def test_a_name_that_leads_where_nobody_may_go(house: House, is_replay: bool) -> None:
    scene = Scene(house, engine=["127.0.0.1"], bad=DENIED)
    engine = house.engine()
    ends = [named(engine.endpoint), named(engine.replay_endpoint)]
    ends[is_replay] = ends[is_replay].replace("engine", "bad")
    scene.follow(*ends)
    await house.until(lambda: scene.refused)
    assert scene.addresses.refused["resolved"] >= 1
    assert "bad" in str(scene.refused[0])


@housed()
async def test_a_name_that_turns_elsewhere_is_not_followed_there(house: House) -> None:
    scene = Scene(house, engine=["127.0.0.1"])
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint))
    await house.until(engine.has_subscriber)
    engine.publish(batch(0))
    await house.until(lambda: house.holds(stream, 0))
    scene.names["engine"] = DENIED
    ports = house.end(engine)
    await house.until(lambda: scene.addresses.refused["resolved"] > 1)
    heir = await house.reborn(ports)  # where the name led before, and leads no more
    assert not scene.refused, "it was an engine once: it stays, and is asked for again"
    scene.names["engine"] = ["127.0.0.1"]
    await house.until(heir.has_subscriber)
    heir.publish(batch(7, ts=1_000.0))
    await house.until(lambda: house.holds(stream, 7))


@housed()
async def test_an_engine_that_moves_is_found_again(house: House) -> None:
    scene = Scene(house, engine=["127.0.0.3"])  # nobody is there
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint))
    await house.until(lambda: scene.asked > 1)
    scene.names["engine"] = ["127.0.0.1"]
    await house.until(engine.has_subscriber)
    engine.publish(batch(0))
    await house.until(lambda: house.holds(stream, 0))


@housed()
async def test_one_that_is_stopped_is_followed_no_more(house: House) -> None:
    scene = Scene(house, engine=[])
    stream = scene.follow("tcp://engine:1")
    house.registry.close_stream(stream)
    house.listeners.stop(stream)
    asked = scene.asked
    await asyncio.sleep(0.05)
    assert scene.asked <= asked + 1


# -- names with several addresses, some of them dead -----------------------------------------------

DEAD, ALIVE, OTHER = "127.0.0.2", "127.0.0.1", "127.0.0.3"


@housed()
async def test_a_dead_first_address_makes_nobody_deaf(house: House) -> None:
    scene = Scene(house, engine=[DEAD, ALIVE])
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint))
    await house.until(engine.has_subscriber)
    await house.mend_a_gap(engine, stream)


@housed()
async def test_when_the_living_one_dies_another_is_found(house: House) -> None:
    scene = Scene(house, engine=[DEAD, ALIVE, OTHER])
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint))
    for number, host in enumerate((OTHER, ALIVE, DEAD)):
        await house.until(engine.has_subscriber)
        engine.publish(batch(number, ts=1_000.0 * number))
        await house.until(lambda: house.holds(stream, number))
        engine = await house.reborn(house.end(engine), host)


@housed()
async def test_who_accepts_connections_and_is_no_engine_is_left(house: House) -> None:
    scene = Scene(house, engine=[DEAD, ALIVE])
    engine = house.engine()
    with socket.create_server((DEAD, engine.ports[0])):  # nothing is ever said there
        stream = scene.follow(named(engine.endpoint))
        await house.until(engine.has_subscriber)
        engine.publish(batch(0))
        await house.until(lambda: house.holds(stream, 0))


@housed(IMPATIENT)
async def test_a_mute_replay_endpoint_is_followed_by_another_address(house: House) -> None:
    scene = Scene(house, engine=[ALIVE], replays=[DEAD, ALIVE])
    engine = house.engine()
    with socket.create_server((DEAD, engine.ports[1])) as mute:
        stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint, "replays"))
        await house.until(engine.has_subscriber)
        await house.mend_a_gap(engine, stream)
        mute.setblocking(False)
        mute.accept()[0].close()
