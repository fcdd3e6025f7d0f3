"""The planner's connector on a real Ray: Serve's REST API with a token, and an actor."""

from __future__ import annotations

import asyncio
import os
import time

import httpx
import pytest

from select_service.planner.edge.connectors.ray import RayConnector
from select_service.planner.types import ModelKey, PoolKey, PoolState, Target
from tests.on_ray.cluster import PATIENCE_S, POLL_S, Cluster

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

DECODE, PREFILL = PoolKey(ModelKey("m"), "decode"), PoolKey(ModelKey("m"), "prefill")
APP = "planned"


def target(pool: PoolKey, replicas: int) -> Target:
    return Target(pool.model.model_name, pool.model.tenant_id, pool.role, replicas)


async def until(connector: RayConnector, pool: PoolKey, wanted: PoolState) -> list[PoolState]:
    """Look until it is so; returns what was seen on the way."""
    deadline = time.monotonic() + PATIENCE_S
    seen: list[PoolState] = []
    while time.monotonic() < deadline:
        state = (await connector.states([pool])).get(pool)
        if state is not None and (not seen or seen[-1] != state):
            seen.append(state)
        if state == wanted:
            return seen
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"wanted {wanted}, saw {seen}: {connector.problems}")


async def until_problem(connector: RayConnector, pool: PoolKey, text: str) -> None:
    """Look until a pool has no state, and why; a busy machine may be a reason, too."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert await connector.states([pool]) == {}
        if text in connector.problems[pool]:
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"wanted {text}: {connector.problems}")


def test_a_serve_deployment_is_scaled_up_and_down(cluster: Cluster) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    application = {
        "name": APP,
        "route_prefix": f"/{APP}",
        "import_path": "tests.on_ray.pool:app",
        "runtime_env": {"env_vars": {"PYTHONPATH": os.getcwd()}},
    }
    httpx.put(
        f"{cluster.dashboard}/api/serve/applications/",
        json={"applications": [application]},
        headers={"authorization": f"Bearer {token}"},
        timeout=PATIENCE_S,
    ).raise_for_status()

    async def use() -> None:
        resources = {DECODE: f"serve/{APP}/Pool", PREFILL: f"serve/{APP}/Missing"}
        header = {"authorization": f"Bearer {token}"}
        connector = RayConnector(resources, cluster.dashboard, lambda: header)
        await until(connector, DECODE, PoolState(1, 1))
        outcome = await connector.apply([target(DECODE, 3)], ["a test"])
        assert [one.replicas for one in outcome.done] == [3]
        seen = await until(connector, DECODE, PoolState(3, 3))
        assert any(one.starting for one in seen), "readiness is seen, not supposed"
        await connector.apply([target(DECODE, 1)], [])
        await until(connector, DECODE, PoolState(1, 1))
        await until_problem(connector, PREFILL, "has no deployment Missing")
        await connector.close()
        stranger = RayConnector(resources, cluster.dashboard)
        await until_problem(stranger, DECODE, "401")
        failed = (await stranger.apply([target(DECODE, 2)], [])).failed
        assert "401" in failed[DECODE]
        await stranger.close()

    asyncio.run(use())


def test_an_actor_scales_a_pool_of_its_own(cluster: Cluster) -> None:
    import ray

    from tests.on_ray.pool import OwnPool

    own = OwnPool.options(name="pool", namespace="planned").remote()  # type: ignore[attr-defined]
    ray.get(
        own.scale.remote(1)
    )  # the connector waits for an answer, and not for a process to start

    async def use() -> None:
        resources = {DECODE: "actor/planned/pool", PREFILL: "actor/planned/nobody"}
        connector = RayConnector(resources)
        await until(connector, DECODE, PoolState(1, 1))
        await connector.apply([target(DECODE, 4)], [])
        seen = await until(connector, DECODE, PoolState(4, 4))
        assert seen[0] == PoolState(4, 1)
        await until_problem(connector, PREFILL, "actor planned/nobody")
        await connector.close()

    asyncio.run(use())
    del own
