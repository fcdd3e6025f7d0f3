"""A selector's name may have dead addresses: the clients connect to one that lives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from select_service.client import AsyncClient, Client, Options, TimedOut, Unreachable
from tests.indexer.test_happy_eyeballs import black_hole
from tests.live.ports import free_port
from tests.select_service.edge.serving import listening
from tests.wait import PATIENCE_S

ONCE = Options.single_attempt(PATIENCE_S)
AT_ONCE = Options.single_attempt(0.5)


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The name leads to a mute address, to one that refuses, and to that of the service."""
    genuine = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in {"selector", b"selector"}:
            return genuine(host, port, *args, **more)
        places = [mute, ("127.0.0.2", port), ("127.0.0.1", port)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with black_hole() as (_, mute):
        yield


def ask_in_a_thread(url: str) -> bool:
    with Client(url, options=ONCE) as client:
        return client.ready().ready


async def test_both_clients_find_the_address_that_lives() -> None:
    async with listening() as (port, *_):
        url = f"http://selector:{port}"
        async with AsyncClient(url, options=ONCE) as client:
            assert not (await client.ready()).ready
        assert not await asyncio.to_thread(ask_in_a_thread, url)


async def test_a_name_where_nobody_lives_is_given_up_in_time() -> None:
    url = f"http://selector:{free_port()}"
    async with AsyncClient(url, options=AT_ONCE) as client:
        with pytest.raises((Unreachable, TimedOut)):
            await client.workers()
    with Client(url, options=AT_ONCE) as client, pytest.raises((Unreachable, TimedOut)):
        client.workers()
