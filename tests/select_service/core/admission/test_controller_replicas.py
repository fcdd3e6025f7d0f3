"""Caps and budgets count what other replicas have booked; what they free lets the waiting in."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.admission.queue import Ticket
from select_service.errors import AdmissionRefused
from select_service.types import Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.admission.gated import keeper_of
from tests.select_service.core.replication.replica import Replica, add
from tests.select_service.core.whole_fleet import Fleet


def behind_a_gate(router_id: int = 10, **settings: Any) -> Replica:
    """A replica with workers 1 and 2."""
    made = Replica.__new__(Replica)
    Fleet.__init__(made, router_id=router_id, admission=AdmissionSettings(**settings))
    made.worker(1)
    made.worker(2)
    return made


def test_the_cap_counts_what_replicas_booked() -> None:
    here = behind_a_gate(max_inflight=1, max_queued=1)
    here.dynamo(add(1), request_id="x", worker_id=1)
    assert isinstance(here.take("a", 2), Selection)
    assert here.load(2) == (16, 1, 1), "the other one is full"
    first, second = here.take("b", 3), here.take("c", 4)
    assert isinstance(first, Ticket)
    assert isinstance(second, Ticket)
    with pytest.raises(AdmissionRefused):
        here.take("d", 5)
    here.dynamo("Free", request_id="x", worker_id=1)
    assert isinstance(first.answer, Selection)
    assert first.answer.worker_id == 1
    assert second.answer is None
    assert here.load(1) == (16, 1, 1)


def test_whose_share_it_is_is_told_to_replicas() -> None:
    budgets = {"tenant_budgets": {"abuser": 0.5}, "seats_per_instance": 1}
    here, there = (behind_a_gate(number, policy_config=budgets) for number in (1, 2))
    here.turn()
    wishes: dict[str, Any] = {"slo_class": "batch", "fairness_id": "abuser"}
    for number in (1, 2):
        answer = here.take(f"r{number}", number, **wishes)
        assert isinstance(answer, Selection)
        there.hears(*here.effects.published)
    with pytest.raises(AdmissionRefused) as caught:
        there.take("r3", 3, **wishes)
    assert caught.value.code == "tenant-budget-shed"
    assert isinstance(there.take("r3", 3, slo_class="batch", fairness_id="good"), Selection)
    keeper_of(there).refresh(there.now)
    assert keeper_of(there).pool.tenant_in_flight("abuser") == 2
