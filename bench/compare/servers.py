"""Processes under test: start, find their port open, read their CPU time, end them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bench.compare.peer import command, peer_pythons
from bench.load.http import BadAnswer, ask, request_bytes

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["OURS", "Contender", "RunningServer", "contenders"]

OURS = "ours"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that can be started: a name for the report, and the command before `--port`."""

    name: str
    command: tuple[str, ...]


def contenders(names: tuple[str, ...]) -> list[Contender]:
    """Ours by its name, the peer by its version."""
    pythons = peer_pythons(tuple(name for name in names if name != OURS))
    return [
        Contender(OURS, (sys.executable, "-m", "select_service", "--host", "127.0.0.1"))
        if name == OURS
        else Contender(name, command(pythons[name]))
        for name in names
    ]


class RunningServer:
    """One server process, from `with` to its end."""

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name
        self._command = contender.command

    def __enter__(self) -> Self:
        self.address = ("127.0.0.1", _free_port())
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log")
        self._process = subprocess.Popen(
            [*self._command, "--port", str(self.address[1])],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.pid = self._process.pid
        try:
            self._wait_healthy()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._log.close()

    def cpu_s(self) -> float:
        """User and system time of the whole process so far, all threads, dead ones included."""
        # The CPU clock of a process (clock_getcpuclockid(3)): what utime + stime of
        # /proc/<pid>/stat count in ticks of 10 ms, this counts in nanoseconds.
        return time.clock_gettime((~self.pid << 3) | 2)

    def memory_bytes(self) -> int:
        """Resident set size."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                ask(self.address, [request_bytes("GET", "/health")])
            except (OSError, BadAnswer) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
                    raise BadAnswer(f"{self.name} did not start:\n{log[-500:]}") from error
                time.sleep(0.05)
            else:
                return

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
