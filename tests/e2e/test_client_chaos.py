"""The client through a network that loses every fifth reply, and with selectors that die."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from select_service.client import AsyncClient, Client, Options, Unreachable
from tests import wait
from tests.e2e.test_client import spec, total
from tests.live.flaky import FlakyProxy
from tests.live.server import Server
from tests.wait import until

pytestmark = [pytest.mark.e2e]

PROMPT = list(range(48))
PATIENT = Options(
    attempt_timeout_ms=2_000, selection_timeout_ms=2_000, attempts_max=12, backoff_ms=2,
    backoff_max_ms=40, lease_rotate_s=0.5, close_timeout_ms=20_000,
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "log") as running:
        with Client(url(running.port)) as client:
            for number in range(4):
                client.upsert_worker(spec(number))
        yield running


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def live(client: AsyncClient, count: int, side_by_side: int) -> set[str]:
    """So many lifecycles; the ids they were booked under."""
    ids: set[str] = set()
    left = iter(range(count))

    async def one_after_another() -> None:
        for number in left:
            async with client.reserve(token_ids=[number, *PROMPT]) as r:
                assert not r.degraded
                ids.add(r.reservation_id)
                r.prefill_complete(cached_tokens=0)
                r.output_tokens(16)

    async with asyncio.TaskGroup() as group:
        for _ in range(side_by_side):
            group.create_task(one_after_another())
    return ids


def events(server: Server) -> dict[str, float]:
    """What became of reservations since the start, as the service says."""
    text = httpx.get(url(server.port) + "/metrics").text
    found = re.findall(
        r'^select_service_reservation_events_total{event="(.*)"} (.*)$', text, re.MULTILINE
    )
    return {name: float(count) for name, count in found}


def lose_a_fifth(server: Server, count: int) -> None:
    async def main() -> None:
        with FlakyProxy(server.port, drop=0.19, swallow=0.01, delay=0.1) as proxy:
            async with AsyncClient(url(proxy.port), options=PATIENT) as client:
                ids = await live(client, count, 8)
                await client.flush()
                assert proxy.lost > 0
            assert len(ids) == count, "no lifecycle was booked under two ids"

    wait.run(main())
    nothing_was_booked_twice_and_nothing_is_left(server, count)


def nothing_was_booked_twice_and_nothing_is_left(server: Server, count: int) -> None:
    with Client(url(server.port)) as client:
        assert total(client) == (0, 0, 0)
        assert client.call("GET", "/leases", kind=dict[str, Any])["total"] == 0
    counts = events(server)
    assert counts["booked"] == count, "none was booked twice"
    assert counts["freed"] + counts["lease_ended"] == count
    assert counts["repeated"] > 0
    assert counts["conflicting"] == counts["expired"] == counts["dropped"] == 0


def test_every_fifth_reply_is_lost(server: Server) -> None:
    lose_a_fifth(server, 60)


def test_every_fifth_reply_is_lost_in_threads(server: Server) -> None:
    count, side_by_side = 40, 4
    with (
        FlakyProxy(server.port, drop=0.19, swallow=0.01, delay=0.1, seed=2) as proxy,
        Client(url(proxy.port), options=PATIENT) as client,
    ):

        def live(number: int) -> None:
            with client.reserve(token_ids=[number, *PROMPT]) as r:
                assert not r.degraded
                r.prefill_complete(cached_tokens=0)
                r.output_tokens(16)

        with ThreadPoolExecutor(side_by_side) as threads:
            for done in [threads.submit(live, number) for number in range(count)]:
                done.result()
        client.flush()
        assert proxy.lost > 0
    nothing_was_booked_twice_and_nothing_is_left(server, count)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_every_fifth_reply_is_lost_a_thousand_times(server: Server) -> None:
    lose_a_fifth(server, 1000)


@pytest.mark.heavy
def test_requests_that_come_late_leave_nothing(server: Server) -> None:
    """Carried out when the client has long asked again, and freed what it got.

    They are refused, their lease being closed; should its opening come once more before them, they
    are gone when it lapses.
    """

    async def main() -> None:
        options = structs.replace(PATIENT, lease_ttl_s=2.0)
        with FlakyProxy(server.port, late=0.2, delay_s=0.4, seed=3) as proxy:
            async with AsyncClient(url(proxy.port), options=options) as client:
                await live(client, 200, 8)
                await client.flush()
            await until(lambda: not proxy.held)

    wait.run(main())
    with Client(url(server.port)) as client:
        wait.block_until(lambda: total(client) == (0, 0, 0), lambda: events(server))


@pytest.mark.heavy
def test_the_next_selector_takes_over(tmp_path: Path) -> None:
    with Server(tmp_path / "b") as second:
        with Client(url(second.port)) as client:
            client.upsert_worker(spec(1))
        first = Server(tmp_path / "a")

        async def main() -> None:
            options = Options(degraded=False)
            async with AsyncClient(url(first.port), url(second.port), options=options) as client:
                async with client.reserve(token_ids=PROMPT, reservation_id="r") as r:
                    r.prefill_complete()
                    r.output_tokens(32)
                    await client.flush()
                    assert first.process is not None
                    first.process.kill()
                    first.process.wait()
                    r.output_tokens(16)  # a sign of life that nobody there knows
                    await client.flush()
                    assert client.selector == url(second.port)
                    assert (r.reservation_id, client.stats()["replays"]) == ("r~1", 1)
                    with Client(url(second.port)) as other:
                        assert total(other) == (1, 0, 3 + 3)
                async with client.reserve(token_ids=PROMPT) as r:
                    assert r.reservation_id != "r~1"
                await client.flush()

        with first:
            with Client(url(first.port)) as client:
                client.upsert_worker(spec(1))
            wait.run(main())
        with Client(url(second.port)) as client:
            assert total(client) == (0, 0, 0)


@pytest.mark.heavy
def test_without_any_selector(tmp_path: Path) -> None:
    first = Server(tmp_path / "a")

    async def main() -> None:
        async with AsyncClient(url(first.port), options=Options(probe_s=0.05)) as client:
            async with client.reserve(token_ids=PROMPT) as r:
                assert not r.degraded
            first.stop()
            chosen = set()
            for _ in range(20):
                async with client.reserve(token_ids=PROMPT, allowed_worker_ids=[1, 3]) as r:
                    assert r.degraded
                    assert r.endpoint == f"ray://w{r.worker_id}"
                    r.output_tokens(100)
                    chosen.add(r.worker_id)
            assert chosen == {1, 3}
            with pytest.raises(Unreachable):
                await client.reserve(token_ids=PROMPT, model_name="unknown")
            with Server(tmp_path / "again", port=first.port) as again:
                with Client(url(again.port)) as other:
                    assert not other.ready().ready
                    other.upsert_worker(spec(5))
                await until(lambda: not client.degraded)
                async with client.reserve(token_ids=PROMPT) as r:
                    assert (r.degraded, r.worker_id) == (False, 5)
                await client.flush()
                with Client(url(again.port)) as other:
                    assert total(other)[0] == 0
                assert client.stats()["degraded"] == 20

    with first:
        with Client(url(first.port)) as client:
            for number in range(4):
                client.upsert_worker(spec(number))
        wait.run(main())
