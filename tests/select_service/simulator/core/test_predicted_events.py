"""What the estimate of caches is worth where engines send no KV events, in simulation."""

from __future__ import annotations

import pytest

from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.runs import run
from select_service.simulator.settings import EngineSpec, SimulationSettings
from select_service.types import KvEvents

CHAT = WorkloadSettings(kind="chat", rate=2.0, requests=400)


def hit_rate(kv_events: KvEvents, replicas: int) -> float:
    settings = SimulationSettings(
        workloads=[CHAT],
        workers=4,
        engine=EngineSpec(kv_tokens=60_000),
        block_size=64,
        kv_events=kv_events,
        replicas=replicas,
    )
    return run(settings).hit_rate


@pytest.mark.parametrize("replicas", [1, 2])
def test_hits_are_within_five_points_of_exact_events(replicas: int) -> None:
    exact, estimated = hit_rate("engine", replicas), hit_rate("predicted", replicas)
    assert exact - 0.05 <= estimated <= exact + 0.05
    assert hit_rate("none", replicas) < exact - 0.1, "events are worth something here"
