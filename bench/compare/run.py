"""The measurement: fresh processes per workload, rounds in turn, CPU clock around each phase.

Every contender does round r before any does round r+1, and who begins changes from round to round,
so that a noisy minute costs all of them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.compare.servers import RunningServer
from bench.compare.target import Target
from bench.load.events import Publishers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.compare.servers import Contender
    from bench.compare.workloads import Workload

__all__ = ["Sample", "measure"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of one round of one contender."""

    workload: str
    phase: str
    unit: str
    contender: str
    round_number: int
    units: int
    cpu_s: float
    wall_s: float
    memory_bytes: int  # resident afterwards

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per unit."""
        return self.cpu_s / self.units * 1e6


def measure(
    workload: Workload,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    connections: int,
    progress: Callable[[str], None],
) -> list[Sample]:
    """All samples of one workload; round 0 warms up and is not among them.

    Raises:
        BadAnswer: a contender did something wrong; the whole workload is void then.
    """
    samples: list[Sample] = []
    with ExitStack() as stack:
        targets = []
        for contender in contenders:
            server = stack.enter_context(RunningServer(contender))
            publishers = Publishers(workload.workers, shared=workload.shares_stream)
            stack.enter_context(publishers)
            target = Target(server, publishers, connections)
            target.register_workers()
            workload.prepare(target)
            targets.append(target)
        for round_number in range(rounds + 1):
            turn = round_number % len(targets)
            for target in targets[turn:] + targets[:turn]:
                measured = _round(workload, target, round_number)
                if round_number:
                    samples += measured
            progress(f"{workload.name}: round {round_number} of {rounds}")
    return samples


def _round(workload: Workload, target: Target, round_number: int) -> list[Sample]:
    samples = []
    for phase in workload.phases(target, round_number):
        cpu, wall = target.server.cpu_s(), time.perf_counter()
        units = phase.work()
        cpu, wall = target.server.cpu_s() - cpu, time.perf_counter() - wall
        if phase.verify is not None:
            phase.verify()
        samples.append(
            Sample(
                workload=workload.name,
                phase=phase.name,
                unit=workload.unit,
                contender=target.server.name,
                round_number=round_number,
                units=units,
                cpu_s=cpu,
                wall_s=wall,
                memory_bytes=target.server.memory_bytes(),
            )
        )
    return samples
