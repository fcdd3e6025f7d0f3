"""Preble's E2 (arXiv 2407.00023): exploit a cached prefix, or explore the least loaded worker.

More cached than new: the worker that has the most cached, unless it has more than 1.4 times the
load of the lightest one, which then takes the request. Else the worker of the least cost: computing
time it was given in the last three minutes, plus what evicting for this prompt will cost those that
ask for it again, plus this prompt's own time. Times are those of the engine, as if profiled.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.simulator.core.baselines.cache_aware import CacheAware

if TYPE_CHECKING:
    import random

    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.routers import Placed
    from select_service.types import KvEvents

WINDOW_S: Final = 180.0
IMBALANCE: Final = 1.4


class PrebleE2(CacheAware):
    """See the module."""

    name = "preble-e2"
    meaning = "a long cached prefix, else the least computing time"

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        super().__init__(rng, kv_events)
        self._window: deque[tuple[float, int, float, list[int]]] = deque()
        self._load_s: Counter[int] = Counter()  # by worker: computing time given in the window
        self._requests: Counter[int] = Counter()  # by worker, in the window
        self._uses: Counter[tuple[int, int]] = Counter()  # by worker and block, in the window
        self._answers: dict[str, int] = {}  # by key: tokens, known when it ends
        self._ended = self._ended_tokens = 0

    # -- the formula ---------------------------------------------------------------------------

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        self._expire()
        cached = self.cached(ids, request)
        most = max(cached.values())
        if most > request.isl - most:
            best = self.lowest(
                [(self._load_s[one], one) for one, tokens in cached.items() if tokens == most]
            )
            lightest = self.lowest([(self._load_s[one], one) for one in ids])
            heaviest = max(self._load_s[one] for one in ids)
            is_heaviest = self._load_s[best] >= heaviest
            is_far = self._load_s[best] > IMBALANCE * self._load_s[lightest]
            return lightest if is_heaviest and is_far else best
        return self.lowest(
            [
                (
                    self._load_s[one]
                    + self._evicting_s(one, request, tokens)
                    + self._prefill_s(one, request, tokens),
                    one,
                )
                for one, tokens in cached.items()
            ]
        )

    def _prefill_s(self, worker_id: int, request: ClientRequest, cached: int) -> float:
        return self.workers[worker_id].settings.latency.prefill_s(request.isl - cached, cached)

    def _decode_s(self, worker_id: int, request: ClientRequest) -> float:
        """Return what an answer of mean length adds to the steps it takes part in."""
        steps = round(self._ended_tokens / self._ended) if self._ended else 0
        stretch_s = self.workers[worker_id].settings.latency.stretch_s
        return stretch_s(2, 2 * request.isl, steps) - stretch_s(1, request.isl, steps)

    def _evicting_s(self, worker_id: int, request: ClientRequest, cached: int) -> float:
        """Return the time to compute again what would go, by how often it is asked for."""
        engine, held = self.workers[worker_id], self.held[worker_id]
        short = len(held) + -(-(request.isl - cached) // engine.block_size) - engine.pool.capacity
        if short <= 0:
            return 0.0
        uses = sum(self._uses[worker_id, block] for block in islice(held, short))
        if not uses:
            return 0.0
        block_s = engine.settings.latency.prefill_s(engine.block_size, 0)
        return block_s * uses / self._requests[worker_id]

    # -- the window ----------------------------------------------------------------------------

    def _expire(self) -> None:
        window = self._window
        while window and window[0][0] < self.now - WINDOW_S:
            _, worker_id, seconds, blocks = window.popleft()
            self._add(worker_id, -seconds, -1, blocks)

    def _add(self, worker_id: int, seconds: float, sign: int, blocks: list[int]) -> None:
        self._load_s[worker_id] += seconds  # type: ignore[assignment]
        self._requests[worker_id] += sign
        for block in blocks:
            uses = self._uses[worker_id, block] + sign
            if uses:
                self._uses[worker_id, block] = uses
            else:
                del self._uses[worker_id, block]

    @override
    def _place(self, key: str, request: ClientRequest, placed: Placed, ids: list[int]) -> Placed:
        computing = ids[-1]
        if computing in self.workers:
            tokens = self.cached([computing], request)[computing]
            seconds = self._prefill_s(computing, request, tokens)
            seconds += self._decode_s(computing, request)
            blocks = list(request.blocks[: request.isl // self.workers[computing].block_size])
            self._window.append((self.now, computing, seconds, blocks))
            self._add(computing, seconds, 1, blocks)
            held = self.held[computing]
            for block in reversed(blocks):  # as the engine will use them
                if block in held:
                    held.move_to_end(block)
        self._answers[key] = request.osl
        return super()._place(key, request, placed, ids)

    @override
    def finished(self, key: str, now: float) -> None:
        super().finished(key, now)
        if key in self._answers:
            self._ended += 1
            self._ended_tokens += self._answers.pop(key)
