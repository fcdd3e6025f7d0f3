"""Processes under test: start, find their port open, read their CPU time, end them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bench.compare.peer import command, peer_pythons
from bench.load.http import BadAnswer, ask, request_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "OURS",
    "VARIANTS",
    "Contender",
    "InterpreterUnfit",
    "RunningServer",
    "contenders",
    "is_ours",
    "variant_of",
]

OURS = "ours"
NO_RING = "ours-no-ring"
VARIANTS: dict[str, dict[str, str]] = {
    OURS: {},
    "ours-pure": {"SELECT_SERVICE_PURE": "1"},
    NO_RING: {},
}
"""This service under different environments: as it is, without its compiled modules, and without
records of its decisions."""
_FLAGS = {NO_RING: ("--decision-ring", "0")}

_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = ("purelib", "platlib")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_PORTS_TRIED = 5
_HEALTH_POLL_S = 0.002  # how exactly `started_in_s` is known


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that can be started: a name for the report, and the command before `--port`.

    `environment` is added to that of this process; `python` runs it in-process (W11).
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable


class InterpreterUnfit(RuntimeError):
    """Another interpreter was asked for and cannot run what is installed for this one."""


def variant_of(name: str) -> str:
    """Return the variant of this service a contender is, whichever interpreter runs it."""
    return name.partition("@")[0]


def is_ours(name: str) -> bool:
    """Whether a contender is this service, in whatever variant, by whatever interpreter."""
    return variant_of(name) in VARIANTS


def contenders(names: Sequence[str], flags: Sequence[str] = ()) -> list[Contender]:
    """Ours by the name of the variant, the peer by its version.

    Args:
        names: in the order of the report. `VARIANT@PATH` is ours by another interpreter, of the
            same version and built otherwise; it runs what is installed for this one.
        flags: more of our own command line; the peer does not get them.

    Raises:
        PeerMissing: a version of the peer cannot be had.
        InterpreterUnfit: another interpreter is not there, or of another version.
    """
    pythons = peer_pythons(tuple(name for name in names if not is_ours(name)))
    return [
        _ours(name, flags)
        if is_ours(name)
        else Contender(name, command(pythons[name]), python=str(pythons[name]))
        for name in names
    ]


def _ours(name: str, flags: Sequence[str]) -> Contender:
    variant, _, python = name.partition("@")
    environment = dict(VARIANTS[variant])
    if python:
        environment["PYTHONPATH"] = _path_for(python)
    python = python or sys.executable
    command = (python, "-m", "select_service", "--host", "127.0.0.1", *flags)
    return Contender(name, (*command, *_FLAGS.get(variant, ())), environment, python)


def _path_for(python: str) -> str:
    """Return where another interpreter finds the sources and what they need."""
    path = os.pathsep.join([str(_ROOT), *dict.fromkeys(map(sysconfig.get_path, _INSTALLED))])
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_config_var('SOABI'))"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise InterpreterUnfit(f"{python}: {error}") from None
    expected = sysconfig.get_config_var("SOABI")
    if found != expected:
        raise InterpreterUnfit(f"{python} loads modules of {found}, installed are {expected}")
    return path


class _PortTaken(Exception):
    """Another process listens on the port that was free a moment ago."""


class RunningServer:
    """One server process, from `with` to its end."""

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name
        self.started_in_s = 0.0
        """From the start of the process to the first 200 of /health."""
        self._contender = contender

    def __enter__(self) -> Self:
        for _ in range(_PORTS_TRIED):
            with contextlib.suppress(_PortTaken):
                self._start()
                return self
        raise BadAnswer(f"{self.name}: other processes took {_PORTS_TRIED} free ports")

    def _start(self) -> None:
        self.address = ("127.0.0.1", _free_port())
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log")  # noqa: SIM115 - see `__exit__`
        started_at = time.perf_counter()
        self._process = subprocess.Popen(
            [*self._contender.command, "--port", str(self.address[1])],
            env=_environment(self._contender),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.pid = self._process.pid
        try:
            self._wait_healthy()
        except BaseException:
            self.__exit__()
            raise
        self.started_in_s = time.perf_counter() - started_at

    def __exit__(self, *exc: object) -> None:
        self._end()
        self._log.close()

    def cpu_s(self) -> float:
        """User and system time so far, all threads, dead ones included, and child processes."""
        # The CPU clock of a process (clock_getcpuclockid(3)): what utime + stime of
        # /proc/<pid>/stat count in ticks of 10 ms, this counts in nanoseconds.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._family())

    def memory_bytes(self) -> int:
        """Resident set size: all pages of the process in memory, shared ones too."""
        return sum(_smaps(pid)["Rss"] for pid in self._family())

    def own_memory_bytes(self) -> int:
        """Proportional set size: a page that n processes share counts as 1/n."""
        return sum(_smaps(pid)["Pss"] for pid in self._family())

    def _family(self) -> list[int]:
        """The process and its descendants."""
        found = [self.pid]
        for pid in found:  # grows as it goes
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):  # a thread that has ended since
                    found += map(int, children.read_text(encoding="ascii").split())
        return found

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                ask(self.address, [request_bytes("GET", "/health")])
            except (OSError, BadAnswer) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
                    if os.strerror(errno.EADDRINUSE) in log:  # in every contender's text
                        raise _PortTaken from error
                    raise BadAnswer(f"{self.name} did not start:\n{log[-500:]}") from error
                time.sleep(_HEALTH_POLL_S)
            else:
                if self._process.poll() is None:
                    return
                raise _PortTaken  # it is another process that answers there

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(contender: Contender) -> dict[str, str]:
    """Return that of a process under test: it may keep bytecode, as an installed package has it.

    Where it is not allowed to (shells of developers forbid it), Python compiles every module of the
    sources at every start, which no installation by `pip install` does.
    """
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **contender.environment}


def _smaps(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = (line.replace(":", " ").split() for line in lines[1:])
    return {name: int(kilobytes) * 1024 for name, kilobytes, _ in fields}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
