"""Busy thresholds over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.select_service.edge.serving import add_worker, app_client

THRESHOLDS = (
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)


@within(app_client, admission_control="token-capacity")
async def test_busy_thresholds_over_http(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    off = dict.fromkeys(THRESHOLDS)
    path = "/busy_threshold"

    async def post(**body: Any) -> httpx.Response:
        return await client.post(path, json={"model": "default", **body})

    assert (await client.get(path)).json() == {"thresholds": [{"model": "default", **off}]}
    answer = await post(active_decode_blocks_threshold=0.85)
    assert answer.status_code == 200
    first = {"model": "default", **off, "active_decode_blocks_threshold": 0.85}
    assert answer.json() == first
    both = {**first, "active_prefill_tokens_threshold": 10}
    assert (await post(active_prefill_tokens_threshold=10)).json() == both
    nothing = await post(active_decode_blocks_threshold=None)
    assert nothing.json() == both, "null changes nothing, it reads"
    assert (await client.get(path)).json() == {"thresholds": [both]}
    cleared = await post(clear=["active_decode_blocks_threshold"])
    assert cleared.json()["active_decode_blocks_threshold"] is None
    unknown = await client.post(path, json={"model": "nobody"})
    assert (unknown.status_code, unknown.json()) == (200, {"model": "nobody", **off})
    setting = {"model": "nobody", "active_prefill_tokens_threshold": 1}
    refused = await client.post(path, json=setting)
    assert refused.status_code == 404
    assert "discovered" in refused.json()["error"]
    gone = await client.delete(path, params={"model": "default"})
    assert (gone.status_code, gone.json()) == (200, {"model": "default", **off})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"model": "default", "active_decode_blocks_threshold": 1.5}', 400),
        ('{"model": "default", "active_prefill_tokens_threshold": -1}', 400),
        ('{"model": "default", "active_prefill_tokens_threshold_frac": -0.5}', 400),
        ('{"model": "default", "active_decode_blocks_threshold": NaN}', 400),
        ('{"model": "default"', 400),
        ('{"model": "default", "active_prefill_tokens_threshold": 1.5}', 422),
        ('{"model": "default", "active_decode_blocks_threshold": "0.5"}', 422),
        ('{"model": "default", "active_decode_blocks_threshold": true}', 422),
        ('{"active_decode_blocks_threshold": 0.5}', 422),
        ("[]", 422),
        ('{"model": "' + "m" * 300 + '"}', 413),
    ],
)
@within(app_client, admission_control="token-capacity", max_body_bytes=256)
async def test_what_cannot_be_a_busy_threshold(
    client: httpx.AsyncClient, service: Driver, *, body: str, status: int
) -> None:
    add_worker(service)
    kind = {"content-type": "application/json"}
    answer = await client.post("/busy_threshold", content=body, headers=kind)
    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)
    answer = await client.post("/busy_threshold", content="{}", headers={})
    assert answer.status_code == 415


@within(app_client)
async def test_busy_thresholds_while_admission_control_is_off(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    setting = {"model": "default", "active_prefill_tokens_threshold": 1}
    answer = await client.post("/busy_threshold", json=setting)
    assert (answer.status_code, answer.json()["code"]) == (409, "admission_control_off")
    assert (await client.delete("/busy_threshold")).status_code == 400
