"""The driver: waiting callers, effects on sockets, the sliced dump."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from select_service import AdmissionRefused, AdmissionSettings
from select_service.core.admission.queue import Ticket
from select_service.core.effects import Effects
from select_service.edge.codec.encoder import show_hashes
from select_service.edge.driver import housekeeping
from select_service.edge.driver.driver import Driver
from select_service.edge.embedded import SelectionService
from select_service.errors import ShuttingDown
from select_service.types import (
    PotentialLoadsRequest,
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)
from tests import wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine the way the process does: on a loop of its own."""
    wait.run(test())


@contextlib.asynccontextmanager
async def driver(**settings: object) -> AsyncIterator[Driver]:
    made = Driver(RouterConfig(queue_threshold=0.0), seed=1, **settings)  # type: ignore[arg-type]
    await made.start()
    try:
        made.upsert_worker(spec(1))
        yield made
    finally:
        await made.close()
        made.core.check()


def spec(worker_id: int, **record: object) -> WorkerSpec:
    base: dict[str, object] = {
        "endpoint": "h",
        "block_size": 16,
        "max_num_batched_tokens": 100,
        "kv_events_endpoint": "tcp://127.0.0.1:1",
    }
    return WorkerSpec(worker_id=worker_id, **(base | record))  # type: ignore[arg-type]


def prompt(reservation_id: str | None = None) -> SelectAndReserveRequest:
    return SelectAndReserveRequest(
        reservation_id=reservation_id, block_hashes=[1], sequence_hashes=[1], isl_tokens=16
    )


async def waits(task: asyncio.Task[object], service: Driver, count: int) -> None:
    """Let the task run until it waits in the queue."""
    while service.loads()[0].pending_count != count:
        assert not task.done()
        await asyncio.sleep(0)


async def test_callers_app_client_get_numbers_where_others_ask_over_http() -> None:
    async with driver() as service:
        service.show_hashes_with(show_hashes)
        booked = await service.select_and_reserve(prompt("a"))
        assert isinstance(booked, Selection)
        assert booked.sequence_hashes == [1]


async def test_a_caller_that_goes_in_the_turn_of_its_answer_keeps_nothing_booked() -> None:
    async with driver() as service:
        await service.select_and_reserve(prompt("a"))
        for answer_first in (True, False):
            task = asyncio.create_task(service.select_and_reserve(prompt("b")))
            await waits(task, service, 1)
            if answer_first:
                service.prefill_complete("a")
                task.cancel()
            else:
                task.cancel()
                service.prefill_complete("a")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert service.loads()[0].loads[0].active_requests == 1
            service.free("a")
            await service.select_and_reserve(prompt("a"))
        service.free("a")


async def test_callers_of_one_request_share_its_place_and_its_answer() -> None:
    async with driver() as service:
        await service.select_and_reserve(prompt("a"))
        tasks = [asyncio.create_task(service.select_and_reserve(prompt("b"))) for _ in "123"]
        await waits(tasks[0], service, 1)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert service.loads()[0].pending_count == 1
        service.free("a")
        answers = await asyncio.gather(*tasks[1:])
        assert msgspec.json.encode(answers[0]) == msgspec.json.encode(answers[1])
        assert service.loads()[0].loads[0].active_requests == 1
        service.free("b")


async def test_closing_sends_waiting_callers_away() -> None:
    async with driver() as service:
        await service.select_and_reserve(prompt("a"))
        task = asyncio.create_task(service.select(SelectRequest(token_ids=[1])))
        await waits(task, service, 1)
        await service.close()
        with pytest.raises(ShuttingDown):
            await task
        ticket = service.select_now(SelectRequest(token_ids=[1]))
        assert isinstance(ticket, Ticket)
        with pytest.raises(ShuttingDown):
            await service.wait(ticket)
        service.free("a")


async def test_a_source_zmq_will_not_connect_to_puts_the_worker_out() -> None:
    async with driver() as service:
        record = service.upsert_worker(spec(2, kv_events_endpoint="tcp://*:7"))
        assert record.lifecycle == "incomplete"
        assert isinstance(record.not_schedulable_reasons, list)
        (reason,) = record.not_schedulable_reasons
        assert reason.startswith("reconciliation failed: event source of worker 2 dp_rank 0:")
        assert service.ready().schedulable_workers == 1
        fine = service.patch_worker(2, WorkerPatch(kv_events_endpoint="tcp://127.0.0.1:2"))
        assert fine.lifecycle == "schedulable"


async def test_a_partition_may_open_while_a_dump_is_read() -> None:
    async with driver() as service:
        service.upsert_worker(spec(2, model_name="m2"))
        pieces = service.dump()
        text = await anext(pieces)
        service.upsert_worker(spec(3, model_name="m3"))
        text += b"".join([piece async for piece in pieces])
        assert {"default:default", "m2:default"} <= set(msgspec.json.decode(text))


async def test_the_embedded_service_mirrors_the_routes() -> None:
    async with SelectionService(seed=1) as service:
        await service.upsert_worker(spec(1))
        await service.patch_worker(1, WorkerPatch(taints=["t"]))
        assert (await service.ready()).ready
        assert [one.taints for one in await service.workers()] == [["t"]]
        answer = await service.select(SelectRequest(token_ids=[1]))
        assert isinstance(answer, Selection)
        assert answer.worker_id == 1
        booked = await service.select_and_reserve(prompt("a"))
        assert isinstance(booked, Selection)
        assert booked.reservation_id == "a"
        booking = ReservationRequest(
            reservation_id="b", worker_id=1, sequence_hashes=[4], isl_tokens=16
        )
        assert (await service.reserve(booking)).endpoint == "h"
        assert (await service.drain_worker(1, "why")).reason == "why"
        assert (await service.drain_status(1)).reservations == 2
        assert (await service.undrain_worker(1)).lifecycle == "schedulable"
        assert (await service.report(1, {"ranks": [{"kv_used_blocks": 1}]})).accepted == [0]
        await service.prefill_complete("a")
        await service.output_block("a", 0.5)
        (scope,) = await service.loads()
        assert scope.loads[0].active_requests == 2
        asked = PotentialLoadsRequest(block_hashes=[4], sequence_hashes=[4], isl_tokens=16)
        assert (await service.potential_loads(asked))[0].potential_prefill_tokens == 32
        assert [piece async for piece in service.dump()]
        for name in "ab":
            await service.free(name)
        assert (await service.delete_worker(1)).lifecycle == "unschedulable"


async def test_an_answer_that_comes_before_its_caller_waits() -> None:
    async with driver() as service:
        service.reserve(
            ReservationRequest(
                reservation_id="busy", worker_id=1, sequence_hashes=[1], isl_tokens=50
            )
        )
        ticket = service.select_now(SelectRequest(token_ids=[1]))
        lost = service.select_now(SelectRequest(token_ids=[2]))
        assert isinstance(ticket, Ticket)
        assert isinstance(lost, Ticket)
        service.free("busy")
        answer = await service.wait(ticket)
        assert isinstance(answer, Selection)
        assert answer.worker_id == 1
        lost.answer = ShuttingDown()
        with pytest.raises(ShuttingDown):
            await service.wait(lost)


async def test_housekeeping_survives_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would expire ever after, and nobody would know."""
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_S", 0.001)
    service = Driver()
    tick, turns = service.core.tick, 0

    def broken_once(now: float) -> tuple[bool, Effects]:
        nonlocal turns
        turns += 1
        if turns == 1:
            raise AssertionError("a bug")
        enough.set()
        return tick(now)

    enough = asyncio.Event()
    monkeypatch.setattr(service.core, "tick", broken_once)
    await service.start()
    try:
        await enough.wait()
    finally:
        await service.close()
    assert service.housekeeping_faults == 1


async def test_the_embedded_service_has_a_gate_too() -> None:
    admission = AdmissionSettings(policy="reject-all")
    async with SelectionService(seed=1, admission=admission) as service:
        await service.upsert_worker(spec(1))
        with pytest.raises(AdmissionRefused) as caught:
            await service.select_and_reserve(prompt("a"))
        assert (caught.value.code, caught.value.status) == ("reject-all", 503)
