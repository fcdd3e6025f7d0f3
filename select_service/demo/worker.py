"""A simulated engine in real time: steps the engine, publishes its events, can be restarted.

`engine.py` decides what a step does and `worker.py` how events travel; this file owns the clock.
Callers submit a job and await its milestones; a restart loses every job, the pool and the sequence
numbers, but keeps the addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Self

import zmq

from indexer.core.endpoint import tcp_address
from indexer.edge.sockets import bind
from select_service.demo.encoding import RemovedBlocks, StoredBlocks, encode_batch
from select_service.demo.engine import DemoEngine, DemoJob, StepLimits, StepReport
from select_service.tcp_listener import host_in_url, loopback

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    speed: StepLimits = field(default_factory=StepLimits)


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


# The ZMQ side of a simulated engine: numbered batches on a PUB, replay on a ROUTER. It has neither
# threads nor a loop: what steps the engine calls `publish` and `serve_replay`, as an engine's
# publishing thread does both in turn. A new publisher on the same ports looks like a restarted
# engine: the sequence starts at 0 again.

_REQUEST: Final = ("identity", "empty", "start")
_U64: Final = 8
_END_OF_REPLAY: Final = b"\xff" * 8
_HIGH_WATER_MARK: Final = 100_000  # vLLM's default for its PUB
_BUFFER_STEPS: Final = 10_000  # vLLM's default


class EventPublisher:
    """One event stream of one (worker, rank).

    Args:
        endpoint: where the PUB binds; port `*` takes any free one (see `endpoint` afterwards), and
            host `*` means every address of both families.
        replay_endpoint: where the ROUTER binds, or None for an engine without replay.
        replay_with_topic: 4 frames as vLLM 0.26 and later, or 3 as before.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str | None = "tcp://127.0.0.1:*",
        *,
        topic: bytes = b"kv-events",
        replay_with_topic: bool = True,
        buffer_steps: int = _BUFFER_STEPS,
    ) -> None:
        self.topic = topic
        self.sequence = 0  # of the next batch
        self.replays_served = 0
        self._replay_with_topic = replay_with_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._pub = self._bind(zmq.PUB, endpoint)
        self._router = None if replay_endpoint is None else self._bind(zmq.ROUTER, replay_endpoint)
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._router is None else _address(self._router)

    def publish(self, payload: bytes) -> int:
        """Send one batch and return its sequence number; never blocks, a slow reader loses it."""
        sequence = self.sequence
        self._pub.send_multipart([self.topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._buffer.append((sequence, payload))
        self.sequence = sequence + 1
        return sequence

    def withhold(self, payload: bytes) -> int:
        """Number and remember a batch without sending it: a live message lost on the way."""
        sequence = self.sequence
        self._buffer.append((sequence, payload))
        self.sequence = sequence + 1
        return sequence

    def serve_replay(self) -> int:
        """Answer the replay requests that have arrived; returns how many."""
        if self._router is None:
            return 0
        served = 0
        while self._router.poll(0):
            frames = self._router.recv_multipart()
            # Like the engines, ignore a request without the empty delimiter.
            if len(frames) == len(_REQUEST) and frames[1] == b"" and len(frames[2]) == _U64:
                self._answer(self._router, frames[0], int.from_bytes(frames[2], "big"))
                served += 1
        self.replays_served += served
        return served

    def close(self) -> None:
        """Close both sockets; what is unsent is gone, as with a killed process."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answer(self, router: zmq.Socket[bytes], identity: bytes, start: int) -> None:
        middle = [self.topic] if self._replay_with_topic else []
        for sequence, payload in self._buffer:
            if sequence >= start:
                number = sequence.to_bytes(8, "big")
                router.send_multipart([identity, b"", *middle, number, payload])
        marker_middle = (
            [b""] if self._replay_with_topic else []
        )  # the marker has no topic (vLLM 0.26 … 0.33)
        router.send_multipart([identity, b"", *marker_middle, _END_OF_REPLAY, b""])

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        # a ROUTER drops beyond its mark, so it must hold the whole buffer (vLLM 0.33 does this)
        bound.set_hwm(_HIGH_WATER_MARK)
        bind(bound, endpoint)
        return bound


@contextlib.contextmanager
def held(endpoint: str) -> Iterator[None]:
    """Keep a TCP endpoint from other processes while no publisher has it; connects are refused.

    A publisher may bind it within the block: both sockets reuse the address, and this one does not
    listen.
    """
    address = tcp_address(endpoint)
    assert address is not None, "as bound by a publisher"
    host, port = address[0].strip("[]"), address[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
        yield


def _address(of: zmq.Socket[bytes]) -> str:
    bound = of.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
