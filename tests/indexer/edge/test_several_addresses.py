"""Names with several addresses, some of them dead: events and replays come from a living one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from indexer.edge import endpoint_follower
from tests.coroutines import run_by
from tests.indexer.edge.house import IMPATIENT, House, batch, play
from tests.indexer.edge.test_endpoint_follower import Scene, named

DEAD, ALIVE, OTHER = "127.0.0.2", "127.0.0.1", "127.0.0.3"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_S", 0.01)
    monkeypatch.setattr(endpoint_follower, "ASK_AFTER_MAX_S", 0.02)


@run_by(play, "context")
async def test_a_dead_first_address_makes_nobody_deaf(house: House) -> None:
    scene = Scene(house, engine=[DEAD, ALIVE])
    engine = house.engine()
    stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint))
    await house.until(engine.has_subscriber)
    engine.publish(batch(0))
    engine.publish(batch(1), is_lost=True)
    engine.publish(batch(2))
    await house.until(lambda: stream.cursor.last == 2)
    assert all(house.holds(stream, number) for number in range(3))
    assert stream.lost_batches == 0
    scene.addresses.close()


@run_by(play, "context")
async def test_when_the_living_one_dies_another_is_found(house: House) -> None:
    scene = Scene(house, engine=[DEAD, ALIVE, OTHER])
    engine = house.engine()
    ports = engine.ports
    stream = scene.follow(named(engine.endpoint))
    for number, host in enumerate((OTHER, ALIVE, DEAD)):
        await house.until(engine.has_subscriber)
        engine.publish(batch(number, ts=1_000.0 * number))
        await house.until(lambda: house.holds(stream, number))
        engine.close()
        house.engines.remove(engine)
        engine = await house.reborn(ports, host)
    scene.addresses.close()


@run_by(play, "context")
async def test_who_accepts_connections_and_is_no_engine_is_left(house: House) -> None:
    scene = Scene(house, engine=[DEAD, ALIVE])
    engine = house.engine()
    with socket.create_server((DEAD, engine.ports[0])):  # nothing is ever said there
        stream = scene.follow(named(engine.endpoint))
        await house.until(engine.has_subscriber)
        engine.publish(batch(0))
        await house.until(lambda: house.holds(stream, 0))
    scene.addresses.close()


def test_a_mute_replay_endpoint_is_followed_by_another_address(context: Any) -> None:
    async def scenario(house: House) -> None:
        scene = Scene(house, engine=[ALIVE], replays=[DEAD, ALIVE])
        engine = house.engine()
        with socket.create_server((DEAD, engine.ports[1])) as mute:
            stream = scene.follow(named(engine.endpoint), named(engine.replay_endpoint, "replays"))
            await house.until(engine.has_subscriber)
            engine.publish(batch(0))
            engine.publish(batch(1), is_lost=True)
            engine.publish(batch(2))
            await house.until(lambda: stream.cursor.last == 2)
            assert house.holds(stream, 1)
            mute.setblocking(False)
            mute.accept()[0].close()
        scene.addresses.close()

    play(context, scenario, IMPATIENT)
