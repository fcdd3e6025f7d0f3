"""The engine reduced to a server, against what queueing theory has in closed form.

M/D/1 and M/M/c know the mean wait; a simulated one that is right comes within a few percent of it
over many arrivals, with a seed that is fixed.
"""

from __future__ import annotations

import math
import random
from heapq import heappop, heappush

import pytest

from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.engine_settings import EngineSettings, SimulatedPool
from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.core.requests import ClientRequest, chain_of
from select_service.simulator.core.routers import RoundRobinRouter
from tests.select_service.simulator.core.engines import Given

TINY_S = 1e-9  # a step must take some time


def waits(engine: EngineSettings, requests: list[ClientRequest], service_s: list[float]) -> float:
    pools = {"workers": SimulatedPool("aggregated", engine)}
    settings = ClusterSettings(pools, block_size=64)
    cluster = Cluster(settings, RoundRobinRouter(random.Random(1)), Given(requests, 64))
    cluster.add_worker("workers", 0.0)
    cluster.finish()
    cluster.check()
    ended = sorted(cluster.outcomes, key=lambda one: one.request.number)
    spent = [one.e2e_s - took for one, took in zip(ended, service_s, strict=True)]
    return sum(spent) / len(spent)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_server_with_equal_prompts_is_m_d_1(load: float) -> None:
    rng = random.Random(7)
    latency = AnalyticLatency(TINY_S, 1e-3, 0.0, 0.0, 0.0)
    engine = EngineSettings(latency, kv_tokens=10_000, step_tokens_max=100, sequences_max=1)
    now, requests = 0.0, []
    for number in range(12_000):
        now += rng.expovariate(load / 0.1)
        requests.append(
            ClientRequest(number=number, arrival=now, isl=100, osl=1, blocks=chain_of())
        )
    wait_s = waits(engine, requests, [0.1] * len(requests))
    assert wait_s == pytest.approx(load * 0.1 / (2 * (1 - load)), rel=0.05)


def test_seats_that_do_not_slow_each_other_are_m_m_c() -> None:
    planned_ranks, mean_s, load, step_s = 4, 1.0, 0.8, 1e-3
    rng = random.Random(11)
    latency = AnalyticLatency(step_s, 0.0, 0.0, 0.0, 0.0)
    engine = EngineSettings(
        latency, kv_tokens=10**6, step_tokens_max=10_000, sequences_max=planned_ranks
    )
    now, requests, service_s = 0.0, [], []
    for number in range(12_000):
        now += rng.expovariate(load * planned_ranks / mean_s)
        steps = max(1, round(rng.expovariate(1.0 / mean_s) / step_s))
        requests.append(
            ClientRequest(number=number, arrival=now, isl=1, osl=steps, blocks=chain_of())
        )
        service_s.append(steps * step_s)
    offered = load * planned_ranks
    below = sum(offered**k / math.factorial(k) for k in range(planned_ranks))
    full = offered**planned_ranks / math.factorial(planned_ranks) / (1 - load)
    erlang_c = full / (below + full)
    expected_s = erlang_c * mean_s / (planned_ranks * (1 - load))
    found_s = waits(engine, requests, service_s)
    assert found_s == pytest.approx(expected_s, rel=0.1), "as far as so many can be the mean"
    # who comes waits for the end of the step in progress: half a step, and no two ends are apart
    assert found_s == pytest.approx(recursion(requests, service_s, planned_ranks), abs=2 * step_s)


def recursion(requests: list[ClientRequest], service_s: list[float], planned_ranks: int) -> float:
    """Return the mean wait of these very requests: each takes the seat that is free first."""
    free = [0.0] * planned_ranks
    total = 0.0
    for one, takes_s in zip(requests, service_s, strict=True):
        begins = max(one.arrival, heappop(free))
        total += begins - one.arrival
        heappush(free, begins + takes_s)
    return total / len(requests)
