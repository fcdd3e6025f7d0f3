"""The workers of a simulated cluster: their states, and the costs of pools.

Books only: the cluster informs routers of workers, and handles their requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count
from typing import TYPE_CHECKING, Literal

from select_service.simulator.core.observation import ObservedPool, coefficient_of_variation
from select_service.simulator.core.worker import EngineWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.simulator.core.engine_settings import SimulatedPool
    from select_service.simulator.core.kv_pool import CommonCache


class FleetWorker:
    """A worker and its state in the cluster."""

    __slots__ = ("busy_before", "jobs_before", "pool", "state", "worker")

    def __init__(self, worker: EngineWorker, pool: str) -> None:
        self.worker = worker
        self.pool = pool
        self.state: Literal["starting", "ready", "draining", "gone"] = "starting"
        self.busy_before = self.jobs_before = 0.0  # already charged to its pool


class SimulatedFleet:
    """Every worker that is not gone, by id."""

    def __init__(
        self, pools: Mapping[str, SimulatedPool], block_size: int, common: CommonCache | None = None
    ) -> None:
        for pool in pools.values():
            pool.engine.check()
        self.pools = pools
        self.fleet_workers: dict[int, FleetWorker] = {}
        self._block_size = block_size
        self._common = common
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
        worker = EngineWorker(worker_id, kind.engine, self._block_size, kind.role, self._common)
        self.fleet_workers[worker_id] = FleetWorker(worker, pool)
        return worker_id

    def leave(self, worker_id: int, now: float) -> None:
        """Remove a worker; its costs stay in the books."""
        self.account(now)
        fleet_worker = self.fleet_workers.pop(worker_id)
        fleet_worker.state = "gone"
        self._evictions += fleet_worker.worker.pool.evictions

    @property
    def evictions(self) -> int:
        """Blocks evicted for lack of room by all workers, past and present."""
        return self._evictions + sum(
            fleet_worker.worker.pool.evictions for fleet_worker in self.fleet_workers.values()
        )

    def ids(self, pool: str) -> list[int]:
        """Return the workers of a pool that are starting or ready, oldest first."""
        return [
            worker_id
            for worker_id, fleet_worker in self.fleet_workers.items()
            if fleet_worker.pool == pool and fleet_worker.state != "draining"
        ]

    def account(self, now: float) -> None:
        """Charge the pools for the time since the last call."""
        seconds = now - self._accounted_at
        self._accounted_at = now
        for fleet_worker in self.fleet_workers.values():
            worker, pool = fleet_worker.worker, fleet_worker.pool
            jobs, busy = worker.job_seconds(now), worker.busy_s
            self._jobs[pool] += jobs - fleet_worker.jobs_before
            self._busy[pool] += busy - fleet_worker.busy_before
            self._paid[pool] += seconds
            fleet_worker.jobs_before, fleet_worker.busy_before = jobs, busy

    def close_books(self, now: float, seconds: float) -> dict[str, ObservedPool]:
        """Return the state of pools and their costs in the last `seconds`, and start anew."""
        self.account(now)
        states = {name: self._state(name, seconds) for name in self.pools}
        for sums in (self._jobs, self._busy, self._paid):
            sums.clear()
        return states

    def _state(self, name: str, seconds: float) -> ObservedPool:
        fleet_workers = [
            fleet_worker
            for fleet_worker in self.fleet_workers.values()
            if fleet_worker.pool == name
        ]
        workers = [fleet_worker.worker for fleet_worker in fleet_workers]
        paid = self._paid[name]
        capacity = sum(worker.pool.capacity for worker in workers)
        states = Counter(fleet_worker.state for fleet_worker in fleet_workers)
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
        ready = [
            fleet_worker.worker
            for fleet_worker in self.fleet_workers.values()
            if fleet_worker.state == "ready"
        ]
        jobs = [worker.jobs for worker in ready]
        if len(ready) < 2 or not any(jobs):  # noqa: PLR2004 - one has no spread
            return None
        tokens = [worker.load_tokens for worker in ready]
        return coefficient_of_variation(jobs), coefficient_of_variation(tokens), sum(jobs)
