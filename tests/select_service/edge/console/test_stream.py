"""The event stream: a snapshot, then what changes; bounded, and nothing while nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from select_service.edge.console import fleet, stream
from select_service.edge.console.sections import sections
from select_service.edge.console.stream import LiveView
from select_service.edge.cooperative import TimeSlices
from select_service.edge.driver.driver import Driver
from select_service.edge.server import Server
from select_service.types import SelectAndReserveRequest
from tests.coroutines import within
from tests.select_service.edge.console.watching import ranks_of, watching
from tests.select_service.edge.serving import Wire, add_worker, listening
from tests.wait import until

BIG = 2**64 - 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "INTERVAL_S", 0.01)


def _book(service: Driver, name: str) -> None:
    request = SelectAndReserveRequest(reservation_id=name, token_ids=list(range(64)))
    service.select_and_reserve_now(request)


@within(listening)
async def test_one_snapshot_then_what_changes(port: int, service: Driver) -> None:
    add_worker(service, BIG, total_kv_blocks=100)
    async with watching(port) as page:
        assert page.headers["content-type"] == "text/event-stream"
        assert page.headers["x-content-type-options"] == "nosniff"
        kind, first = await page.next()
        fields = first["about"]["rank_fields"]
        assert kind == "snapshot"
        assert [one["worker_id"] for one in first["workers"]] == [str(BIG)]
        row = ranks_of(first, fields)[str(BIG), 0]
        assert (row["prefill_tokens"], row["decode_blocks"], row["requests"]) == (0, 0, 0)
        kind, quiet = await page.next()
        assert kind == "tick"
        assert (quiet["workers"], quiet["ranks"], quiet["gone"]) == ([], [], [])
        assert "admission" not in quiet, "only what is different"
        _book(service, "a")
        update = await page.until("ranks")
        booked = {"prefill_tokens": 64, "decode_blocks": 4, "requests": 1}
        counted = {"selections": 1, "isl_tokens": 64, "selected_prefill_tokens": 64}
        assert ranks_of(update, fields) == {(str(BIG), 0): row | booked | counted}
        assert update["state"]["reservations"] == 1
        add_worker(service, 7)
        assert [one["worker_id"] for one in (await page.until("workers"))["workers"]] == ["7"]
        service.delete_worker(BIG)
        assert (await page.until("gone"))["gone"] == [str(BIG)]


@within(listening)
async def test_who_comes_later_gets_all_there_is(port: int, service: Driver) -> None:
    for worker_id in range(40):
        add_worker(service, worker_id, data_parallel_size=2, kv_events_endpoints=_endpoints(2))
    async with watching(port) as early:
        await early.next()
        _book(service, "a")
        await early.until("ranks")
        async with watching(port) as late:
            kind, snapshot = await late.next()
            assert kind == "snapshot"
            rows = ranks_of(snapshot, snapshot["about"]["rank_fields"])
            assert len(rows) == 80
            assert sum(row["requests"] for row in rows.values()) == 1
            assert (await late.next())[0] == "tick"


def _endpoints(ranks: int) -> dict[str, str]:
    return {str(rank): "tcp://127.0.0.1:9" for rank in range(ranks)}


@within(listening)
async def test_nothing_is_computed_while_nobody_looks(
    port: int, service: Driver, server: Server
) -> None:
    counts = server._application._traffic.console
    async with watching(port) as page:
        await page.next()
        assert counts.clients == 1
        assert counts.rounds > 0
    await until(lambda: counts.clients == 0)
    console = server._application._console
    assert console is not None
    assert console._console is not None
    live = console._console._live
    await until(lambda: live._rounds is None)
    assert live._view is None, "nor remembered"
    rounds = counts.rounds
    for name in "abc":
        _book_if_possible(service, name)
        await asyncio.sleep(0.02)
    assert counts.rounds == rounds


def _book_if_possible(service: Driver, name: str) -> None:
    with contextlib.suppress(Exception):
        _book(service, name)


@within(listening, console_clients_max=2)
async def test_pages_are_bounded_and_counted(port: int, service: Driver, server: Server) -> None:
    traffic = server._application._traffic
    async with watching(port) as one, watching(port) as two:
        await one.next()
        await two.next()
        third = await Wire.to(port)
        status, headers, body = await third.exchange("GET", "/console/events")
        assert status == 503
        assert b"too_many_console_clients" in body
        assert headers["retry-after"]
        assert traffic.console.refused == 1
        text = (await third.exchange("GET", "/metrics"))[2].decode()
        assert "select_service_console_clients 2.0" in text
        assert 'console_clients_ended_total{reason="refused"} 1.0' in text
        assert 'limit_hits_total{name="console_clients_max"} 1.0' in text
        assert traffic.in_flight == 0, "a stream is no request under way"
    await until(lambda: traffic.console.clients == 0)
    async with watching(port) as again:
        assert (await again.next())[0] == "snapshot"


@within(listening, console_clients_max=1)
async def test_head_opens_no_stream(port: int, service: Driver, server: Server) -> None:
    wire = await Wire.to(port)
    wire.say(b"HEAD /console/events HTTP/1.1\r\nhost: s\r\n\r\n")
    head = await wire.reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head
    assert server._application._traffic.console.clients == 0


@within(listening)
async def test_a_client_without_pieces_is_told_so(
    port: int, service: Driver, server: Server
) -> None:
    wire = await Wire.to(port)
    wire.say(b"GET /console/events HTTP/1.0\r\nhost: s\r\n\r\n")
    text = await wire.rest()
    assert b" 505 " in text.split(b"\r\n")[0]
    assert b"http_version_too_old" in text
    assert server._application._traffic.console.clients == 0


@within(listening)
async def test_who_does_not_read_is_dropped(port: int, service: Driver, server: Server) -> None:
    traffic = server._application._traffic
    service.core.limits.worker_bytes_max = 1 << 30
    add_worker(service, 1, endpoint="http://" + "x" * 16_000_000)  # more than sockets take
    async with watching(port):
        await until(lambda: traffic.console.dropped == 1)
        console = server._application._console
        assert console is not None
        assert console._console is not None
        (client,) = console._console._live._clients
        assert not client.messages, "and nothing is kept for it"
        async with watching(port) as other:
            assert (await other.next())[0] == "snapshot", "the others go on"


@within(listening)
async def test_the_end_of_the_process_ends_the_stream(
    port: int, service: Driver, server: Server
) -> None:
    async with watching(port) as page:
        await page.next()
        server.should_exit = True
        with contextlib.suppress(EOFError):
            while True:
                await page.next()
        assert await page.wire.rest() == b"\r\n", "and the connection with it"


async def test_what_a_failed_look_had_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = fleet.FleetTable.look
    is_ill = False

    async def look(self: fleet.FleetTable, slices: TimeSlices) -> fleet.FleetChanges:
        nonlocal is_ill
        news = await looked(self, slices)
        if is_ill and news.ranks:
            is_ill = False
            raise RuntimeError("a bug")
        return news

    monkeypatch.setattr(fleet.FleetTable, "look", look)
    async with listening() as (port, service, server):
        add_worker(service, 1)
        async with watching(port) as page:
            await page.next()
            is_ill = True
            _book(service, "a")
            update = await page.until("ranks")
            assert update["ranks"][0][4] == 1, "the request that was booked"
            assert update["state"]["reservations"] == 1
            assert server._application._traffic.console.faults == 1


class Breaths(TimeSlices):
    """Counts the places where others could have their turn."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    async def yield_if_due(self) -> None:
        self.taken += 1
        await super().yield_if_due()


@within(listening, admission_control="token-capacity")
async def test_pools_and_thresholds_are_written_one_by_one(port: int, service: Driver) -> None:
    for number in range(20):
        add_worker(service, number, model_name=f"m{number}", max_inflight=9)
    breaths = Breaths()
    text = (await sections(service, breaths))["admission"]
    answer = json.loads(text)
    assert [one["model"] for one in answer["thresholds"]] == sorted(f"m{n}" for n in range(20))
    assert len(answer["scopes"]) == answer["gates"] == 20
    assert breaths.taken >= 4 * 20, "read and written, each of both"


@within(listening)
async def test_a_closed_view_has_nothing_to_say(port: int, service: Driver, server: Server) -> None:
    console = server._application._console
    assert console is not None
    view = LiveView(
        service, console.history, server._application._traffic.console, {}, clients_max=1
    )
    view.close()
    assert [message async for message in view.open()] == []
