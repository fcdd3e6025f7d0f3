"""Workloads over HTTP: a server, its workers' event streams, and phases between CPU readings."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bench.compare.run import Reading
from bench.compare.servers import RunningServer
from bench.compare.target import Target
from bench.load.events import Publishers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.compare.servers import Contender

__all__ = ["Phase", "Served", "ServedSession", "ServedWorkload", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a phase took."""

    units: int
    cpu_s: float
    wall_s: float
    memory_bytes: int  # resident afterwards

    def detail(self) -> dict[str, float]:
        """For the file."""
        return {
            "units": self.units,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "memory_bytes": self.memory_bytes,
        }


@dataclass(frozen=True, slots=True)
class Phase:
    """A piece of work to measure: what it is called, how to do it, how to see it was done.

    `work` returns the units done. `verify` runs outside the clock and raises BadAnswer. `read`
    turns what it took into readings; without it the reading is CPU per unit.
    """

    name: str
    work: Callable[[], int]
    verify: Callable[[], None] | None = None
    read: Callable[[Usage], list[Reading]] | None = None


class ServedWorkload(Protocol):
    """What `Served` makes a workload of."""

    @property
    def name(self) -> str:
        """Unique; the first word is the W-number."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows it gives readings for."""

    @property
    def unit(self) -> str:
        """What the cost is counted per."""

    @property
    def workers(self) -> int:
        """Workers to register."""

    @property
    def shares_stream(self) -> bool:
        """Whether all workers may listen to one silent publisher."""

    def prepare(self, target: Target) -> None:
        """Bring a fresh target into its starting state."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """What to measure in this round; preparation happens here, outside the clock."""


@dataclass(frozen=True, slots=True)
class ServedSession:
    """A target and the rounds of its workload."""

    workload: ServedWorkload
    target: Target

    def round(self, number: int) -> list[Reading]:
        """All phases, one after the other."""
        return [
            reading
            for phase in self.workload.phases(self.target, number)
            for reading in self._phase(phase)
        ]

    def _phase(self, phase: Phase) -> list[Reading]:
        server = self.target.server
        cpu, wall = server.cpu_s(), time.perf_counter()
        units = phase.work()
        cpu, wall = server.cpu_s() - cpu, time.perf_counter() - wall
        if phase.verify is not None:
            phase.verify()
        usage = Usage(units, cpu, wall, server.memory_bytes())
        if phase.read is not None:
            return phase.read(usage)
        unit = f"CPU µs / {self.workload.unit}"
        return [Reading(phase.name, unit, cpu / units * 1e6, usage.detail())]


@dataclass(frozen=True, slots=True)
class Served:
    """A workload for `run.measure`."""

    workload: ServedWorkload
    rounds_max: int | None = None
    warms_up: bool = True

    @property
    def name(self) -> str:
        """Of the workload."""
        return self.workload.name

    @property
    def rows(self) -> tuple[str, ...]:
        """Of the workload."""
        return self.workload.rows

    @contextmanager
    def session(self, contender: Contender, connections: int) -> Iterator[ServedSession]:
        """A fresh process with its workers registered."""
        with (
            RunningServer(contender) as server,
            Publishers(self.workload.workers, shared=self.workload.shares_stream) as publishers,
        ):
            target = Target(server, publishers, connections)
            target.register_workers()
            self.workload.prepare(target)
            yield ServedSession(self.workload, target)
