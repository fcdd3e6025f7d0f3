"""Somebody outside who asks for /health all the time: a process of its own, with few imports.

It notes how long each answer took, and by how much its own sleep between two questions was
overslept: what the machine took away from everybody. No interpreter lock of a busy test is in it.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import socket
import time
from dataclasses import dataclass
from typing import Self

PAUSE_S = 0.005
TIMEOUT_S = 5.0
UNLUCKY = 3  # of the slowest answers
JOIN_S = 20.0
_REQUEST = b"GET /health HTTP/1.1\r\nhost: probe\r\n\r\n"


@dataclass(frozen=True)
class Health:
    """What the probe saw: milliseconds, and how often there was no answer at all."""

    asked: int
    failed: int
    p50_ms: float
    p99_ms: float
    judged_ms: float
    """The 99th percentile without the three slowest: of some hundred answers it would be one that
    the machine, and nobody else, has held up."""
    max_ms: float
    overslept_p99_ms: float
    """The same share of the probe's own sleeps took so much longer than they should have."""


class Probe:
    """Asks from its start to its end. Use as a context manager; `health` is there afterwards."""

    health: Health
    seen: list[tuple[float, float]]
    """When (`time.monotonic`), and how many milliseconds."""

    def __init__(self, port: int, host: str = "127.0.0.1", pause_s: float = PAUSE_S) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_ask, args=(theirs, host, port, pause_s), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        assert self._ours.poll(JOIN_S), "the probe never began"
        self._ours.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        assert self._ours.poll(JOIN_S), "the probe does not end"
        self.seen, overslept, failed = self._ours.recv()
        self._process.join(JOIN_S)
        waits = [ms for _, ms in self.seen]
        self.health = Health(
            len(waits) + failed,
            failed,
            share(waits, 0.5),
            share(waits, 0.99),
            share(sorted(waits)[:-UNLUCKY], 0.99),
            max(waits, default=math.nan),
            share(overslept, 0.99),
        )


def share(values: list[float], part: float) -> float:
    """The value that this part of all does not exceed."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def _ask(pipe: multiprocessing.connection.Connection, host: str, port: int, pause_s: float) -> None:
    seen: list[tuple[float, float]] = []
    overslept: list[float] = []
    failed = 0
    connection: socket.socket | None = None
    pipe.send("begun")
    while not pipe.poll():
        began = time.perf_counter()
        try:
            if connection is None:
                connection = socket.create_connection((host, port), TIMEOUT_S)
            connection.sendall(_REQUEST)
            if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                raise OSError("no answer")  # noqa: TRY301 - like any other
            seen.append((time.monotonic(), (time.perf_counter() - began) * 1e3))
        except OSError:
            failed += 1
            if connection is not None:
                connection.close()
            connection = None
        began = time.perf_counter()
        time.sleep(pause_s)
        overslept.append((time.perf_counter() - began - pause_s) * 1e3)
    pipe.send((seen, overslept, failed))
