"""Answers of one turn are sent when all of them are made, in their order, and never too many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
from typing_extensions import override
from uvicorn.server import ServerState

from select_service.edge.app import create_application, create_driver
from select_service.edge.codec.responses import Response
from select_service.edge.http.connection import ANSWERS_MAX, HttpConnection
from select_service.edge.http.connection_limits import ConnectionLimits
from select_service.edge.http.traffic import Connections
from select_service.edge.server import http_protocol
from tests.select_service.edge.serving import SETTINGS

LIMITS = ConnectionLimits(1.0, 1.0, 100, 1 << 16, 128, 100, 100, 1 << 20, 0)


class _Sent(asyncio.Transport):
    """Notes what is written, and whether it is closing."""

    def __init__(self, said: list[tuple[str, bytes]], name: str) -> None:
        super().__init__()
        self.said, self.name, self.closing = said, name, False

    @override
    def write(self, data: Any) -> None:
        self.said.append((self.name, bytes(data).partition(b"\r\n\r\n")[2]))

    @override
    def is_closing(self) -> bool:
        return self.closing


def _connected() -> Callable[[_Sent], HttpConnection]:
    application = create_application(create_driver(SETTINGS), SETTINGS)[0]
    made = http_protocol(application, LIMITS, Connections())
    state = ServerState()

    def connect(transport: _Sent) -> HttpConnection:
        connection = made(uvicorn.Config(application), state, {})
        connection.connection_made(transport)
        return connection

    return connect


async def test_answers_of_one_turn_go_out_together_and_in_order() -> None:
    said: list[tuple[str, bytes]] = []
    connect = _connected()
    gone_one = _Sent(said, "gone")
    one, other, gone = (
        connect(_Sent(said, "one")),
        connect(_Sent(said, "other")),
        connect(gone_one),
    )
    for connection, body in ((one, b"1"), (other, b"2"), (gone, b"3"), (one, b"4")):
        connection.write_answer(Response(200, body))
    gone_one.closing = True
    assert said == []
    await asyncio.sleep(0)
    assert said == [("one", b"1"), ("other", b"2"), ("one", b"4")]
    await asyncio.sleep(0)
    assert len(said) == 3, "nothing twice"


async def test_not_many_answers_wait_for_the_others() -> None:
    said: list[tuple[str, bytes]] = []
    connection = _connected()(_Sent(said, "one"))
    for _ in range(ANSWERS_MAX + 1):
        connection.write_answer(Response(200, b"x"))
    assert len(said) == ANSWERS_MAX
    await asyncio.sleep(0)
    assert len(said) == ANSWERS_MAX + 1
