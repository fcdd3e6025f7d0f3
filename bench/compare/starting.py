"""W10: from the start of the process to the first 200 of /health."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.compare.run import Reading
from bench.compare.servers import RunningServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.compare.servers import Contender

__all__ = ["Start"]


@dataclass(frozen=True, slots=True)
class Start:
    """Fresh processes, nothing registered; wall-clock time, interpreter included on both sides."""

    name: str
    starts: int = 3  # a round's value is their median
    rounds_max: ClassVar[int | None] = 7
    warms_up: ClassVar[bool] = True  # files of the interpreter come from the page cache

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    @contextmanager
    def session(self, contender: Contender, connections: int) -> Iterator[_StartSession]:
        """Nothing yet: processes start in each round."""
        del connections
        yield _StartSession(self, contender)


@dataclass(frozen=True, slots=True)
class _StartSession:
    workload: Start
    contender: Contender

    def round(self, number: int) -> list[Reading]:
        """Start and end some processes."""
        del number
        seconds, cpu = [], []
        for _ in range(self.workload.starts):
            with RunningServer(self.contender) as server:
                seconds.append(server.started_in_s)
                cpu.append(server.cpu_s())
        detail = {"cpu_s": statistics.median(cpu), "slowest_s": max(seconds)}
        return [Reading(self.workload.name, "s", statistics.median(seconds), detail)]
