"""Answers of one turn are sent when all of them are made, in their order, and never too many."""

from __future__ import annotations

import asyncio
from typing import Any

from select_service.edge.http.outbox import ANSWERS_MAX, Outbox


class _Sent(asyncio.Transport):
    """Notes what is written, and whether it is closing."""

    def __init__(self, said: list[tuple[str, bytes]], name: str) -> None:
        super().__init__()
        self.said, self.name, self.closing = said, name, False

    def write(self, data: Any) -> None:
        self.said.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


def test_answers_of_one_turn_go_out_together_and_in_order() -> None:
    async def use() -> None:
        loop = asyncio.get_running_loop()
        said: list[tuple[str, bytes]] = []
        one, other, gone = (_Sent(said, name) for name in ("one", "other", "gone"))
        box = Outbox(ANSWERS_MAX)
        box.put(one, b"1", loop)
        box.put(other, b"2", loop)
        box.put(gone, b"3", loop)
        box.put(one, b"4", loop)
        gone.closing = True
        assert said == []
        await asyncio.sleep(0)
        assert said == [("one", b"1"), ("other", b"2"), ("one", b"4")]
        await asyncio.sleep(0)
        assert len(said) == 3, "nothing twice"

    asyncio.run(use())


def test_not_many_answers_wait_for_the_others() -> None:
    async def use() -> None:
        loop = asyncio.get_running_loop()
        said: list[tuple[str, bytes]] = []
        box, transport = Outbox(ANSWERS_MAX), _Sent(said, "one")
        for _ in range(ANSWERS_MAX + 1):
            box.put(transport, b"x", loop)
        assert len(said) == ANSWERS_MAX
        await asyncio.sleep(0)
        assert len(said) == ANSWERS_MAX + 1

    asyncio.run(use())
