"""The replica plane behind its HTTP API: bounds on peers and snapshots, hostile words."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from select_service.core.replication.checksum import is_checked, with_checksum
from select_service.core.replication.dynamo_events import TOPIC
from select_service.core.replication.message_codec import decode_part
from select_service.core.replication.messages import (
    CACHED_TOKENS_TOPIC,
    OWN_TOPIC,
    SESSIONS_TOPIC,
    SnapshotEnd,
    SnapshotHead,
)
from select_service.edge.dump_stream import StreamCut
from select_service.edge.replication.plane import ENDPOINT_CHARS_MAX
from select_service.edge.replication.pull import Frames
from select_service.errors import TooManySnapshots
from select_service.types import ReservationRequest
from tests import wait
from tests.coroutines import within
from tests.effort import examples
from tests.live.ports import free_port
from tests.select_service.edge.serving import PROMPT, add_worker, app_client

PEER = "tcp://127.0.0.1:9"
SNAPSHOT = "/replica_sync/snapshot"


async def register(client: httpx.AsyncClient, endpoint: str) -> httpx.Response:
    return await client.post("/replica_sync/register_peer", json={"endpoint": endpoint})


async def test_no_more_peers_than_allowed() -> None:
    async with app_client(replica_sync_port=free_port(), replica_peers_max=1) as (client, _):
        assert (await register(client, PEER)).status_code == 201
        assert (await register(client, PEER)).status_code == 200
        refused = await register(client, "tcp://127.0.0.1:10")
        assert (refused.status_code, refused.json()["code"]) == (409, "too_many_replica_peers")
        assert (await client.get("/replica_sync/peers")).json() == [PEER]


async def test_a_peer_is_no_longer_than_anything_that_can_be_connected_to() -> None:
    """All of them are kept, written down and listed: each may have been as long as a body."""
    async with app_client(replica_sync_port=free_port()) as (client, _):
        longest = "tcp://" + "h" * (ENDPOINT_CHARS_MAX - 8) + ":9"
        assert (await register(client, longest)).status_code == 201
        refused = await register(client, longest.replace(":9", "h:9"))
        assert (refused.status_code, refused.json()["code"]) == (400, "replica_peer_refused")
        assert str(ENDPOINT_CHARS_MAX) in refused.json()["details"]["reason"]
        assert len(refused.content) < ENDPOINT_CHARS_MAX
        assert (await client.get("/replica_sync/peers")).json() == [longest]


@within(app_client)
async def test_a_snapshot_without_replica_sync(client: httpx.AsyncClient) -> None:
    answer = await client.get(SNAPSHOT)
    assert (answer.status_code, answer.json()["code"]) == (409, "replica_sync_disabled")


async def test_a_snapshot_holds_what_is_booked() -> None:
    async with app_client(replica_sync_port=free_port()) as (client, service):
        add_worker(service)
        for number in range(3):
            service.reserve(ReservationRequest(reservation_id=str(number), worker_id=1, **PROMPT))
        answer = await client.get(SNAPSHOT)
        assert answer.headers["content-type"] == "application/octet-stream"
        frames = list(Frames(9999).feed(answer.content))
        assert all(is_checked(frame) for frame in frames)
        head, *parts, end = [decode_part(frame) for frame in frames]
        assert isinstance(head, SnapshotHead)
        assert end == SnapshotEnd(3)
        assert {getattr(part, "reservation_id", None) for part in parts} >= {"0", "1", "2"}


async def test_no_more_snapshots_at_one_time_than_allowed() -> None:
    chosen = {"replica_sync_port": free_port(), "replica_snapshots_max": 1}
    async with app_client(**chosen) as (client, service):
        plane = service.replica_plane()
        half = plane.snapshot()
        assert await anext(aiter(half))
        refused = await client.get(SNAPSHOT)
        assert (refused.status_code, refused.json()["code"]) == (503, "too_many_snapshots")
        assert [piece async for piece in half] == []
        assert (await client.get(SNAPSHOT)).status_code == 200
        assert plane.snapshots == {"complete": 2, "cut_off": 0, "timeout": 0, "refused": 1}
        asked = [plane.snapshot()]  # many may ask in one turn, and begin to read later
        with pytest.raises(TooManySnapshots):
            plane.snapshot()
        asked.clear()  # nobody has read it
        plane.snapshot()


async def test_a_snapshot_ends_when_nobody_of_ours_would_listen_any_more() -> None:
    async with app_client(replica_sync_port=free_port()) as (client, service):
        add_worker(service)
        plane = service.replica_plane()
        blocks = list(range(4_000))
        for number in range(10):
            service.reserve(
                ReservationRequest(
                    reservation_id=str(number),
                    worker_id=1,
                    block_hashes=blocks,
                    sequence_hashes=blocks,
                    isl_tokens=64_000,
                )
            )
        pieces = plane.snapshot()
        assert await anext(aiter(pieces))
        plane._clock = lambda: 1e12
        with pytest.raises(StreamCut):
            assert [piece async for piece in pieces]
        assert plane.snapshots["timeout"] == 1
        assert (await client.get("/health")).status_code == 200


EVENT = {
    "model_name": "default",
    "tenant_id": "default",
    "block_size": 16,
    "event": {
        "request_id": "x",
        "worker": {"worker_id": 1, "dp_rank": 0},
        "data": {"AddRequest": {"token_sequence": [1, 2], "track_prefill_tokens": True}},
        "router_id": 5,
        "lora_name": None,
    },
    "select_service": {"epoch": 1, "seq": 1},
}
BEAT = {"type": "heartbeat", "router_id": 5, "epoch": 1, "seq": 0, "live": 0, "digest": 0}
SAID = {"type": "said", "router_id": 5, "epoch": 1, "seq": 1, "items": []}
FOUND = {
    "type": "cached_tokens",
    "router_id": 5,
    "epoch": 1,
    "number": 1,
    "reports": [["x", 1 << 60], ["y", 0]],
}
SESSIONS = {
    "type": "sessions",
    "router_id": 5,
    "epoch": 1,
    "number": 2,
    "sessions": [["default", "default", "s", 1, 0]],
}
NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
)


def _with(value: Any, path: tuple[str, ...], nonsense: object) -> Any:
    if not path:
        return nonsense
    return {**value, path[0]: _with(value[path[0]], path[1:], nonsense)}


def _paths(value: object) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [()]
    return [(), *((key, *rest) for key, below in value.items() for rest in _paths(below))]


SPOKEN = [
    (TOPIC, EVENT),
    (OWN_TOPIC, BEAT),
    (OWN_TOPIC, SAID),
    (CACHED_TOKENS_TOPIC, FOUND),
    (SESSIONS_TOPIC, SESSIONS),
]


@st.composite
def _garbled(draw: st.DrawFn) -> list[bytes]:
    topic, message = draw(st.sampled_from(SPOKEN))
    payload = _with(message, draw(st.sampled_from(_paths(message))), draw(NONSENSE))
    encoded = msgspec.msgpack.encode(payload)
    return [
        topic,
        encoded[: draw(st.integers(0, len(encoded)))] if draw(st.booleans()) else encoded,
    ]


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_garbled(), min_size=40, max_size=80))
def test_no_word_of_a_peer_is_a_fault(messages: list[list[bytes]]) -> None:
    async def run() -> None:
        async with app_client(replica_sync_port=free_port()) as (client, service):
            add_worker(service)
            plane = service.replica_plane()
            for frames in messages:
                plane._receive(PEER, frames)
            for _ in range(5):
                plane.carry_out(service.core.replica_operations.tick(1e9)[1])
            service.core.check()
            assert (await client.get("/loads")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200

    wait.run(run())


@pytest.mark.parametrize(
    "frames",
    [[], [TOPIC], [TOPIC, b"", b""], [b"", b""], [TOPIC + b".x", b"\x80"], [TOPIC, b"\xc1"]],
)
async def test_what_is_no_message_is_counted(frames: list[bytes]) -> None:
    async with app_client(replica_sync_port=free_port()) as (_, service):
        plane = service.replica_plane()
        plane._receive(PEER, frames)
        assert (plane.malformed, plane.received) == (1, 0)
        await asyncio.sleep(0)


async def test_what_comes_garbled_is_dropped_counted_and_told_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with app_client(replica_sync_port=free_port()) as (client, service):
        plane = service.replica_plane()
        right = with_checksum(msgspec.msgpack.encode(BEAT))
        wrong = right.replace(b"digest\x00", b"digest\x01")
        for _ in range(3):
            plane._receive(PEER, [OWN_TOPIC, wrong])
        assert (plane.garbled, plane.malformed, plane.received) == (3, 0, 0)
        assert service.replica_status() == []
        plane._receive(PEER, [OWN_TOPIC, right])
        (row,) = service.replica_status()
        assert row.router_id == BEAT["router_id"]
        plane._receive(PEER, [OWN_TOPIC, msgspec.msgpack.encode(BEAT | {"number": 2})])
        text = (await client.get("/metrics")).text
        assert 'replica_refused_total{reason="garbled"} 4.0' in text
        clock = plane._clock
        plane._clock = lambda: clock() + 61.0
        plane._receive(PEER, [OWN_TOPIC, wrong])
    first, second = (one.getMessage() for one in caplog.records if "garbled" in one.getMessage())
    assert f"of replica {PEER} came garbled and was dropped (1 since the last line)" in first
    assert "(3 since the last line)" in second


async def test_all_that_is_published_has_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    async with app_client(replica_sync_port=free_port()) as (_, service):
        plane = service.replica_plane()
        monkeypatch.setattr(plane.publisher, "publish", lambda _, payload: sent.append(payload))
        add_worker(service)
        request = ReservationRequest(reservation_id="r", worker_id=1, dp_rank=0, **PROMPT)
        service.reserve(request)
        plane.carry_out(service.core.replica_operations.tick(1e9)[1])
        plane.leave()
    assert len(sent) > 3
    assert all(map(is_checked, sent))
