"""Faults that show without a look at events: records, replicas, and how callers behave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import zmq

from select_service.core.replication.dynamo_events import TOPIC
from select_service.core.replication.message_codec import encode_message
from select_service.core.replication.messages import OWN_TOPIC, Heartbeat
from select_service.edge.driver.driver import Driver
from select_service.types import (
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    WorkerSpec,
)
from select_service.types.doctor import PeerLink
from tests.coroutines import run_by
from tests.live.ports import HOST, free_port
from tests.select_service.doctor.ward import BLOCK, Ward, play, prompt

Context = zmq.Context[zmq.Socket[bytes]]
NO_EVENTS = RouterConfig(use_kv_events=False)
STEP_S = 8.0  # a replica that is silent for ten seconds is gone


@run_by(play, "context", config=NO_EVENTS, core={"reservation_ttl_s": 20.0})
async def test_requests_that_outlive_their_reservations(ward: Ward) -> None:
    ward.register(1)
    service = ward.service
    for number in range(12):
        body = {"reservation_id": f"long{number}", "worker_id": 1, "token_ids": prompt(number)}
        service.reserve(msgspec.convert(body, ReservationRequest))
    ward.clock.skipped += 30
    await ward.until(lambda: service.core.counters.reservations_expired == 12)
    for number in range(100):  # most are short, so that more are freed than expire
        await ward.ask(prompt(number))
    assert await ward.codes() == []
    for number in range(4):
        service.free(f"long{number}")
    (finding,) = await ward.examine()
    assert finding.code == "reservations-outlived"
    assert finding.what == "4 reservations were spoken of lately that had expired before"
    assert await ward.pass_time(130) == []


# -- replicas --------------------------------------------------------------------------------------


class Peer:
    """A replica's socket, which says what the test wants."""

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"tcp://{HOST}:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self.socket.close()

    def beat(self, http_port: int = 0) -> None:
        beat = Heartbeat(router_id=5, epoch=1, seq=0, live=0, digest=0, http_port=http_port)
        topic, payload = encode_message(beat)
        assert topic in {TOPIC, OWN_TOPIC}
        self.socket.send_multipart([topic, payload])


def links(ward: Ward) -> list[PeerLink]:
    assert ward.service.replicas is not None
    return ward.service.replicas.subscriptions.links()


async def joined(ward: Ward, peer: str) -> None:
    await ward.until(lambda: peer in {one.peer for one in ward.service.replica_status()})


async def wait_together(ward: Ward, seconds: float, say: Callable[[], None]) -> list[str]:
    """Let time pass while replicas send messages."""
    codes: list[str] = []
    for _ in range(round(seconds / STEP_S)):
        ward.clock.skipped += STEP_S

        def have_spoken() -> bool:
            say()
            return all(link.quiet_s < STEP_S for link in links(ward))

        await ward.until(have_spoken)
        codes = await ward.codes()
    return codes


def replicas(context: Context, scenario: Callable[[Ward], Awaitable[None]]) -> None:
    async def with_a_worker(ward: Ward) -> None:
        ward.register(1)
        await scenario(ward)

    play(context, with_a_worker, config=NO_EVENTS, replica_sync_port=free_port())


@run_by(replicas, "context")
async def test_replicas_that_come_and_go_are_no_fault(ward: Ward) -> None:
    for _ in range(2):
        port = free_port()
        other = Driver(NO_EVENTS, replica_sync_port=port, clock=ward.clock)
        await other.start()
        spec = {"worker_id": 1, "endpoint": "http://w1", "block_size": BLOCK}
        other.upsert_worker(msgspec.convert(spec, WorkerSpec))
        ward.service.register_peer(f"tcp://{HOST}:{port}")
        await joined(ward, f"tcp://{HOST}:{port}")
        for number in range(4):
            body = {"reservation_id": f"{port}-{number}", "token_ids": prompt(number)}
            await other.select_and_reserve(msgspec.convert(body, SelectAndReserveRequest))
        assert await wait_together(ward, 70, lambda: None) == []
        await other.close()
        ward.service.deregister_peer(f"tcp://{HOST}:{port}")
        assert await ward.pass_time(60) == []
