"""How a replay places requests, and what engines are measured to take meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from typing_extensions import override

from select_service.core.ledger.rank_speeds import RankSpeeds
from select_service.planner.types import Moments
from select_service.simulator.core.routers import Counting, Placed

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from select_service.core.ledger import rank_speeds
    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.routers import Verdict
    from select_service.simulator.core.worker import EngineWorker


class LeastWork(Counting):
    """Places like the service: prompts where the fewest tokens wait, outputs likewise."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._tokens: Counter[int] = Counter()  # of prompts that are not computed, by worker
        self._prompts: dict[str, tuple[int, int]] = {}  # worker and tokens, by key

    @override
    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        verdict = super().route(key, request, now)
        if isinstance(verdict, Placed) and verdict.prefill_worker_id is not None:
            self._prompts[key] = verdict.prefill_worker_id, request.isl
            self._tokens[verdict.prefill_worker_id] += request.isl
        return verdict

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        return min(ids, key=lambda one: (self._tokens[one], self.load(one), one))

    @override
    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        super().prefilled(key, cached_tokens, now)
        self._computed(key)

    @override
    def finished(self, key: str, now: float) -> None:
        super().finished(key, now)
        self._computed(key)

    def tokens_at(self, worker_id: int) -> int:
        """Return the tokens that an engine has to compute."""
        return self._tokens[worker_id]

    def _computed(self, key: str) -> None:
        worker_id, tokens = self._prompts.pop(key, (None, 0))
        if worker_id is not None:
            self._tokens[worker_id] -= tokens


class Measuring(LeastWork):
    """Measures ranks as the service does: first tokens as they come, decode steps at looks."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._speeds = RankSpeeds()
        self._booked: dict[str, tuple[int, int, float]] = {}  # worker, tokens until done, when
        self._reported = (Moments(), Moments())

    @override
    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        verdict = super().route(key, request, now)
        worker_id = verdict.prefill_worker_id if isinstance(verdict, Placed) else None
        if worker_id is not None:
            self._booked[key] = worker_id, self.tokens_at(worker_id), now
        return verdict

    @override
    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        super().prefilled(key, cached_tokens, now)
        worker_id, tokens, booked_at = self._booked.pop(key, (None, 0, 0.0))
        if worker_id is not None:
            self._speeds.computed(worker_id, tokens, now - booked_at)

    @override
    def finished(self, key: str, now: float) -> None:
        super().finished(key, now)
        self._booked.pop(key, None)

    @override
    def remove(self, worker_id: int, now: float) -> None:
        super().remove(worker_id, now)
        self._speeds.forget(worker_id)

    def look(self, workers: Mapping[int, EngineWorker], now: float) -> None:
        """Measure a step of every engine that decodes."""
        for worker_id, worker in workers.items():
            if worker.decoding:
                step_s = worker.settings.latency.stretch_s(worker.decoding, worker.context, 1)
                size, speeds = worker.block_size, self._speeds
                believed = speeds.decoded(worker_id, worker.context / size, size * step_s, now)
                if believed is not None:
                    speeds.blocks.add(worker.context / size, believed)

    def measured(self, block_size: int) -> tuple[Moments, Moments]:
        """Return what was measured since the last call, of first tokens and between tokens."""
        speeds, before = self._speeds, self._reported
        self._reported = _moments(speeds.prefills, 1), _moments(speeds.blocks, block_size)
        prefills, itls = (
            Moments._make(new - old for new, old in zip(*both, strict=True))
            for both in zip(self._reported, before, strict=True)
        )
        return prefills, itls


def _moments(sums: rank_speeds.MeasurementSums, size: int) -> Moments:
    return Moments(sums.count, sums.x * size, sums.y / size, sums.xx * size**2, sums.xy)
