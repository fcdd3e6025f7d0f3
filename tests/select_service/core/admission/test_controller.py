"""The gate inside the service: when there is one, and what it is asked."""

from __future__ import annotations

from select_service.core.admission.policy_api import AdmissionRequest, AdmissionVerdict
from select_service.core.admission.pool_load import PoolLoad
from tests.select_service.core.admission.gated import fleet, keeper_of
from tests.select_service.core.whole_fleet import DEFAULT


def test_without_anything_to_judge_there_is_no_gate() -> None:
    some = fleet()
    some.take("a", 1, 2)
    assert some.core.partitions[DEFAULT].admission is None
    assert some.core.partitions[DEFAULT].ledger.changes is None


def test_a_worker_with_a_cap_opens_the_gate_of_its_scope() -> None:
    some = fleet(1)
    some.take("a", 1)
    some.worker(2, max_inflight=1)
    keeper = keeper_of(some)
    some.core.check()
    assert keeper.pool.instances == 2
    assert keeper.pool.prefill_backlog == 16


def test_a_request_is_asked_for_with_every_fact_in_its_place() -> None:
    some = fleet(policy="tier-shed")
    keeper, seen = keeper_of(some), list[AdmissionRequest]()
    judge = keeper.gate.policy.judge

    def spy(ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        seen.append(ask)
        return judge(ask, pool, now)

    keeper.gate.policy.judge = spy  # type: ignore[method-assign]
    some.take("a", 1, slo_class="batch", fairness_id="t", slo_ttft_ms=500.0)
    (ask,) = seen
    assert ask == AdmissionRequest(
        tokens=16, slo_class="batch", tenant_id="t", target_s=0.5, key=ask.key, is_unique=True
    )
