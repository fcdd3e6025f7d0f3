"""Replicas that share an index decide as replicas do that have one each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indexer.core.registry import StreamRegistry
from indexer.types import Tier, WorkerRank
from select_service.simulator.core import core_router
from select_service.simulator.core.core_router import CoreRouter
from select_service.simulator.core.kv_events import KvEvent, Stored
from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.runs import run
from select_service.simulator.settings import EngineSpec, FleetChange, SimulationSettings


class Apart(CoreRouter):
    """The naive twin: every replica has an index of its own, and gets every event."""

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        rank = WorkerRank(worker_id, 0)
        for replica in self.replicas:
            for _, index in replica.registry.indexes():
                if index.slot_of(rank) is None:
                    continue
                for event in events:
                    if isinstance(event, Stored):
                        blocks = event.blocks
                        index.store(rank, Tier.DEVICE, event.parent, blocks, blocks.tobytes())
                    else:
                        index.remove(rank, Tier.DEVICE, event.blocks)

    def check(self) -> None:
        indexes = [index for one in self.replicas for _, index in one.registry.indexes()]
        assert len({id(index) for index in indexes}) == len(self.replicas), "the twin is no twin"
        for index in indexes:
            index.check()


@pytest.mark.parametrize("policy", ["first-token", "kv-cost"])
def test_one_index_for_all_replicas_is_as_one_for_each(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimulationSettings(
        policy=policy,
        workers=4,
        replicas=3,
        sync_delay_s=0.05,
        block_size=16,
        engine=EngineSpec(kv_tokens=15_000),  # so that there are evictions
        workloads=[WorkloadSettings(kind="chat", rate=6.0, requests=120)],
        changes=[
            FleetChange(at=5.0, do="fail", startup_s=8.0),
            FleetChange(at=9.0, do="remove"),
            FleetChange(at=14.0, do="add", count=2, startup_s=1.0),
        ],
    )
    shared = run(settings)
    assert shared.evictions
    monkeypatch.setattr(core_router, "_Registry", lambda _: StreamRegistry())
    monkeypatch.setattr("select_service.simulator.runs.CoreRouter", Apart)
    assert run(settings) == shared
