"""Busy thresholds inside the service: from flags, over HTTP, and with what engines report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.errors import (
    AdmissionControlOff,
    InvalidRequest,
    ModelNotFound,
    ServiceError,
    retry_after,
)
from select_service.types import PinnedWorker
from select_service.types.admission import RankMetrics, WorkerMetrics
from tests.select_service.core.admission.gated import fleet, keeper_of, refused, threshold
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of
from tests.sliced import answer_of


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


def report(some: Fleet, worker_id: int = 1, **reported: Any) -> None:
    metrics = WorkerMetrics(ranks=[RankMetrics(**reported)])
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
    assert some.core.admission_controller.reports.dropped == 1
    assert refused(some, 1).gate == "busy"
    some.tick(6.0)
    assert keeper_of(some).pool.saturation == 1.0, "what it says is too old: it counts as full"
    selection_of(some.take("a", 1))
    some.worker(1, endpoint="http://other", total_kv_blocks=100)
    some.delete(1)
    assert some.core.admission_controller.reports.by_worker == {}


def test_a_fleet_whose_reporters_stop_is_full_or_goes_by_what_is_booked() -> None:
    some = fleet(record={"total_kv_blocks": 100}, policy="slo-shed", load_report_stale_s=5.0)
    report(some, kv_used_blocks=1)
    some.tick(6.0)
    assert keeper_of(some).pool.saturation == 1.0
    assert len([*some.core.admission_controller.reports.stale()]) == 1
    waits = ticket_of(some.take("a", 1))
    some.core.admission_controller.settings.load_report_stale_as = "unknown"
    some.tick(1.0)
    assert keeper_of(some).pool.saturation < 0.1
    assert selection_of(waits.answer).worker_id == 1
    selection_of(some.take("b", 2))
    some.core.admission_controller.settings.load_report_stale_as = "full"
    some.tick(1.0)
    assert keeper_of(some).pool.saturation == 1.0
    report(some, kv_used_blocks=1)
    assert not [*some.core.admission_controller.reports.stale()]
    assert keeper_of(some).pool.saturation < 0.1


def test_a_rank_that_comes_again_has_told_nothing() -> None:
    """Growing adds idle ranks: what one of that number reported before it went is not of it."""
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
    assert not some.core.admission_controller.reports.by_worker[1]


def test_the_body_of_a_busy_refusal_is_the_references_and_more() -> None:
    some = fleet(mode="token-capacity", active_prefill_tokens_threshold=10)
    some.take("a", 1)
    refusal = refused(some, 2)
    body = refusal.body()
    assert {name: body[name] for name in ("message", "type", "code")} == {
        "message": "Service temporarily unavailable: All workers are busy, please retry later",
        "type": "service_unavailable",
        "code": 503,
    }
    assert (body["reason"], body["gate"]) == ("all-workers-busy", "busy")
    assert (body["knob"], body["value"], body["limit"]) == (
        "active_prefill_tokens_threshold",
        16,
        10,
    )
    assert retry_after(refusal) is not None
    assert keeper_of(some).rejections == {"select_and_reserve": 1}


def test_a_threshold_set_over_http_holds_at_once_and_merges() -> None:
    some = fleet(mode="token-capacity")
    some.take("a", 1)
    change, now = some.core.admission.change_threshold, some.now
    answer, _ = change(threshold(active_prefill_tokens_threshold=10), now)
    assert answer.active_prefill_tokens_threshold == 10
    assert refused(some, 2).gate == "busy"
    answer, _ = change(threshold(active_decode_blocks_threshold=0.5), now)
    assert answer.active_prefill_tokens_threshold == 10, "merged, not replaced"
    answer, _ = change(threshold(clear=["active_prefill_tokens_threshold"]), now)
    assert answer.active_prefill_tokens_threshold is None
    assert answer.active_decode_blocks_threshold == 0.5
    selection_of(some.take("b", 2))
    answer, _ = some.core.admission.forget_threshold("default", None, now)
    assert answer.active_decode_blocks_threshold is None
    assert [one.model for one in answer_of(some.core.admission.busy_thresholds()).thresholds] == [
        "default"
    ]


def test_what_cannot_be_a_threshold_is_refused_and_changes_nothing() -> None:
    some = fleet(mode="token-capacity")
    for wrong in (
        {"active_decode_blocks_threshold": 1.5},
        {"active_prefill_tokens_threshold": -1},
        {"active_prefill_tokens_threshold_frac": math.nan},
        {"clear": ["nonsense"]},
    ):
        with pytest.raises(InvalidRequest):
            some.core.admission.change_threshold(threshold(**wrong), some.now)
    change = threshold(model="nobody", active_prefill_tokens_threshold=1)
    with pytest.raises(ModelNotFound):
        some.core.admission.change_threshold(change, some.now)
    answer, _ = some.core.admission.change_threshold(threshold(model="nobody"), some.now)
    assert answer.active_decode_blocks_threshold is None, "reading an unknown one is no error"
    assert some.core.partitions[DEFAULT].admission is None


def test_with_admission_control_off_nothing_is_set_silently() -> None:
    some = fleet(active_prefill_tokens_threshold=0)
    selection_of(some.take("a", 1))
    selection_of(some.take("b", 2))
    with pytest.raises(AdmissionControlOff):
        some.core.admission.change_threshold(threshold(active_prefill_tokens_threshold=1), some.now)
