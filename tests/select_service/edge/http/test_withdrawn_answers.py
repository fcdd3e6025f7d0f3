"""An answer that cannot be written takes its booking back, unless a lease or somebody else has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn
import uvloop
from msgspec.structs import replace
from typing_extensions import override
from uvicorn.server import ServerState

from select_service.edge.app import create_door, create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.embedded import SelectionService
from select_service.edge.http.connection import HttpConnection, http_protocol
from select_service.edge.http.connection_limits import ConnectionLimits
from select_service.edge.http.traffic import Connections
from select_service.edge.state.keeper import Keeper
from tests.select_service.edge.serving import HOST, PROMPT, SETTINGS, listening, seat, worker
from tests.wait import run, until

LIMITS = ConnectionLimits(1e3, 1e3, 100, 1 << 16, 128, 100, 100, 1 << 20, 0)
ROOM: Final = 1 << 30
BOOK: Final = {**PROMPT, "reservation_id": "mine"}
WAVE: Final = {"requests": [{**PROMPT, "n": 3}], "reserve": True}
CHOSEN: Final = {**BOOK, "worker_id": 1}
FORMS: Final = {
    "select_and_reserve": ("/select_and_reserve", BOOK),
    "without an id": ("/select_and_reserve", PROMPT),
    "explained": ("/select_and_reserve", {**BOOK, "explain": True}),
    "of a session": ("/select_and_reserve", {**BOOK, "session_id": "s"}),
    "pair": ("/select_pair", BOOK),
    "batch": ("/select_batch", WAVE),
    "all or none": ("/select_batch", {**WAVE, "atomic": True}),
    "large batch": ("/select_batch", {"requests": [{**PROMPT, "n": 40}], "reserve": True}),
    "reservation": ("/reservations", CHOSEN),
}


class _Client(asyncio.Transport):
    """A connection whose client, and kernel, do what a test says.

    As those of asyncio, it drops what is written once it is closing, and notices while it writes
    that the client has gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.connection: HttpConnection
        self.sent = b""  # to the kernel
        self.buffer = b""
        self.room = ROOM  # of the kernel, in bytes
        self.writes_left = ROOM  # until one fails
        self.is_closed = self.is_paused = False
        self.high, self.low = 1 << 16, 1 << 14

    @override
    def write(self, data: Any) -> None:
        if self.is_closed:
            return
        self.writes_left -= 1
        if self.writes_left < 0:
            self.is_closed = True
            return
        self.buffer += bytes(data)
        self._send()

    def make_room(self, room: int) -> None:
        self.room += room
        self._send()

    def _send(self) -> None:
        went, self.buffer = self.buffer[: self.room], self.buffer[self.room :]
        self.sent += went
        self.room -= len(went)
        self._control()

    def _control(self) -> None:
        if len(self.buffer) > self.high and not self.is_paused:
            self.is_paused = True
            self.connection.pause_writing()
        elif len(self.buffer) <= self.low and self.is_paused:
            self.is_paused = False
            self.connection.resume_writing()

    @override
    def get_write_buffer_size(self) -> int:
        return len(self.buffer)

    @override
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is not None
        self.high, self.low = high, low
        self._control()

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (HOST, 1) if name.endswith("name") else default

    @override
    def is_closing(self) -> bool:
        return self.is_closed

    @override
    def close(self) -> None:
        self.is_closed = True

    @override
    def pause_reading(self) -> None:
        """The test says nothing meanwhile."""

    @override
    def resume_reading(self) -> None:
        """Likewise."""

    @override
    def write_eof(self) -> None:
        """Nobody reads it."""

    def leave(self, why: Exception | None = None) -> None:
        """Break, as asyncio tells of it: what is in the buffer is lost."""
        self.is_closed, self.buffer = True, b""
        self.connection.connection_lost(why)

    def ask(self, path: str, body: object, method: str = "POST", *lines: str) -> None:
        self.connection.data_received(request(path, body, method, *lines))


def request(path: str, body: object, method: str = "POST", *lines: str) -> bytes:
    content = json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "host: s", "content-type: application/json"]
    return (
        "\r\n".join([*head, *lines, f"content-length: {len(content)}", "", ""]).encode() + content
    )


class _Rig:
    def __init__(self, service: Driver, connect: Callable[[], _Client]) -> None:
        self.service, self.connect = service, connect

    @property
    def booked(self) -> list[str]:
        return sorted(self.service.core.desk.bookings.by_id)

    @property
    def withdrawn(self) -> int:
        return self.service.core.counters.reservations_withdrawn

    @property
    def waiting(self) -> int:
        return self.service.waiting

    async def settled(self) -> None:
        """Until no request is under way, and nothing is left to be done."""
        for _ in range(20):
            await asyncio.sleep(0)
        await until(lambda: not self.tasks(), lambda: self.tasks())
        self.service.core.check()

    def tasks(self) -> list[str]:
        own = asyncio.current_task()
        return [repr(one) for one in asyncio.all_tasks() if one is not own and "run(" in repr(one)]


@contextlib.asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[_Rig]:
    chosen = replace(SETTINGS, **settings)
    service = create_driver(chosen)
    await service.start()
    door = create_door(service, chosen)[0]
    kind = http_protocol(door, LIMITS, Connections())
    state = ServerState()

    def connect() -> _Client:
        client = _Client()
        client.connection = kind(uvicorn.Config(door), state, {})
        client.connection.connection_made(client)
        return client

    try:
        yield _Rig(service, connect)
    finally:
        await service.close()


def play(scene: Callable[[_Rig], Any], **settings: Any) -> None:
    async def use() -> None:
        async with rig(**settings) as one:
            seat(one.service)
            await scene(one)

    run(use())


def full(scene: Callable[[_Rig, _Client], Any], **settings: Any) -> None:
    """With one worker that takes one request, has it, and another one that waits."""

    async def use(body: dict[str, Any] = BOOK) -> None:
        async with rig(**settings) as one:
            seat(one.service, max_inflight=1)
            one.connect().ask("/select_and_reserve", {**PROMPT, "reservation_id": "first"})
            client = one.connect()
            client.ask("/select_and_reserve", body)
            await until(lambda: one.waiting == 1, pause_s=0)
            await scene(one, client)

    run(use())


# -- answers given at once -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_client_that_leaves_before_the_turn_ends_has_booked_nothing(form: str) -> None:
    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.ask(*FORMS[form])
        client.leave()
        await one.settled()
        assert one.booked == []
        assert client.sent == b""

    play(scene, session_ttl_s=60.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("writes", [0, 1])
def test_what_the_kernel_refuses_is_withdrawn(form: str, writes: int) -> None:
    """An answer in one write, or one whose head was taken and whose body was not."""

    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.writes_left = writes
        client.ask(*FORMS[form])
        await one.settled()
        if client.sent.endswith(b"}") and writes:
            assert one.booked != [], "it was one write"
        else:
            assert one.booked == []

    play(scene, session_ttl_s=60.0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_stays(form: str) -> None:
    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.ask(*FORMS[form])
        await until(lambda: client.sent.endswith(b"}"), pause_s=0)
        client.leave()
        await one.settled()
        assert one.booked != []
        assert one.withdrawn == 0

    play(scene, session_ttl_s=60.0)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_kernel_had_no_room_for_is_withdrawn(form: str) -> None:
    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.room = 10
        client.ask(*FORMS[form])
        await until(lambda: client.sent, pause_s=0)
        await one.settled()
        assert one.booked != []
        client.leave(ConnectionResetError())
        await one.settled()
        assert one.booked == []

    play(scene, session_ttl_s=60.0)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_kernel_takes_later_is_written(form: str) -> None:
    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.room = 10
        client.ask(*FORMS[form])
        await until(lambda: client.sent, pause_s=0)
        client.make_room(ROOM)
        await until(lambda: client.sent.endswith(b"}"), pause_s=0)
        client.leave()
        await one.settled()
        assert one.booked != []

    play(scene, session_ttl_s=60.0)


@pytest.mark.parametrize("form", [one for one in FORMS if one != "without an id"])
def test_a_lease_decides_for_itself(form: str) -> None:
    async def scene(one: _Rig) -> None:
        client, other = one.connect(), one.connect()
        other.ask("/leases", {"owner": "o", "ttl_s": 9.0, "lease_id": "l"})
        path, body = FORMS[form]
        lease = {"lease_id": "l"}
        if "requests" in body:
            body = {**body, "requests": [{**one, **lease} for one in body["requests"]]}
        else:
            body = {**body, **lease}
        client.writes_left = 0
        client.ask(path, body)
        await one.settled()
        assert one.booked != []
        assert one.withdrawn == 0
        other.ask("/leases/l", None, "DELETE")
        await one.settled()
        assert one.booked == []

    play(scene, session_ttl_s=60.0)


def test_a_client_that_is_answered_elsewhere_keeps_its_booking() -> None:
    async def scene(one: _Rig) -> None:
        client, again = one.connect(), one.connect()
        client.ask("/select_and_reserve", BOOK)
        again.ask("/select_and_reserve", BOOK)  # a repeat, before the first is written
        client.leave()
        await one.settled()
        assert one.booked == ["mine"]
        assert again.sent.endswith(b"}")

    play(scene)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_when_all_its_answers_are_lost_it_is_withdrawn(order: tuple[int, int]) -> None:
    async def scene(one: _Rig) -> None:
        clients = one.connect(), one.connect()
        for client in clients:
            client.ask("/select_and_reserve", BOOK)
        for at in order:
            clients[at].leave()
        await one.settled()
        assert one.booked == []
        assert one.withdrawn == 1

    play(scene)


def test_a_repeat_that_is_lost_takes_nothing_back() -> None:
    async def scene(one: _Rig) -> None:
        client, again = one.connect(), one.connect()
        client.ask("/select_and_reserve", BOOK)
        await one.settled()
        again.ask("/select_and_reserve", BOOK)
        again.leave()
        await one.settled()
        assert one.booked == ["mine"]

    play(scene)


def test_who_calls_it_by_its_id_keeps_it() -> None:
    async def scene(one: _Rig) -> None:
        client, other = one.connect(), one.connect()
        client.room = 0
        client.ask("/select_and_reserve", BOOK)
        await one.settled()
        other.ask("/reservations/mine/prefill_complete", {})
        await one.settled()
        client.leave()
        await one.settled()
        assert one.booked == ["mine"]

    play(scene)


def test_a_later_booking_of_its_id_is_another_one() -> None:
    async def scene(one: _Rig) -> None:
        client, other = one.connect(), one.connect()
        client.room = 0
        client.ask("/select_and_reserve", BOOK)
        await one.settled()
        other.ask("/reservations/mine", None, "DELETE")
        other.ask("/select_and_reserve", BOOK)
        await one.settled()
        client.leave()
        await one.settled()
        assert one.booked == ["mine"]

    play(scene)


def test_the_record_of_the_decision_and_a_counter_tell_of_it() -> None:
    async def scene(one: _Rig) -> None:
        kept, lost, reader = one.connect(), one.connect(), one.connect()
        kept.ask("/select_and_reserve", {**BOOK, "reservation_id": "kept"})
        lost.ask("/select_and_reserve", BOOK)
        lost.leave()
        await one.settled()
        told = {}
        for name in ("kept", "mine"):
            reader.sent = b""
            reader.ask(f"/decisions/{name}", None, "GET")
            await until(lambda: reader.sent.endswith(b"}"), pause_s=0)
            told[name] = json.loads(reader.sent.partition(b"\r\n\r\n")[2])
        assert told["mine"]["withdrawn"] is True
        assert told["mine"]["outcome"] == "placed"
        assert "withdrawn" not in told["kept"]
        reader.sent = b""
        reader.ask("/metrics", None, "GET")
        await until(lambda: b"reservation_events_total" in reader.sent)
        assert b'reservation_events_total{event="withdrawn"} 1.0' in reader.sent
        assert b'reservation_events_total{event="freed"} 0.0' in reader.sent

    play(scene)


# -- answers that waited ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["client", "turn"])
@pytest.mark.parametrize("why", [None, ConnectionResetError()])
def test_a_client_that_leaves_in_the_instant_of_its_turn_has_booked_nothing(
    first: str, why: Exception | None
) -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        if first == "client":
            client.leave(why)
        one.service.free("first")
        if first == "turn":
            client.leave(why)
        await one.settled()
        assert one.booked == []

    full(scene)


@pytest.mark.parametrize("turns", range(8))
def test_a_client_that_leaves_some_turns_of_the_loop_later_is_answered_or_has_booked_nothing(
    turns: int,
) -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        one.service.free("first")
        for _ in range(turns):
            await asyncio.sleep(0)
        client.leave()
        await one.settled()
        assert one.booked == (["mine"] if client.sent.endswith(b"}") else [])

    full(scene)


def test_a_client_of_whose_end_only_the_transport_knows_has_booked_nothing() -> None:
    """Half-closed: asyncio closes the transport at once, and tells the protocol a turn later."""

    async def scene(one: _Rig, client: _Client) -> None:
        client.connection.eof_received()
        client.close()
        one.service.free("first")
        await one.settled()
        assert one.booked == []
        client.leave()

    full(scene)


@pytest.mark.parametrize("writes", [0, 1])
def test_what_the_kernel_refuses_of_an_answer_that_waited_is_withdrawn(writes: int) -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        client.writes_left = writes
        one.service.free("first")
        await one.settled()
        assert one.booked == []

    full(scene)


def test_an_answer_that_waits_for_its_client_to_read_is_withdrawn_with_it() -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        client.connection.pause_writing()
        one.service.free("first")
        for _ in range(10):
            await asyncio.sleep(0)
        assert one.booked == ["mine"]
        client.leave()
        await one.settled()
        assert one.booked == []

    full(scene)


def test_requests_behind_one_that_waits_are_as_if_never_sent() -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        for name in ("behind", "further behind"):
            client.ask("/select_and_reserve", {**BOOK, "reservation_id": name})
        one.service.free("first")
        client.leave()
        await one.settled()
        assert one.booked == []

    full(scene)


def test_of_pipelined_answers_those_that_are_written_stay() -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        client.ask("/select_and_reserve", {**BOOK, "reservation_id": "behind"})
        one.service.free("first")
        await until(lambda: client.sent.endswith(b"}"), pause_s=0)
        await until(lambda: one.waiting == 1, pause_s=0)
        seat(one.service, 2)
        client.writes_left = 1
        await one.settled()
        assert one.booked == ["mine"]

    full(scene)


def test_a_place_that_is_given_back_goes_to_the_next() -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        behind = one.connect()
        behind.ask("/select_and_reserve", {**BOOK, "reservation_id": "behind"})
        await until(lambda: one.waiting == 2, pause_s=0)
        client.writes_left = 0
        one.service.free("first")
        await until(lambda: behind.sent.endswith(b"}"), pause_s=0)
        await one.settled()
        assert one.booked == ["behind"]

    full(scene)


@pytest.mark.parametrize("leaving", ["first", "second", "both"])
def test_who_waits_twice_for_one_booking_has_it_while_one_is_answered(leaving: str) -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        again = one.connect()
        again.ask("/select_and_reserve", BOOK)
        for _ in range(10):
            await asyncio.sleep(0)
        one.service.free("first")
        if leaving != "second":
            client.leave()
        if leaving != "first":
            again.leave()
        await one.settled()
        assert one.booked == ([] if leaving == "both" else ["mine"])

    full(scene)


# -- answers that wait for the disk ----------------------------------------------------------------


def _on_disk(path: Path) -> dict[str, Any]:
    return {"state_dir": str(path), "durability": "strict"}


@pytest.mark.parametrize("form", FORMS)
def test_a_client_that_leaves_while_the_disk_writes_has_booked_nothing(
    form: str, tmp_path: Path
) -> None:
    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.ask(*FORMS[form])
        client.leave()
        await one.settled()
        assert one.booked == []
        assert client.sent == b""

    play(scene, session_ttl_s=60.0, **_on_disk(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_what_the_kernel_refuses_once_it_is_on_disk_is_withdrawn(form: str, tmp_path: Path) -> None:
    async def scene(one: _Rig) -> None:
        client = one.connect()
        client.writes_left = 0
        client.ask(*FORMS[form])
        await until(lambda: client.is_closed)
        await one.settled()
        assert one.booked == []

    play(scene, session_ttl_s=60.0, **_on_disk(tmp_path))


def test_an_answer_that_waited_for_its_turn_and_then_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(one: _Rig, client: _Client) -> None:
        written = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(Keeper, "settled", lambda _: written)
        one.service.free("first")
        await until(lambda: one.waiting == 0, pause_s=0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert one.booked == ["mine"]
        client.leave()
        await one.settled()
        assert one.booked == []

    full(scene, **_on_disk(tmp_path))


# -- real sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_real_client_that_leaves_in_the_instant_of_its_turn(end: str, loop: str) -> None:
    async def use() -> None:
        async with listening() as (port, service, _):
            seat(service, max_inflight=1)
            service.select_and_reserve_now(_reserve("first"))
            client = socket.create_connection((HOST, port))
            client.setblocking(False)
            client.sendall(request("/select_and_reserve", BOOK))
            await until(lambda: service.waiting == 1)
            if end == "rst":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end == "half-close":
                client.shutdown(socket.SHUT_WR)
            else:
                client.close()
            service.free("first")
            await until(lambda: service.waiting == 0)
            await until(lambda: not service.core.desk.bookings.by_id)
            client.close()

    if loop == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(use())
    else:
        run(use())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_answer_that_a_real_kernel_has_no_room_for(loop: str) -> None:
    """Its hashes are megabytes, and nobody reads them."""
    many = list(range(1, 60_000))
    long = {"block_hashes": many, "sequence_hashes": many, "isl_tokens": 16 * len(many)}

    async def use() -> None:
        async with listening() as (port, service, server):
            seat(service)
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().run_in_executor(None, client.connect, (HOST, port))
            await until(lambda: server.server_state.connections)
            connection = next(iter(server.server_state.connections))
            accepted = connection.transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            body = request("/select_and_reserve", {**BOOK, **long})
            await asyncio.get_running_loop().run_in_executor(None, client.sendall, body)
            await until(lambda: service.core.desk.bookings.by_id)
            await until(lambda: connection._unsent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await until(lambda: not service.core.desk.bookings.by_id)

    if loop == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(use())
    else:
        run(use())


def _reserve(name: str) -> Any:
    from msgspec import convert

    from select_service.types import SelectAndReserveRequest

    return convert({**PROMPT, "reservation_id": name}, SelectAndReserveRequest)


# -- a caller in this process ----------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(4))
def test_a_task_cancelled_around_its_turn_has_an_answer_or_no_booking(turns: int) -> None:
    async def use() -> None:
        async with SelectionService() as service:
            await service.upsert_worker({**worker(), "max_inflight": 1})
            await service.select_and_reserve({**PROMPT, "reservation_id": "first"})
            task = asyncio.ensure_future(service.select_and_reserve({**BOOK, "explain": True}))
            await until(lambda: service.driver.waiting == 1, pause_s=0)
            await service.free("first")
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            booked = list(service.driver.core.desk.bookings.by_id)
            assert booked == ([] if task.cancelled() else ["mine"])
            assert turns or task.cancelled()

    run(use())


@pytest.mark.parametrize("form", [one for one in FORMS if one != "of a session"])
def test_a_task_cancelled_while_the_disk_writes_has_booked_nothing(
    form: str, tmp_path: Path
) -> None:
    async def use() -> None:
        async with SelectionService(state_dir=tmp_path) as service:
            await service.upsert_worker(worker())
            path, body = FORMS[form]
            name = {"/reservations": "reserve"}.get(path, path[1:])
            task = asyncio.ensure_future(getattr(service, name)(body))
            await until(lambda: service.driver.core.desk.bookings.by_id, pause_s=0)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            await until(lambda: not service.driver.core.desk.bookings.by_id)

    run(use())
