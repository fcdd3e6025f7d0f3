"""Pools for tests: given, not computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from select_service.core.admission.policy_api import InstanceSnapshot
from select_service.core.ledger.rank_speeds import PoolSpeed
from select_service.simulator.trial_pool import SnapshotPool

if TYPE_CHECKING:
    from collections.abc import Iterable


def pool_of(snapshots: Iterable[dict[str, Any]]) -> SnapshotPool:
    pool = SnapshotPool()
    pool.set_snapshots([InstanceSnapshot(**one) for one in snapshots])
    return pool


class FixedPool(SnapshotPool):
    """A pool with the saturation, backlog and rate a test wants."""

    prefill_backlog: float = 0.0

    def __init__(self, saturation: float = 0.0, backlog: float = 0.0, rate: float = 0.0) -> None:
        super().__init__()
        self.level = saturation
        self.prefill_backlog = backlog
        self.rate = rate
        self.instances = 1

    @property
    def saturation(self) -> float:
        return self.level

    @property
    def prefill_rate(self) -> float:
        return self.rate

    def outlook(self) -> tuple[PoolSpeed | None, float, float]:
        rate = self.rate * self.instances
        speed = PoolSpeed(0.0, rate, self.instances, rate) if rate else None
        return speed, self.prefill_backlog, self.level
