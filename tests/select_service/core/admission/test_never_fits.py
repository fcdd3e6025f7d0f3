"""A request that exceeds a limit no waiting changes is refused so, and given no time to return."""

from __future__ import annotations

import math
from typing import Any

import pytest

from select_service.errors import BatchNotPlaced, retry_after
from select_service.types import CoreLimits, RouterConfig
from select_service.types.admission import AdmissionChange, AdmissionSettings
from select_service.types.batches import SelectBatchItem, SelectBatchRequest
from tests.select_service.core.admission.gated import (
    fleet,
    keeper_of,
    refused,
    tally,
)
from tests.select_service.core.whole_fleet import Fleet
from tests.sliced import put_in_force

SMALL: dict[str, Any] = {"policy_config": {"capacity": 1000, "refill_rate": 100}}


def never(some: Fleet, code: str, **wishes: Any) -> dict[str, object]:
    """Check that the refusal gives no time, whatever is done in between; return its body."""
    body: dict[str, object] = {}
    for _ in range(3):
        error = refused(some, 1, **wishes)
        assert (error.code, error.gate, error.promised) == (code, "policy", False)
        assert (error.retry_after_s, retry_after(error)) == (math.inf, None)
        body = error.body()
        assert body["retry_after_s"] is None
        some.now += 3600.0
    assert not keeper_of(some).gate.returns.size
    return body


@pytest.mark.parametrize("per_tenant", [False, True])
def test_more_tokens_than_the_bucket_ever_holds(per_tenant: bool) -> None:
    config = SMALL["policy_config"] | {"per_tenant": per_tenant}
    some = fleet(policy="token-bucket", policy_config=config)
    body = never(some, "exceeds-capacity", isl=5000, fairness_id="a")
    assert (body["knob"], body["value"], body["limit"]) == ("capacity", 5000, 1000)
    assert tally(some).refused == 3
    later = [some.take(f"r{n}", n, isl=1000, fairness_id="a") for n in (1,)]
    assert later, "what fits is let in"
    soon = refused(some, 2, isl=1000, fairness_id="a")
    assert (soon.code, retry_after(soon)) == ("insufficient-tokens", 10)


def test_it_is_said_first_where_time_would_help_with_another_limit() -> None:
    some = fleet(record={"max_inflight": 1, "max_queued": 0}, policy="token-bucket", **SMALL)
    some.take("a", 1, isl=16)
    assert refused(some, 2, isl=16).gate == "capacity"
    assert refused(some, 2, isl=5000).code == "exceeds-capacity"


def test_it_is_said_where_the_tenant_is_over_its_budget() -> None:
    config = SMALL["policy_config"] | {"tenant_budgets": {"a": 0.0}}
    some = fleet(policy="token-bucket", policy_config=config)
    some.take("a", 1, isl=16, fairness_id="a", slo_class="batch")
    over = refused(some, 2, isl=16, fairness_id="a", slo_class="batch")
    assert over.code == "tenant-budget-shed"
    never = refused(some, 3, isl=5000, fairness_id="a", slo_class="batch")
    assert (never.code, never.promised, retry_after(never)) == ("exceeds-capacity", False, None)


def test_a_threshold_that_any_load_exceeds() -> None:
    config = {"threshold": -1, "min_priority": 3}
    some = fleet(policy="tier-shed", policy_config=config)
    body = never(some, "tier-shed-always", slo_class="batch")
    assert (body["knob"], body["value"], body["limit"]) == ("threshold", 0, -1)


def test_who_waits_is_told_when_a_change_makes_it_never_fit() -> None:
    some = fleet(record={"max_inflight": 1})
    some.take("a", 1)
    some.take("b", 2, isl=5000)
    change = AdmissionChange(policy="token-bucket", config=SMALL["policy_config"])
    effects = put_in_force(some.core, change, some.now)
    (ticket,) = (ticket for one in effects for ticket in one.answered)
    assert getattr(ticket.answer, "code", None) == "exceeds-capacity"
    assert getattr(ticket.answer, "retry_after_s", None) == math.inf


@pytest.mark.parametrize(
    ("settings", "record", "limits", "samples", "code"),
    [
        ({"policy": "token-bucket", **SMALL}, {}, {}, 3, "exceeds-capacity"),
        ({}, {"max_inflight": 2, "max_queued": 0}, {}, 3, "workers-at-capacity"),
        ({}, {}, {"reservations_max": 2}, 3, "too_many_reservations"),
    ],
    ids=["bucket", "N", "reservations"],
)
def test_a_batch_of_all_or_none_that_exceeds_a_limit_as_a_answer_of(
    settings: dict[str, Any],
    record: dict[str, Any],
    limits: dict[str, Any],
    samples: int,
    code: str,
) -> None:
    some = Fleet(limits=CoreLimits(**limits), admission=AdmissionSettings(**settings))
    some.worker(1, **record)
    never = batch_refused(some, samples)
    assert never is not None
    assert never.details is not None
    assert never.details["never_fits"] == code
    assert retry_after(never) is None
    some.now += 3600.0
    assert batch_refused(some, samples - 1) is None
    later = batch_refused(some, samples - 1)
    assert later is not None
    assert later.details is not None
    assert "never_fits" not in later.details
    assert retry_after(later) is not None


def test_a_batch_that_exceeds_n_of_the_workers_it_allows() -> None:
    some = Fleet(admission=AdmissionSettings())
    some.worker(1, max_inflight=2, max_queued=0)
    some.worker(2)
    never = batch_refused(some, 3, allowed_worker_ids=[1])
    assert never is not None
    assert never.details is not None
    assert never.details["never_fits"] == "workers-at-capacity"
    assert retry_after(never) is None
    assert batch_refused(some, 3, allowed_worker_ids=[1, 2]) is None
    some.take("r", 9, allowed_worker_ids=[1])
    later = batch_refused(some, 2, allowed_worker_ids=[1])
    assert later is not None
    assert retry_after(later) is not None, "in time they fit"


@pytest.mark.parametrize("limit", ["queue file", "busy threshold"])
def test_a_batch_that_alone_keeps_its_workers_busy(limit: str) -> None:
    """On an idle fleet there is nothing to wait for."""
    if limit == "queue file":
        code, some = "would_wait", Fleet(RouterConfig(queue_threshold=1.0))
    else:
        code = "all-workers-busy"
        some = Fleet(
            admission=AdmissionSettings(mode="token-capacity", active_prefill_tokens_threshold=500)
        )
    some.worker(1, max_num_batched_tokens=500)
    never = batch_refused(some, 3, apart=True)
    assert never is not None
    assert never.details is not None
    assert never.details["never_fits"] == never.details["code"] == code
    assert retry_after(never) is None
    for name in [*some.core.lifecycle.bookings.by_id]:
        some.core.reservations.free(name, some.now)
    some.take("r", 9, isl=16)
    later = batch_refused(some, 3, apart=True)
    assert later is not None
    assert retry_after(later) is not None, "somebody else's load ends"


def batch_refused(
    some: Fleet, n: int, *, apart: bool = False, **wishes: Any
) -> BatchNotPlaced | None:
    """Reserve a batch of all or none, of n samples; return its refusal, if it has one.

    Args:
        some: takes it.
        n: prompts.
        apart: they have nothing in common.
        wishes: of each.
    """
    starts, each = (range(1, n + 1), 1) if apart else (range(1, 2), n)
    items = [
        (
            SelectBatchItem(
                block_hashes=[at], sequence_hashes=[at], isl_tokens=400, n=each, **wishes
            ),
            b"",
        )
        for at in starts
    ]
    wants = SelectBatchRequest(requests=[], reserve=True, atomic=True)
    steps = some.core.batch_selection.begin(wants, items).steps(some.now)
    try:
        next(steps)
        while True:
            steps.send(some.now)
    except StopIteration:
        return None
    except BatchNotPlaced as error:
        return error
