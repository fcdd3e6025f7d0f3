"""Rows of workers and ranks: right, only what changed, and in slices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from indexer.types import LinkState
from select_service.core.diagnostics import causes
from select_service.edge import cooperative
from select_service.edge.app import create_driver
from select_service.edge.console.fleet import RANK_FIELDS, FleetChanges, FleetTable
from select_service.edge.cooperative import TimeSlices
from select_service.types import SelectAndReserveRequest
from select_service.types.admission import RankMetrics, WorkerMetrics
from tests.select_service.edge.serving import SETTINGS, add_worker


def look(view: FleetTable) -> FleetChanges:
    return asyncio.run(view.look(TimeSlices()))


def row(news: FleetChanges, at: int = 0) -> dict[str, Any]:
    return dict(zip(RANK_FIELDS, json.loads(news.ranks[at]), strict=True))


def test_a_backlog_beyond_64_bits_is_told_as_the_largest_number() -> None:
    service = create_driver(SETTINGS)
    add_worker(service)
    for name in ("a", "b"):
        service.select_and_reserve_now(
            SelectAndReserveRequest(
                reservation_id=name, block_hashes=[], sequence_hashes=[], isl_tokens=2**64 - 1
            )
        )
    shown = row(look(FleetTable(service)))
    assert shown["prefill_tokens"] == shown["isl_tokens"] == 2**64 - 1
    assert shown["selections"] == 2


def test_a_worker_that_cannot_be_scheduled_has_reasons_and_no_ranks() -> None:
    service = create_driver(SETTINGS)
    add_worker(service, 1, endpoint=None)
    news = look(FleetTable(service))
    answer = json.loads(news.workers[0])
    assert answer["lifecycle"] == "incomplete"
    assert answer["reasons"] == ["endpoint is required"]
    assert news.ranks == []


def test_a_worker_becomes_schedulable_and_back() -> None:
    service = create_driver(SETTINGS)
    add_worker(service, 1, endpoint=None)
    view = FleetTable(service)
    look(view)
    add_worker(service, 1)
    assert len(look(view).ranks) == 1
    add_worker(service, 1, endpoint=None)
    news = look(view)
    assert len(news.workers) == 1
    assert view.all_rows().ranks == [], "rows of ranks go with them"


def test_what_a_worker_says_of_itself() -> None:
    service = create_driver(SETTINGS)
    add_worker(service, 1)
    reported = RankMetrics(kv_used_blocks=12, kv_total_blocks=2**64 - 1, num_requests_waiting=3)
    service.report(1, WorkerMetrics(ranks=[reported]))
    found = row(look(FleetTable(service)))
    assert (found["kv_used_blocks"], found["kv_total_blocks"]) == (12, 2**64 - 1)
    assert found["requests_waiting"] == 3


def test_a_publisher_out_of_reach_is_not_called_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor calls it an error at the same time; who is only quiet may have nothing to say."""
    service = create_driver(SETTINGS)
    add_worker(service, 1)
    view = FleetTable(service)
    assert row(look(view))["kv_state"] == "silent", "nobody has listened yet"
    since = service.now()
    link = LinkState(False, since, 0, 0)
    monkeypatch.setattr(service.sources, "link", lambda _: link)
    assert look(view).ranks == [], "it has just begun to connect"
    monkeypatch.setattr(service, "_clock", lambda: since + causes.EVENTS_UNREACHABLE.after_s + 1.0)
    assert row(look(view))["kv_state"] == "unreachable"
    link = LinkState(True, since, 1, 0)
    assert row(look(view))["kv_state"] == "silent"


@pytest.mark.parametrize("stamp", [float("nan"), float("inf"), -1e300, 1e300])
def test_an_engine_with_a_mad_clock(stamp: float) -> None:
    service = create_driver(SETTINGS)
    add_worker(service, 1)
    (stream,) = service.core.registry.streams()
    stream.last_batch_ts = stamp
    assert row(look(FleetTable(service)))["event_at_ms"] is None


def test_a_large_fleet_is_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)  # every step is too long
    service = create_driver(SETTINGS)
    for worker_id in range(64):
        add_worker(service, worker_id)
    view = FleetTable(service)

    async def run() -> tuple[FleetChanges, int]:
        looking = asyncio.ensure_future(view.look(TimeSlices()))
        turns = 0
        while not looking.done():
            turns += 1
            if turns == 10:
                service.delete_worker(63)  # meanwhile
            await asyncio.sleep(0)
        return await looking, turns

    news, turns = asyncio.run(run())
    assert turns >= 63, "others have their turn after every worker"
    assert len(news.ranks) == 63
    assert look(view).gone == []


def test_how_far_a_rank_is_believed() -> None:
    service = create_driver(SETTINGS)
    add_worker(service, 1)
    view = FleetTable(service)
    assert row(look(view))["trust"] == 1.0
    (partition,) = service.core.partitions.values()
    ((_, slot),) = partition.fleet_slots.ranks_and_slots()
    partition.trust.note_freshness(slot, 0.4, ("lag",))
    assert row(look(view))["trust"] == 0.4
