"""When to ask again where there is no gate: computed from what the ledger drains."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.admission.drain_rate import RETURN_MAX_S, DrainRate
from select_service.core.admission.queue import Ticket
from select_service.core.ledger.rank_speeds import SURE
from select_service.core.ledger.slot_loads import SlotLoads
from select_service.core.pricing.policy import PolicyBook, PolicyClass, RoutingPolicy
from select_service.errors import (
    RETRY_AFTER_S,
    AdmissionRefused,
    NoSchedulableWorker,
    QueueFull,
    retry_after,
)
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.whole_fleet import Fleet


def drainage(rate: float = 100.0) -> DrainRate:
    return DrainRate(SlotLoads(), prior_tokens_per_s=rate)


def test_who_is_refused_together_comes_one_after_another() -> None:
    some = drainage()
    waits_s = [some.retry_after_s(100.0, 350.0, 1, 10.0) for _ in range(5)]
    assert waits_s == pytest.approx([1.0, 2.0, 3.0, 3.5, 3.5]), "then everybody has gone"
    assert some.retry_after_s(100.0, 350.0, 1, 12.0) == pytest.approx(2.5)
    assert some.retry_after_s(100.0, 350.0, 1, 99.0) == pytest.approx(1.0)
    assert some.retry_after_s(100.0, 350.0, 5, 200.0) == pytest.approx(0.2), (
        "ranks compute side by side"
    )
    assert some.retry_after_s(0.0, 0.0, 0, 300.0) == 0.0


def test_unequal_engines_drain_as_fast_as_they_were_measured() -> None:
    """A busy slow rank says nothing of the fast one beside it, whatever the pool's mean is."""
    loads = SlotLoads()
    some = DrainRate(loads, prior_tokens_per_s=100.0)
    for tokens in range(100, 100 * (SURE + 1), 100):
        loads.speeds.computed(0, tokens, tokens / 100.0)
        loads.speeds.computed(1, tokens, tokens / 900.0)
    assert some.retry_after_s(1_000.0, 5_000.0, 2, 0.0) == pytest.approx(1.0, rel=0.01)
    assert some.retry_after_s(0.0, 5_000.0, 3, 100.0) == pytest.approx(0.0)
    assert some.retry_after_s(1_100.0, 5_000.0, 3, 200.0) == pytest.approx(1.0, rel=0.01)


def test_nobody_is_sent_away_for_ever() -> None:
    assert drainage().retry_after_s(1e9, 1e9, 1, 0.0) == RETURN_MAX_S


def full_fleet(warm: int = 0, **settings: Any) -> Fleet:
    """Two ranks that compute 1600 tokens each; one request waits, and no more may.

    Before, one of them has computed as many in a second, so many times.
    """
    one = PolicyClass(prefill_busy_threshold=0.0, raw_isl_token_queue_limit_per_worker=400)
    policies = PolicyBook(RoutingPolicy((one,)), {})
    some = Fleet(policies=policies, admission=AdmissionSettings(**settings))
    some.worker(1)
    some.worker(2)
    for number in range(warm):
        some.book(f"warm-{number}", 1, *range(100))
        some.now += 1.0
        some.done(f"warm-{number}")
        some.free(f"warm-{number}")
        some.tick(0.0)
    some.book("a", 1, *range(100))
    some.book("b", 2, *range(100, 200))
    assert isinstance(some.select(*range(200, 300)), Ticket)
    assert some.core.partitions[next(iter(some.core.partitions))].admission is None
    return some


def refused(some: Fleet) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        some.select(7)
    return caught.value


def test_a_full_queue_says_when_one_of_it_is_computed() -> None:
    some = full_fleet(prefill_tokens_per_s=100.0)
    waits_s = [refused(some).retry_after_s for _ in range(4)]
    assert waits_s == pytest.approx([8.0, 16.0, 24.0, 24.0]), "4800 tokens at 200 a second"
    assert retry_after(refused(some)) == 24


def test_what_was_measured_counts() -> None:
    some = full_fleet(warm=60, prefill_tokens_per_s=100.0)
    assert refused(some).retry_after_s == pytest.approx(0.5, rel=0.05), "1600 of 3200 a second"


def test_who_waited_too_long_without_a_gate_is_told_as_well() -> None:
    some = full_fleet(prefill_tokens_per_s=100.0, queue_deadline_s=5.0)
    some.now += 5.0
    late = some.core.refuse_late(some.now).answered[0].answer
    assert isinstance(late, AdmissionRefused)
    assert late.retry_after_s == pytest.approx(8.0)


def test_where_nothing_drains_the_shortest_time_is_told() -> None:
    with pytest.raises(NoSchedulableWorker) as caught:
        Fleet().select(1)
    assert caught.value.retry_after_s == RETRY_AFTER_S
    assert retry_after(caught.value) == 1
