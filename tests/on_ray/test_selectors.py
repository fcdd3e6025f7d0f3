"""The service as a Serve application outlives any of its replicas."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from select_service.client import AsyncClient, Options
from tests.on_ray.cluster import Cluster, kill_replicas, wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

TOKENS = list(range(64))


def test_one_of_two_is_killed(cluster: Cluster) -> None:
    selectors = cluster.run_selectors("pair")
    selectors.register(7)
    first, second = selectors.urls()
    _booked_at_one_is_completed_at_the_other(first, second)
    asyncio.run(_work_through_a_death([first, second]))
    wait_until(lambda: len(set(selectors.urls()) - {first, second}) == 1, "another one is there")
    (new,) = set(selectors.urls()) - {first, second}
    wait_until(lambda: len(selectors.urls()) == 2, "the dead one is forgotten")
    (old,) = set(selectors.urls()) - {new}
    wait_until(
        lambda: [one["worker_id"] for one in httpx.get(f"{new}/workers").json()] == [7],
        "the catalog came along",
    )
    wait_until(lambda: _knows(new, old) and _knows(old, new), "they receive each other's messages")
    _booked_at_one_is_completed_at_the_other(new, old)
    wait_until(selectors.loads_are_zero, "nothing is left")
    # the new one may still wait for the books of the dead one, until it is looked for no more
    wait_until(
        lambda: (
            httpx.get(f"{new}/ready").json()["ready"]
            and httpx.get(f"{selectors.url}/ready").json()["ready"]
        ),
        "and Serve's proxy finds them",
    )


def _knows(url: str, other: str) -> bool:
    """Whether one listens to somebody; the other is the only one there is."""
    return bool(httpx.get(f"{url}/replica_sync/peers").json()) and url != other


def _booked_at_one_is_completed_at_the_other(first: str, second: str) -> None:
    name = f"across-{first[-5:]}"
    body = {"reservation_id": name, "token_ids": TOKENS}
    wait_until(
        lambda: httpx.post(f"{first}/select_and_reserve", json=body).is_success, "it is booked"
    )

    def known(url: str) -> bool:
        return httpx.post(f"{url}/reservations/{name}/prefill_complete").is_success

    wait_until(lambda: known(second), "the other one knows the reservation")
    httpx.delete(f"{second}/reservations/{name}").raise_for_status()
    # of what nobody has a lease on, a selector that dies before it could publish loses the end
    wait_until(lambda: not known(first), "the first one has received that it is over")


async def _work_through_a_death(urls: list[str]) -> None:
    """Lives go on while one selector dies; each of them is booked somewhere, none twice."""
    done = itertools.count()
    is_dead = asyncio.Event()

    async def live(client: AsyncClient) -> None:
        while True:
            async with client.reserve(token_ids=TOKENS, timeout_ms=20_000) as r:
                assert not r.degraded
                r.prefill_complete()
                await asyncio.sleep(0.01)
            if next(done) == 100:
                assert kill_replicas("pair", "selector", 1) == 1
                is_dead.set()
            if is_dead.is_set():
                break
        for _ in range(20):
            async with client.reserve(token_ids=TOKENS, timeout_ms=20_000) as r:
                assert not r.degraded

    options = Options(lease_ttl_s=3.0)
    async with (
        AsyncClient(*urls, options=options) as one,
        AsyncClient(*urls[::-1], options=options) as other,
    ):
        await asyncio.gather(*(live(client) for client in (one, other) for _ in range(8)))
        await asyncio.gather(one.flush(), other.flush())
