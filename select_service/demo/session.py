"""One run of the demo: a fleet, its traffic, occasional restarts, and the audit at the end.

Everything it knows of the service it learns over HTTP. `cli.py` calls it with settings and a view;
it uses `worker.py`, `session.py` and `client.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING, Any

from select_service.demo.client import MODEL, SelectorClient, SelectorRefused
from select_service.demo.engine import DemoJob
from select_service.demo.left_over import engine_endpoint
from select_service.demo.stats import DecisionLine, DemoStats, Summary, WorkerTally, percentile
from select_service.demo.view import Board, BoardRow
from select_service.demo.worker import EngineDown, EngineShape, Milestone, SimulatedWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.demo.worker import Progress


# Seeded multi-turn chat: the prompts, the lengths of answers, the pauses in between. Prompts grow
# as real ones do: a system prompt shared by many conversations, then the history, then the new
# message. Token ids are random numbers, since only their equality matters here. Pure: the caller
# supplies the generator and does the waiting.

_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Ranges of the traffic, in tokens and seconds; both ends included."""

    system_prompts: int = 6
    system_tokens: tuple[int, int] = (128, 768)
    message_tokens: tuple[int, int] = (16, 192)
    answer_tokens: tuple[int, int] = (24, 128)
    turns: tuple[int, int] = (1, 7)
    think_mean_s: float = 1.0

    @property
    def turns_mean(self) -> float:
        """Mean number of turns of a conversation."""
        return sum(self.turns) / 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: think, then send `prompt`; the engine will answer `answer`."""

    think_s: float
    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Conversation:
    """A growing history with a known end."""

    shape: ChatShape
    rng: Random
    history: list[int]
    turns_left: int
    _first: bool = field(default=True)

    def next_turn(self) -> Turn | None:
        """Return the next request, None when the conversation is over; extends the history."""
        if self.turns_left == 0:
            return None
        self.turns_left -= 1
        think_s = 0.0 if self._first else self.rng.expovariate(1 / self.shape.think_mean_s)
        self._first = False
        self.history += _tokens(self.rng, self.shape.message_tokens)
        answer = _tokens(self.rng, self.shape.answer_tokens)
        turn = Turn(think_s, list(self.history), answer)
        self.history += answer
        return turn


def system_prompts(shape: ChatShape, rng: Random) -> list[list[int]]:
    """Return the prompts that conversations share."""
    return [_tokens(rng, shape.system_tokens) for _ in range(shape.system_prompts)]


def new_conversation(shape: ChatShape, rng: Random, systems: list[list[int]]) -> Conversation:
    """Return a conversation under one of the system prompts; earlier ones are more popular."""
    popularity = [1 / (1 + index) for index in range(len(systems))]
    system = rng.choices(systems, popularity)[0]
    return Conversation(shape, rng, list(system), rng.randint(*shape.turns))


def _tokens(rng: Random, length: tuple[int, int]) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(rng.randint(*length))]


_ATTEMPTS_MAX = 5
_FORGOTTEN = (
    "the service no longer knows the demo's engines: it was restarted without --state-dir, or "
    "somebody removed them. Start the demo again"
)
_AUDIT_PROMPTS = 48  # most recent ones; older ones are mostly evicted and prove little


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The parameters of a run."""

    url: str
    token: str | None = None  # that the service asks for
    requests: int | None = None  # None: until `DemoSession.stop`
    rate: float = 20.0  # requests per second, on average
    engines: int = 4
    seed: int = 1
    restart_every: int | None = None  # requests between two restarts; None: never
    restart_down_s: float = 0.7
    settle_timeout_s: float = 5.0  # for the last events to reach the index
    model_name: str = MODEL
    first_worker_id: int = 1
    engine: EngineShape = field(default_factory=EngineShape)
    chat: ChatShape = field(default_factory=ChatShape)


class DemoSession:
    """One run of the demo, which cannot be repeated.

    Attributes:
        registered: set once the service knows the engines.
    """

    def __init__(self, settings: DemoSettings, client: SelectorClient | None = None) -> None:
        self.settings = settings
        self.stats = DemoStats()
        self._rng = Random(settings.seed)
        first = settings.first_worker_id
        self.workers = {
            worker_id: SimulatedWorker(worker_id, settings.engine)
            for worker_id in range(first, first + settings.engines)
        }
        self._client = client or SelectorClient(
            settings.url, model_name=settings.model_name, token=settings.token
        )
        self.registered = asyncio.Event()
        self._stop = asyncio.Event()
        self._restart_due = asyncio.Event()
        self._registered: list[int] = []
        self._loads: dict[int, dict[str, Any]] = {}
        self._prompts: deque[list[int]] = deque(maxlen=_AUDIT_PROMPTS)
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Issue no further requests; those under way finish."""
        self._stop.set()

    async def run(self) -> Summary:
        """Run everything; return once the last request is done and the books are checked."""
        self._started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(worker.run()) for worker in self.workers.values()]
                await self._register()
                self.registered.set()
                background.append(group.create_task(self._watch_loads()))
                background.append(group.create_task(self._restart_engines()))
                await self._traffic()
                seconds = time.perf_counter() - self._started
                load_left = await self._load_left()
                checks, wrong = await self._audit()
                for task in background:
                    task.cancel()
            return self._summary(seconds, load_left, checks, wrong)
        finally:
            await self._leave()

    def board(self) -> Board:
        """Return a picture of this moment."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        recent = self.stats.latencies_s[-500:]
        return Board(
            title=f"select-service at {self.settings.url}",
            seconds=seconds,
            issued=self.stats.issued,
            finished=self.stats.finished,
            decisions_per_s=len(self.stats.latencies_s) / seconds,
            latency_p50_s=percentile(recent, 0.5),
            rows=[self._board_row(worker) for worker in self.workers.values()],
            decisions=list(self.stats.decisions),
        )

    # -- traffic ---------------------------------------------------------------------------------

    async def _traffic(self) -> None:
        """Start conversations as a Poisson process until enough turns have been issued."""
        shape = self.settings.chat
        systems = system_prompts(shape, self._rng)
        conversations_per_s = self.settings.rate / shape.turns_mean
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                conversation_seed = self._rng.getrandbits(64)
                group.create_task(self._converse(conversation_seed, systems))
                await self._pause(self._rng.expovariate(conversations_per_s))

    async def _converse(self, seed: int, systems: list[list[int]]) -> None:
        # One generator each, so that the order of answers changes nothing.
        rng = Random(seed)
        conversation = new_conversation(self.settings.chat, rng, systems)
        while (turn := conversation.next_turn()) is not None:
            await self._pause(turn.think_s)
            if self._stop.is_set():
                return
            number = self._issue()
            try:
                if not await self._serve(f"chat-{self.settings.seed}-{number}", turn):
                    return
            except SelectorRefused as error:
                self.stats.gave_up(str(error) or type(error).__name__)
                return

    def _issue(self) -> int:
        self.stats.issued += 1
        number = self.stats.issued
        if number == self.settings.requests:
            self._stop.set()
            return number  # a restart now would only show an idle engine
        every = self.settings.restart_every
        if every is not None and number % every == 0:
            self._restart_due.set()
        return number

    async def _serve(self, request_id: str, turn: Turn) -> bool:
        """Serve one turn: place it, follow it, place it again if its engine dies."""
        shunned: set[int] = set()
        for attempt in range(_ATTEMPTS_MAX):
            reservation_id = f"{request_id}.{attempt}" if attempt else request_id
            worker, predicted = await self._place(reservation_id, turn, shunned)
            try:
                job = DemoJob(reservation_id, turn.prompt, turn.answer)
                progress = worker.submit(job)
                served = await self._follow(worker, reservation_id, job, progress, predicted)
            except EngineDown:
                served = False
            finally:
                await self._client.free(reservation_id)
            if served:
                self.stats.finished += 1
                self._prompts.append(turn.prompt)
                return True
            self.stats.lost += 1
            shunned.add(worker.worker_id)
        self.stats.gave_up(f"{request_id} lost {_ATTEMPTS_MAX} engines")
        return False

    async def _place(
        self, reservation_id: str, turn: Turn, shunned: set[int]
    ) -> tuple[SimulatedWorker, int]:
        allowed = [worker_id for worker_id in self.workers if worker_id not in shunned]
        before = time.perf_counter()
        booking = await self._client.select_and_reserve(
            reservation_id,
            turn.prompt,
            expected_output_tokens=len(turn.answer),
            allowed_worker_ids=allowed if shunned and allowed else None,
        )
        block_size = self.settings.engine.block_size
        # an engine always computes the last token, so it cannot reuse the block that holds it
        reusable = (len(turn.prompt) - 1) // block_size
        predicted = min(booking.predicted_tokens // block_size, reusable)
        self.stats.decided(
            DecisionLine(
                reservation_id,
                booking.worker_id,
                prompt_blocks=len(turn.prompt) // block_size,
                predicted_blocks=predicted,
                latency_s=time.perf_counter() - before,
            )
        )
        return self.workers[booking.worker_id], predicted

    async def _follow(
        self,
        worker: SimulatedWorker,
        reservation_id: str,
        job: DemoJob,
        progress: Progress,
        predicted: int,
    ) -> bool:
        """Report every milestone to the service; False if the engine died under the request."""
        while True:
            milestone = await progress.milestones.get()
            if milestone is Milestone.PREFILLED:
                self.stats.prefilled(
                    worker.worker_id,
                    prompt=len(job.token_ids) // worker.shape.block_size,
                    predicted=predicted,
                    actual=progress.cached_blocks,
                )
                cached_tokens = progress.cached_blocks * worker.shape.block_size
                await self._client.prefill_complete(reservation_id, cached_tokens)
            elif milestone is Milestone.BLOCK_FILLED:
                await self._client.output_block(reservation_id)
            else:
                return milestone is Milestone.FINISHED

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond the end of the traffic."""
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._stop.wait()
            except TimeoutError:
                return

    # -- the fleet -------------------------------------------------------------------------------

    async def _register(self) -> None:
        shape = self.settings.engine
        for worker in self.workers.values():
            lifecycle = await self._client.register(
                {
                    "worker_id": worker.worker_id,
                    "endpoint": engine_endpoint(worker.worker_id),
                    "block_size": shape.block_size,
                    "kv_events_endpoint": worker.kv_events_endpoint,
                    "replay_endpoint": worker.replay_endpoint,
                    # Required by services that queue by default; ours can do without.
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": shape.blocks,
                }
            )
            self._registered.append(worker.worker_id)
            if lifecycle != "schedulable":
                reason = f"worker {worker.worker_id} is {lifecycle}"
                raise SelectorRefused(reason)

    async def _restart_engines(self) -> None:
        for victim in cycle(self.workers.values()):  # in turn: none is in a restart storm
            await self._restart_due.wait()
            self._restart_due.clear()
            await victim.restart(self.settings.restart_down_s)

    async def _watch_loads(self) -> None:
        while True:
            try:
                rows = await self._client.loads()
            except SelectorRefused as error:
                self.stats.gave_up(f"GET /loads: {error}")
                self.stop()
                return
            self._loads = {row["worker_id"]: row for row in rows}
            if not self._loads and not self._stop.is_set():
                self.stats.gave_up(_FORGOTTEN)
                self.stop()
                return
            await asyncio.sleep(0.5)

    async def _leave(self) -> None:
        """Deregister the workers from a service that lives on, and close every socket."""
        try:
            for worker_id in self._registered:
                await self._client.deregister(worker_id)
        except SelectorRefused:
            pass  # the run has its verdict already; a dead service cannot be cleaned up
        finally:
            for worker in self.workers.values():
                worker.close()
            await self._client.close()

    # -- the end ---------------------------------------------------------------------------------

    async def _load_left(self) -> str | None:
        """Return the load /loads shows now that every request is freed; None, if correct."""
        rows = await self._client.loads()
        self._loads = {row["worker_id"]: row for row in rows}
        left = [
            f"worker {row['worker_id']} {row['active_requests']} requests"
            f" {row['potential_prefill_tokens']} tokens {row['potential_decode_blocks']} blocks"
            for row in rows
            if row["active_requests"]
            or row["potential_prefill_tokens"]
            or row["potential_decode_blocks"]
        ]
        return "; ".join(left) or None

    async def _audit(self) -> tuple[int, int]:
        """Compare index and pools on the last prompts; return (checks, wrong at the deadline)."""
        draining = await self._client.draining()  # via the console, say: not reported
        audible = [
            w for w in self.workers.values() if self._has_spoken(w) and w.worker_id not in draining
        ]
        suspects: Sequence[list[int]] = list(self._prompts)
        checks = len(suspects) * len(audible)
        deadline = time.perf_counter() + self.settings.settle_timeout_s
        while True:
            wrong: dict[int, int] = {}
            for position, prompt in enumerate(suspects):
                indexed = await self._client.device_blocks(prompt)
                misses = sum(indexed.get(w.worker_id) != w.engine.match(prompt) for w in audible)
                if misses:
                    wrong[position] = misses
            if not wrong or time.perf_counter() > deadline:
                return checks, sum(wrong.values())
            suspects = [suspects[position] for position in wrong]
            await asyncio.sleep(0.1)

    @staticmethod
    def _has_spoken(worker: SimulatedWorker) -> bool:
        """Whether the service can know its cache: not after a silent restart."""
        return worker.restarts == 0 or worker.publisher.sequence > 0

    def _summary(self, seconds: float, load_left: str | None, checks: int, wrong: int) -> Summary:
        stats, total = self.stats, self.stats.total()
        workers = self.workers.values()
        return Summary(
            requests=stats.issued,
            finished=stats.finished,
            lost=stats.lost,
            failed=stats.failed,
            first_failure=stats.first_failure,
            seconds=seconds,
            hit_rate_actual=_share(total.actual_blocks, total.prompt_blocks),
            hit_rate_predicted=_share(total.predicted_blocks, total.prompt_blocks),
            prediction_error=_share(total.error_blocks, total.actual_blocks),
            latency_p50_s=percentile(stats.latencies_s, 0.5),
            latency_p99_s=percentile(stats.latencies_s, 0.99),
            batches_published=sum(w.batches_published for w in workers),
            blocks_stored=sum(w.blocks_stored for w in workers),
            blocks_removed=sum(w.blocks_removed for w in workers),
            replays_served=sum(w.replays_served for w in workers),
            restarts=sum(w.restarts for w in workers),
            load_left=load_left,
            audit_checks=checks,
            audit_wrong=wrong,
        )

    def _board_row(self, worker: SimulatedWorker) -> BoardRow:
        load = self._loads.get(worker.worker_id)
        tally = self.stats.tallies.get(worker.worker_id, WorkerTally())
        return BoardRow(
            worker_id=worker.worker_id,
            up=worker.up,
            restarts=worker.restarts,
            running=worker.engine.running,
            waiting=worker.engine.waiting,
            prefill_tokens=None if load is None else load["potential_prefill_tokens"],
            decode_blocks=None if load is None else load["potential_decode_blocks"],
            blocks_held=worker.engine.blocks_held,
            blocks_capacity=worker.shape.blocks,
            hit_rate_predicted=_share(tally.predicted_blocks, tally.prompt_blocks),
            hit_rate_actual=_share(tally.actual_blocks, tally.prompt_blocks),
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
