"""Workers that publish their load where they publish their events."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from indexer.types import WorkerRank
from select_service.edge import load_topic
from select_service.edge.load_topic import LoadTopic
from select_service.types.admission import WorkerMetrics
from tests.coroutines import within
from tests.select_service.edge.serving import add_worker, app_client
from tests.wait import until

PACK = msgspec.msgpack.encode


class LoadReceiver:
    """A topic and what it handed on."""

    def __init__(self, **bounds: int) -> None:
        self.taken: list[tuple[int, WorkerMetrics]] = []
        self.topic = LoadTopic(
            lambda worker_id, metrics: self.taken.append((worker_id, metrics)), **bounds
        )

    def receive(self, *frames: bytes, rank: int = 0) -> None:
        stream: Any = SimpleNamespace(rank=WorkerRank(7, rank))
        self.topic.receive(stream, frames)

    async def settled(self) -> list[tuple[int, dict[int, float | None]]]:
        await until(lambda: bool(self.taken))
        return [
            (worker_id, {one.dp_rank: one.kv_used_blocks for one in reported.ranks})
            for worker_id, reported in self.taken
        ]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (PACK({"kv_used_blocks": 5}), {1: 5.0}),
        (b'{"kv_used_blocks": 5.5, "surprise": [1]}', {1: 5.5}),
        (PACK({"dp_rank": 3, "kv_used_blocks": "5"}), {3: 5.0}),
        (
            PACK({"ranks": [{"dp_rank": 0, "kv_used_blocks": 1}, {"num_requests_waiting": 2}]}),
            {0: 1.0, 1: None},
        ),
    ],
)
async def test_both_forms_and_whatever_else_is_said(
    payload: bytes, expected: dict[int, float | None]
) -> None:
    receiver = LoadReceiver()
    receiver.receive(b"kv_metrics", payload, rank=1)
    assert await receiver.settled() == [(7, expected)]
    assert (receiver.topic.received, receiver.topic.bad) == (1, 0)


async def test_only_the_latest_of_each_rank_is_taken_in() -> None:
    receiver = LoadReceiver()
    for number in range(1000):
        report = {"kv_used_blocks": number}
        receiver.receive(b"kv_metrics", struct.pack(">q", 1), PACK(report), rank=number % 2)
    assert receiver.taken == []
    assert await receiver.settled() == [(7, {0: 998.0, 1: 999.0})]


@pytest.mark.parametrize(
    "frames",
    [
        (b"kv_metrics",),
        (b"kv_metrics", b""),
        (b"kv_metrics", b"\xc1"),
        (b"kv_metrics", b"{"),
        (b"kv_metrics", PACK([1, 2])),
        (b"kv_metrics", PACK({"kv_used_blocks": -1})),
        (b"kv_metrics", PACK({"dp_rank": -1})),
        (b"kv_metrics", b'{"ranks":' * 5000),
    ],
)
async def test_what_nobody_understands_is_counted(frames: tuple[bytes, ...]) -> None:
    receiver = LoadReceiver()
    receiver.receive(*frames)
    assert (receiver.topic.received, receiver.topic.bad) == (1, 1)
    receiver.topic.close()
    assert receiver.taken == []


@within(app_client)
async def test_over_a_real_socket_and_events_go_on(client: Any, service: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        add_worker(service, kv_events_endpoint=f"tcp://127.0.0.1:{port}", total_kv_blocks=100)
        stream = service.core.registry.streams()[0]
        events = PACK([0.0, [["AllBlocksCleared"]]])

        def say() -> bool:
            publisher.send_multipart([b"kv_metrics", PACK({"kv_used_blocks": 77})])
            publisher.send_multipart([b"", struct.pack(">q", say_number[0]), events])
            say_number[0] += 1
            reports = service.core.admission_controller.reports.by_worker.get(1, {})
            return 0 in reports and stream.tallies.batches > 0

        say_number = [0]
        await until(say)
        reported = service.core.admission_controller.reports.by_worker[1][0].metrics
        assert reported.kv_used_blocks == 77
        assert not stream.tallies.bad_messages
        assert stream.lost_batches == 0, "reports have no part in the sequence"


@pytest.mark.parametrize("form", ["msgpack", "json"])
async def test_a_message_of_endless_ranks_is_not_read(form: str) -> None:
    """Eight megabytes of empty ranks were as many objects, and seconds in which nobody else ran."""
    receiver = LoadReceiver(bytes_max=600, ranks_max=64)
    one, encode = {"dp_rank": 1}, (PACK if form == "msgpack" else msgspec.json.encode)

    def of(count: int, **more: str) -> bytes:
        return encode({"ranks": [{}] * (count - 1) + [one], **more})

    receiver.receive(b"kv_metrics", of(64))
    receiver.receive(b"kv_metrics", of(65))  # more than a worker may have
    assert (receiver.topic.received, receiver.topic.bad) == (2, 1)
    size = len(of(1, surprise=""))
    receiver.receive(b"kv_metrics", of(1, surprise="x" * (500 - size)))
    assert receiver.topic.bad == 1
    receiver.receive(b"kv_metrics", of(1, surprise="x" * 601))
    assert receiver.topic.bad == 2
    assert await receiver.settled() == [(7, {0: None, 1: None})]


@pytest.mark.parametrize(
    "payload",
    [
        b"\x81\xa5ranks\xdd\x7f\xff\xff\xff" + b"\x80" * 1000,
        b"\xdf\x7f\xff\xff\xff" + b"\xa1a\x01" * 1000,
        b"\xde\x00\x41" + b"".join(b"\xa2%02d\x01" % number for number in range(65)),
        b'{"ranks": [' + b",".join([b"{}"] * 1000) + b"]}",
    ],
)
def test_what_announces_too_much_is_refused_before_it_is_read(
    payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_topic, "_from_msgpack", None)  # whoever reads on would fail
    monkeypatch.setattr(load_topic, "_from_json", None)
    receiver = LoadReceiver(ranks_max=64)
    receiver.receive(b"kv_metrics", payload)
    assert receiver.topic.bad == 1


async def test_ranks_inside_ranks_are_not_read() -> None:
    receiver = LoadReceiver()
    inner = {"ranks": [{"dp_rank": number} for number in range(3)], "kv_used_blocks": 2}
    receiver.receive(b"kv_metrics", PACK({"ranks": [inner]}))
    assert await receiver.settled() == [(7, {0: 2.0})]


async def test_ranks_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_topic, "RANKS_MAX", 2)
    receiver = LoadReceiver()
    for rank in (0, 1, 1, 2):
        receiver.receive(b"kv_metrics", PACK({"dp_rank": rank}))
    assert receiver.topic.left_out == 1
    assert await receiver.settled() == [(7, {1: None, 2: None})]
