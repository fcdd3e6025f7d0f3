"""Real protocol class and driver, with connections whose client and kernel do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import uvicorn
from msgspec.structs import replace
from typing_extensions import override
from uvicorn.server import ServerState

from select_service.edge.app import create_application, create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.http.connection import HttpConnection
from select_service.edge.http.connection_limits import ConnectionLimits
from select_service.edge.http.traffic import Connections
from select_service.edge.server import http_protocol
from select_service.settings import Settings
from tests.select_service.edge.serving import HOST, PROMPT, SETTINGS, add_worker
from tests.wait import run, until

LIMITS = ConnectionLimits(1e3, 1e3, 100, 1 << 16, 128, 100, 100, 1 << 20, 0)
ROOM: Final = 1 << 30
BOOK: Final = {**PROMPT, "reservation_id": "mine"}
BATCH: Final = {"requests": [{**PROMPT, "n": 3}], "reserve": True}
CHOSEN: Final = {**BOOK, "worker_id": 1}
FORMS: Final = {
    "select_and_reserve": ("/select_and_reserve", BOOK),
    "without an id": ("/select_and_reserve", PROMPT),
    "explained": ("/select_and_reserve", {**BOOK, "explain": True}),
    "of a session": ("/select_and_reserve", {**BOOK, "session_id": "s"}),
    "pair": ("/select_pair", BOOK),
    "batch": ("/select_batch", BATCH),
    "all or none": ("/select_batch", {**BATCH, "atomic": True}),
    "large batch": ("/select_batch", {"requests": [{**PROMPT, "n": 40}], "reserve": True}),
    "reservation": ("/reservations", CHOSEN),
}


class FakeClient(asyncio.Transport):
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
        """Break, as asyncio reports it: what is in the buffer is lost."""
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


class Rig:
    def __init__(self, service: Driver, connect: Callable[[], FakeClient]) -> None:
        self.service, self.connect = service, connect

    @property
    def booked(self) -> list[str]:
        return sorted(self.service.core.lifecycle.bookings.by_id)

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
        await until(lambda: not self.tasks(), self.tasks)
        self.service.core.check()

    def tasks(self) -> list[str]:
        own = asyncio.current_task()
        others = [repr(one) for one in asyncio.all_tasks() if one is not own]
        return [one for one in others if "run(" in one or "take_steps(" in one]


def unopened(
    service: Driver, settings: Settings = SETTINGS, limits: ConnectionLimits = LIMITS
) -> Callable[[], HttpConnection]:
    """Make connections of one server, which nobody has opened yet."""
    application = create_application(service, settings)[0]
    made, state = http_protocol(application, limits, Connections()), ServerState()
    return lambda: made(uvicorn.Config(application), state, {})


@contextlib.asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    chosen = replace(SETTINGS, **settings)
    service = create_driver(chosen)
    await service.start()
    connection = unopened(service, chosen)

    def connect() -> FakeClient:
        client = FakeClient()
        client.connection = connection()
        client.connection.connection_made(client)
        return client

    try:
        yield Rig(service, connect)
    finally:
        await service.close()


def play(scene: Callable[[Rig], Any], **settings: Any) -> None:
    async def use() -> None:
        async with rig(**settings) as one:
            add_worker(one.service)
            await scene(one)

    run(use())


def full(scene: Callable[[Rig, FakeClient], Any], **settings: Any) -> None:
    """With one worker that takes one request, has it, and another one that waits."""

    async def use(body: dict[str, Any] = BOOK) -> None:
        async with rig(**settings) as one:
            add_worker(one.service, max_inflight=1)
            one.connect().ask("/select_and_reserve", {**PROMPT, "reservation_id": "first"})
            client = one.connect()
            client.ask("/select_and_reserve", body)
            await until(lambda: one.waiting == 1, pause_s=0)
            await scene(one, client)

    run(use())
