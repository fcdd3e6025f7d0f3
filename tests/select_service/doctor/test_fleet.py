"""Faults that show without a look at events: records, replicas, and how callers behave."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import zmq

from select_service.core.replication.dynamo_events import TOPIC
from select_service.core.replication.message_codec import encode_message
from select_service.core.replication.messages import OWN_TOPIC, Heartbeat
from select_service.edge.driver.driver import Driver
from select_service.errors import NoSchedulableWorker
from select_service.types import (
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    WorkerSpec,
)
from select_service.types.admission import AdmissionChange, RankMetrics, WorkerMetrics
from select_service.types.doctor import PeerLink
from tests.coroutines import run_by
from tests.live.ports import HOST, free_port
from tests.select_service.doctor.ward import BLOCK, Ward, play, prompt

Context = zmq.Context[zmq.Socket[bytes]]
NO_EVENTS = RouterConfig(use_kv_events=False)
STEP_S = 8.0  # a replica that is silent for ten seconds is gone


@run_by(play, "context", config=NO_EVENTS)
async def test_a_worker_that_lacks_something(ward: Ward) -> None:
    ward.register(1)
    ward.register(2, endpoint=None)
    assert await ward.codes() == []  # perhaps somebody is about to complete it
    await ward.pass_time(10)
    (finding,) = await ward.examine()
    assert finding.code == "worker-incomplete"
    assert finding.subject.worker_id == 2
    assert finding.what == "endpoint is required"
    assert finding.since_s >= 10
    ward.register(2)
    assert await ward.codes() == []


@run_by(play, "context", config=NO_EVENTS)
async def test_a_worker_whose_blocks_differ_from_its_scopes(ward: Ward) -> None:
    ward.register(1)
    ward.register(2, block_size=2 * BLOCK)
    await ward.pass_time(10)
    (finding,) = await ward.examine()
    assert finding.code == "worker-incomplete"
    assert "existing=16 requested=32" in finding.what
    ward.service.delete_worker(2)
    assert await ward.codes() == []


@run_by(play, "context", config=NO_EVENTS)
async def test_no_worker_at_all(ward: Ward) -> None:
    assert await ward.pass_time(50) == []  # they register after us
    assert await ward.pass_time(20) == ["no-workers"]
    ward.register(1)
    assert await ward.codes() == []


@run_by(play, "context", config=NO_EVENTS)
async def test_requests_for_a_model_by_another_name(ward: Ward) -> None:
    ward.register(1, model_name="org/llama")

    async def ask(name: str, times: int) -> None:
        for number in range(times):
            with contextlib.suppress(NoSchedulableWorker):
                await ward.ask(prompt(number), model_name=name)

    await ask("Llama", 3)
    assert await ward.codes() == []  # somebody's slip
    await ask("Llama", 3)
    (finding,) = await ward.examine()
    assert finding.code == "unknown-model"
    assert finding.subject.model_name == "Llama"
    await ask("org/llama", 9)
    assert await ward.pass_time(130) == []


@run_by(play, "context", config=NO_EVENTS, core={"reservation_ttl_s": 20.0})
async def test_callers_that_never_free(ward: Ward) -> None:
    ward.register(1)
    for number in range(12):
        body = {"reservation_id": f"kept{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
    await ward.codes()
    ward.clock.skipped += 30
    await ward.until(lambda: ward.service.core.counters.reservations_expired == 12)
    assert await ward.codes() == ["reservations-expire"]
    for number in range(30):
        await ward.ask(prompt(number))
    assert await ward.pass_time(130) == []


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


@run_by(play, "context", config=NO_EVENTS)
async def test_a_worker_that_tells_of_its_load_no_more(ward: Ward) -> None:
    service = ward.service
    for worker_id in (1, 2, 3):
        ward.register(worker_id)
    for worker_id in (1, 2):
        service.report(worker_id, WorkerMetrics(ranks=[RankMetrics(num_requests_waiting=0)]))
    assert await ward.pass_time(8) == []
    service.report(1, WorkerMetrics(ranks=[RankMetrics(num_requests_waiting=0)]))
    ward.clock.skipped += 4
    await ward.until(lambda: [*service.core.admitting.reports.stale()])
    assert await ward.codes() == []  # nobody judges by it
    service.change_admission(AdmissionChange(policy="slo-shed"))
    (finding,) = await ward.examine()
    assert (finding.code, finding.subject.worker_id) == ("load-reports-stale", 2)
    assert finding.what.startswith("it last told of its load 1")
    service.report(2, WorkerMetrics(ranks=[RankMetrics(num_requests_waiting=0)]))
    assert await ward.codes() == []


@run_by(play, "context", config=NO_EVENTS)
async def test_a_wall_clock_that_is_set(ward: Ward) -> None:
    ward.register(1)
    off = [0.0]
    ward.service.doctor()._wall_clock = lambda: ward.clock.wall() + off[0]
    assert await ward.pass_time(20) == []
    off[0] = -3600.0
    (finding,) = await ward.examine()
    assert (finding.code, finding.what) == ("clock-set", "our wall clock went back by 3600 s")
    assert await ward.pass_time(110) == ["clock-set"]
    assert await ward.pass_time(20) == []
    off[0] += 2.0  # slewed, or as much as a busy machine is late between two looks
    assert await ward.pass_time(20) == []
    off[0] += 3600.0
    (finding,) = await ward.examine()
    assert finding.what == "our wall clock went forward by 3600 s"


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
    """Let time pass while replicas are heard."""
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
async def test_a_replica_that_cannot_be_reached(ward: Ward) -> None:
    port = free_port()
    ward.service.register_peer(f"tcp://{HOST}:{port}")
    assert await ward.pass_time(20) == []
    await ward.pass_time(20)
    (finding,) = await ward.examine()
    assert finding.code == "replica-unreachable"
    assert finding.subject.peer == f"tcp://{HOST}:{port}"
    ward.service.deregister_peer(f"tcp://{HOST}:{port}")
    assert await ward.codes() == []


@run_by(replicas, "context")
async def test_a_replica_that_never_speaks(ward: Ward, *, context: Context) -> None:
    with contextlib.closing(Peer(context)) as peer:
        ward.service.register_peer(peer.endpoint)
        await ward.until(lambda: links(ward)[0].is_connected and peer.socket.poll(0))
        assert await ward.pass_time(30) == []
        assert await ward.pass_time(20) == ["replica-silent"]
        peer.beat()
        await ward.until(lambda: links(ward)[0].quiet_s < 1)
        assert await ward.codes() == []


@run_by(replicas, "context")
async def test_a_replica_whose_snapshot_cannot_be_fetched(ward: Ward, *, context: Context) -> None:
    with contextlib.closing(Peer(context)) as peer:
        nowhere = free_port()
        ward.service.register_peer(peer.endpoint)
        await ward.until(lambda: peer.socket.poll(0))
        assert await wait_together(ward, 40, lambda: peer.beat(nowhere)) == []
        codes = await wait_together(ward, 40, lambda: peer.beat(nowhere))
        assert codes == ["replica-behind"]
        core = ward.service.core
        view = core.replicas.publishers.views[5]
        view.pulled(view.high, ward.clock(), core.limits)  # as if it had been
        view.ask_again_at = None
        assert await ward.codes() == []


@run_by(replicas, "context")
async def test_a_replica_that_knows_other_workers(ward: Ward) -> None:
    port = free_port()
    other = Driver(NO_EVENTS, replica_sync_port=port, clock=ward.clock)
    await other.start()
    try:
        spec = {"worker_id": 2, "endpoint": "http://w2", "block_size": BLOCK}
        other.upsert_worker(msgspec.convert(spec, WorkerSpec))
        ward.service.register_peer(f"tcp://{HOST}:{port}")
        await ward.until(lambda: links(ward)[0].is_connected)
        assert await wait_together(ward, 70, lambda: None) == []  # nothing booked there
        body = {"reservation_id": "r", "token_ids": prompt(1)}
        await other.select_and_reserve(msgspec.convert(body, SelectAndReserveRequest))
        codes = await wait_together(ward, 70, lambda: None)
        assert codes == ["replica-workers-differ"]
        ward.register(2)
        assert await wait_together(ward, 5, lambda: None) == []
    finally:
        await other.close()


@run_by(replicas, "context")
async def test_a_replica_under_our_own_name(ward: Ward) -> None:
    await ward.codes()
    ward.service.core.replicas.counters.namesakes += 1
    assert await ward.codes() == ["replica-namesake"]
    assert await ward.pass_time(130) == []


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
