"""Cache-hit thresholds inside the service."""

from __future__ import annotations

from typing import Any

from select_service.core.admission.tallies import ClassTally
from select_service.types import CacheThreshold, Selection
from tests.select_service.core.admission.gated import fleet, keeper_of, tally
from tests.select_service.core.whole_fleet import DEFAULT, selection_of, ticket_of


def test_only_those_that_hold_enough_are_candidates() -> None:
    some = fleet(3)
    some.hold(2, [1, 2])
    some.hold(3, [1])
    some.book("load", 2, *range(50, 90))
    answer = selection_of(some.take("a", 1, 2, cache_hit_threshold=0.9))
    assert answer.worker_id == 2, "although it carries more than anybody"
    assert answer.cache_hit is not None
    some.book("less", 3, 9)
    answer = selection_of(some.take("b", 1, 2, cache_hit_threshold=0.5))
    assert answer.worker_id == 3


def test_a_fallback_goes_to_the_best_and_says_what_it_needs() -> None:
    some = fleet(2)
    some.hold(2, [1])
    wishes: dict[str, Any] = {"cache_hit_threshold": 0.9, "on_cache_threshold": "fallback"}
    answer = selection_of(some.take("a", 1, 2, 3, 4, **wishes))
    assert (answer.worker_id, answer.needs_prefill) == (2, True)
    assert len(some.core.lifecycle.bookings) == 1
    again = selection_of(some.take("a", 1, 2, 3, 4, **wishes))
    assert again.needs_prefill is True


def test_a_request_that_was_refused_often_enough_is_placed() -> None:
    some = fleet(cache_hit_attempts_max=2)
    assert isinstance(some.take("a", 1, cache_hit_threshold=0.5, attempt=1), CacheThreshold)
    selection_of(some.take("a", 1, cache_hit_threshold=0.5, attempt=2))
    assert some.core.partitions[DEFAULT].hit_tally.guarded == 1


def test_a_cache_refusal_is_charged_nothing_and_counted_as_refused() -> None:
    some = fleet(policy="token-bucket")
    assert isinstance(some.take("a", 1, cache_hit_threshold=0.5), CacheThreshold)
    bucket = keeper_of(some).gate.policy.bucket_of("", 0)  # type: ignore[attr-defined]
    assert bucket.tokens == 10_000
    assert (tally(some).offered, tally(some).refused) == (1, 1)
    assert keeper_of(some).rejections == {}, "not for load"


def test_who_waited_is_held_to_its_threshold_when_its_turn_comes() -> None:
    some = fleet(record={"max_inflight": 1})
    some.take("a", 9)
    first = ticket_of(some.take("b", 1, cache_hit_threshold=0.5))
    second = ticket_of(some.take("c", 2, cache_hit_threshold=0.5))
    some.hold(1, [2])
    some.free("a")
    assert isinstance(first.answer, CacheThreshold)
    assert isinstance(second.answer, Selection)
    assert tally(some) == ClassTally(3, 2, 1, 0, 0, 2)
