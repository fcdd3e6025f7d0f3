"""What a scrape says: right numbers, bounded labels, no ghosts."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import (
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from select_service.core.ledger.demand_tally import UnservedDemand
from select_service.core.partition import Partition
from select_service.edge.app import create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.demand_metrics import demand_tables
from select_service.edge.metrics.exposition import Metrics
from select_service.edge.metrics.scope_series import ScopeGroups, by_scope
from select_service.metric_rows import SERIES_PER_STEP, MetricTable
from select_service.metric_rows import value as gauge
from select_service.types import CoreLimits, ReservationRequest, SelectAndReserveRequest
from tests.coroutines import within
from tests.live.ports import free_port
from tests.select_service.edge.serving import PROMPT, SETTINGS, add_worker, app_client
from tests.wait import PATIENCE_S

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: object) -> float:
    key = frozenset((label, str(text)) for label, text in labels.items())
    return samples[f"select_service_{name}", key]


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


SCOPE = {"model_name": "default", "tenant_id": "default"}


@within(app_client)
async def test_requests_by_route_and_status(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/health", "/nope/1", "/nope/2"):
        await client.get(path)
    await client.delete("/reservations/a")
    await client.delete("/reservations/b")
    await client.post("/select", json={"isl_tokens": "x"})
    samples = await scrape(client)

    def requests(method: str, route: str, status: int) -> float:
        return value(samples, "http_requests_total", method=method, route=route, status=status)

    assert requests("GET", "/health", 200) == 2
    assert requests("other", "other", 404) == 2
    assert requests("DELETE", "/reservations/{reservation_id}", 404) == 2
    assert requests("POST", "/select", 422) == 1
    latency = {"method": "GET", "route": "/health"}
    assert value(samples, "http_request_duration_seconds_count", **latency) == 2
    assert value(samples, "http_request_duration_seconds_bucket", **latency, le="+Inf") == 2
    assert value(samples, "http_request_duration_seconds_sum", **latency) > 0
    assert value(samples, "http_requests_in_flight") == 0, "but for who asks"
    assert value(await scrape(client), "http_crashes_total") == 0


@within(app_client)
async def test_the_life_of_a_rank(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 5, data_parallel_size=2, kv_events_endpoints={"0": "tcp://127.0.0.1:9"})
    assert value(await scrape(client), "workers", lifecycle="incomplete") == 1
    add_worker(
        service,
        5,
        data_parallel_size=2,
        kv_events_endpoints={"0": "tcp://127.0.0.1:9", "1": "tcp://127.0.0.1:10"},
    )
    pinned = {**PROMPT, "pinned_worker": {"worker_id": 5, "dp_rank": 1}}
    await client.post("/select_and_reserve", json={**pinned, "reservation_id": "r"})
    await client.post("/select_and_reserve", json={**pinned, "reservation_id": "s"})
    await client.post("/reservations/s/prefill_complete")
    samples = await scrape(client)
    rank = {"worker_id": 5, "dp_rank": 1, **SCOPE}
    assert value(samples, "rank_prefill_tokens", **rank) == 32
    assert value(samples, "rank_decode_blocks", **rank) == 2
    assert value(samples, "rank_requests", **rank) == 2
    assert value(samples, "reservations", state="prefill", **SCOPE) == 1
    assert value(samples, "reservations", state="decode", **SCOPE) == 1
    assert value(samples, "reservation_events_total", event="booked") == 2
    assert value(samples, "kv_listener_state", **rank, state="silent") == 1
    assert value(samples, "kv_listeners", state="silent") == 2
    assert value(samples, "index_nodes", **SCOPE) >= 0
    assert value(samples, "index_holdings", **SCOPE, tier="host_pinned") == 0
    assert value(samples, "ranks") == 2

    await client.delete("/workers/5")
    samples = await scrape(client)
    gone = {name for name, labels in samples if ("worker_id", "5") in labels}
    assert gone == set()
    assert value(samples, "reservation_events_total", event="dropped") == 2
    assert value(samples, "freed_reservation_ids") >= 2


async def test_threads_that_all_hang_leave_a_scrape_alone() -> None:
    """Names that are looked up and disks that hang take the threads of the loop, all of them."""
    hangs = threading.Event()
    async with app_client() as (client, _):
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        hanging = loop.run_in_executor(None, hangs.wait)
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert value(await scrape(client), "http_crashes_total") == 0
            assert not hanging.done()
        finally:
            hangs.set()
        await hanging


@within(app_client)
async def test_what_waits(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, max_num_batched_tokens=1)
    busy = SelectAndReserveRequest(block_hashes=[], sequence_hashes=[], isl_tokens=100)
    service.select_and_reserve_now(busy)
    waiting = asyncio.ensure_future(client.post("/select", json=PROMPT))
    while not service.loads()[0].pending_count:
        await asyncio.sleep(0)
    samples = await scrape(client)
    assert value(samples, "http_requests_in_flight") == 1
    assert value(samples, "pending_requests", **SCOPE) == 1
    assert value(samples, "pending_isl_tokens", **SCOPE) == 32
    assert value(samples, "selections_queued_total") == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@within(app_client)
async def test_events_are_counted_by_kind_dialect_and_outcome(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    (stream,) = service.core.registry.streams()
    stream.tallies.count_event("stored", "array", "applied")
    stream.tallies.bad_messages["frames"] += 1
    stream.tallies.replays["complete"] += 1
    stream.tallies.gaps += 2
    stream.tallies.restarts += 1
    stream.lost_batches = 3
    stream.last_batch_ts = 0.0
    samples = await scrape(client)
    labels = {"kind": "stored", "dialect": "array", "outcome": "applied"}
    assert value(samples, "kv_events_total", **SCOPE, **labels) == 1
    assert value(samples, "kv_bad_messages_total", **SCOPE, reason="frames") == 1
    assert value(samples, "kv_replays_total", **SCOPE, outcome="complete") == 1
    assert value(samples, "kv_gaps_total", **SCOPE) == 2
    assert value(samples, "kv_restarts_total", **SCOPE) == 1
    assert value(samples, "kv_listeners", state="uncertain") == 1
    assert "select_service_kv_listener_lag_seconds" not in names(samples)  # implausible

    stream.last_batch_ts = time.time() - 5
    stream.lost_batches = 0
    stream.last_event_at = 1.0
    service.core.counters.selections_failed["queue_full"] = 2
    samples = await scrape(client)
    rank = {"worker_id": 1, "dp_rank": 0, **SCOPE}
    assert value(samples, "kv_listener_lag_seconds", **rank) >= 5
    assert value(samples, "kv_listener_state", **rank, state="current") == 1
    assert value(samples, "selections_failed_total", code="queue_full") == 2

    stream._replay = object()  # type: ignore[assignment]
    samples = await scrape(client)
    assert value(samples, "kv_listener_state", **rank, state="replaying") == 1
    stream._replay = None


@within(app_client, metrics_rank_series_max=3)
async def test_ranks_beyond_the_limit_are_only_counted(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id in range(5):
        add_worker(service, worker_id)
    samples = await scrape(client)
    listed = [labels for name, labels in samples if name == "select_service_rank_requests"]
    assert len(listed) == 3
    assert value(samples, "ranks") == 5
    assert value(samples, "ranks_unlisted") == 2


@within(app_client)
async def test_scopes_that_come_and_go_leave_no_series(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    await scrape(client)
    before = len(await scrape(client))
    for n in range(40):
        add_worker(service, 2, model_name=f"m{n}")
    assert value(await scrape(client), "scopes") == 2
    await client.delete("/workers/2")
    after = await scrape(client)
    assert len(after) <= before + 50  # those of the route DELETE /workers/{worker_id}
    assert not any("m" in dict(labels).get("model_name", "") for _, labels in after)


@within(app_client, metrics_scope_series_max=2)
async def test_scopes_beyond_the_limit_are_summed_up(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 0, model_name="other", tenant_id="other")  # no series may come twice
    for n in range(1, 5):
        add_worker(service, n, model_name=f"m{n}")
        body = {**PROMPT, "model_name": f"m{n}", "reservation_id": f"r{n}"}
        assert (await client.post("/select_and_reserve", json=body)).status_code == 200
    for stream in service.core.registry.streams():
        stream.tallies.gaps += 1
    text = (await client.get("/metrics")).text
    lines = [line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    samples = await scrape(client)
    rest = {"model_name": "other", "tenant_id": "other"}
    one = {"model_name": "m1", "tenant_id": "default"}
    assert value(samples, "scopes") == 5
    assert value(samples, "scopes_unlisted") == 3
    assert value(samples, "reservations", state="prefill", **one) == 1
    assert value(samples, "reservations", state="prefill", **rest) == 2
    assert value(samples, "kv_gaps_total", **one) == 1
    assert value(samples, "kv_gaps_total", **rest) == 3
    assert value(samples, "index_nodes", **rest) == 0
    named = [dict(labels)["model_name"] for name, labels in samples if "kv_gaps" in name]
    assert sorted(named) == ["m1", "m2", "other"]


@within(app_client, metrics_scope_series_max=2)
async def test_no_counter_jumps_when_a_scope_with_a_name_goes(
    client: httpx.AsyncClient, service: Driver
) -> None:
    """The next in line got its name: what it had counted went from `other` to series of its own."""
    counted = "demand_requests_total"
    rest = {"model_name": "other", "tenant_id": "other", "outcome": "placed"}
    for number in range(3):
        add_worker(service, number, model_name=f"m{number}")
        for _ in range(number + 1):
            await client.post("/select", json=PROMPT | {"model_name": f"m{number}"})
    assert value(await scrape(client), counted, **rest) == 3
    service.delete_worker(0)
    samples = await scrape(client)
    assert value(samples, counted, **rest) == 3
    assert value(samples, "scopes") == 2
    assert value(samples, "scopes_unlisted") == 1
    add_worker(service, 7, model_name="m7")
    await client.post("/select", json=PROMPT | {"model_name": "m7"})
    add_worker(service, 0, model_name="m0")
    samples = await scrape(client)
    assert value(samples, counted, **rest) == 4
    assert value(samples, counted, **rest | {"model_name": "m0", "tenant_id": "default"}) == 1
    assert value(samples, "scopes_unlisted") == 2


@within(app_client)
async def test_what_is_summed_up_is_read_in_small_steps(
    client: httpx.AsyncClient, service: Driver
) -> None:
    """A thousand scopes under one name were added up in one step of 4 ms."""
    for number in range(3 * SERIES_PER_STEP):
        add_worker(service, number, model_name=f"m{number}")
    groups = ScopeGroups(service.core, 1)
    assert sum(1 for _ in groups.collect()) >= 3
    per_step: list[set[int]] = [set()]

    def read(one: Partition) -> int:
        per_step[-1].add(id(one))
        return 1

    rest = groups.found[1].partitions
    rows = [gauge("partitions", "How many.", read)]
    found: list[Metric] = []
    for step in MetricTable(rows, by_scope(groups, lambda one: one), tuple(SCOPE)).collect():
        if step is None:
            per_step.append(set())  # a new one with each pause
        else:
            found.append(step)
    assert [sample.value for sample in found[0].samples] == [1, len(rest)]
    assert len(rest) == 3 * SERIES_PER_STEP - 1
    assert max(map(len, per_step)) == SERIES_PER_STEP
    for table in demand_tables(groups, UnservedDemand(CoreLimits())):
        steps = [step is None for step in table.collect()]
        assert steps.count(True) >= 4, "one for each of two names, two within the rest"


@within(app_client, unserved_scopes_max=3)
async def test_strangers_make_few_series(client: httpx.AsyncClient, service: Driver) -> None:
    """Only those by which a fleet at zero is woken, and of these as many as are allowed."""
    await client.get("/metrics")
    before = len(await scrape(client))
    for n in range(50):
        body = {**PROMPT, "model_name": f"m{n}", "tenant_id": f"t{n}"}
        await client.post("/select", json=body)
        await client.get(f"/path/{n}")
        await client.delete(f"/reservations/{n}")
        await client.request(f"M{n}", "/select")
    after = await scrape(client)
    routes = {dict(labels).get("route") for _, labels in after}
    assert len(routes) == 5  # None, other, /metrics, /select, /reservations/{…}
    assert len(after) < before + 100
    strange = [
        (name, dict(labels))
        for name, labels in after
        if dict(labels).get("model_name", "").startswith("m")
    ]
    assert {(name, labels["outcome"]) for name, labels in strange} == {
        ("select_service_demand_requests_total", "unserved")
    }
    assert [labels["model_name"] for _, labels in strange] == ["m47", "m48", "m49"]
    labels = {"model_name": "other", "tenant_id": "other", "outcome": "unserved"}
    assert value(after, "demand_requests_total", **labels) == 47


def test_two_apps_share_nothing() -> None:
    one = Metrics(create_driver(SETTINGS), Traffic(), SETTINGS)
    two = Metrics(create_driver(SETTINGS), Traffic(), SETTINGS)
    assert b"select_service_build_info" in asyncio.run(one.render())[0]
    assert b"process_cpu_seconds_total" in asyncio.run(two.render())[0]
    assert not any("select_service" in family.name for family in REGISTRY.collect())


@within(app_client, replica_sync_port=free_port())
async def test_replica_events(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    service.reserve(ReservationRequest(reservation_id="r", worker_id=1, **PROMPT))
    samples = await scrape(client)
    assert value(samples, "replica_events_total", outcome="sent") >= 1
    assert value(samples, "replica_events_total", outcome="dropped") == 0
    assert value(samples, "replica_peers", state="connected") == 0


async def test_a_replica_that_was_never_heard_has_an_age() -> None:
    """An alert on the age of what was received has to fire where nothing ever was."""
    peer = f"tcp://127.0.0.1:{free_port()}"
    async with app_client(replica_sync_port=free_port()) as (client, service):
        assert service.replicas is not None
        assert service.replicas.register(peer)
        assert value(await scrape(client), "replica_heard_age_seconds", peer=peer) >= 0.0
