"""One simulated inference engine: continuous batching over a block pool, one step at a time.

A step decodes for every running request, spends the rest of its token budget on prefill in order of
arrival, and admits waiting requests while the pool can guarantee them room. Pure: the caller
decides when a step happens (`worker.py` in real time, a simulator or a test at will).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from select_service.demo.pool import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.demo.pool import BlockPool, PoolEvent

__all__ = ["Engine", "EngineSpeed", "Job", "StepReport"]


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What one step can do."""

    prefill_tokens_per_step: int = 512
    decode_tokens_per_step: int = 4  # per request; more than 1 makes a demo quicker than life
    running_max: int = 64


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and the answer the engine will "generate"."""

    request_id: str
    token_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(slots=True)
class StepReport:
    """What one step did, in request ids."""

    admitted: list[tuple[str, int]] = field(default_factory=list)  # with the cached blocks
    prefilled: list[str] = field(default_factory=list)
    blocks_filled: list[str] = field(default_factory=list)  # once per block of output
    finished: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # would never fit
    events: list[PoolEvent] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    computed: int
    generated: int = 0

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.job.token_ids)


class Engine:
    """Requests in, `StepReport`s out."""

    def __init__(self, pool: BlockPool, speed: EngineSpeed | None = None) -> None:
        self.pool = pool
        self.speed = speed or EngineSpeed()
        self._waiting: deque[Job] = deque()
        self._running: OrderedDict[str, _Running] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def submit(self, job: Job) -> None:
        """Append a request to the queue."""
        self._waiting.append(job)

    def cancel(self, request_id: str) -> bool:
        """Withdraw a request; its blocks stay cached. False if it is not here."""
        if self._running.pop(request_id, None) is not None:
            self.pool.close(request_id)
            return True
        for job in self._waiting:
            if job.request_id == request_id:
                self._waiting.remove(job)
                return True
        return False

    def step(self) -> StepReport:
        """Advance everything by one step."""
        report = StepReport()
        self._decode(report)
        self._admit(report)
        self._prefill(report)
        report.events = self.pool.take_events()
        return report

    def _decode(self, report: StepReport) -> None:
        for request_id, running in list(self._running.items()):
            if running.prefilling:
                continue
            outputs = running.job.output_ids
            until = min(running.generated + self.speed.decode_tokens_per_step, len(outputs))
            for token_id in outputs[running.generated : until]:
                if self.pool.append(request_id, token_id):
                    report.blocks_filled.append(request_id)
            running.generated = until
            if until == len(outputs):
                del self._running[request_id]
                self.pool.close(request_id)
                report.finished.append(request_id)

    def _admit(self, report: StepReport) -> None:
        while self._waiting and len(self._running) < self.speed.running_max:
            job = self._waiting[0]
            try:
                hits = self.pool.open(job.request_id, job.token_ids, len(job.output_ids))
            except RequestTooLarge:
                self._waiting.popleft()
                report.refused.append(job.request_id)
                continue
            if hits is None:
                return  # first come, first served: nobody overtakes a request that lacks room
            self._waiting.popleft()
            self._running[job.request_id] = _Running(job, hits * self.pool.block_size)
            report.admitted.append((job.request_id, hits))

    def _prefill(self, report: StepReport) -> None:
        budget = self.speed.prefill_tokens_per_step
        for request_id, running in self._running.items():
            left = len(running.job.token_ids) - running.computed
            tokens = min(budget, left)
            if tokens == 0:
                continue
            budget -= tokens
            running.computed += tokens
            self.pool.compute(request_id, running.computed)
            if tokens == left:
                report.prefilled.append(request_id)
