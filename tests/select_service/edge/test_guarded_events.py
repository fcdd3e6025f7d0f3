"""Engines that encrypt: KV events and replays under CURVE, by the key of a record or of all."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import pytest
import zmq

from indexer.edge.curve import KeyPair
from select_service.edge.driver.driver import Driver
from tests.live.relay import Relay
from tests.select_service.edge.serving import add_worker, listening

ENGINE, OTHER = KeyPair.new(), KeyPair.new()


def batch(number: int) -> list[bytes]:
    """One stored block."""
    stored = ["BlockStored", [1000 + number], None, list(range(16)), 16]
    return [b"kv", struct.pack(">Q", number), msgspec.msgpack.encode([0.0, [stored], 0])]


class EncryptedEngine:
    """A publisher and its replay, both under one key."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events, self.endpoint = self._bind(zmq.PUB)
        self.replay, self.replay_endpoint = self._bind(zmq.ROUTER)

    def _bind(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        server = self._context.socket(kind)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, ENGINE.secret.encode())
        server.setsockopt(zmq.LINGER, 0)
        return server, f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"

    def answer_replays(self, last: int) -> int:
        """Answer who asks with all up to a batch; how many asked."""
        asked = 0
        while self.replay.poll(0):
            asked += 1
            identity, _, start = self.replay.recv_multipart()
            for number in range(struct.unpack(">Q", start)[0], last + 1):
                self.replay.send_multipart([identity, b"", *batch(number)[1:]])
            self.replay.send_multipart([identity, b"", b"\xff" * 8, b""])
        return asked

    def close(self) -> None:
        self._context.destroy(linger=0)


def blocks(service: Driver) -> int:
    return sum(index.stats.blocks for _, index in service.core.registry.indexes())


@pytest.mark.parametrize("of", ["record", "flag"])
async def test_events_and_replays_of_an_engine_that_encrypts(of: str) -> None:
    engine = EncryptedEngine()
    events, replay = Relay(engine.endpoint), Relay(engine.replay_endpoint)
    record: dict[str, Any] = {
        "kv_events_endpoint": await events.start(),
        "replay_endpoint": await replay.start(),
    }
    settings: dict[str, Any] = {}
    if of == "record":
        record["curve_public_key"] = ENGINE.public
    else:
        settings["curve_worker_key"] = ENGINE.public
    async with listening(**settings) as (_, service, _):
        add_worker(service, **record)
        asked = 0
        while not blocks(service) or not asked:  # batch 0 is lost to who subscribes later
            engine.events.send_multipart(batch(3))
            asked += engine.answer_replays(3)
            await asyncio.sleep(0.01)
        assert b"BlockStored" not in events.seen + replay.seen
        assert b"CURVE" in events.seen
        assert b"CURVE" in replay.seen
        if of == "record":
            (shown,) = service.workers()
            assert shown.curve_public_key == ENGINE.public
    await events.stop()
    await replay.stop()
    engine.close()


@pytest.mark.parametrize("key", [None, OTHER.public], ids=["none", "another"])
async def test_who_has_not_the_key_is_not_believed(key: str | None) -> None:
    engine = EncryptedEngine()
    async with listening() as (_, service, _):
        fields: dict[str, Any] = {} if key is None else {"curve_public_key": key}
        add_worker(service, kv_events_endpoint=engine.endpoint, **fields)
        assert service.sources.listeners is not None
        for _ in range(20):
            engine.events.send_multipart(batch(0))
            await asyncio.sleep(0.01)
        (stream,) = service.core.registry.streams()
        link = service.sources.listeners.link(stream)
        assert link is not None
        assert not link.is_connected
        assert blocks(service) == 0
        # the record is mended: another key is another source
        add_worker(service, kv_events_endpoint=engine.endpoint, curve_public_key=ENGINE.public)
        while not blocks(service):
            engine.events.send_multipart(batch(0))
            await asyncio.sleep(0.01)
    engine.close()


@pytest.mark.parametrize("key", ["", "short", "#" * 40])
async def test_a_key_that_is_none_is_refused(key: str) -> None:
    async with listening() as (_, service, _):
        with pytest.raises(msgspec.ValidationError, match="curve_public_key"):
            add_worker(service, curve_public_key=key)
