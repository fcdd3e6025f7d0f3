"""Counters never fall, whatever scopes come and go: a fall looks like a restart to Prometheus.

Series of a scope end with its workers, and begin again at nought; what is summed over scopes has
no such excuse.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from select_service.core.admission.slo_shed import SloShed
from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, add_worker, app_client

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

SCOPES = (("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"))
OF_SCOPES = ("model_name", "model")
"""What has such a label ends with the last worker under it."""


async def counted(client: httpx.AsyncClient) -> Samples:
    """Every sample that may only rise."""
    answer = await client.get("/metrics")
    samples = (one.rpartition(" ") for one in answer.text.splitlines() if not one.startswith("#"))
    return {
        key: float(value)
        for series, _, value in samples
        if (key := key_of(series))[0].endswith(("_total", "_bucket", "_count", "_sum"))
        and key[0].startswith(("select_service_", "dynamo_"))
    }


@cache
def key_of(series: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Name and labels; they are the same from one scrape to the next, and slow to parse."""
    ((sample,),) = (one.samples for one in text_string_to_metric_families(f"{series} 0"))
    return sample.name, frozenset(sample.labels.items())


def fallen(before: Samples, after: Samples) -> dict[str, tuple[float, float | None]]:
    """Counters that say less than they did, or are not there any more though no scope's."""
    return {
        f"{name}{sorted(labels)}": (value, after.get((name, labels)))
        for (name, labels), value in before.items()
        if ((name, labels) in after and after[name, labels] < value)
        or ((name, labels) not in after and not any(label in OF_SCOPES for label, _ in labels))
    }


async def use_all(client: httpx.AsyncClient, service: Driver, round_: int = 0) -> None:
    """Let something happen in every scope: bookings, refusals for load, promises, events."""
    for number, (model, tenant) in enumerate(SCOPES):
        add_worker(
            service, number, model_name=model, tenant_id=tenant, max_inflight=1, max_queued=0
        )
        for name in "rst":
            body = {
                **PROMPT,
                "model_name": model,
                "tenant_id": tenant,
                "reservation_id": f"{name}{number}.{round_}",
                "cache_hit_threshold": 0.5 if name == "t" else 0.0,
                "fairness_id": f"{name}{number}",
            }
            await client.post("/select_and_reserve", json=body)
    for stream in service.core.registry.streams():
        stream.tallies.gaps += 1
        stream.tallies.recalls["credited"] += 1
        stream.tallies.replays["complete"] += 1
    for partition in service.core.partitions.values():
        keeper = partition.admission
        assert keeper is not None, "everything is judged"
        keeper.gate.returns.redeem(b"nobody's")
        if isinstance(keeper.gate.queue, SloShed):
            keeper.gate.queue._closed[0] += 1  # it takes an overload of seconds to come to it
    for number in range(len(SCOPES)):
        await client.delete(f"/reservations/r{number}.{round_}")


async def close(service: Driver, *numbers: int) -> None:
    """Take these workers away, and let their scopes be given up."""
    core = service.core
    for number in numbers:
        service.delete_worker(number)
    now, left = 1e7, len(core.partitions) - len(numbers)
    for _ in range(20):
        core.tick(now)
        now += core.limits.scope_linger_s
        if len(core.partitions) == left:
            return
    pytest.fail("scopes stay")


@pytest.mark.parametrize("policy", ["slo-shed", "token-bucket", "always-admit"])
@pytest.mark.parametrize("gone", [(3,), (1, 2, 3), (0, 1), (0, 1, 2, 3)])
async def test_counters_outlive_the_scopes_they_are_summed_over(
    policy: str, gone: tuple[int, ...]
) -> None:
    settings: dict[str, Any] = {"admission_policy": policy, "max_inflight_default": 1}
    async with app_client(**settings) as (client, service):
        await use_all(client, service)
        before = await counted(client)
        refused: frozenset[tuple[str, str]] = frozenset()
        assert before["dynamo_rejection_request_total", refused] >= len(SCOPES)
        await close(service, *gone)
        assert fallen(before, await counted(client)) == {}
        await use_all(client, service, 1)
        alive = await counted(client)
        of_all = {at: v for at, v in before.items() if not dict(at[1]).keys() & set(OF_SCOPES)}
        assert fallen(of_all, alive) == {}
        service.core.check()


@within(app_client, admission_policy="slo-shed", max_inflight_default=1)
async def test_counters_outlive_a_policy(client: httpx.AsyncClient, service: Driver) -> None:
    await use_all(client, service)
    for policy in ("token-bucket", "slo-shed", "token-bucket", "always-admit", "slo-shed"):
        before = await counted(client)
        answer = await client.put("/admission", json={"policy": policy})
        assert answer.status_code == 200
        assert fallen(before, await counted(client)) == {}, policy
        for partition in service.core.partitions.values():
            keeper = partition.admission
            assert keeper is not None
            keeper.gate.returns.counts.kept += 1
    service.core.check()


@within(app_client, admission_policy="slo-shed", tenant_labels_max=1)
async def test_who_is_refused_most_takes_a_label_and_nothing_from_the_others(
    client: httpx.AsyncClient, service: Driver
) -> None:
    """Of one outcome under `other` nothing goes because of another outcome."""
    add_worker(service, 1, model_name="a")
    add_worker(service, 2, model_name="b", max_inflight=1, max_queued=0)
    body = {**PROMPT, "model_name": "b", "fairness_id": "p"}
    await client.post("/select_and_reserve", json=body)
    for _ in range(9):
        await client.post("/select", json={**body, "model_name": "a"})
    before: Samples = {}
    for _ in range(20):
        await client.post("/select", json={**body, "fairness_id": "q"})
        after = await counted(client)
        assert fallen(before, after) == {}
        before = after
