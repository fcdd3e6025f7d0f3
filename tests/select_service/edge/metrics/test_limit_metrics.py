"""Every limit has a name, a value in /metrics, and where it is counted a count."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from indexer.types import StreamLimits, Tier
from select_service.edge.app import create_driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.exposition import Metrics
from select_service.edge.metrics.limit_metrics import TURN_BUDGETS, limit_hits, limit_values
from select_service.errors import InvalidRequest
from select_service.metric_rows import PREFIX
from select_service.settings import FLAGS
from select_service.types import CoreLimits, ReservationRequest, WorkerSpec
from tests.coroutines import within
from tests.select_service.edge.serving import SETTINGS, app_client, worker


def test_every_bound_of_the_core_and_the_streams_is_a_flag_or_a_turn_budget() -> None:
    settable = {*SETTINGS.core_limits.__struct_fields__, *SETTINGS.stream_limits.__struct_fields__}
    limits = [flag.field for flag in FLAGS if flag.is_limit]
    values: dict[str, Any] = {field: number for number, field in enumerate(limits, 1000)}
    odd = replace(SETTINGS, **values)
    for bounds, defaults in (
        (odd.core_limits, CoreLimits()),
        (odd.stream_limits, StreamLimits()),
    ):
        for name in bounds.__struct_fields__:
            changed = getattr(bounds, name) != getattr(defaults, name)
            assert changed is (name not in TURN_BUDGETS), f"{name}: is it a flag, and a limit?"
    assert settable >= TURN_BUDGETS.keys()


def test_limits_reach_their_index() -> None:
    driver = create_driver(replace(SETTINGS, kv_orphan_blocks_max=0))
    driver.upsert_worker(msgspec.convert(worker(1), WorkerSpec))
    (_, index), *_ = driver.core.registry.indexes()
    rank = next(iter(driver.core.partitions.values())).fleet_slots.ranks_and_slots()[0][0]
    index.store(rank, Tier.DEVICE, 77, [1], bytes(8))
    assert index.stats.orphan_blocks == 0
    assert limit_hits(driver, Traffic(), index.stats.orphan_blocks_dropped)["kv_orphan_blocks_max"]


def test_hits_are_counted() -> None:
    driver = create_driver(replace(SETTINGS, freed_ids_max=1, data_parallel_size_max=2))
    traffic = Traffic()
    driver.upsert_worker(msgspec.convert(worker(1), WorkerSpec))
    with pytest.raises(InvalidRequest):
        driver.upsert_worker(msgspec.convert(worker(2, data_parallel_size=3), WorkerSpec))
    for name in "abc":
        request = ReservationRequest(
            reservation_id=name, worker_id=1, sequence_hashes=[], isl_tokens=1
        )
        driver.reserve(request)
        driver.free(name)
    traffic.connections.refused = 5
    traffic.limit_hits["max_body_bytes"] += 1
    hits = limit_hits(driver, traffic, 0)
    assert hits["freed_ids_max"] == 2
    assert hits["data_parallel_size_max"] == 1
    assert (hits["connections_max"], hits["max_body_bytes"]) == (5, 1)
    assert hits.keys() <= limit_values(SETTINGS).keys()


@within(app_client)
async def test_metrics_show_limits(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    families: dict[str, Any] = {f.name: f for f in text_string_to_metric_families(text)}
    shown = {s.labels["name"]: s.value for s in families["select_service_limit"].samples}
    assert shown == limit_values(SETTINGS)
    hits = {s.labels["name"]: s.value for s in families["select_service_limit_hits"].samples}
    assert set(hits.values()) == {0.0}


def test_every_limit_says_what_to_watch() -> None:
    """A family there is; a series of it may only come with what it is about."""
    metrics = Metrics(create_driver(SETTINGS), Traffic(), SETTINGS)
    families = {family.name.removeprefix(PREFIX): family for family in metrics.families()}
    hits = limit_hits(create_driver(SETTINGS), Traffic(), 0)
    for flag in (one for one in FLAGS if one.is_limit):
        name, _, rest = flag.watch.partition("{")
        family = families[name.removesuffix("_total")]
        assert (family.type == "counter") is name.endswith("_total"), flag.name
        if name == "limit_hits_total":
            assert rest.split('"')[1] == flag.field
            assert flag.field in hits
