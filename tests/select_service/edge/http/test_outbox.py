"""Answers of one turn are sent when all of them are made, in their order, and never too many."""

from __future__ import annotations

import asyncio
from typing import Any

from typing_extensions import override

from select_service.edge.app import create_driver
from select_service.edge.codec.responses import Response
from select_service.edge.http.connection import ANSWERS_MAX
from tests.select_service.edge.http.fake_clients import unopened
from tests.select_service.edge.serving import SETTINGS


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


async def test_answers_of_one_turn_go_out_together_and_in_order() -> None:
    said: list[tuple[str, bytes]] = []
    connection = unopened(create_driver(SETTINGS))
    ends = [_Sent(said, name) for name in ("one", "other", "gone")]
    one, other, gone = [connection() for _ in ends]
    for made, end in zip((one, other, gone), ends, strict=True):
        made.connection_made(end)
    for made, body in ((one, b"1"), (other, b"2"), (gone, b"3"), (one, b"4")):
        made.write_answer(Response(200, body))
    ends[-1].closing = True
    assert said == []
    await asyncio.sleep(0)
    assert said == [("one", b"1"), ("other", b"2"), ("one", b"4")]
    await asyncio.sleep(0)
    assert len(said) == 3, "nothing twice"


async def test_not_many_answers_wait_for_the_others() -> None:
    said: list[tuple[str, bytes]] = []
    connection = unopened(create_driver(SETTINGS))()
    connection.connection_made(_Sent(said, "one"))
    for _ in range(ANSWERS_MAX + 1):
        connection.write_answer(Response(200, b"x"))
    assert len(said) == ANSWERS_MAX
    await asyncio.sleep(0)
    assert len(said) == ANSWERS_MAX + 1
