"""Twenty actors drive a thousand requests through their lives, and one of them is killed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.on_ray.cluster import Cluster, wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

ACTORS = 20
LIVES = 50
AT_ONCE = 5
WORKERS = 4
LEASE_S = 2.0


class Engineer:
    """One actor: a client of its own, some requests at a time."""

    def __init__(self, urls: list[str]) -> None:
        from select_service.client import AsyncClient, Options

        self._client = AsyncClient(*urls, options=Options(lease_ttl_s=LEASE_S))
        self._done = 0
        self._chosen: set[int] = set()

    async def drive(self, lives: int) -> tuple[int, set[int], dict[str, int]]:
        """Whole lives; returns how many, of which workers, and what the client counts."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def live(number: int) -> None:
            async with turns, self._client.reserve(token_ids=range(number, number + 96)) as r:
                self._chosen.add(r.worker_id)
                r.prefill_complete(cached_tokens=0)
                for _ in range(40):
                    r.output_tokens(1)
                await asyncio.sleep(0)
                assert not r.degraded
            self._done += 1

        await asyncio.gather(*map(live, range(lives)))
        await self._client.flush()
        return self._done, self._chosen, self._client.stats()

    async def hold(self, count: int) -> int:
        """Book and never free."""
        for number in range(count):
            await self._client.reserve(token_ids=range(number, number + 96))
        return count


def test_a_thousand_lives_and_a_death(cluster: Cluster) -> None:
    import ray

    selectors = cluster.run_selectors("actors")
    for worker_id in range(2**63, 2**63 + WORKERS):  # 64 bits, all of them used
        selectors.register(worker_id)
    urls = selectors.urls()
    make: Any = ray.remote(Engineer).options(num_cpus=0)
    engineers = [make.remote(urls if n % 2 else urls[::-1]) for n in range(ACTORS)]
    doomed = make.remote(urls)
    held = ray.get(doomed.hold.remote(25))
    wait_until(lambda: all(selectors.active(url) >= held for url in urls), "both know")
    under_way = [one.drive.remote(LIVES) for one in engineers]
    ray.wait(under_way, num_returns=2)
    ray.kill(doomed)
    results = ray.get(under_way)
    assert [done for done, _, _ in results] == [LIVES] * ACTORS
    assert {one for _, chosen, _ in results for one in chosen} == set(range(2**63, 2**63 + WORKERS))
    assert sum(stats["requests"] for _, _, stats in results) > 0
    wait_until(selectors.loads_are_zero, "nothing is booked any more")
