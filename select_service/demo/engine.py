"""The simulator's engine with the text of its requests, one step of the demo at a time.

`simulator/core/worker.py` batches, computes and evicts; it knows requests by lengths and the names
of blocks. Here tokens become names, and names in its events become tokens again, as vLLM publishes
them. Pure: the caller decides when a step happens (`worker.py` in real time, a test at will).
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from select_service.demo.encoding import RemovedBlocks, StoredBlocks
from select_service.simulator.core import kv_events
from select_service.simulator.core.engine_settings import EngineSettings
from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.core.requests import ClientRequest, chain_of
from select_service.simulator.core.worker import EngineJob, EngineWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.demo.encoding import PoolEvent

_STEPS: AnalyticLatency = AnalyticLatency(
    base_s=1.0, prefill_token_s=0.0, prefill_pair_s=0.0, sequence_s=0.0, kv_token_s=0.0
)
"""Time is counted in steps of the simulated engine."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step can do."""

    prefill_tokens_per_step: int = 512  # decoded tokens among them
    decode_tokens_per_step: int = 4  # per request; more than 1 makes a demo quicker than life
    running_max: int = 64


@dataclass(frozen=True, slots=True)
class DemoJob:
    """A prompt and the answer the engine will "generate"; neither is empty."""

    request_id: str
    token_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(slots=True)
class StepReport:
    """What one step did, in request ids."""

    prefilled: list[tuple[str, int]] = field(default_factory=list)  # with the cached blocks
    blocks_filled: list[str] = field(default_factory=list)  # once per block of output
    finished: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # would never fit
    events: list[PoolEvent] = field(default_factory=list)


class DemoEngine:
    """Requests in, `StepReport`s out.

    Args:
        blocks: of its KV cache.
        block_size: tokens of a block.
        speed: of a step.
        hash_seed: colours the block hashes, as each start of a real engine may.
    """

    def __init__(
        self, blocks: int, block_size: int, speed: StepLimits | None = None, *, hash_seed: int = 0
    ) -> None:
        self.speed = speed or StepLimits()
        self.block_size = block_size
        settings = EngineSettings(
            latency=_STEPS,
            kv_tokens=blocks * block_size,
            step_tokens_max=self.speed.prefill_tokens_per_step // self.speed.decode_tokens_per_step,
            sequences_max=self.speed.running_max,
        )
        settings.check()
        self._worker = EngineWorker(0, settings, block_size)
        self._root = hashlib.sha256(hash_seed.to_bytes(8, "little", signed=True)).digest()
        self._now = 0.0
        self._filled: dict[EngineJob, int] = {}  # jobs, with their blocks of output
        # by block hash: its tokens, and the number of jobs that name it
        self._tokens: dict[int, tuple[Sequence[int], int]] = {}
        self._refused: list[EngineJob] = []

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._worker.waiting)

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return self._worker.running

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._filled

    @property
    def blocks_held(self) -> int:
        """Blocks that can be found in the cache."""
        return self._worker.pool.named

    @property
    def evictions(self) -> int:
        """Blocks dropped to make room so far."""
        return self._worker.pool.evictions

    def match(self, token_ids: Sequence[int]) -> int:
        """How many leading whole blocks of `token_ids` the cache holds."""
        chain = self._chain(token_ids)
        return self._worker.pool.match(chain, len(chain))[0]

    def submit(self, job: DemoJob) -> None:
        """Append a request to the queue."""
        text = [*job.token_ids, *job.output_ids]
        blocks = self._chain(text)
        size = self.block_size
        for number, block in enumerate(blocks):
            tokens, jobs = self._tokens.get(block, (text[number * size : (number + 1) * size], 0))
            self._tokens[block] = (tokens, jobs + 1)
        request = ClientRequest(
            number=0,
            arrival=self._now,
            isl=len(job.token_ids),
            osl=len(job.output_ids),
            blocks=blocks,
        )
        made = EngineJob(request)
        made.key = job.request_id
        self._filled[made] = 0
        self._worker.submit(made, self._now)
        self._refused += self._worker.take_refused()

    def step(self) -> StepReport:
        """Advance everything by one step."""
        report, ended = StepReport(), self._refused
        self._refused = []
        report.refused += [job.key for job in ended]
        until = self._now + self.speed.decode_tokens_per_step
        while self._worker.due <= until:
            self._now = self._worker.due
            for kind, job in self._worker.step(self._now):
                if kind == "first_token":
                    report.prefilled.append((job.key, job.cached // self.block_size))
                    continue
                (report.finished if kind == "done" else report.refused).append(job.key)
                ended.append(job)
                if kind == "done":
                    self._count_output(job, report)
        self._now = until
        for job in self._filled:
            self._count_output(job, report)
        report.events = self._take_events()
        for job in ended:
            self._forget(job)
        self._worker.gaps.clear()
        return report

    def check(self) -> None:
        """Assert every invariant; tests call it after each step."""
        self._worker.check()
        named = sum(len(job.request.blocks) for job in self._filled)
        assert named == sum(jobs for _, jobs in self._tokens.values()), "texts are kept for jobs"

    def _count_output(self, job: EngineJob, report: StepReport) -> None:
        prompt = job.request.isl
        tokens = self._worker.tokens_of(job, self._now)
        filled = (prompt + tokens) // self.block_size - prompt // self.block_size
        report.blocks_filled += [job.key] * (filled - self._filled[job])
        self._filled[job] = filled

    def _take_events(self) -> list[PoolEvent]:
        pool = self._worker.pool
        events, pool.events = pool.events, []
        return [self._pool_event(event) for event in events]

    def _pool_event(self, event: kv_events.KvEvent) -> PoolEvent:
        if isinstance(event, kv_events.Removed):
            return RemovedBlocks(tuple(event.blocks))
        tokens = tuple(token for block in event.blocks for token in self._tokens[block][0])
        return StoredBlocks(tuple(event.blocks), event.parent, tokens)

    def _forget(self, job: EngineJob) -> None:
        del self._filled[job]
        for block in job.request.blocks:
            tokens, jobs = self._tokens[block]
            if jobs > 1:
                self._tokens[block] = (tokens, jobs - 1)
            else:
                del self._tokens[block]

    def _chain(self, token_ids: Sequence[int]) -> array[int]:
        """Hashes of the whole blocks, chained as vLLM's sha256 with 64-bit event hashes."""
        digest = self._root
        packed = array("I", token_ids).tobytes()
        width = self.block_size * array("I").itemsize
        hashes = []
        for start in range(0, len(packed) - width + 1, width):
            digest = hashlib.sha256(digest + packed[start : start + width]).digest()
            hashes.append(int.from_bytes(digest[-8:], "big"))
        return chain_of(hashes)
