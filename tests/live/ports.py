"""Free TCP ports for processes that bind by number, alone or as a block of neighbours."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable

HOST = "127.0.0.1"
# Below the kernel's ephemeral range, five digits like the recordings; runners side by side have a
# range each, since a port that was given out need not be bound yet. TEST_PORTS_FIRST=14000 leaves
# this range to others who run tests at the same time.
RUNNERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
RUNNER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
SPAN = (12_000 if "TEST_PORTS_FIRST" not in os.environ else 4_000) // RUNNERS // 100 * 100
FIRST = int(os.environ.get("TEST_PORTS_FIRST", "20000")) + RUNNER * SPAN
LAST = FIRST + SPAN
ATTEMPTS = 200
_given: set[int] = set()  # what was given out need not be bound yet


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
    """One port that was free a moment ago, and that nobody here was given before."""
    dice = random.SystemRandom()
    for _ in range(ATTEMPTS):
        port = dice.randrange(FIRST, LAST)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise RuntimeError("no free port")


def free_base(offsets: Iterable[int]) -> int:
    """A base, a multiple of 100, such that base + offset is free for each offset."""
    wanted = sorted(offsets)
    dice = random.SystemRandom()
    for _ in range(ATTEMPTS):
        base = dice.randrange(FIRST, LAST, 100)
        if all(is_free(base + offset) for offset in wanted):
            return base
    raise RuntimeError(f"no free block of ports {wanted}")
