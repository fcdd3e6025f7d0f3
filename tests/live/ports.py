"""Free TCP ports for processes that bind by number, alone or as a block of neighbours.

A port that was given out need not be bound yet, and others run tests on this machine at the same
time. So each is reserved: byte N of one file is locked by the process to which port N was given.
The kernel lets go of the locks of a process that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
FIRST, LAST = 10_000, 32_000
"""Five digits like the recordings, and below the ports that the kernel gives to clients."""
KEPT_MAX: Final = 200
"""So many are kept for this process; older ones are bound by now or not needed any more."""
ATTEMPTS: Final = 1000

_locks = os.open(
    Path(tempfile.gettempdir()) / f"select-service-test-ports-{os.getuid()}",
    os.O_RDWR | os.O_CREAT,
    0o600,
)
_given: deque[int] = deque()
_in_blocks: set[int] = set()


def is_free(port: int) -> bool:
    """Whether nobody listens on the port right now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """One port that nobody listens on, and that nobody else is given for now."""
    dice = random.SystemRandom()
    for _ in range(ATTEMPTS):
        port = dice.randrange(FIRST, LAST)
        if _reserve([port]):
            _given.append(port)
            while len(_given) > KEPT_MAX:
                _unlock(_given.popleft())
            return port
    raise RuntimeError("no free port")


@contextlib.contextmanager
def free_base(offsets: Iterable[int]) -> Iterator[int]:
    """A base, a multiple of 100, such that base + offset is a free port for each offset.

    There are few of them: they are kept for the block only.
    """
    wanted = sorted(offsets)
    dice = random.SystemRandom()
    for _ in range(ATTEMPTS):
        base = dice.randrange(FIRST, LAST, 100)
        if _reserve([base + offset for offset in wanted]):
            break
    else:
        raise RuntimeError(f"no free block of ports {wanted}")
    block = {base + offset for offset in wanted}
    _in_blocks.update(block)
    try:
        yield base
    finally:
        _in_blocks.difference_update(block)
        for port in block:
            _unlock(port)


def _reserve(ports: list[int]) -> bool:
    """Keep all of these ports for this process, or none."""
    taken: list[int] = []
    for port in ports:
        if port in _given or port in _in_blocks or not _lock(port):
            break
        taken.append(port)
        if not is_free(port):
            break
    else:
        return True
    for port in taken:
        _unlock(port)
    return False


def _lock(port: int) -> bool:
    try:
        fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    return True


def _unlock(port: int) -> None:
    fcntl.lockf(_locks, fcntl.LOCK_UN, 1, port)
