"""A clock that jumps: a machine that was suspended, a process that stood still for days.

Forwards only: `now` is monotonic, and the system's monotonic clock never goes back.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from indexer.core.registry import Registry
from select_service.core.service import SelectionCore
from select_service.errors import LeaseNotFound, ReservationNotFound
from select_service.types import (
    LeaseRenewal,
    LeaseRequest,
    ReservationRequest,
    RouterConfig,
    WorkerSpec,
)

WORKERS = (1, 2)
JUMPS_S = (0.0, 0.0, 0.01, 0.01, 1.0, 1.0, 30.0, 59.0, 3600.0, 1e7)


class Life:
    """A core whose `now` is whatever somebody says."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = SelectionCore(
            Registry(), RouterConfig(use_kv_events=False), random.Random(seed)
        )
        self.now = 1e6
        self.names = 0
        self.live: list[str] = []
        for worker_id in WORKERS:
            spec = WorkerSpec(worker_id=worker_id, endpoint="http://w", block_size=16)
            self.core.upsert_worker(spec, self.now)

    def step(self) -> None:
        self.now += self.rng.choice(JUMPS_S)
        act: Any = self.rng.choice([self.book, self.book, self.free, self.report, self.renew])
        with contextlib.suppress(ReservationNotFound, LeaseNotFound):
            act()
        while self.core.tick(self.now)[0]:
            pass
        self.core.check()

    def book(self) -> None:
        self.names += 1
        name = f"r{self.names}"
        lease_id = None
        if self.rng.random() < 0.5:
            lease_id = f"l{self.rng.randrange(4)}"
            lease = LeaseRequest(owner="o", ttl_s=60.0, lease_id=lease_id)
            self.core.open_lease(lease, self.now)
        request = ReservationRequest(
            reservation_id=name,
            worker_id=self.rng.choice(WORKERS),
            sequence_hashes=[self.names, self.names + 1],
            isl_tokens=32,
            lease_id=lease_id,
        )
        self.core.reserve(request, self.now)
        self.live.append(name)

    def free(self) -> None:
        self.core.free(self.rng.choice([*self.live, "nobody's"]), self.now)

    def report(self) -> None:
        name = self.rng.choice([*self.live, "nobody's"])
        self.core.prefill_complete(name, self.now)
        self.core.output_block(name, None, self.now)

    def renew(self) -> None:
        self.core.renew_lease(f"l{self.rng.randrange(4)}", LeaseRenewal(), self.now)

    def carried(self) -> int:
        return sum(row.active_requests for scope in self.core.loads() for row in scope.loads)

    def rest(self) -> None:
        """Time goes on as it should, longer than anything lives."""
        for _ in range(40):
            self.now += 100.0
            while self.core.tick(self.now)[0]:
                pass
        self.core.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_that_jumps(seed: int) -> None:
    """Load is always the sum of what stands, and nothing outlives its time for good."""
    life = Life(seed)
    for _ in range(120):
        life.step()
    life.rest()
    assert life.carried() == 0
