"""A clock that jumps: a machine that was suspended, a process that stood still for days.

Backwards, too, where somebody gives the service a clock of his own: to the core it stands still.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest

from indexer.core.registry import StreamRegistry
from select_service.core.service import SelectionCore
from select_service.edge.driver.driver import Driver, forwards_only
from select_service.errors import AdmissionRefused, LeaseNotFound, ReservationNotFound
from select_service.types import (
    LeaseRenewal,
    LeaseRequest,
    ReservationRequest,
    RouterConfig,
    SelectRequest,
    WorkerSpec,
)

WORKERS = (1, 2)
BACK_S = (-0.01, -1.0, -59.0, -3600.0)
JUMPS_S = (0.0, 0.0, 0.01, 0.01, 1.0, 1.0, 30.0, 59.0, 3600.0, 1e7)


class Life:
    """A core whose `now` is whatever somebody says."""

    def __init__(self, seed: int, jumps: tuple[float, ...]) -> None:
        self.jumps = jumps
        self.rng = random.Random(seed)
        self.core = SelectionCore(
            StreamRegistry(), RouterConfig(use_kv_events=False), random.Random(seed)
        )
        self.now = self.wall = 1e6
        self.clock = forwards_only(lambda: self.wall)
        self.names = 0
        self.live: list[str] = []
        for worker_id in WORKERS:
            spec = WorkerSpec(worker_id=worker_id, endpoint="http://w", block_size=16)
            self.core.workers.upsert_worker(spec, self.now)

    def step(self) -> None:
        self.wall += self.rng.choice(self.jumps)
        self.now = self.clock()
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
            self.core.reservations.open_lease(lease, self.now)
        request = ReservationRequest(
            reservation_id=name,
            worker_id=self.rng.choice(WORKERS),
            sequence_hashes=[self.names, self.names + 1],
            isl_tokens=32,
            lease_id=lease_id,
        )
        self.core.reservations.reserve(request, self.now)
        self.live.append(name)

    def free(self) -> None:
        self.core.reservations.free(self.rng.choice([*self.live, "nobody's"]), self.now)

    def report(self) -> None:
        name = self.rng.choice([*self.live, "nobody's"])
        self.core.reservations.prefill_complete(name, self.now)
        self.core.reservations.output_block(name, None, self.now)

    def renew(self) -> None:
        self.core.reservations.renew_lease(f"l{self.rng.randrange(4)}", LeaseRenewal(), self.now)

    def carried(self) -> int:
        return sum(
            row.active_requests for scope in self.core.queries.loads() for row in scope.loads
        )

    def rest(self) -> None:
        """Time goes on as it should, longer than anything lives."""
        self.wall = max(self.wall, self.now)
        for _ in range(40):
            self.wall += 100.0
            self.now = self.clock()
            while self.core.tick(self.now)[0]:
                pass
        self.core.check()


@pytest.mark.parametrize("jumps", [JUMPS_S, JUMPS_S + BACK_S], ids=["forwards", "both"])
@pytest.mark.parametrize("seed", range(4))
def test_a_clock_that_jumps(seed: int, jumps: tuple[float, ...]) -> None:
    """Load is always the sum of what stands, and nothing outlives its time for good."""
    life = Life(seed, jumps)
    for _ in range(120):
        life.step()
    life.rest()
    assert life.carried() == 0


def test_a_bucket_and_a_lease_while_the_clock_is_behind() -> None:
    """Nothing is taken out of a bucket by time, and nothing expires early or is kept for good."""
    wall = [1e6]
    service = Driver(RouterConfig(use_kv_events=False), clock=lambda: wall[0])
    core = service.core
    worker = WorkerSpec(worker_id=1, endpoint="http://w", block_size=16)
    core.admission_controller.put_in_force("token-bucket", {"capacity": 100, "refill_rate": 10})
    core.workers.upsert_worker(worker, service.now())

    def select(tokens: int) -> bool:
        prompt = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": tokens}
        request = msgspec.convert(prompt | {"slo_class": "batch"}, SelectRequest)
        try:
            core.selection.select(request, service.now())
        except AdmissionRefused:
            return False
        return True

    core.reservations.open_lease(LeaseRequest(owner="o", ttl_s=60.0, lease_id="l"), service.now())
    assert select(100)
    wall[0] -= 3600.0
    assert not select(10)
    core.tick(service.now())
    assert core.reservations.renew_lease("l", LeaseRenewal(), service.now())
    wall[0] += 3605.0
    assert not select(51)
    assert select(50), "refilled by the five seconds that have passed"
    wall[0] += 60.0
    core.tick(service.now())
    with pytest.raises(LeaseNotFound):
        core.reservations.renew_lease("l", LeaseRenewal(), service.now())
