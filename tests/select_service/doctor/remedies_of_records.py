"""Faults of records, callers, reports and replicas, and their remedies."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec

from select_service.core.replication.message_codec import encode_message
from select_service.core.replication.messages import Heartbeat
from select_service.edge.driver.driver import Driver
from select_service.errors import NoSchedulableWorker
from select_service.types import Outcome, ReservationRequest, SelectAndReserveRequest, WorkerSpec
from select_service.types.admission import AdmissionChange, RankMetrics, WorkerMetrics
from tests.indexer.encoding import stored
from tests.live.ports import HOST, free_port
from tests.select_service.doctor.remedies import Found, remedy
from tests.select_service.doctor.test_events import UNPOLLED
from tests.select_service.doctor.test_fleet import NO_EVENTS, Peer, links, wait_together
from tests.select_service.doctor.ward import BLOCK, Ward, prompt


@remedy("worker-incomplete", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Register it again with what the reasons name."""
    ward.register(1, endpoint=None)
    ward.register(2)
    assert await ward.codes() == [], "perhaps somebody is about to complete it"
    await ward.pass_time(10)
    await found("endpoint is required", worker_id=1)
    ward.register(1)


@remedy("worker-incomplete", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """One that differs gets a model_name of its own."""
    ward.register(1)
    ward.register(2, is_eagle=True)
    await ward.pass_time(10)
    await found()
    ward.register(2, is_eagle=True, model_name="drafted")


@remedy("worker-incomplete", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Or the others go."""
    ward.register(1)
    ward.register(2, block_size=2 * BLOCK)
    await ward.pass_time(10)
    await found("existing=16 requested=32")
    ward.service.delete_worker(1)


@remedy("worker-incomplete")
async def _(ward: Ward, found: Found) -> None:
    """Its engine publishes no KV events, and its record says so."""
    ward.register(1)
    await ward.pass_time(10)
    await found()
    ward.register(1, kv_events="predicted")


@remedy("events-estimated", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Its engine is made to publish KV events, and registered with them."""
    ward.register(1, kv_events="predicted")
    await found()
    await ward.hire(ward.engine(), 1)


@remedy("blocks-counted-twice", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Its record says that its engine reports in full: the index is asked for anew."""
    engine = ward.engine()
    await ward.hire(engine, 1, total_kv_blocks=4)
    tokens = prompt(1)
    for _ in range(2):  # the second time it shows what a prompt found
        engine.send([stored([1, 2, 3], tokens[: 3 * BLOCK], block_size=BLOCK)])
        await ward.received(engine)
    await ward.pass_time(30)
    await found("6 blocks, 3 of them again, where it has room for 4", worker_id=1)
    await ward.hire(engine, 1, total_kv_blocks=4, kv_cache_report_mode="full")


@remedy("no-workers", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    assert await ward.pass_time(50) == [], "they register after us"
    await ward.pass_time(20)
    await found()
    ward.register(1)


@remedy("rank-failing", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Restart the engine: the next request is completed."""
    ward.register(1)

    async def serve(number: int, outcome: Outcome) -> None:
        body = {"reservation_id": f"f{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
        await ward.pass_time(1)
        ward.service.free(f"f{number}", outcome=outcome)

    most = ward.service.core.limits.outlier_failures
    for number in range(most):
        await serve(number, "failed")
    await found()
    await serve(most, "completed")


@remedy("endpoint-shared", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    one, two = ward.engine(), ward.engine()
    await ward.hire(one, 1)
    await ward.hire(one, 2)
    await found()
    await ward.hire(two, 2)


@remedy("unknown-model", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    ward.register(1, model_name="org/llama")

    async def ask(name: str, times: int) -> None:
        for number in range(times):
            with contextlib.suppress(NoSchedulableWorker):
                await ward.ask(prompt(number), model_name=name)

    await ask("Llama", 3)
    assert await ward.codes() == [], "somebody's slip"
    await ask("Llama", 3)
    await found(model_name="Llama")
    for _ in range(13):
        await ask("org/llama", 6)
        await ward.pass_time(10)


@remedy("reservations-expire", config=NO_EVENTS, core={"reservation_ttl_s": 20.0})
async def _(ward: Ward, found: Found) -> None:
    ward.register(1)
    for number in range(12):
        body = {"reservation_id": f"kept{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
    await ward.codes()
    ward.clock.skipped += 30
    await ward.until(lambda: ward.service.core.counters.reservations_expired == 12)
    await found()
    for number in range(30):
        await ward.ask(prompt(number))  # frees what it books
    await ward.pass_time(120)


@remedy("reservations-outlived", config=NO_EVENTS, core={"reservation_ttl_s": 20.0})
async def _(ward: Ward, found: Found) -> None:
    """Book with a ttl_s."""
    ward.register(1)

    async def run(first: int, **fields: Any) -> None:
        for number in range(first, first + 4):
            body = {"reservation_id": f"long{number}", "worker_id": 1, "token_ids": prompt(number)}
            ward.service.reserve(msgspec.convert(body | fields, ReservationRequest))
        await ward.codes()
        ward.clock.skipped += 30
        if not fields:
            counters = ward.service.core.counters
            await ward.until(lambda: counters.reservations_expired == 4)
        for number in range(first, first + 4):
            ward.service.free(f"long{number}")

    await run(0)
    await found()
    for round_ in range(1, 6):
        await run(10 * round_, ttl_s=60.0)
        await ward.codes()


async def _load_reports(ward: Ward, found: Found) -> None:
    for worker_id in (1, 2):
        ward.register(worker_id)
    _report(ward, 2)
    ward.clock.skipped += 12
    await ward.until(lambda: [*ward.service.core.admission_controller.reports.stale()])
    assert await ward.codes() == [], "nobody judges by it"
    await ward.service.change_admission(AdmissionChange(policy="slo-shed"))
    await found("it last reported its load 1", worker_id=2)


def _report(ward: Ward, worker_id: int) -> None:
    metrics = WorkerMetrics(ranks=[RankMetrics(num_requests_waiting=0)])
    ward.service.report(worker_id, metrics)


@remedy("load-reports-stale", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Start the reporter again."""
    await _load_reports(ward, found)
    _report(ward, 2)


@remedy("load-reports-stale", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Register the worker anew."""
    await _load_reports(ward, found)
    ward.service.delete_worker(2)
    ward.register(2)


@remedy("load-reports-stale", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Set --load-report-stale-as unknown."""
    await _load_reports(ward, found)
    changed = {"load_report_stale_as": "unknown"}
    ward.service._carry_out(ward.service.core.admission.reconfigure({}, changed, ward.clock()))
    reports = ward.service.core.admission_controller.reports
    await ward.until(lambda: all(one.stale_as == "unknown" for *_, one in reports.stale()))


SYNCED: Final = {"config": NO_EVENTS, "replica_sync_port": 0}
"""With a port of its own each."""


@remedy("replica-unreachable", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    ward.register(1)
    peer = f"tcp://{HOST}:{free_port()}"
    ward.service.register_peer(peer)
    assert await ward.pass_time(20) == []
    await ward.pass_time(20)
    await found(peer=peer)
    ward.service.deregister_peer(peer)


@remedy("replica-silent", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    """Name the replica's --replica-sync-port."""
    ward.register(1)
    with contextlib.closing(Peer(ward.context)) as wrong:
        ward.service.register_peer(wrong.endpoint)
        await ward.until(lambda: links(ward)[0].is_connected and wrong.socket.poll(0))
        assert await ward.pass_time(30) == []
        await ward.pass_time(20)
        await found()
        ward.service.deregister_peer(wrong.endpoint)
        with contextlib.closing(Peer(ward.context)) as peer:
            ward.service.register_peer(peer.endpoint)
            await ward.until(lambda: peer.socket.poll(0))
            peer.beat()
            await ward.until(lambda: links(ward)[0].quiet_s < 1)


@remedy("replica-behind", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    """Set --advertise-url to where it can be reached: here, where its snapshot is."""
    ward.register(1)
    with contextlib.closing(Peer(ward.context)) as peer:
        nowhere = free_port()
        ward.service.register_peer(peer.endpoint)
        await ward.until(lambda: peer.socket.poll(0))
        assert await wait_together(ward, 40, lambda: peer.beat(nowhere)) == []
        await wait_together(ward, 40, lambda: peer.beat(nowhere))
        await found()
        view = ward.service.core.replicas.publishers.views[5]
        view.pulled(view.high, ward.clock(), ward.service.core.limits)  # as if it had been
        view.ask_again_at = None


@remedy("replica-workers-differ", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    ward.register(1)
    port = free_port()
    other = Driver(NO_EVENTS, replica_sync_port=port, clock=ward.clock)
    await other.start()
    try:
        spec = {"worker_id": 2, "endpoint": "http://w2", "block_size": BLOCK}
        other.upsert_worker(msgspec.convert(spec, WorkerSpec))
        ward.service.register_peer(f"tcp://{HOST}:{port}")
        await ward.until(lambda: links(ward)[0].is_connected)
        assert await wait_together(ward, 70, lambda: None) == [], "nothing is booked there"
        body = {"reservation_id": "r", "token_ids": prompt(1)}
        await other.select_and_reserve(msgspec.convert(body, SelectAndReserveRequest))
        await wait_together(ward, 80, lambda: None)
        await found()
        ward.register(2)
        await wait_together(ward, 5, lambda: None)
        assert "replica-workers-differ" not in await ward.codes()
    finally:
        await other.close()
    ward.service.deregister_peer(f"tcp://{HOST}:{port}")


@remedy("replica-namesake", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    """Start one of the two from an empty state directory: it has another id then."""
    ward.register(1)
    await ward.codes()
    core = ward.service.core
    with contextlib.closing(Peer(ward.context)) as peer:
        ward.service.register_peer(peer.endpoint)
        await ward.until(lambda: peer.socket.poll(0))
        namesake = Heartbeat(
            router_id=core.lifecycle.announcer.claims.router_id, epoch=1, seq=9, live=0, digest=0
        )
        peer.socket.send_multipart(encode_message(namesake))
        await ward.until(lambda: core.replicas.counters.namesakes)
        await found()
        for _ in range(17):
            await wait_together(ward, 8, peer.beat)
    ward.service.deregister_peer(peer.endpoint)
