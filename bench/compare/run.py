"""The measurement: rounds in turn, fresh processes per workload.

Every contender does round r before any does round r+1, and which begins changes with each round,
so that a noisy minute costs all of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from bench.compare.servers import Contender

__all__ = ["Reading", "Sample", "Session", "Workload", "measure"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of one round: a cost, so less is better."""

    row: str  # the line of the table it belongs to
    unit: str
    value: float
    detail: dict[str, float] = field(default_factory=dict)  # what else was seen, for the file


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading, and whose it is."""

    workload: str
    row: str
    unit: str
    contender: str
    round_number: int
    value: float
    detail: dict[str, float] = field(default_factory=dict)


class Session(Protocol):
    """One contender under one workload, ready to be measured."""

    def round(self, number: int) -> list[Reading]:
        """Do the work once and check it."""


class Workload(Protocol):
    """Something to measure."""

    @property
    def name(self) -> str:
        """Unique; the first word is the W-number."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows it gives readings for."""

    @property
    def rounds_max(self) -> int | None:
        """As many rounds are enough, for what takes long and varies little; None: as asked."""

    @property
    def warms_up(self) -> bool:
        """Whether a round before the first is needed, and not counted."""

    def session(self, contender: Contender, connections: int) -> AbstractContextManager[Session]:
        """Start a contender and bring it into the workload's starting state."""


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
    last = min(rounds, workload.rounds_max or rounds)
    with ExitStack() as stack:
        sessions = [
            (one.name, stack.enter_context(workload.session(one, connections)))
            for one in contenders
        ]
        for number in range(0 if workload.warms_up else 1, last + 1):
            turn = number % len(sessions)
            for name, session in sessions[turn:] + sessions[:turn]:
                readings = session.round(number)
                if number:
                    samples += [_sample(workload, name, number, one) for one in readings]
            progress(f"{workload.name}: round {number} of {last}")
    return samples


def _sample(workload: Workload, contender: str, number: int, one: Reading) -> Sample:
    return Sample(workload.name, one.row, one.unit, contender, number, one.value, one.detail)
