"""A fleet of simulated engines behind the real core, in one thread and a made-up time.

Engines are those of the demo: a block pool with evictions, batching, events as vLLM writes them.
Their events and replays go through the real streams; one engine's may be made to lie.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from indexer.core.progress import END_MARKER
from indexer.core.registry import StreamRegistry
from indexer.core.stream import EventStream
from indexer.types import WorkerRank
from select_service.core.service import SelectionCore
from select_service.demo.encoding import PoolEvent, RemovedBlocks, StoredBlocks, encode_batch
from select_service.demo.engine import DemoEngine, DemoJob, StepLimits
from select_service.types import (
    RankTrustRow,
    RouterConfig,
    SelectAndReserveRequest,
    Selection,
    TrustSettings,
    WorkerSpec,
)

BLOCK = 16
STEP_S = 0.05
MODEL_EPOCH = 1_700_000_000.0  # the engines' wall clock when ours shows 0

Lie = Callable[[PoolEvent, random.Random], list[PoolEvent]]


@dataclass
class Shape:
    """The fleet and its traffic."""

    workers: int = 8
    pool_blocks: int = 600
    prefixes: int = 48
    prefix_blocks: int = 48
    tail_blocks: int = 4
    output_tokens: int = 24
    requests_per_step: float = 1.2
    speed: StepLimits = field(default_factory=lambda: StepLimits(2048, 4, 64))


@dataclass
class Done:
    """One prompt that was computed."""

    number: int
    worker_id: int
    prompt_tokens: int
    cached_tokens: int


class SimulatedRank:
    """One engine, what it has told, and what it should have told."""

    def __init__(self, worker_id: int, shape: Shape) -> None:
        self.worker_id = worker_id
        self.engine = DemoEngine(shape.pool_blocks, BLOCK, shape.speed, hash_seed=worker_id)
        self.lie: Lie | None = None
        self.told: list[bytes] = []
        self.true: list[bytes] = []
        self.replay_from = 0  # what went before has left the buffer
        self.has_replay = True
        self.request: object = None

    def publish(self, events: list[PoolEvent], now: float, rng: random.Random) -> bytes | None:
        if not events:
            return None
        ts = MODEL_EPOCH + now
        self.true.append(encode_batch(ts, events, block_size=BLOCK))
        if self.lie is not None:
            events = [told for event in events for told in self.lie(event, rng)]
        self.told.append(encode_batch(ts, events, block_size=BLOCK))
        return self.told[-1]

    def correct(self) -> None:
        """From now on it tells the truth, also of the past."""
        self.lie = None
        self.told = list(self.true)


class TruthFleet:
    """Runs requests through the core and the engines; `done` has what became of them."""

    def __init__(
        self, shape: Shape | None = None, *, seed: int = 1, feedback: bool = True, **trust: object
    ) -> None:
        self.shape = shape or Shape()
        self.feedback = feedback
        self.traffic = random.Random(seed)
        self.noise = random.Random(seed + 1)
        settings = TrustSettings(**trust)  # type: ignore[arg-type]
        self.core = SelectionCore(
            StreamRegistry(), RouterConfig(), random.Random(seed + 2), trust=settings
        )
        self.core.trust_monitor.wall_ahead = MODEL_EPOCH
        self.now = 100.0
        self.ranks: dict[int, SimulatedRank] = {}
        for worker_id in range(1, self.shape.workers + 1):
            self.ranks[worker_id] = SimulatedRank(worker_id, self.shape)
            self.core.workers.upsert_worker(
                WorkerSpec(
                    worker_id=worker_id,
                    endpoint=f"http://w{worker_id}",
                    block_size=BLOCK,
                    kv_events_endpoint=f"tcp://w{worker_id}:1",
                    replay_endpoint=f"tcp://w{worker_id}:2",
                ),
                self.now,
            )
        self.prefixes = [
            [self.traffic.randrange(100_000) for _ in range(self.shape.prefix_blocks * BLOCK)]
            for _ in range(self.shape.prefixes)
        ]
        self.asked = 0
        self.decisions: list[tuple[int, int]] = []  # (worker, effective prefill tokens)
        self.done: list[Done] = []
        self.news: list[tuple[int, tuple[str, ...]]] = []
        self._home: dict[str, tuple[int, int]] = {}  # worker, prompt tokens
        self._ticked_at = self.now
        self._due = 0.0

    # -- running ---------------------------------------------------------------------------------

    def run(self, requests: int) -> list[Done]:
        """Ask for so many more, and return what was computed meanwhile."""
        before, until = len(self.done), self.asked + requests
        while self.asked < until:
            self._due += self.shape.requests_per_step
            while self._due >= 1 and self.asked < until:
                self._due -= 1
                self._ask()
            self.step()
        return self.done[before:]

    def drain(self) -> None:
        while any(not rank.engine.idle for rank in self.ranks.values()):
            self.step()

    def _ask(self) -> None:
        shape, rng = self.shape, self.traffic
        popular = min(rng.randrange(shape.prefixes), rng.randrange(shape.prefixes))
        tail = [rng.randrange(100_000) for _ in range(shape.tail_blocks * BLOCK + 5)]
        tokens = self.prefixes[popular] + tail
        outputs = [rng.randrange(100_000) for _ in range(shape.output_tokens)]
        name = f"r{self.asked}"
        self.asked += 1
        answer, _ = self.core.selection.select_and_reserve(
            SelectAndReserveRequest(reservation_id=name, token_ids=tokens), self.now
        )
        assert isinstance(answer, Selection), "nobody is ever busy"
        self.decisions.append((answer.worker_id, answer.effective_prefill_tokens))
        self._home[name] = (answer.worker_id, len(tokens))
        self.ranks[answer.worker_id].engine.submit(DemoJob(name, tokens, outputs))

    def step(self) -> None:
        self.now += STEP_S
        for rank in self.ranks.values():
            self._step_engine(rank)
            self._replay(rank)
        if self.now - self._ticked_at >= 1.0:
            self._ticked_at = self.now
            more = True
            while more:
                more, effects = self.core.tick(self.now)
                self.news += [(one.rank.worker_id, one.reasons) for one in effects.trusted]

    def _step_engine(self, rank: SimulatedRank) -> None:
        report = rank.engine.step()
        payload = rank.publish(report.events, self.now, self.noise)
        if payload is not None:
            self._hear(rank, len(rank.told) - 1, payload)
        for name, cached_blocks in report.prefilled:
            cached = cached_blocks * BLOCK
            _, tokens = self._home[name]
            self.done.append(Done(int(name[1:]), rank.worker_id, tokens, cached))
            told = cached if self.feedback else None
            self.core.reservations.prefill_complete(name, self.now, told)
        for name in report.finished:
            del self._home[name]
            self.core.reservations.free(name, self.now)

    def _hear(self, rank: SimulatedRank, seq: int, payload: bytes) -> None:
        stream = self.stream(rank.worker_id)
        stream.on_live([b"kv", seq.to_bytes(8, "big"), payload], self.now)
        while stream.is_busy:
            stream.resume(self.now)

    def _replay(self, rank: SimulatedRank) -> None:
        stream = self.stream(rank.worker_id)
        stream.on_timer(self.now, may_poll=False)
        replies: deque[tuple[int, bytes]] = deque()
        while stream.request is not None:
            if stream.request is not rank.request:
                rank.request = stream.request
                first = max(stream.request.start, rank.replay_from)
                replies = deque(list(enumerate(rank.told))[first:])
                replies.append((END_MARKER, b""))
            if not replies:
                break
            seq, payload = replies.popleft()
            stream.on_replay([b"", b"kv", seq.to_bytes(8, "big"), payload], self.now)
            while stream.is_busy:
                stream.resume(self.now)

    # -- looking ---------------------------------------------------------------------------------

    def stream(self, worker_id: int) -> EventStream:
        stream = self.core.membership.stream_at(WorkerRank(worker_id, 0))
        assert stream is not None
        return stream

    def trust(self, worker_id: int) -> RankTrustRow:
        rows = self.core.trust_monitor.table().ranks
        return next(row for row in rows if row.worker_id == worker_id)

    def claim_everything(self, event: PoolEvent, rng: random.Random) -> list[PoolEvent]:
        """A lie: with everything stored comes the claim to hold every prefix, for good."""
        if not isinstance(event, StoredBlocks):
            return []
        claims: list[PoolEvent] = [
            StoredBlocks(
                tuple(1_000_000 * (number + 1) + at for at in range(self.shape.prefix_blocks)),
                None,
                tuple(prefix),
            )
            for number, prefix in enumerate(self.prefixes)
        ]
        return [event, *claims]

    def foreign(self, event: PoolEvent, rng: random.Random) -> list[PoolEvent]:
        """A lie: what is stored is told as the prefix of some other prompts."""
        if not isinstance(event, StoredBlocks):
            return [event]
        blocks = len(event.hashes)
        tokens = self.prefixes[rng.randrange(len(self.prefixes))][: blocks * BLOCK]
        tokens += [rng.randrange(100_000) for _ in range(blocks * BLOCK - len(tokens))]
        return [StoredBlocks(event.hashes, event.parent, tuple(tokens))]


def keep_removed(event: PoolEvent, rng: random.Random) -> list[PoolEvent]:
    """A lie: nothing ever goes."""
    return [] if isinstance(event, RemovedBlocks) else [event]


def hit_rate(done: list[Done]) -> float:
    """Cached tokens of all tokens."""
    return sum(one.cached_tokens for one in done) / sum(one.prompt_tokens for one in done)


def by_worker(done: list[Done]) -> Counter[int]:
    """How many prompts each worker computed."""
    return Counter(one.worker_id for one in done)
