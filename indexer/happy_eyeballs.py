"""Connects to the first of several addresses that accepts (RFC 8305, "happy eyeballs").

A name may have addresses at which no server listens, or of a family that is not routed. All are
tried, each a moment after the one before, so that a dead one costs at most a quarter of a second.
The service's names (`edge/addresses`) and the client's connections use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

STAGGER_S: Final = 0.25
"""How long an attempt is given before the next address is tried as well (RFC 8305, section 5)."""

Target: TypeAlias = tuple[int, tuple[Any, ...]]
"""Address family and socket address."""


def targets_of(rows: Iterable[tuple[Any, ...]]) -> list[Target]:
    """Return what `getaddrinfo` found, without repetition, the families in turn."""
    found: dict[int, list[Target]] = {}
    for family, _, _, _, address in dict.fromkeys(rows):
        found.setdefault(family, []).append((family, address))
    in_turn = chain.from_iterable(zip_longest(*found.values()))
    return [one for one in in_turn if one is not None]


async def connect_first(
    targets: Sequence[Target], stagger_s: float = STAGGER_S
) -> tuple[Target, socket.socket]:
    """Connect to the first target that accepts; the others are given up.

    Args:
        targets: in the order in which they are tried; at least one.
        stagger_s: seconds until the next is tried beside those that have not answered; one that
            fails is followed at once.

    Raises:
        OSError: none accepts; the error of the first.
    """
    loop = asyncio.get_running_loop()
    waiting = deque(targets)
    running: dict[asyncio.Task[socket.socket], Target] = {}
    failures: list[OSError] = []
    try:
        while waiting or running:
            if waiting:
                target = waiting.popleft()
                running[loop.create_task(_connect(target))] = target
            done, _ = await asyncio.wait(
                running,
                timeout=stagger_s if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                target = running[task]
                error = task.exception()
                if error is None:
                    del running[task]
                    return target, task.result()
                del running[task]
                if not isinstance(error, OSError):
                    raise error
                failures.append(error)
        raise failures[0]
    finally:
        await _give_up(running)


async def _connect(target: Target) -> socket.socket:
    family, address = target
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setblocking(False)  # noqa: FBT003 - the name of the parameter is `flag`
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


async def _give_up(attempts: Iterable[asyncio.Task[socket.socket]]) -> None:
    for one in attempts:
        one.cancel()
    for made in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(made, socket.socket):  # it was too late
            made.close()


def connect_first_blocking(
    targets: Sequence[Target], timeout_s: float | None, stagger_s: float = STAGGER_S
) -> socket.socket:
    """Do the same for a thread; the socket blocks.

    Args:
        targets: in the order in which they are tried; at least one.
        timeout_s: for all of them together; None: as long as the system allows.
        stagger_s: as above.

    Raises:
        TimeoutError: none accepted in time.
        OSError: none accepts; the error of the first.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = deque(targets)
    running: dict[int, socket.socket] = {}
    failures: list[OSError] = []
    ready = select.poll()  # not `select`, which refuses descriptors from 1024 on
    with contextlib.ExitStack() as stack:
        while waiting or running:
            if waiting:
                family, address = waiting.popleft()
                made = stack.enter_context(
                    socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
                )
                made.setblocking(False)  # noqa: FBT003 - the name of the parameter is `flag`
                code = made.connect_ex(address)
                if code not in {0, errno.EINPROGRESS}:
                    failures.append(OSError(code, os.strerror(code)))
                    continue
                running[made.fileno()] = made
                ready.register(made, select.POLLOUT)
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError("no connection in time")
            wait_s = min(stagger_s, left_s or stagger_s) if waiting else left_s
            for number, _ in ready.poll(None if wait_s is None else wait_s * 1e3):
                made = running.pop(number)
                ready.unregister(number)
                code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    won = socket.socket(fileno=made.detach())
                    won.settimeout(None)
                    return won
                failures.append(OSError(code, os.strerror(code)))
                made.close()
        raise failures[0]
