"""A simulated engine in real time: steps the engine, publishes its events, can be restarted.

`engine.py` decides what a step does and `publisher.py` how events travel; this file owns the clock.
Callers submit a job and await its milestones; a restart loses every job, the pool and the sequence
numbers, but keeps the addresses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto

from select_service.demo.encoding import RemovedBlocks, StoredBlocks, encode_batch
from select_service.demo.engine import DemoEngine, DemoJob, EngineSpeed, StepReport
from select_service.demo.publisher import EventPublisher, held
from select_service.tcp_listener import host_in_url, loopback


class EngineDown(Exception):
    """The engine is restarting; the request must go elsewhere."""


class Milestone(Enum):
    """The progress that a job reports."""

    PREFILLED = auto()
    BLOCK_FILLED = auto()
    FINISHED = auto()
    LOST = auto()  # the engine died, or the job can never fit


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The parameters of one engine."""

    blocks: int = 512
    block_size: int = 16
    step_s: float = 0.01
    speed: EngineSpeed = field(default_factory=EngineSpeed)


@dataclass(slots=True, eq=False)
class Progress:
    """The milestones of one job, in order, ending with FINISHED or LOST."""

    milestones: asyncio.Queue[Milestone] = field(default_factory=asyncio.Queue)
    cached_blocks: int = 0  # what the engine really reused; known once PREFILLED


class SimulatedWorker:
    """One worker of the fleet."""

    def __init__(self, worker_id: int, shape: EngineShape) -> None:
        self.worker_id = worker_id
        self.shape = shape
        self.restarts = 0
        self.up = True
        self.batches_published = 0
        self.blocks_stored = 0
        self.blocks_removed = 0
        self._replays_before = 0
        self._jobs: dict[str, Progress] = {}
        self._start()

    def _start(self, endpoint: str | None = None, replay_endpoint: str | None = None) -> None:
        self.engine = DemoEngine(
            self.shape.blocks,
            self.shape.block_size,
            self.shape.speed,
            hash_seed=self.worker_id * 1000 + self.restarts,
        )
        any_port = f"tcp://{host_in_url(loopback())}:*"
        self.publisher = EventPublisher(endpoint or any_port, replay_endpoint or any_port)

    @property
    def kv_events_endpoint(self) -> str:
        """Where the service subscribes."""
        return self.publisher.endpoint

    @property
    def replay_endpoint(self) -> str:
        """Where the service requests replays."""
        assert self.publisher.replay_endpoint is not None
        return self.publisher.replay_endpoint

    @property
    def replays_served(self) -> int:
        """Replay requests answered, across restarts of the engine."""
        return self._replays_before + self.publisher.replays_served

    def submit(self, job: DemoJob) -> Progress:
        """Hand a job to the engine.

        Raises:
            EngineDown: it is restarting.
        """
        if not self.up:
            raise EngineDown
        progress = Progress()
        self._jobs[job.request_id] = progress
        self.engine.submit(job)
        return progress

    async def run(self) -> None:
        """Step until cancelled; an idle engine only listens for replay requests."""
        while True:
            if self.up:
                self.publisher.serve_replay()
                if not self.engine.idle:
                    self._settle(self.engine.step())
            await asyncio.sleep(self.shape.step_s)

    async def restart(self, down_s: float) -> None:
        """Stop, stay away for `down_s`, come back empty on the same addresses."""
        endpoint, replay_endpoint = self.kv_events_endpoint, self.replay_endpoint
        self.up = False
        self.publisher.close()
        self._replays_before += self.publisher.replays_served
        for progress in self._jobs.values():
            progress.milestones.put_nowait(Milestone.LOST)
        self._jobs.clear()
        self.restarts += 1
        with held(endpoint), held(replay_endpoint):
            await asyncio.sleep(down_s)
            self._start(endpoint, replay_endpoint)
        # Real engines load their weights for minutes at this point; long enough for every
        # subscriber to be back before the first event.
        await asyncio.sleep(down_s)
        self.up = True

    def close(self) -> None:
        """Close the sockets for good."""
        self.up = False
        self.publisher.close()

    def _settle(self, report: StepReport) -> None:
        # Events first: when a caller learns of a block, the service may already know of it.
        if report.events:
            self.blocks_stored += sum(
                len(event.hashes) for event in report.events if isinstance(event, StoredBlocks)
            )
            self.blocks_removed += sum(
                len(event.hashes) for event in report.events if isinstance(event, RemovedBlocks)
            )
            payload = encode_batch(
                datetime.now(UTC).timestamp(), report.events, block_size=self.shape.block_size
            )
            self.publisher.publish(payload)
            self.batches_published += 1
        for request_id, cached_blocks in report.prefilled:
            self._jobs[request_id].cached_blocks = cached_blocks
        for milestone, request_ids in (
            (Milestone.PREFILLED, [request_id for request_id, _ in report.prefilled]),
            (Milestone.BLOCK_FILLED, report.blocks_filled),
            (Milestone.FINISHED, report.finished),
            (Milestone.LOST, report.refused),
        ):
            for request_id in request_ids:
                self._jobs[request_id].milestones.put_nowait(milestone)
        for request_id in (*report.finished, *report.refused):
            del self._jobs[request_id]
