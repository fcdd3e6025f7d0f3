"""The server of tests: whatever instant it ends in, it leaves nothing open."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest

from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server
from tests.wait import run


@pytest.mark.parametrize("turns", range(10))
def test_a_caller_of_the_last_instant_leaves_nothing_open(turns: int) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        await asyncio.sleep(3600)

    async def scene() -> None:
        async with tcp_server(hang) as port:
            caller = socket.create_connection((HOST, port))
            for _ in range(turns):  # accepted, made, handled: each in a turn of its own
                await asyncio.sleep(0)
        caller.close()
        assert len(asyncio.all_tasks()) == 1

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(scene())
        gc.collect()
    assert [str(one.message) for one in seen] == []


def test_a_handler_that_fails_fails_its_test() -> None:
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("not what was asked for")

    async def scene() -> None:
        async with tcp_server(fail) as port:
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await reader.read() == b""
            writer.close()

    with pytest.raises(AssertionError, match="not what"):
        run(scene())
