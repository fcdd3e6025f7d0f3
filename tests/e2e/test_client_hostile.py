"""The clients' faces where the surroundings are hostile: a full fleet, slow drips, other loops."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from select_service.client import (
    AsyncClient,
    Client,
    ClientError,
    Options,
    OtherLoop,
    TimedOut,
)
from select_service.client.core.upkeep import SessionUpkeep
from tests import wait
from tests.e2e.test_client import TOKENS, spec, total, url
from tests.live.server import Server

pytestmark = pytest.mark.e2e

DRIPPED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Server]:
    """One worker, which has room for one prompt at a time."""
    with Server(tmp_path / "log", env={"DYN_ROUTER_QUEUE_THRESHOLD": "0.1"}) as running:
        with Client(url(running)) as client:
            client.upsert_worker(spec(1, max_num_batched_tokens=64))
        yield running


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "log") as running:
        with Client(url(running)) as client:
            client.upsert_worker(spec(1))
        yield running


def test_ends_are_reported_while_every_connection_waits_in_the_queue(busy: Server) -> None:
    """Else the end that makes room waits behind those who wait for the room."""
    options = Options(connections_max=4)

    async def use() -> None:
        async with AsyncClient(url(busy), options=options) as client:

            async def one(number: int) -> None:
                async with client.reserve(token_ids=[number, *TOKENS]):
                    await asyncio.sleep(0)

            async with asyncio.TaskGroup() as group:
                for number in range(24):
                    group.create_task(one(number))
            await client.flush()

    wait.run(use())
    assert busy.fleet_load() == (0, 0, 0)


def test_the_same_in_threads(busy: Server) -> None:
    with Client(url(busy), options=Options(connections_max=2)) as client:

        def one(number: int) -> None:
            with client.reserve(token_ids=[number, *TOKENS]):
                pass

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(one, number) for number in range(16)]:
                done.result(timeout=wait.PATIENCE_S)
        client.flush()
        assert total(client) == (0, 0, 0)


@pytest.fixture
def drip() -> Iterator[str]:
    """A selector that is never silent for long, and never done."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(1 << 16)
            try:
                for at in range(100_000):
                    connection.sendall(DRIPPED[at : at + 1] or b" ")
                    if over.wait(0.02):
                        return
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)


def test_a_deadline_holds_however_slowly_an_answer_drips(drip: str) -> None:
    options = Options(close_timeout_ms=100)

    async def use() -> None:
        async with AsyncClient(drip, options=options) as client:
            with pytest.raises(TimedOut, match=drip):
                await client.reserve(token_ids=TOKENS, timeout_ms=200)

    wait.run(use())
    with Client(drip, options=options) as client, pytest.raises(TimedOut, match=drip):
        client.call("GET", "/workers", timeout_ms=200)


def test_the_next_selector_is_asked_when_one_drips(drip: str, calm: Server) -> None:
    options = Options(attempt_timeout_ms=2_000, selection_timeout_ms=2_000, attempts_max=1)

    async def use() -> None:
        async with AsyncClient(drip, url(calm), options=options) as client:
            async with client.reserve(token_ids=TOKENS) as r:
                assert not r.degraded
            assert client.selector == url(calm)

    wait.run(use())
    assert calm.fleet_load() == (0, 0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_another_loop_is_refused(calm: Server) -> None:
    from_loop_to_loop(url(calm))
    gc.collect()  # what the first loop has left open warns here, and not in another test


def from_loop_to_loop(address: str) -> None:
    client = AsyncClient(address)

    async def use() -> None:
        async with client.reserve(token_ids=TOKENS):
            pass
        await client.flush()

    wait.run(use())
    for call in (use, client.flush, client.aclose, client.workers):
        with pytest.raises(OtherLoop, match="one event loop"):
            asyncio.run(call())
    assert issubclass(OtherLoop, ClientError)


async def test_a_close_that_is_cancelled_is_cancelled(calm: Server) -> None:
    client = AsyncClient(url(calm))
    await client.reserve(token_ids=TOKENS)
    closing = asyncio.ensure_future(client.aclose())
    await asyncio.sleep(0)  # it waits for what runs beside
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


class Broken(SessionUpkeep):
    """Whose first turn meets an error of ours."""

    left = 1

    def turn(self, now: float) -> Any:
        if self.left:
            self.left -= 1
            raise KeyError("ours")
        return super().turn(now)


def test_what_runs_beside_outlives_an_error(
    calm: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("select_service.client.base_client.SessionUpkeep", Broken)

    async def use() -> None:
        async with AsyncClient(url(calm)) as client:
            async with client.reserve(token_ids=TOKENS):
                pass
            await client.flush()
            assert client.stats()["upkeep_errors"] == 1

    wait.run(use())
    with Client(url(calm)) as client:
        with client.reserve(token_ids=TOKENS):
            pass
        client.flush()
        assert client.stats()["upkeep_errors"] == 1
        assert total(client) == (0, 0, 0)
    assert [one.levelname for one in caplog.records] == ["ERROR", "ERROR"]


@pytest.mark.parametrize("address", ["http://" + "a" * 64 + ".example", "http://a..b:1"])
def test_a_name_that_is_none_is_refused_when_it_is_given(address: str) -> None:
    with pytest.raises(ValueError, match="no name of a host"):
        AsyncClient(address)
