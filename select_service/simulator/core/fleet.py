"""The workers of a simulated cluster: their states, and the costs of pools.

Books only: the cluster informs routers of workers, and handles their requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count
from typing import TYPE_CHECKING, Literal

from select_service.simulator.core.observation import ObservedPool, coefficient_of_variation
from select_service.simulator.core.routers import RouterMember
from select_service.simulator.core.worker import EngineWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.simulator.core.cluster_settings import SimulatedPool

__all__ = ["Seat", "SimulatedFleet"]


class Seat:
    """A worker and its state in the cluster."""

    __slots__ = ("busy_before", "jobs_before", "pool", "state", "worker")

    def __init__(self, worker: EngineWorker, pool: str) -> None:
        self.worker = worker
        self.pool = pool
        self.state: Literal["starting", "ready", "draining", "gone"] = "starting"
        self.busy_before = self.jobs_before = 0.0  # already charged to its pool

    @property
    def member(self) -> RouterMember:
        """The worker as described to routers."""
        worker = self.worker
        return RouterMember(
            worker.worker_id,
            worker.role,
            worker.block_size,
            worker.settings.step_tokens_max,
            worker.pool.capacity,
            worker.settings.sequences_max,
        )


class SimulatedFleet:
    """Every worker that is not gone, by id."""

    def __init__(self, pools: Mapping[str, SimulatedPool], block_size: int) -> None:
        for pool in pools.values():
            pool.engine.check()
        self.pools = pools
        self.seats: dict[int, Seat] = {}
        self._block_size = block_size
        self._ids = count()
        self._accounted_at = 0.0
        self._jobs: defaultdict[str, float] = defaultdict(float)  # by pool: job-seconds on workers
        self._busy: defaultdict[str, float] = defaultdict(float)  # seconds of steps
        self._paid: defaultdict[str, float] = defaultdict(float)  # seconds of existence
        self._evictions = 0  # of workers that are gone

    def open(self, pool: str, now: float) -> int:
        """Add a new worker in state `starting`; returns its id."""
        kind = self.pools[pool]
        self.account(now)
        worker_id = next(self._ids)
        worker = EngineWorker(worker_id, kind.engine, self._block_size, kind.role)
        self.seats[worker_id] = Seat(worker, pool)
        return worker_id

    def leave(self, worker_id: int, now: float) -> Seat:
        """Remove a worker; its costs stay in the books."""
        self.account(now)
        seat = self.seats.pop(worker_id)
        seat.state = "gone"
        self._evictions += seat.worker.pool.evictions
        return seat

    @property
    def evictions(self) -> int:
        """Blocks evicted for lack of room by all workers, past and present."""
        return self._evictions + sum(seat.worker.pool.evictions for seat in self.seats.values())

    def ids(self, pool: str, *, draining: bool = False) -> list[int]:
        """Return the workers of a pool, oldest first: starting and ready ones, or all."""
        return [
            worker_id
            for worker_id, seat in self.seats.items()
            if seat.pool == pool and (draining or seat.state != "draining")
        ]

    def account(self, now: float) -> None:
        """Charge the pools for the time since the last call."""
        seconds = now - self._accounted_at
        self._accounted_at = now
        for seat in self.seats.values():
            worker, pool = seat.worker, seat.pool
            jobs, busy = worker.job_seconds(now), worker.busy_s
            self._jobs[pool] += jobs - seat.jobs_before
            self._busy[pool] += busy - seat.busy_before
            self._paid[pool] += seconds
            seat.jobs_before, seat.busy_before = jobs, busy

    def close_books(self, now: float, seconds: float) -> dict[str, ObservedPool]:
        """Return the state of pools and their costs in the last `seconds`, and start anew."""
        self.account(now)
        states = {name: self._state(name, seconds) for name in self.pools}
        for sums in (self._jobs, self._busy, self._paid):
            sums.clear()
        return states

    def _state(self, name: str, seconds: float) -> ObservedPool:
        seats = [seat for seat in self.seats.values() if seat.pool == name]
        workers = [seat.worker for seat in seats]
        paid = self._paid[name]
        capacity = sum(worker.pool.capacity for worker in workers)
        states = Counter(seat.state for seat in seats)
        return ObservedPool(
            ready=states["ready"],
            starting=states["starting"],
            draining=states["draining"],
            concurrency=self._jobs[name] / seconds if seconds else 0.0,
            busy=self._busy[name] / paid if paid else 0.0,
            waiting=sum(len(worker.waiting) for worker in workers),
            prefill_backlog_tokens=sum(worker.prefill_backlog for worker in workers),
            kv_usage=sum(w.pool.used for w in workers) / capacity if capacity else 0.0,
            worker_seconds=paid,
        )

    def spread(self) -> tuple[float, float, int] | None:
        """Return the CoV of requests and of tokens over ready workers, and the number of requests.

        None: there is no load to spread.
        """
        ready = [seat.worker for seat in self.seats.values() if seat.state == "ready"]
        jobs = [worker.jobs for worker in ready]
        if len(ready) < 2 or not any(jobs):  # noqa: PLR2004 - one has no spread
            return None
        tokens = [worker.load_tokens for worker in ready]
        return coefficient_of_variation(jobs), coefficient_of_variation(tokens), sum(jobs)
