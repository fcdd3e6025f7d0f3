"""Busy thresholds inside the service: from flags, over HTTP, and with what engines tell."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.errors import ServiceError, retry_after
from select_service.types import PinnedWorker
from select_service.types.admission import RankMetrics, WorkerMetrics
from tests.select_service.core.admission.gated import fleet, keeper_of, refused, threshold
from tests.select_service.core.whole_fleet import Fleet, selection_of, ticket_of


def test_a_busy_worker_is_passed_over_while_another_is_free() -> None:
    some = fleet(2, mode="token-capacity", active_prefill_tokens_threshold=10)
    some.hold(1, [1, 2, 3])
    first = selection_of(some.take("a", 1, 2, 3, 4))
    assert first.worker_id == 1
    assert selection_of(some.take("b", 1, 2, 3, 5)).worker_id == 2, "it holds less, and is free"
    assert refused(some, 1, 2, 3, 6).gate == "busy"
    some.done("b")
    assert selection_of(some.take("c", 1, 2, 3, 7)).worker_id == 2


def test_nobody_there_is_not_overloaded() -> None:
    some = fleet(mode="token-capacity", active_prefill_tokens_threshold=0)
    some.delete(1)
    with pytest.raises(ServiceError) as caught:
        some.take("a", 1)
    assert caught.value.code == "no_schedulable_worker"
    assert retry_after(caught.value) is not None


def test_a_tenants_threshold_is_its_own() -> None:
    some = fleet(mode="token-capacity")
    some.worker(2, tenant_id="other", kv_events_endpoint="tcp://127.0.0.1:5099")
    change = threshold(tenant_id="other", active_prefill_tokens_threshold=0)
    some.core.admission.change_threshold(change, some.now)
    selection_of(some.take("a", 1))
    selection_of(some.take("b", 2))
    selection_of(some.take("c", 3, tenant_id="other"))
    assert refused(some, 4, tenant_id="other").gate == "busy"


def report(some: Fleet, worker_id: int = 1, **told: Any) -> None:
    metrics = WorkerMetrics(ranks=[RankMetrics(**told)])
    _, effects = some.core.admission.report(worker_id, metrics, some.now)
    some._did(effects)


def test_a_rank_nobody_declared_is_dropped_and_a_silent_one_is_not_believed_for_ever() -> None:
    some = fleet(
        record={"total_kv_blocks": 100},
        mode="token-capacity",
        active_decode_blocks_threshold=0.85,
        load_report_stale_s=5.0,
    )
    metrics = WorkerMetrics(
        ranks=[RankMetrics(kv_used_blocks=99), RankMetrics(dp_rank=7, kv_used_blocks=1)]
    )
    answer, _ = some.core.admission.report(1, metrics, some.now)
    assert (answer.accepted, answer.dropped) == ([0], [7])
    assert some.core.admitting.reports.dropped == 1
    assert refused(some, 1).gate == "busy"
    some.tick(6.0)
    assert keeper_of(some).pool.saturation == 1.0, "what it says is too old: it counts as full"
    selection_of(some.take("a", 1))
    some.worker(1, endpoint="http://other", total_kv_blocks=100)
    some.delete(1)
    assert some.core.admitting.reports.by_worker == {}


def test_a_fleet_whose_reporters_stop_is_full_or_goes_by_what_is_booked() -> None:
    some = fleet(record={"total_kv_blocks": 100}, policy="slo-shed", load_report_stale_s=5.0)
    report(some, kv_used_blocks=1)
    some.tick(6.0)
    assert keeper_of(some).pool.saturation == 1.0
    assert len([*some.core.admitting.reports.stale()]) == 1
    waits = ticket_of(some.take("a", 1))
    some.core.admitting.settings.load_report_stale_as = "unknown"
    some.tick(1.0)
    assert keeper_of(some).pool.saturation < 0.1
    assert selection_of(waits.answer).worker_id == 1
    selection_of(some.take("b", 2))
    some.core.admitting.settings.load_report_stale_as = "full"
    some.tick(1.0)
    assert keeper_of(some).pool.saturation == 1.0
    report(some, kv_used_blocks=1)
    assert not [*some.core.admitting.reports.stale()]
    assert keeper_of(some).pool.saturation < 0.1


def test_a_rank_that_comes_again_has_told_nothing() -> None:
    """Growing adds idle ranks: what one of that number told before it went is not of it."""
    record: dict[str, Any] = {"total_kv_blocks": 100, "kv_events_endpoint": None}
    record["kv_events_endpoints"] = {"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:2"}
    some = fleet(
        record=record | {"data_parallel_size": 2},
        mode="token-capacity",
        active_decode_blocks_threshold=0.85,
    )
    report(some, dp_rank=1, kv_used_blocks=99)
    assert refused(some, 1, pinned_worker=PinnedWorker(1, 1)).gate == "busy"
    some.worker(1, **record, data_parallel_size=1)
    some.worker(1, **record, data_parallel_size=2)
    selection_of(some.take("a", 1, pinned_worker=PinnedWorker(1, 1)))
    assert not some.core.admitting.reports.by_worker[1]
