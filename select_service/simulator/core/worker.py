"""One simulated engine: continuous batching, chunked prefill, a KV pool, preemption.

A step decodes a token for every running sequence and spends the rest of its token budget on
prompts, first come, first served. Decode-only steps are simulated as one *stretch*, up to the first
end of an answer or the last free block; a request arriving meanwhile is considered when the step in
progress ends. A request is scheduled when fewer than `sequences_max` run
and there are blocks for its whole prompt. When
decoding runs out of blocks, the last scheduled request goes back to the front of the queue and
recomputes what is no longer cached (as in vLLM). Reads no clock: `due` says when to call `step`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from select_service.simulator.core.kv_pool import KvPool, SharingKvPool, TieredKvPool

if TYPE_CHECKING:
    from select_service.simulator.core.engine_settings import EngineSettings
    from select_service.simulator.core.kv_pool import CommonCache
    from select_service.simulator.core.requests import ClientRequest, Role

_NEVER: Final = math.inf
_NO_STEP: Final = -1


class EngineJob:
    """A request on an engine."""

    __slots__ = (
        "cached",
        "computed",
        "end_step",
        "generated",
        "held",
        "key",
        "named",
        "preemptions",
        "pulled",
        "request",
        "start_step",
        "stopped_at",
        "total",
    )

    def __init__(
        self,
        request: ClientRequest,
        *,
        prefilled: bool = False,
        stopped_at: float = -1.0,
        pulled: int = 0,
    ) -> None:
        self.request = request
        self.pulled = pulled  # first blocks of its chain that came from another worker
        self.key = ""  # its owner's name for it
        self.generated = 1 if prefilled else 0  # tokens its client has received
        self.total = request.isl  # tokens needed in the cache before it decodes
        self.computed = request.isl if prefilled else 0
        self.cached = 0  # tokens found when it was first scheduled
        self.named = 0  # blocks of its chain that can be found
        self.held = 0  # all blocks it holds while its prompt is computed
        self.start_step = _NO_STEP  # of decoding
        self.end_step = _NO_STEP
        self.preemptions = 0
        # when its last token came, while not decoding; below 0: unset
        self.stopped_at = stopped_at


class Happening(NamedTuple):
    """The outcome for a job at the end of a step."""

    kind: Literal["first_token", "done", "too_large"]
    job: EngineJob


class EngineWorker:
    """Call `submit` for jobs, and `step` at `due`; `check` asserts all invariants.

    Attributes:
        due: The end of the stretch in progress; infinity: the engine is idle.
        busy_s: Time spent on steps.
        gaps: Times between tokens, as [seconds, number of tokens with that gap].
    """

    def __init__(
        self,
        worker_id: int,
        settings: EngineSettings,
        block_size: int,
        role: Role = "aggregated",
        common: CommonCache | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.block_size = block_size
        self.settings = settings
        blocks = max(1, settings.kv_tokens // block_size)
        lower = settings.lower_tiers(block_size)
        if common is not None:
            common.capacity += sum(one.blocks.capacity for one in lower)
            self.pool: KvPool = SharingKvPool(blocks, common)
        else:
            self.pool = TieredKvPool(blocks, lower) if lower else KvPool(blocks)
        self.due = _NEVER
        self.busy_s = 0.0
        self.steps = 0
        self.prefill_tokens = 0  # computed so far
        self.gaps: list[tuple[float, int]] = []
        self.waiting: deque[EngineJob] = deque()
        self._latency = settings.latency
        self._running: dict[EngineJob, None] = {}  # in order of scheduling
        self._prefilling: deque[EngineJob] = deque()
        self._ends: list[tuple[int, int, EngineJob]] = []  # of decoding; stale if end_step differs
        self._order = count()
        self._phases: list[int] = []  # of decoding jobs, which begin a block at steps ≡ phase
        self._kv_tokens = 0  # of decoding jobs
        self._chunks: list[tuple[EngineJob, int]] = []  # of the step in progress
        self._waited: list[float] = []  # gaps so far of jobs that decode here from this step on
        self._stretch = 0  # steps in progress
        self._begun = 0.0
        self._too_large: list[EngineJob] = []
        self._job_seconds = 0.0
        self._counted_at = 0.0

    # -- observation -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of jobs that hold blocks."""
        return len(self._running)

    @property
    def jobs(self) -> int:
        """The number of jobs on this worker."""
        return len(self._running) + len(self.waiting)

    @property
    def load_tokens(self) -> int:
        """Tokens in the cache of running jobs, plus those of waiting prompts."""
        waiting = sum(job.total for job in self.waiting)
        return self._kv_tokens + sum(job.total for job in self._prefilling) + waiting

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens not computed yet, as if none of them were cached."""
        waiting = sum(job.total - job.computed for job in self.waiting)
        return waiting + sum(job.total - job.computed for job in self._prefilling)

    @property
    def decoding(self) -> int:
        """The number of jobs that decode."""
        return len(self._phases)

    @property
    def context(self) -> int:
        """Tokens in the cache of decoding jobs."""
        return self._kv_tokens

    def cached(self, request: ClientRequest) -> int:
        """Return the prompt tokens that a request would find now; the last one is computed."""
        found, _ = self.pool.match(request.blocks, (request.isl - 1) // self.block_size)
        return found * self.block_size

    def prefill_ahead_s(self, now: float) -> float:
        """Return the time to compute all prompts that are here, without steps of decoding."""
        prefill_s = self._latency.prefill_s
        under_way = dict(self._chunks)
        seconds = max(0.0, self.due - now) if under_way else 0.0
        for job in self._prefilling:
            done = job.computed + under_way.get(job, 0)
            seconds += prefill_s(job.total - done, done)
        for job in self.waiting:
            done = job.computed or self.cached(job.request)
            seconds += prefill_s(job.total - done, done)
        return seconds

    def tokens_of(self, job: EngineJob, now: float) -> int:
        """Return the tokens of its answer that a job's client has received until now."""
        if job.start_step == _NO_STEP:
            return job.generated
        steps = self.steps - job.start_step
        if not self._chunks:
            decoding, seconds = len(self._phases), now - self._begun
            steps += min(self._latency.steps_in(decoding, self._kv_tokens, seconds), self._stretch)
        return job.generated + steps

    def job_seconds(self, now: float) -> float:
        """Return the total time of all jobs on this worker until now."""
        self._job_seconds += self.jobs * (now - self._counted_at)
        self._counted_at = now
        return self._job_seconds

    # -- work ------------------------------------------------------------------------------------

    def submit(self, job: EngineJob, now: float) -> None:
        """Append a job to the queue."""
        self.job_seconds(now)
        was_empty = not self.waiting
        self.waiting.append(job)
        if self.due == _NEVER:
            self._begin(now)
        elif was_empty and self._stretch > 1 and len(self._running) < self.settings.sequences_max:
            self._shorten(now)

    def _shorten(self, now: float) -> None:
        """End the stretch in progress with its current step."""
        jobs, kv_tokens = len(self._phases), self._kv_tokens
        done = self._latency.steps_in(jobs, kv_tokens, now - self._begun)
        if done + 1 < self._stretch:
            self._stretch = done + 1
            ends = self._begun + self._latency.stretch_s(jobs, kv_tokens, done + 1)
            self.due = max(now, ends)

    def step(self, now: float) -> list[Happening]:
        """End the stretch in progress and begin the next one; returns the happenings, in order."""
        self.job_seconds(now)
        happened: list[Happening] = []
        self._end(now, happened)
        self._begin(now)
        if self._too_large:
            happened += [Happening("too_large", job) for job in self._too_large]
            self._too_large.clear()
        return happened

    def take_refused(self) -> list[EngineJob]:
        """Return jobs that can never fit, as found by `submit`."""
        refused, self._too_large = self._too_large, []
        return refused

    def _end(self, now: float, happened: list[Happening]) -> None:
        steps, decoding = self._stretch, len(self._phases)
        seconds = now - self._begun
        self.busy_s += seconds
        if decoding:
            self.pool.take(self._blocks_for(steps))
            self._kv_tokens += steps * decoding
            self._note_gaps(seconds / steps, steps * decoding)
        self.steps += steps
        for job, tokens in self._chunks:
            self._computed(job, tokens, now, happened)
        self._chunks = []
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            end_step, _, job = heappop(ends)
            if job.end_step == end_step and job in self._running:
                self._finish(job, happened)

    def _note_gaps(self, step_s: float, tokens: int) -> None:
        """Record the gaps between tokens of a stretch; jobs that moved here had waited before."""
        waited, self._waited = self._waited, []
        self.gaps += [(seconds + step_s, 1) for seconds in waited]
        if tokens > len(waited):
            self.gaps.append((step_s, tokens - len(waited)))

    def _computed(self, job: EngineJob, tokens: int, now: float, happened: list[Happening]) -> None:
        job.computed += tokens
        self.prefill_tokens += tokens
        self._name(job, job.computed)
        if job.computed < job.total:
            return
        self._prefilling.popleft()
        is_first = not job.generated
        job.generated += 1
        if is_first:
            happened.append(Happening("first_token", job))
        elif job.stopped_at >= 0.0:
            self.gaps.append((now - job.stopped_at, 1))
            job.stopped_at = -1.0
        if self.role == "prefill" or job.generated >= job.request.osl:
            self._leave(job, job.total)
            happened.append(Happening("done", job))
        else:
            self._decode(job)

    def _name(self, job: EngineJob, tokens: int) -> None:
        """Name the full blocks computed so far, as far as their names are known."""
        blocks = job.request.blocks
        full = min(tokens // self.block_size, len(blocks))
        if full > job.named:
            self.pool.name(blocks, job.named, full)
            job.named = full

    def _decode(self, job: EngineJob) -> None:
        job.start_step = self.steps
        job.end_step = self.steps + job.request.osl - job.generated
        insort(self._phases, (self.steps - job.total) % self.block_size)
        self._kv_tokens += job.total
        heappush(self._ends, (job.end_step, next(self._order), job))

    def _stop_decoding(self, job: EngineJob) -> int:
        """Remove a job from the decoding batch; returns its tokens in the cache."""
        done = self.steps - job.start_step
        phases = self._phases
        phases.pop(bisect_left(phases, (job.start_step - job.total) % self.block_size))
        tokens = job.total + done
        self._kv_tokens -= tokens
        job.generated += done
        job.start_step = job.end_step = _NO_STEP
        return tokens

    def _finish(self, job: EngineJob, happened: list[Happening]) -> None:
        tokens = self._stop_decoding(job)
        job.held = -(-tokens // self.block_size)
        self._name(job, tokens)
        self._leave(job, tokens)
        happened.append(Happening("done", job))

    def _leave(self, job: EngineJob, tokens: int) -> None:
        """Release the blocks of this many tokens."""
        held = -(-tokens // self.block_size)
        self.pool.release(job.request.blocks, job.named, held - job.named)
        job.named = job.held = 0
        del self._running[job]

    # -- scheduling ------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._begun = now
        preempted = self._make_room()
        budget = self.settings.step_tokens_max - len(self._phases)
        chunks = self._chunks
        prefill_s = 0.0
        for job in self._prefilling:
            if budget <= 0:
                break
            tokens = min(budget, job.total - job.computed)
            prefill_s += self._latency.prefill_s(tokens, job.computed)
            chunks.append((job, tokens))
            budget -= tokens
        if self.waiting and not preempted:
            prefill_s += self._let_in(budget)
        decoding = len(self._phases)
        if not (chunks or decoding):
            self._stretch, self.due = 0, _NEVER
            return
        # nothing was scheduled after a preemption: try again a step later
        steps = 1 if chunks or preempted else self._steps_at_most()
        self._stretch = steps
        self.due = now + prefill_s + self._latency.stretch_s(decoding, self._kv_tokens, steps)

    def _let_in(self, budget: int) -> float:
        """Schedule jobs while there are places, tokens and blocks; returns the time they add."""
        pool, latency, size = self.pool, self._latency, self.block_size
        places = self.settings.sequences_max - len(self._running)
        prefill_s = 0.0
        while self.waiting and places > 0 and budget > 0:
            job = self.waiting[0]
            request = job.request
            if -(-(request.isl + request.osl) // size) > pool.capacity:
                self._too_large.append(self.waiting.popleft())
                continue
            done = job.computed  # on another worker: nothing is left to compute here
            blocks = request.blocks
            most = min(len(blocks), (job.total - (not done)) // size)
            found, unused = pool.match(blocks, most)
            need = -(-job.total // size) - found
            # for the step that begins, in which jobs computed elsewhere take part
            spare = self._blocks_for(1) + (done > 0 and not job.total % size)
            if need + spare > pool.available - unused:
                break
            self.waiting.popleft()
            pool.use(blocks, found)
            pool.take(need)
            job.named, job.held = found, found + need
            places -= 1
            self._running[job] = None
            if done:
                job.cached = found * size
                self._name(job, job.total)
                self._decode(job)
                if job.stopped_at >= 0.0:
                    self._waited.append(self._begun - job.stopped_at)
                    job.stopped_at = -1.0
                continue
            job.computed = max(found, min(job.pulled, most)) * size
            if not job.preemptions:  # later it may find what it computed itself
                job.cached = job.computed
            tokens = min(budget, job.total - job.computed)
            prefill_s += latency.prefill_s(tokens, job.computed)
            self._prefilling.append(job)
            self._chunks.append((job, tokens))
            budget -= tokens
        return prefill_s + pool.loading_s()

    # -- blocks of decoding ----------------------------------------------------------------------

    def _blocks_for(self, steps: int) -> int:
        """Return the new blocks that decoding needs in the next `steps` steps. O(log jobs)."""
        phases, size = self._phases, self.block_size
        jobs = len(phases)
        if not jobs:
            return 0
        rounds, rest = divmod(steps, size)
        low = self.steps % size
        high = low + rest
        first = bisect_left(phases, low)
        if high <= size:
            return rounds * jobs + bisect_left(phases, high) - first
        return rounds * jobs + jobs - first + bisect_left(phases, high - size)

    def _steps_at_most(self) -> int:
        """Return the steps without a change: no job ends, and blocks suffice. Above 0."""
        ends = self._ends
        while ends[0][2].end_step != ends[0][0]:
            heappop(ends)  # preempted since
        steps = ends[0][0] - self.steps
        phases, size = self._phases, self.block_size
        jobs = len(phases)
        rounds, free = divmod(self.pool.available, jobs)
        low = self.steps % size
        at = bisect_left(phases, low) + free  # the first block that is missing
        phase = phases[at] if at < jobs else phases[at - jobs] + size
        return min(steps, rounds * size + phase - low)

    def _make_room(self) -> bool:
        """Free blocks for the next step; True if that took a preemption."""
        preempted = False
        while self._blocks_for(1) > self.pool.available:
            self._preempt(next(reversed(self._running)))
            preempted = True
        return preempted

    def _preempt(self, job: EngineJob) -> None:
        if job.start_step == _NO_STEP:
            self._prefilling.remove(job)
            tokens = job.total
        else:
            tokens = self._stop_decoding(job)
            self._name(job, tokens)
            job.stopped_at = self._begun
        self._leave(job, tokens)
        # tokens its client has are part of the prompt now
        job.total = job.request.isl + job.generated
        job.computed = 0
        job.preemptions += 1
        self.waiting.appendleft(job)

    # -- the end ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """Lose everything."""
        self.due = _NEVER
        self._running.clear()
        self.waiting.clear()
        self._prefilling.clear()
        self._chunks, self._ends, self._phases, self._waited = [], [], [], []
        self._kv_tokens = self._stretch = 0
        self.pool = KvPool(self.pool.capacity)

    def check(self) -> None:
        """Assert all invariants of the engine."""
        self.pool.check()
        assert len(self._phases) + len(self._prefilling) == len(self._running)
        assert self._phases == sorted(self._phases)
        assert (self.due == _NEVER) == (not self._running)
        if not self._running:
            assert not self.pool.used, "nothing runs, and nothing is held"
            assert not self.waiting, "an idle engine lets in what waits"
            assert not self._kv_tokens
