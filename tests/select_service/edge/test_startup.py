"""While the index is being recovered: served, not ready, and no event source listened to."""

from __future__ import annotations

import asyncio

import httpx

from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.indexer.edge.test_recovery import DUMP, hangs_after, peer, whole
from tests.select_service.edge.serving import PROMPT, app_client, worker
from tests.wait import until


@within(app_client, indexer_peers=("http://127.0.0.1:1",), recovery_backoff_s=0.3)
async def test_recovery_beside_requests(client: httpx.AsyncClient, service: Driver) -> None:
    assert service.recovery is not None
    gate = asyncio.Event()
    answer = whole(DUMP)

    async def late(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await answer(writer)

    async with peer(late) as url:
        service.recovery._peers[:] = [url]
        assert (await client.get("/health")).status_code == 200
        record = (await client.post("/workers", json=worker(1))).json()
        assert record["lifecycle"] == "schedulable"
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["waiting_for"] == ["index_recovery"]
        assert (await client.post("/select_and_reserve", json=PROMPT)).status_code == 200
        assert service.sources.listeners is not None
        assert len(service.sources.listeners) == 0
        gate.set()
        await until(lambda: service.ready().ready)
        assert len(service.sources.listeners) == 1
    asked = {"block_hashes": [1, 2, 3], "sequence_hashes": [1, 2, 3], "isl_tokens": 48}
    (row,) = (await client.post("/overlap_scores", json=asked)).json()["workers"]
    assert row["device_blocks"] == 3
    second = (await client.post("/workers", json=worker(2, data_parallel_start_rank=3))).json()
    assert second["lifecycle"] == "schedulable"
    rows = (await client.post("/overlap_scores", json=asked)).json()["workers"]
    assert [row["device_blocks"] for row in rows] == [3, 3]
    text = (await client.get("/metrics")).text
    assert 'index_recovery{state="recovered"} 1.0' in text
    assert "index_recovery_blocks_total 2002.0" in text
    service.core.check()


async def test_ready_waits_no_longer_than_it_is_told() -> None:
    async with (
        peer(hangs_after(b"{")) as url,
        app_client(indexer_peers=(url,), ready_timeout_s=0.2, recovery_silence_s=60.0) as (
            client,
            service,
        ),
    ):
        await client.post("/workers", json=worker(1))
        await until(lambda: service.ready().ready)
        assert service.readiness.given_up == ["index_recovery"]
        assert service.recovery is not None
        assert service.recovery.outcome == "running"
