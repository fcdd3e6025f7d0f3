"""Of several addresses the first that accepts is connected to; the dead ones cost a moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from indexer.happy_eyeballs import Target, connect_first, connect_first_blocking, targets_of
from tests.live.ports import free_port
from tests.wait import PATIENCE_S, run, until

BOTH_RUN = 4  # two attempts, what waits for them, and the test
Connect = Callable[[list[Target], float], str]
PATIENT_S = 10 * PATIENCE_S
"""A stagger that nobody waits for: what fails must be followed at once."""


def on_a_loop(targets: list[Target], stagger_s: float) -> str:
    async def use() -> str:
        target, made = await connect_first(targets, stagger_s)
        with made:
            assert made.getpeername() == target[1]
            return str(made.getpeername()[0])

    return run(use())


def in_a_thread(targets: list[Target], stagger_s: float) -> str:
    with connect_first_blocking(targets, PATIENCE_S, stagger_s) as made:
        assert made.gettimeout() is None
        return str(made.getpeername()[0])


@pytest.fixture(params=[on_a_loop, in_a_thread])
def connect(request: pytest.FixtureRequest) -> Connect:
    chosen: Connect = request.param
    return chosen


@contextlib.contextmanager
def listening(host: str, backlog: int = 5) -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(backlog)
        yield listener.getsockname()[1]


@contextlib.contextmanager
def black_hole() -> Iterator[Target]:
    """An address that answers nothing: its backlog is full, so the kernel drops what comes."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening("127.0.0.3", 0))
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.3", port))
        yield at("127.0.0.3", port)


def at(host: str, port: int) -> Target:
    return socket.AF_INET, (host, port)


def test_a_dead_address_is_followed_at_once(connect: Connect) -> None:
    with listening("127.0.0.1") as port:
        assert connect([at("127.0.0.2", port), at("127.0.0.1", port)], PATIENT_S) == "127.0.0.1"


def test_a_mute_address_is_followed_after_a_moment(connect: Connect) -> None:
    with black_hole() as hole, listening("127.0.0.1") as port:
        assert connect([hole, at("127.0.0.1", port)], 0.01) == "127.0.0.1"


def test_the_first_of_two_that_accept_is_taken(connect: Connect) -> None:
    with listening("127.0.0.1") as port, listening("127.0.0.2") as other:
        found = connect([at("127.0.0.2", other), at("127.0.0.1", port)], PATIENT_S)
        assert found == "127.0.0.2"


def test_where_nobody_accepts_the_first_error_is_told(connect: Connect) -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        connect([at("127.0.0.2", port), at("127.0.0.1", port)], PATIENT_S)


def test_a_thread_gives_up_in_time() -> None:
    with black_hole() as hole, pytest.raises(TimeoutError):
        connect_first_blocking([hole], 0.05)


def test_a_loop_that_is_cancelled_leaves_no_socket() -> None:
    async def use() -> None:
        with black_hole() as hole:
            connecting = asyncio.ensure_future(connect_first([hole, hole], 0.01))
            await until(lambda: len(asyncio.all_tasks()) == BOTH_RUN)
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting
            assert len(asyncio.all_tasks()) == 1

    run(use())


def test_the_families_take_turns() -> None:
    rows = [
        (family, socket.SOCK_STREAM, 6, "", (host, 1))
        for family, host in ((10, "a"), (10, "a"), (10, "b"), (2, "c"))
    ]
    assert [host for _, (host, _) in targets_of(rows)] == ["a", "c", "b"]
