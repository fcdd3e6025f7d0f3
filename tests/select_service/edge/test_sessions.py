"""Sessions over HTTP: requests of one go to one worker, and /metrics says what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, add_worker, app_client

if TYPE_CHECKING:
    import httpx

    from select_service.edge.driver.driver import Driver


@within(app_client, session_ttl_s=60.0)
async def test_a_session_follows_its_last_request(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id in range(1, 9):
        add_worker(service, worker_id)
    chosen = set()
    for _ in range(12):
        answer = await client.post("/select", json=PROMPT | {"session_id": "s"})
        assert answer.status_code == 200
        assert "warning" not in answer.headers
        chosen.add(answer.json()["worker_id"])
    assert len(chosen) == 1
    for route, more in (
        ("/select", {}),
        ("/select_and_reserve", {"reservation_id": "r"}),
        ("/select_pair", {"reservation_id": "p"}),
    ):
        answer = await client.post(route, json=PROMPT | more | {"session_id": ""})
        assert answer.status_code == 200, "no session"
    refused = await client.post("/select", json=PROMPT | {"session_id": "x" * 257})
    assert (refused.status_code, refused.json()["field"]) == (422, "session_id")
    metrics = (await client.get("/metrics")).text
    assert 'session_requests_total{outcome="kept"} 11.0' in metrics
    assert "sessions 1.0" in metrics
